"""Settings of fault tolerance: the section [fault_tolerance], and the environment variables that the launcher sets.

Flow: start.py makes the manager from both. Only this module, command lines and process_groups/shared.py read settings from the environment.
Importing this module needs neither torch nor grpc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from ft.protocol.messages import MAX_BEAT_S, Timeouts
from ft.rpc.access import Endpoint, Tls, check_scheme, find_tls, find_token

# most slots of a step, and most groups: the tail has a number for each slot, and a digest of each group (buckets.TAIL_ELEMENTS)
MAX_SLOTS = 1 << 13


@dataclass(frozen=True)
class Schedule:
    """Schedule of semi-synchronous training (semi_sync.py). `sync_steps`: optimizer steps between two reductions of one fragment. `delay`:
    steps that a fragment's all-reduce may overlap. `alpha`: weight of the local parameters when the reduced ones are applied."""

    sync_steps: int
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    @property
    def inner_steps(self) -> int:
        """Optimizer steps between two reductions, of different fragments if there are several."""
        return self.sync_steps // self.fragments

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError for an invalid schedule. `names`: the names of the four settings in its message."""
        steps, count, delay, alpha = names
        fragments = self.fragments
        if fragments < 1:
            raise ValueError(f"{count} = {fragments}: must be at least 1; nearest: 1")
        if self.sync_steps < 1:
            raise ValueError(f"{steps} = {self.sync_steps}: must be at least 1; nearest: {fragments}")
        if self.sync_steps % fragments:
            below = self.sync_steps // fragments * fragments
            nearest = f"{below} or {below + fragments}" if below else f"{fragments}"
            raise ValueError(
                f"{steps} = {self.sync_steps}: must be a multiple of {count} = {fragments}, because one fragment is reduced at a time; "
                f"nearest: {nearest}"
            )
        inner = self.inner_steps
        if not 0 <= self.delay < inner:
            every = f"{steps} / {count} = {inner}" if fragments > 1 else f"{steps} = {inner}"
            raise ValueError(
                f"{delay} = {self.delay}: must be from 0 to {inner - 1}, because the next reduction is due after {every} steps; "
                f"nearest: {min(max(self.delay, 0), inner - 1)}"
            )
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"{alpha} = {self.alpha:g}: must be from 0 to 1; nearest: {int(self.alpha > 0)}")


@dataclass(frozen=True)
class FaultTolerance:
    """[fault_tolerance]: several replica groups that train together, and continue when some of them fail.

    The environment says which group this is and where the lighthouse is: REPLICA_GROUP_ID, NUM_REPLICA_GROUPS, TORCHFT_LIGHTHOUSE.
    """

    enable: Annotated[bool, "train together with other replica groups, in quorums that the lighthouse forms"] = False
    process_group: Annotated[
        Literal["auto", "gloo", "nccl", "baby_gloo", "baby_nccl"],
        "process group that reduces gradients between replica groups; auto: nccl for gradients on a GPU, else gloo; baby_gloo, "
        "baby_nccl: in a child process, which is killed if it hangs",
    ] = "auto"
    min_replica_size: Annotated[
        int,
        "fewest groups of a quorum, healing ones included; run_replicas.sh and train.sbatch pass it as the lighthouse's --min_replicas",
        ">= 1",
    ] = 1
    quorum: Annotated[
        Literal["on_change", "every_step"],
        "when a group requests a quorum from the lighthouse: after a change, or before each step as torchft does",
    ] = "on_change"
    keep_gradients: Annotated[
        bool,
        "keep this group's gradients until the step commits, so that the other groups lose no step when a group fails; false: less memory",
    ] = True
    keep_global_batch: Annotated[
        bool,
        "every step trains on slots_per_step slots (batches of one group): the other groups compute the slots of a lost group in the "
        "same step; false: a step has one slot for each group, and that of a lost group comes in a later step",
    ] = False
    slots_per_step: Annotated[
        int,
        "with keep_global_batch: slots of a step, assigned to the groups in turns; further groups are spares; "
        "0: as many as NUM_REPLICA_GROUPS",
        ">= 0",
        f"<= {MAX_SLOTS}",
    ] = 0
    deterministic_reduce: Annotated[
        bool,
        "with keep_global_batch: reduce each slot's gradients separately, then add them in the slots' order, so that the bits of the "
        "weights do not depend on the membership; multiplies the traffic between groups and the memory of their sums by slots_per_step",
    ] = False
    interface: Annotated[
        str,
        'the network on which other groups reach this host: an interface ("eth0") or addresses ("10.0.0.0/8"); '
        '"": the one that leads to the lighthouse',
    ] = ""
    digest_interval: Annotated[
        int,
        "steps between two comparisons of the groups' weights and persistent buffers (digests, shard by shard), which find errors of "
        "memory or arithmetic, and buffers that a forward changes for itself; 0: never",
        ">= 0",
    ] = 100
    on_corruption: Annotated[
        Literal["heal", "leave"],
        "action of a group whose weights differ from those of most others: fetch theirs, or end with exit code 1 (a faulty "
        "machine stays faulty); without a majority, as with two groups, all end and resume from the newest checkpoint",
    ] = "heal"
    max_retries: Annotated[
        int, "failed attempts in a row that a group survives; one more ends it; -1: no limit", ">= -1"
    ] = -1
    # Each timeout, except stall_s, must be below the next one (heal_grace_s may equal takeover_s, and takeover_s collective_s).
    beat_s: Annotated[float, "seconds between two heartbeats of a group", "> 0", f"<= {MAX_BEAT_S:g}"] = 1.0
    heartbeat_timeout_s: Annotated[
        float,
        "seconds of silence after which a group is lost; equal to the lighthouse's --heartbeat_timeout_ms",
        "> 0",
        "<= 86400",
    ] = 5.0
    rendezvous_s: Annotated[float, "seconds that groups have to connect to each other", "> 0", "<= 86400"] = 10.0
    heal_grace_s: Annotated[
        float, "seconds that others wait for a group whose state is still arriving", "> 0", "<= 86400"
    ] = 30.0
    takeover_s: Annotated[
        float,
        "once all groups that hold the job's state have been silent for this many seconds, others may continue from the newest checkpoint; "
        "the lighthouse's --takeover_s; 0 (the flag's never): only after an operator has allowed it",
        ">= 0",
        "<= 86400",
    ] = 30.0
    stall_s: Annotated[
        float,
        "seconds that a group waits for a reduction or a quorum before the groups that do not wait count as lost; 10 s once most members "
        "wait; in both cases at least five median steps. A group also ends if one of its ranks requests no quorum for this long after its "
        "other ranks. Pass it to the lighthouse as --stall_s",
        "> 0",
        "<= 86400",
    ] = 60.0
    collective_s: Annotated[
        float, "seconds after which a reduction fails, whatever the reason", "> 0", "<= 2592000"
    ] = 600.0
    heal_transport: Annotated[
        Literal["http", "pg"],
        "transport of the state to a joining group, the same in all groups; http: from two groups at once, guarded by the job's token; "
        "pg: over a gloo group of the two ranks, where replica groups reach each other only by process groups",
    ] = "http"
    heal_copy_bytes: Annotated[
        int,
        "most bytes that are copied for joining groups that have not received the whole state when the step commits; the commit waits "
        "while more is missing",
        ">= 0",
    ] = 256 << 20
    heal_backlog: Annotated[int, "steps that a joining group may be behind while its state arrives", ">= 1"] = 2
    # Semi-synchronous training, for groups with a low-bandwidth link between them (docs/semi_sync.md).
    semi_sync_method: Annotated[
        Literal["none", "local_sgd", "diloco"],
        "none: groups reduce gradients in every step; local_sgd: each group steps by itself, and every sync_steps steps the weights are "
        "averaged; diloco: the mean of their changes is the gradient of an outer optimizer",
    ] = "none"
    sync_steps: Annotated[
        int, "with a semi_sync_method: optimizer steps between two reductions of the same weights", ">= 1"
    ] = 5
    num_fragments: Annotated[
        int,
        "with diloco: fragments (of whole layers) that the model is split into; one is reduced every sync_steps / num_fragments steps",
        ">= 1",
    ] = 1
    fragment_sync_delay: Annotated[int, "with diloco: optimizer steps that a reduction may overlap", ">= 0"] = 0
    fragment_update_alpha: Annotated[
        float,
        "with diloco: share of a group's local weights when the new outer weights are taken over; 0: none",
        ">= 0",
        "<= 1",
    ] = 0.0
    should_quantize: Annotated[
        bool,
        "with diloco: reductions in int8, a quarter of the bytes; the rounding error is added to the next reduction",
    ] = False
    outer_lr: Annotated[float, "with diloco: learning rate of the outer optimizer, SGD", "> 0"] = 0.7
    outer_momentum: Annotated[float, "with diloco: momentum of the outer optimizer", ">= 0", "< 1"] = 0.9
    outer_nesterov: Annotated[bool, "with diloco: the outer optimizer uses Nesterov momentum"] = True

    def check(self) -> None:
        for key, why in self._contradictions():
            value = getattr(self, key)
            shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
            raise ValueError(f"fault_tolerance.{key} = {shown}: {why}")
        for lower, x, relation, upper, y in self.times.timeout_order_violations():
            raise ValueError(
                f"fault_tolerance.{lower} = {x:g}: must {relation} fault_tolerance.{upper} = {y:g}: the longer timeout "
                "relies on a result of the shorter one"
            )

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yields each key that conflicts with another one, with the reason. Raises ValueError for an invalid schedule."""
        method = self.semi_sync_method
        for key in _SEMI_SYNC:
            default, methods = getattr(type(self), key), ("local_sgd", "diloco") if key == "sync_steps" else ("diloco",)
            if getattr(self, key) != default and method not in methods:
                legal = " or ".join(f'"{one}"' for one in methods)
                unused = f'requires fault_tolerance.semi_sync_method = {legal}, but it is "{method}"'
                yield key, f"{unused}; nearest: {str(default).lower()}"
        if method != "none":
            if not self.enable:
                alone = "a single group has no other group to synchronise with"
                yield "semi_sync_method", f'requires fault_tolerance.enable = true: {alone}; nearest: "none"'
            for key, wanted in (("keep_gradients", True), ("keep_global_batch", False)):
                if getattr(self, key) != wanted:
                    own = "a group's own steps between two reductions cannot be computed by a different group"
                    with_it = "not supported with fault_tolerance.semi_sync_method"
                    yield key, f"{with_it}: {own}; nearest: {str(wanted).lower()}"
            if self.outer_nesterov and not self.outer_momentum:
                yield "outer_nesterov", "requires fault_tolerance.outer_momentum above 0; nearest: false"
            keys = ("sync_steps", "num_fragments", "fragment_sync_delay", "fragment_update_alpha")
            self.schedule.check(tuple(f"fault_tolerance.{key}" for key in keys))
        if self.heal_transport != "http" and not self.enable:
            alone = "a single group has no other group to heal from"
            yield "heal_transport", f'requires fault_tolerance.enable = true: {alone}; nearest: "http"'
        ms = round(self.heartbeat_timeout_s * 1000)
        if ms / 1000 != self.heartbeat_timeout_s:
            whole = "must be whole milliseconds, as the lighthouse's --heartbeat_timeout_ms is"
            yield "heartbeat_timeout_s", f"{whole}; nearest: {max(1, ms) / 1000}"
        for key in ("slots_per_step", "deterministic_reduce"):
            if getattr(self, key) and not self.keep_global_batch:
                requires = "requires fault_tolerance.keep_global_batch = true"
                yield key, f"{requires}, without which a step has one slot for each group of the quorum"

    def process_group_kind(self, device_type: str) -> ProcessGroupKind:
        """Returns the kind of process group for gradients on "cpu" or "cuda". Raises ValueError if `process_group` does not support that.

        "auto" on CUDA is NCCL in this process: without MPS a child process and this one share the GPU by time slices, and a reduction that
        waits for peers may take slices from the backward. A child process as the default needs a measurement first."""
        kinds = _KINDS[device_type]
        for kind in kinds:
            if self.process_group in ("auto", kind):
                return kind
        reduces, are = ("host", "on a GPU") if device_type == "cuda" else ("GPU", "in host memory")
        legal = ", ".join(f'"{kind}"' for kind in ("auto", *kinds))
        raise ValueError(
            f'fault_tolerance.process_group = "{self.process_group}": reduces only gradients in {reduces} memory, and here they are {are}; '
            f'legal here: {legal}; nearest: "{kinds[self.process_group.startswith("baby")]}"'
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.sync_steps, self.num_fragments, self.fragment_sync_delay, self.fragment_update_alpha)

    @property
    def inner_steps(self) -> int:
        """Optimizer steps from one commit to the next."""
        return 1 if self.semi_sync_method == "none" else self.schedule.inner_steps

    @property
    def times(self) -> Timeouts:
        """Timeouts of this process; heartbeat_timeout_s and heal_grace_s must be those of the lighthouse."""
        timeouts = {timeout.name: getattr(self, timeout.name) for timeout in fields(Timeouts)}
        return Timeouts(**{**timeouts, "takeover_s": self.takeover_s or None})


ProcessGroupKind = Literal["gloo", "nccl", "baby_gloo", "baby_nccl"]
# By the gradients' device type: in this process, in a child process. gloo is registered for CPU tensors only (base.group_of).
_KINDS: dict[str, tuple[ProcessGroupKind, ProcessGroupKind]] = {
    "cpu": ("gloo", "baby_gloo"),
    "cuda": ("nccl", "baby_nccl"),
}

_SEMI_SYNC = [x.name for x in fields(FaultTolerance)]
_SEMI_SYNC = _SEMI_SYNC[_SEMI_SYNC.index("semi_sync_method") + 1 :]


def _whole(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit():
            raise ValueError("must be a whole number")
        number = int(text)
        if not least <= number <= most:
            raise ValueError(f"must be from {least} to {most}; nearest: {min(max(number, least), most)}")
        return number

    return whole


def group_name(text: str) -> str:
    """Checks a replica group's name, the part of a replica ID before the colon. It is also part of file names and store keys."""
    if not re.fullmatch(r"[\w.-]{1,64}", text, re.ASCII):
        nearest = re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII)[:64]
        raise ValueError(f"a group's name must be 1 to 64 letters, digits, '_', '.' or '-'; nearest: {nearest}")
    return text


def _address(text: str) -> str:
    try:
        Endpoint.parse(text, "")
    except ValueError:
        raise ValueError("must be http://HOST:PORT, such as http://localhost:29510 or http://[::1]:29510") from None
    return text if "://" in text else f"http://{text}"


def _variable(name: str, rule: Callable[[str], object], default: Any = None) -> Any:
    return field(default=default, metadata={"variable": name, "rule": rule})


@dataclass(frozen=True)
class Environment:
    """Settings that differ between replica groups and ranks, and secrets. Empty or None: the variable is not set."""

    lighthouse: str = _variable("TORCHFT_LIGHTHOUSE", _address, "")  # http://host:port
    replica_group_id: str = _variable("REPLICA_GROUP_ID", group_name, "")  # the group's name
    num_replica_groups: int | None = _variable("NUM_REPLICA_GROUPS", _whole(1, MAX_SLOTS))
    token: str = field(default="", repr=False)  # PHAROS_TOKEN, or in PHAROS_TOKEN_FILE

    group_rank: int = _variable("RANK", _whole(0), 0)
    world_size: int = _variable("WORLD_SIZE", _whole(1), 1)  # ranks of this group
    local_rank: int = _variable("LOCAL_RANK", _whole(0), 0)
    master_addr: str = _variable("MASTER_ADDR", str, "")  # address of the group's own store
    master_port: int | None = _variable("MASTER_PORT", _whole(0, 65535))
    # Restarts of this node's ranks by torchelastic so far, without those because of another node; torchelastic's store outlives them.
    restart_count: int = _variable("TORCHELASTIC_RESTART_COUNT", _whole(0), 0)

    # torchft's variables: they override arguments of ft.Manager, except for manager_port.
    timeout_s: int | None = _variable("TORCHFT_TIMEOUT_SEC", _whole(1))
    quorum_timeout_s: int | None = _variable("TORCHFT_QUORUM_TIMEOUT_SEC", _whole(1))
    connect_timeout_s: int | None = _variable("TORCHFT_CONNECT_TIMEOUT_SEC", _whole(1))
    quorum_retries: int | None = _variable("TORCHFT_QUORUM_RETRIES", _whole(-1))  # -1: no limit
    manager_port: int | None = _variable("TORCHFT_MANAGER_PORT", _whole(0, 65535))

    injects_faults: bool = False  # PHAROS_DRILL=1: fault injection for tests; see recording.py
    tls: Tls | None = None  # of connections to the lighthouse: PHAROS_TLS_CA, PHAROS_TLS_CERT, PHAROS_TLS_KEY

    @property
    def name(self) -> str:
        return self.replica_group_id or "0"

    @staticmethod
    def read(environ: Mapping[str, str]) -> Environment:
        """Reads the environment. Raises ValueError, which names the variable, its value and what is legal."""
        token, token_file = environ.get("PHAROS_TOKEN", ""), environ.get("PHAROS_TOKEN_FILE", "")
        if token and token_file:
            raise ValueError("PHAROS_TOKEN and PHAROS_TOKEN_FILE are both set: set one")
        token = find_token(Path(token_file) if token_file else None, token)
        tls = find_tls(*(environ.get(f"PHAROS_TLS_{name}", "").strip() for name in ("CA", "CERT", "KEY")))
        values: dict[str, Any] = {"token": token, "injects_faults": environ.get("PHAROS_DRILL") == "1", "tls": tls}
        for one in (one for one in fields(Environment) if one.metadata):
            text = environ.get(one.metadata["variable"], "").strip()
            try:
                if text:
                    values[one.name] = one.metadata["rule"](text)
            except ValueError as error:
                raise ValueError(f"{one.metadata['variable']} = {text}: {error}") from None
        made = Environment(**values)
        if made.group_rank >= made.world_size:
            raise ValueError(f"RANK = {made.group_rank}: must be below WORLD_SIZE = {made.world_size}")
        return made

    def slots_per_step(self, settings: FaultTolerance) -> int:
        """Slots of each step; 0: one for each group of the quorum. Raises ValueError if neither setting gives their number."""
        if not settings.keep_global_batch:
            return 0
        slots = settings.slots_per_step or self.num_replica_groups
        if not slots:
            raise ValueError(
                "fault_tolerance.slots_per_step = 0: means NUM_REPLICA_GROUPS, which is not set; set one of the two"
            )
        return slots

    def check(self, settings: FaultTolerance) -> None:
        """Raises ValueError for errors that can be found before anything is connected."""
        if not settings.enable:
            return
        if not self.lighthouse:
            raise ValueError(
                "TORCHFT_LIGHTHOUSE is not set: fault_tolerance.enable = true requires the lighthouse's address, such as "
                "http://localhost:29510; scripts/run_lighthouse.sh starts one"
            )
        check_scheme(self.lighthouse, self.tls)
        self.slots_per_step(settings)
        groups = self.num_replica_groups
        if groups is not None and settings.min_replica_size > groups:
            raise ValueError(
                f"fault_tolerance.min_replica_size = {settings.min_replica_size}: there are NUM_REPLICA_GROUPS = {groups}; "
                f"nearest: {groups}"
            )


def group_folder(run_folder: Path, settings: FaultTolerance, environment: Environment) -> Path:
    """Returns the folder of a group's own files: <run>/groups/<id>; <run> without replica groups."""
    return run_folder / "groups" / environment.name if settings.enable else run_folder
