from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(_message.Message):
    __slots__ = ("step", "commit_quorum_id", "commit_id")
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMIT_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ID_FIELD_NUMBER: _ClassVar[int]
    step: int
    commit_quorum_id: int
    commit_id: str
    def __init__(self, step: _Optional[int] = ..., commit_quorum_id: _Optional[int] = ..., commit_id: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data", "commit_failures", "reconfigure_handles", "commit_id", "commit_quorum_id", "restored", "writes_checkpoint", "assigned", "assignment_id", "init_sync")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    WRITES_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_ID_FIELD_NUMBER: _ClassVar[int]
    INIT_SYNC_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int
    reconfigure_handles: _containers.RepeatedScalarFieldContainer[str]
    commit_id: str
    commit_quorum_id: int
    restored: int
    writes_checkpoint: bool
    assigned: int
    assignment_id: str
    init_sync: bool
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., store_address: _Optional[str] = ..., step: _Optional[int] = ..., world_size: _Optional[int] = ..., shrink_only: bool = ..., data: _Optional[str] = ..., commit_failures: _Optional[int] = ..., reconfigure_handles: _Optional[_Iterable[str]] = ..., commit_id: _Optional[str] = ..., commit_quorum_id: _Optional[int] = ..., restored: _Optional[int] = ..., writes_checkpoint: bool = ..., assigned: _Optional[int] = ..., assignment_id: _Optional[str] = ..., init_sync: bool = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("quorum_id", "members", "reference", "epoch", "fingerprint")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    reference: State
    epoch: str
    fingerprint: _containers.RepeatedCompositeFieldContainer[Digest]
    def __init__(self, quorum_id: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., reference: _Optional[_Union[State, _Mapping]] = ..., epoch: _Optional[str] = ..., fingerprint: _Optional[_Iterable[_Union[Digest, _Mapping]]] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("beat_s", "heartbeat_timeout_s", "rendezvous_s", "heal_grace_s", "takeover_s", "stall_s", "collective_s")
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_S_FIELD_NUMBER: _ClassVar[int]
    HEAL_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    beat_s: float
    heartbeat_timeout_s: float
    rendezvous_s: float
    heal_grace_s: float
    takeover_s: float
    stall_s: float
    collective_s: float
    def __init__(self, beat_s: _Optional[float] = ..., heartbeat_timeout_s: _Optional[float] = ..., rendezvous_s: _Optional[float] = ..., heal_grace_s: _Optional[float] = ..., takeover_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., collective_s: _Optional[float] = ...) -> None: ...

class JobLimits(_message.Message):
    __slots__ = ("min_replicas", "takeover_s", "num_replica_groups")
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICA_GROUPS_FIELD_NUMBER: _ClassVar[int]
    min_replicas: int
    takeover_s: float
    num_replica_groups: int
    def __init__(self, min_replicas: _Optional[int] = ..., takeover_s: _Optional[float] = ..., num_replica_groups: _Optional[int] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("what", "digest")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    what: str
    digest: str
    def __init__(self, what: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class MemberLost(_message.Message):
    __slots__ = ("quorum_id", "replica_ids", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., replica_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class GenerationAborted(_message.Message):
    __slots__ = ("quorum_id", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ChangeAnnounced(_message.Message):
    __slots__ = ("quorum_id", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("quorum_id", "replica_id")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    replica_id: str
    def __init__(self, quorum_id: _Optional[int] = ..., replica_id: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("member_lost", "generation_aborted", "change_announced", "finished")
    MEMBER_LOST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ABORTED_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    member_lost: MemberLost
    generation_aborted: GenerationAborted
    change_announced: ChangeAnnounced
    finished: Finished
    def __init__(self, member_lost: _Optional[_Union[MemberLost, _Mapping]] = ..., generation_aborted: _Optional[_Union[GenerationAborted, _Mapping]] = ..., change_announced: _Optional[_Union[ChangeAnnounced, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("member", "known", "failed", "blame", "fingerprint", "number", "epoch")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    member: Member
    known: int
    failed: bool
    blame: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: _containers.RepeatedCompositeFieldContainer[Digest]
    number: int
    epoch: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., known: _Optional[int] = ..., failed: bool = ..., blame: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[_Iterable[_Union[Digest, _Mapping]]] = ..., number: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class QuorumRequest(_message.Message):
    __slots__ = ("call", "static_quorum_id")
    CALL_FIELD_NUMBER: _ClassVar[int]
    STATIC_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    call: Call
    static_quorum_id: str
    def __init__(self, call: _Optional[_Union[Call, _Mapping]] = ..., static_quorum_id: _Optional[str] = ...) -> None: ...

class QuorumReply(_message.Message):
    __slots__ = ("quorum", "dynamic", "restore", "times", "limits")
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    quorum: Quorum
    dynamic: DynamicQuorum
    restore: Restore
    times: Times
    limits: JobLimits
    def __init__(self, quorum: _Optional[_Union[Quorum, _Mapping]] = ..., dynamic: _Optional[_Union[DynamicQuorum, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., times: _Optional[_Union[Times, _Mapping]] = ..., limits: _Optional[_Union[JobLimits, _Mapping]] = ...) -> None: ...

class DynamicQuorum(_message.Message):
    __slots__ = ("quorum_id", "epoch", "reference", "assigned", "assignment_id")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_ID_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    epoch: str
    reference: State
    assigned: int
    assignment_id: str
    def __init__(self, quorum_id: _Optional[int] = ..., epoch: _Optional[str] = ..., reference: _Optional[_Union[State, _Mapping]] = ..., assigned: _Optional[int] = ..., assignment_id: _Optional[str] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("settled",)
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    settled: int
    def __init__(self, settled: _Optional[int] = ...) -> None: ...

class Up(_message.Message):
    __slots__ = ("hello", "quorum", "report", "timeline_event")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_EVENT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    quorum: Quorum
    report: Report
    timeline_event: TimelineEvent
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., quorum: _Optional[_Union[Quorum, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., timeline_event: _Optional[_Union[TimelineEvent, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("replica_id", "quorum_id", "settled", "epoch")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    quorum_id: int
    settled: int
    epoch: str
    def __init__(self, replica_id: _Optional[str] = ..., quorum_id: _Optional[int] = ..., settled: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("replica_id", "step", "commit_quorum_id", "waiting", "median_step_s", "settled", "sent_s", "phase", "healed_bytes", "goodput_s", "wall_s", "mean_loss", "heal_done_bytes", "heal_total_bytes", "phase_limit_s", "launched", "summed", "blame", "quorum_id")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMIT_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_STEP_S_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    HEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_S_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_LOSS_FIELD_NUMBER: _ClassVar[int]
    HEAL_DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAL_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASE_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    LAUNCHED_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    step: int
    commit_quorum_id: int
    waiting: bool
    median_step_s: float
    settled: int
    sent_s: float
    phase: str
    healed_bytes: int
    goodput_s: float
    wall_s: float
    mean_loss: float
    heal_done_bytes: int
    heal_total_bytes: int
    phase_limit_s: float
    launched: int
    summed: bool
    blame: _containers.RepeatedScalarFieldContainer[str]
    quorum_id: int
    def __init__(self, replica_id: _Optional[str] = ..., step: _Optional[int] = ..., commit_quorum_id: _Optional[int] = ..., waiting: bool = ..., median_step_s: _Optional[float] = ..., settled: _Optional[int] = ..., sent_s: _Optional[float] = ..., phase: _Optional[str] = ..., healed_bytes: _Optional[int] = ..., goodput_s: _Optional[float] = ..., wall_s: _Optional[float] = ..., mean_loss: _Optional[float] = ..., heal_done_bytes: _Optional[int] = ..., heal_total_bytes: _Optional[int] = ..., phase_limit_s: _Optional[float] = ..., launched: _Optional[int] = ..., summed: bool = ..., blame: _Optional[_Iterable[str]] = ..., quorum_id: _Optional[int] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("lane", "step", "text")
    LANE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    lane: str
    step: int
    text: str
    def __init__(self, lane: _Optional[str] = ..., step: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Down(_message.Message):
    __slots__ = ("beat_answered", "send_quorum", "answer", "refused", "notice", "order", "waits")
    BEAT_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    SEND_QUORUM_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    beat_answered: float
    send_quorum: bool
    answer: QuorumReply
    refused: Refused
    notice: Notice
    order: Order
    waits: str
    def __init__(self, beat_answered: _Optional[float] = ..., send_quorum: bool = ..., answer: _Optional[_Union[QuorumReply, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., waits: _Optional[str] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("kind", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("replica_id", "code", "reason")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    code: str
    reason: str
    def __init__(self, replica_id: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("replica_id", "clean", "reason", "finished")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    clean: bool
    reason: str
    finished: bool
    def __init__(self, replica_id: _Optional[str] = ..., clean: bool = ..., reason: _Optional[str] = ..., finished: bool = ...) -> None: ...

class Evict(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class TakeOver(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankCall(_message.Message):
    __slots__ = ("group_rank", "member", "checkpoint_metadata", "known", "failed", "blame", "fingerprint", "number")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_METADATA_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    member: Member
    checkpoint_metadata: str
    known: int
    failed: bool
    blame: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: _containers.RepeatedCompositeFieldContainer[Digest]
    number: int
    def __init__(self, group_rank: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., checkpoint_metadata: _Optional[str] = ..., known: _Optional[int] = ..., failed: bool = ..., blame: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[_Iterable[_Union[Digest, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("replica_rank", "address")
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    replica_rank: int
    address: str
    def __init__(self, replica_rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class QuorumResult(_message.Message):
    __slots__ = ("quorum_id", "epoch", "replica_id", "replica_rank", "members", "store_address", "reference", "heal", "sources", "recover_dst_replica_ranks", "participants", "assigned", "same_generation", "handles")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    RECOVER_DST_REPLICA_RANKS_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    SAME_GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    epoch: str
    replica_id: str
    replica_rank: int
    members: _containers.RepeatedScalarFieldContainer[str]
    store_address: str
    reference: State
    heal: bool
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    recover_dst_replica_ranks: _containers.RepeatedScalarFieldContainer[int]
    participants: _containers.RepeatedScalarFieldContainer[str]
    assigned: int
    same_generation: bool
    handles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, quorum_id: _Optional[int] = ..., epoch: _Optional[str] = ..., replica_id: _Optional[str] = ..., replica_rank: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., store_address: _Optional[str] = ..., reference: _Optional[_Union[State, _Mapping]] = ..., heal: bool = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., recover_dst_replica_ranks: _Optional[_Iterable[int]] = ..., participants: _Optional[_Iterable[str]] = ..., assigned: _Optional[int] = ..., same_generation: bool = ..., handles: _Optional[_Iterable[str]] = ...) -> None: ...

class RankReply(_message.Message):
    __slots__ = ("quorum", "restore", "released")
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    quorum: QuorumResult
    restore: Restore
    released: Done
    def __init__(self, quorum: _Optional[_Union[QuorumResult, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., released: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("group_rank", "kind", "quorum_id", "attempt", "step", "verdict", "change", "reason", "divergent", "joint")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIVERGENT_FIELD_NUMBER: _ClassVar[int]
    JOINT_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    kind: str
    quorum_id: int
    attempt: int
    step: int
    verdict: str
    change: bool
    reason: str
    divergent: _containers.RepeatedScalarFieldContainer[str]
    joint: bool
    def __init__(self, group_rank: _Optional[int] = ..., kind: _Optional[str] = ..., quorum_id: _Optional[int] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., verdict: _Optional[str] = ..., change: bool = ..., reason: _Optional[str] = ..., divergent: _Optional[_Iterable[str]] = ..., joint: bool = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("kind", "quorum_id", "attempt", "step", "verdict", "change", "reason", "divergent", "healed")
    KIND_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIVERGENT_FIELD_NUMBER: _ClassVar[int]
    HEALED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    quorum_id: int
    attempt: int
    step: int
    verdict: str
    change: bool
    reason: str
    divergent: _containers.RepeatedScalarFieldContainer[str]
    healed: bool
    def __init__(self, kind: _Optional[str] = ..., quorum_id: _Optional[int] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., verdict: _Optional[str] = ..., change: bool = ..., reason: _Optional[str] = ..., divergent: _Optional[_Iterable[str]] = ..., healed: bool = ...) -> None: ...

class RankUp(_message.Message):
    __slots__ = ("hello", "report", "rejoin", "timeline_event", "wants_to_leave")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    REJOIN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_EVENT_FIELD_NUMBER: _ClassVar[int]
    WANTS_TO_LEAVE_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    report: Report
    rejoin: RejoinUnderNewId
    timeline_event: TimelineEvent
    wants_to_leave: Done
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., rejoin: _Optional[_Union[RejoinUnderNewId, _Mapping]] = ..., timeline_event: _Optional[_Union[TimelineEvent, _Mapping]] = ..., wants_to_leave: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("group_rank", "pid", "host")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    pid: int
    host: str
    def __init__(self, group_rank: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class RejoinUnderNewId(_message.Message):
    __slots__ = ("reason", "quorum_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    quorum_id: int
    def __init__(self, reason: _Optional[str] = ..., quorum_id: _Optional[int] = ...) -> None: ...

class RankDown(_message.Message):
    __slots__ = ("notice", "ended", "waits")
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    notice: Notice
    ended: Ended
    waits: Waits
    def __init__(self, notice: _Optional[_Union[Notice, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ...) -> None: ...

class Waits(_message.Message):
    __slots__ = ("reason", "waited_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    waited_s: float
    def __init__(self, reason: _Optional[str] = ..., waited_s: _Optional[float] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class AskMetadata(_message.Message):
    __slots__ = ("group_rank",)
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    def __init__(self, group_rank: _Optional[int] = ...) -> None: ...

class Metadata(_message.Message):
    __slots__ = ("group_rank", "checkpoint_metadata")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_METADATA_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    checkpoint_metadata: str
    def __init__(self, group_rank: _Optional[int] = ..., checkpoint_metadata: _Optional[str] = ...) -> None: ...
