"""Fault tolerance: the interface of the trainer (seam.py) and its implementation. Imports no sibling package, so it can be used alone.
Names resolve on first use (PEP 562), so that importing `ft` costs nothing.

Reading order: seam.py, start.py, manager.py with protocol/step.py, gradients.py with buckets.py, process_groups/base.py, healer.py with
healing/transport.py, membership.py; protocol/ and rpc/ state their own. docs/glossary.md explains terms such as holder, tail and void.

Where is a gradient reduced? In the last backward, on the thread that runs it (on a GPU autograd's, on a CPU the trainer's), by the
    parameter's hook: with FSDP2 after the reduce-scatter, on the shard, between the same ranks of all groups. The rest (everything, while
    the process group still forms) is launched on the trainer's thread, with the tail.
    -> gradients.py:Gradients._on_gradient, gradients.py:Gradients.launch_remaining, manager.py:Manager._launch
Who decides a commit (should_commit)? Each group for itself: the worst vote of its ranks wins. Groups do not vote with each other: a
    complete sum, whose tail says that no group needs a retry, is the same in all of them.
    -> protocol/step.py:StepMachine._vote_on_commit, agreement.py:Agreement.outcome, protocol/group.py:GroupMachine._tally_votes
A death between vote and commit? Groups whose sums are complete commit the dead group's contribution, too. The others vote "failed", and
    heal from these in the next quorum. A step that only the dead group had committed is repeated.
    -> protocol/rules.py:reference_state, protocol/group.py:GroupMachine._decide, protocol/group.py:recover_src_replica_ranks
From whom does a joiner get its state, and how does it know that bytes are right? From one or two members with the reference state, not the
    writer of checkpoints if there is another one; each rank from that of its group_rank. By a digest of each chunk, the layout, and a
    validity token, which proves that the offer held to the end; the state's step, commit_quorum_id and commit_id must be those of the
    quorum's reference state. Over HTTP a second source is used only if all its digests equal the first's, else an error is logged. With
    digest_interval later steps compare weights.
    -> protocol/group.py:recover_src_replica_ranks, healer.py:Healer.fetch, healing/format.py:chunk_digest,
    healing/http_transport.py:SourceConnection.read_validity_token, healing/http_transport.py:HttpFetch._compare,
    protocol/step.py:StepMachine._on_heal_ended
The lighthouse restarts? Steps go on (with quorum = "every_step" they wait), requests repeat, commits wait after takeover_s / 2 of
    silence. It continues from its state file with larger quorum ids; without that file, from the newest quorum that members report. If a
    request comes before any report, and --recover is not given, the job begins anew, and gives way to the former one if members report that
    before a new step is settled.
    -> rpc/state_file.py:reserved, protocol/lighthouse.py:LighthouseMachine._adopt,
    protocol/lighthouse.py:LighthouseMachine._gives_way_to, protocol/group.py:GroupMachine._lighthouse_is_silent
A second process of a live name? It is refused while the first was heard of in the last 2.5 s, retries for twice heartbeat_timeout_s,
    then raises BadInput. If the first is silent, the second takes the name, and the first, now lost, asks again until the name is free.
    -> protocol/lighthouse.py:LighthouseMachine._take_name, rpc/clients.py:GroupClient.ask_quorum, protocol/group.py:GroupMachine._refused
Which timeouts exist? Seven settings of [fault_tolerance], described in Timeouts; docs/operating.md (Timeouts) says what shorter and
    longer ones cause. Also the lighthouse's --join_timeout_ms, ManagerOptions.quorum_s, TORCHFT_CONNECT_TIMEOUT_SEC and, for ft.Manager,
    TORCHFT_TIMEOUT_SEC and TORCHFT_QUORUM_TIMEOUT_SEC. All others are constants *_S at the top of a module, or attributes *_s of a class.
    The docstring of manager.py says which of them the trainer gets as an exception.
    -> protocol/messages.py:Timeouts, config.py:FaultTolerance, manager.py:ManagerOptions
What ends a hang? Of a process that is stopped, its silence: heartbeat_timeout_s. Of a trainer whose server still sends heartbeats, the
    waits of the others: 10 s or stall_s. Of a link that is cut, probes. Of one rank of a group, its server after stall_s, or the watchdog
    of training/. The last resort is collective_s.
    -> protocol/roster.py:Roster.silent, protocol/quorum_record.py:QuorumRecord.find_stalled, process_groups/probe.py:Prober._run,
    manager.py:Manager._on_unreachable, protocol/group.py:GroupMachine._on_tick, process_groups/base.py:Generation._keep_limit
How do the ranks of a group agree on an error? One whose sums failed votes at the group server, which fails the attempt for all. Then the
    ranks all-reduce their votes: if all are yes and name no divergent member, rank 0 votes for all, else each votes at the server; all
    follow its outcome. Without an Agreement, and while a heal is open, each votes at the server at once.
    -> manager.py:Manager._cast_vote, agreement.py:Agreement.outcome, protocol/group.py:GroupMachine._decide
How is a kind of process group added? By a subclass with KIND, DEVICE and `_build`, which returns an Engine; the docstring of
    process_groups/base.py lists all other places.
    -> process_groups/base.py:ProcessGroup._build, process_groups/forming.py:Engine, start.py:make_process_group
How does semi-sync share the step? A round is a step of the same machine. Its gradients are the pseudo-gradients of one fragment, outer
    minus local weights (Local SGD: the weights), sent fragment_sync_delay inner steps before the round's end; at the commit the outer
    optimizer steps with their mean (Local SGD: the mean becomes the outer weights).
    -> semi_sync_manager.py:SemiSyncManager.on_inner_step, semi_sync_manager.py:SemiSyncManager.commit, semi_sync.py:Fragment.step
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {  # public names, by module
    "ft.compat.lighthouse": ("LighthouseClient", "LighthouseServer"),
    "ft.compat.local_sgd": ("DiLoCo", "LocalSGD"),
    "ft.compat.manager": ("Manager", "WorldSizeMode"),
    "ft.compat.process_groups": ("ErrorSwallowingProcessGroup", "ManagedProcessGroup", "ProcessGroupDummy"),
    "ft.compat.wrappers": ("DistributedDataParallel", "DistributedSampler", "Optimizer"),
    "ft.optim_state": ("init_optim_state",),
    "ft.process_groups.baby": ("ProcessGroupBabyGloo", "ProcessGroupBabyNCCL"),
    "ft.process_groups.gloo": ("ProcessGroupGloo",),
    "ft.process_groups.nccl": ("ProcessGroupNCCL",),
    "ft.seam": ("Commit", "DataAssignment", "Seam", "StepTotals"),
    "ft.start": ("SoloManager",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

# Former names, for programs that still import them.
_FORMER = {"Deal": "DataAssignment", "Sums": "StepTotals"}

# torchft's modules, which a program may use as attributes after `import ft`.
_TORCHFT = ("checkpointing", "coordination", "data", "ddp", "local_sgd", "optim", "process_group")

# torchft's names that are absent, with the alternative.
_XCCL = "Intel GPUs are not supported; ProcessGroupGloo is for CPUs, ProcessGroupNCCL for NVIDIA GPUs"
_ABSENT = {
    "ManagerClient": "the Manager has its own connection to its group's server",
    "ManagerServer": "the Manager starts its group's server",
    "ProcessGroupBabyXCCL": _XCCL,
    "ProcessGroupXCCL": _XCCL,
    "parameter_server": "no server offers weights; LocalSGD and DiLoCo average them, and the Manager sends them to a group that joins",
}

__all__ = sorted(_MODULE_OF)


def absent(module: str, name: str) -> Exception:
    """Returns the error for a name that the module does not have, with the alternative if it is one of torchft's."""
    if name in _ABSENT:  # ImportError, as `from ft import ...` hides the message of an AttributeError
        return ImportError(f"ft has no {name}: {_ABSENT[name]} (docs/torchft.md)")
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
    if name in _TORCHFT:
        return importlib.import_module(f"ft.{name}")
    if name not in _MODULE_OF:
        raise absent("ft", name)
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
