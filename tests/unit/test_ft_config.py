"""[fault_tolerance] and the environment: legal values, and the message for each illegal one."""

# ruff: noqa: E501 (exact messages stay on one line)

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ft.config import Environment, FaultTolerance
from ft.protocol.messages import Timeouts

SECRET = "0123456789abcdef"
ROOT = Path(__file__).resolve().parents[2]


def test_the_defaults_are_those_of_the_protocol():
    settings = FaultTolerance()
    settings.check()
    assert settings.times == Timeouts()


def test_every_length_of_the_protocol_can_be_set():
    lengths = {field.name: 1000.0 + number for number, field in enumerate(fields(Timeouts))}
    assert FaultTolerance(**lengths).times == Timeouts(**lengths)
    assert FaultTolerance(takeover_s=0).times.takeover_s is None


SEMI = dict(enable=True, semi_sync_method="diloco")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(beat_s=5.0), "fault_tolerance.beat_s = 5: must be below fault_tolerance.heartbeat_timeout_s = 5"),
        (dict(rendezvous_s=4.0), "fault_tolerance.heartbeat_timeout_s = 5: must be below fault_tolerance.rendezvous_s = 4"),
        (dict(rendezvous_s=31.0), "fault_tolerance.rendezvous_s = 31: must be below fault_tolerance.heal_grace_s = 30"),
        (dict(heal_grace_s=31.0), "fault_tolerance.heal_grace_s = 31: must not exceed fault_tolerance.takeover_s = 30"),
        (dict(takeover_s=601.0), "fault_tolerance.takeover_s = 601: must not exceed fault_tolerance.collective_s = 600"),
        (dict(heartbeat_timeout_s=5.0005), "fault_tolerance.heartbeat_timeout_s = 5.0005: must be whole milliseconds, as the lighthouse's --heartbeat_timeout_ms is; nearest: 5.0"),
        (dict(slots_per_step=4), "fault_tolerance.slots_per_step = 4: requires fault_tolerance.keep_global_batch = true"),
        (dict(deterministic_reduce=True), "fault_tolerance.deterministic_reduce = true: requires fault_tolerance.keep_global_batch"),
        (dict(sync_steps=10), 'fault_tolerance.sync_steps = 10: requires fault_tolerance.semi_sync_method = "local_sgd" or "diloco", but it is "none"'),
        (dict(num_fragments=2), 'fault_tolerance.num_fragments = 2: requires fault_tolerance.semi_sync_method = "diloco", but it is "none"; nearest: 1'),
        (dict(outer_nesterov=False), "fault_tolerance.outer_nesterov = false: requires fault_tolerance.semi_sync_method"),
        (dict(should_quantize=True), 'fault_tolerance.should_quantize = true: requires fault_tolerance.semi_sync_method = "diloco", but it is "none"; nearest: false'),
        (dict(enable=True, semi_sync_method="local_sgd", should_quantize=True), 'fault_tolerance.should_quantize = true: requires fault_tolerance.semi_sync_method = "diloco", but it is "local_sgd"'),
        (dict(semi_sync_method="diloco"), 'fault_tolerance.semi_sync_method = "diloco": requires fault_tolerance.enable = true'),
        (dict(heal_transport="pg"), 'fault_tolerance.heal_transport = "pg": requires fault_tolerance.enable = true: a single group has no other group to heal from; nearest: "http"'),
        (dict(**SEMI, keep_gradients=False), "fault_tolerance.keep_gradients = false: not supported with fault_tolerance.semi_sync_method"),
        (dict(**SEMI, keep_global_batch=True), "fault_tolerance.keep_global_batch = true: not supported with fault_tolerance.semi_sync_method"),
        (dict(**SEMI, num_fragments=2), "fault_tolerance.sync_steps = 5: must be a multiple of fault_tolerance.num_fragments = 2, because one fragment is reduced at a time; nearest: 4 or 6"),
        (dict(**SEMI, num_fragments=6), "fault_tolerance.sync_steps = 5: must be a multiple of fault_tolerance.num_fragments = 6, because one fragment is reduced at a time; nearest: 6"),
        (dict(**SEMI, fragment_sync_delay=5), "fault_tolerance.fragment_sync_delay = 5: must be from 0 to 4, because the next reduction is due after fault_tolerance.sync_steps = 5 steps; nearest: 4"),
        (dict(**SEMI, outer_momentum=0.0), "fault_tolerance.outer_nesterov = true: requires fault_tolerance.outer_momentum above 0; nearest: false"),
        (dict(enable=True, semi_sync_method="local_sgd", fragment_sync_delay=1), 'fault_tolerance.fragment_sync_delay = 1: requires fault_tolerance.semi_sync_method = "diloco", but it is "local_sgd"; nearest: 0'),
        (dict(takeover_s=0, heal_grace_s=601.0), "fault_tolerance.heal_grace_s = 601: must not exceed fault_tolerance.collective_s = 600"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_each_other(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        FaultTolerance(**settings).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        dict(heal_grace_s=20.0),
        dict(heartbeat_timeout_s=4.001),
        dict(stall_s=20.0),  # stall_s is not part of the timeout order
        dict(takeover_s=0.0, heal_grace_s=599.0),
        dict(**SEMI, sync_steps=12, num_fragments=4, fragment_sync_delay=2, fragment_update_alpha=0.5),
        dict(**SEMI, outer_momentum=0.0, outer_nesterov=False),
        dict(enable=True, semi_sync_method="local_sgd", sync_steps=1),
        dict(enable=True, heal_transport="pg"),
    ],
)
def test_settings_that_do(settings: dict[str, object]):
    FaultTolerance(**settings).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("process_group", "device_type", "expected"),
    [
        ("auto", "cpu", "gloo"),
        ("gloo", "cpu", "gloo"),
        ("baby_gloo", "cpu", "baby_gloo"),
        ("auto", "cuda", "nccl"),
        ("nccl", "cuda", "nccl"),
        ("baby_nccl", "cuda", "baby_nccl"),
        ("gloo", "cuda", 'fault_tolerance.process_group = "gloo": reduces only gradients in host memory, and here they are on a GPU; legal here: "auto", "nccl", "baby_nccl"; nearest: "nccl"'),
        ("baby_gloo", "cuda", 'fault_tolerance.process_group = "baby_gloo": reduces only gradients in host memory, and here they are on a GPU; legal here: "auto", "nccl", "baby_nccl"; nearest: "baby_nccl"'),
        ("nccl", "cpu", 'fault_tolerance.process_group = "nccl": reduces only gradients in GPU memory, and here they are in host memory; legal here: "auto", "gloo", "baby_gloo"; nearest: "gloo"'),
        ("baby_nccl", "cpu", 'fault_tolerance.process_group = "baby_nccl": reduces only gradients in GPU memory, and here they are in host memory; legal here: "auto", "gloo", "baby_gloo"; nearest: "baby_gloo"'),
    ],
)  # fmt: skip
def test_the_process_group_is_one_for_the_device(process_group: Any, device_type: str, expected: str):
    settings = FaultTolerance(process_group=process_group)
    if " " not in expected:
        assert settings.process_group_kind(device_type) == expected
        return
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        settings.process_group_kind(device_type)


# ------------------------------------------------------------------------------------------------ the environment


def test_nothing_is_set():
    assert Environment.read({}) == Environment()
    assert Environment.read({"RANK": "", "TORCHFT_LIGHTHOUSE": " "}) == Environment()


def test_what_a_launcher_sets():
    read = Environment.read(
        {
            "TORCHFT_LIGHTHOUSE": "head:29510",
            "REPLICA_GROUP_ID": "left-2",
            "NUM_REPLICA_GROUPS": "3",
            "PHAROS_TOKEN": SECRET,
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHFT_TIMEOUT_SEC": "5",
            "TORCHFT_QUORUM_TIMEOUT_SEC": "6",
            "TORCHFT_CONNECT_TIMEOUT_SEC": "7",
            "TORCHFT_QUORUM_RETRIES": "-1",
            "TORCHFT_MANAGER_PORT": "9",
        }
    )
    assert read == Environment("http://head:29510", "left-2", 3, SECRET, 3, 4, 1, "10.0.0.1", 29500, 2, 5, 6, 7, -1, 9)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TORCHFT_LIGHTHOUSE", "head", "TORCHFT_LIGHTHOUSE = head: must be http://HOST:PORT"),
        ("REPLICA_GROUP_ID", "left:2/x", "REPLICA_GROUP_ID = left:2/x: .*name must be 1 to 64 .*; nearest: left_2_x$"),
        ("NUM_REPLICA_GROUPS", "0", "NUM_REPLICA_GROUPS = 0: must be from 1 to 8192; nearest: 1$"),
        ("RANK", "one", "RANK = one: must be a whole number$"),
        ("RANK", "1", "RANK = 1: must be below WORLD_SIZE = 1$"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK = -1: must be from 0 to .*; nearest: 0$"),
        ("MASTER_PORT", "65536", "MASTER_PORT = 65536: must be from 0 to 65535; nearest: 65535$"),
        ("TORCHFT_TIMEOUT_SEC", "0.5", "TORCHFT_TIMEOUT_SEC = 0.5: must be a whole number$"),
        ("PHAROS_TOKEN", "short", "the token of PHAROS_TOKEN must have at least 16"),
    ],
)
def test_what_is_refused(variable: str, value: str, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        Environment.read({variable: value})


def test_a_token_in_a_file(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    assert Environment.read({"PHAROS_TOKEN_FILE": str(file)}).token == SECRET
    with pytest.raises(ValueError, match="both set"):
        Environment.read({"PHAROS_TOKEN_FILE": str(file), "PHAROS_TOKEN": SECRET})
    with pytest.raises(ValueError, match="no token in"):
        Environment.read({"PHAROS_TOKEN_FILE": str(tmp_path / "none")})


def test_a_token_does_not_show():
    assert SECRET not in repr(Environment.read({"PHAROS_TOKEN": SECRET}))


def test_settings_that_do_not_fit_the_environment():
    environment = Environment(lighthouse="http://head:29510", num_replica_groups=2)
    environment.check(FaultTolerance(enable=True, min_replica_size=2))
    with pytest.raises(
        ValueError, match=r"^fault_tolerance.min_replica_size = 3: there are NUM_REPLICA_GROUPS = 2; nearest: 2$"
    ):
        environment.check(FaultTolerance(enable=True, min_replica_size=3))
    with pytest.raises(ValueError, match=r"^TORCHFT_LIGHTHOUSE is not set: "):
        Environment().check(FaultTolerance(enable=True))
    Environment().check(FaultTolerance())


def test_reading_settings_loads_neither_torch_nor_grpc():
    script = "import sys, ft.config, ft.addresses; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_slots_of_a_step_are_as_many_as_groups_unless_it_is_said():
    several, unknown = Environment.read({"NUM_REPLICA_GROUPS": "3"}), Environment()
    assert several.slots_per_step(FaultTolerance()) == 0
    assert several.slots_per_step(FaultTolerance(keep_global_batch=True)) == 3
    assert unknown.slots_per_step(FaultTolerance(keep_global_batch=True, slots_per_step=5)) == 5
    with pytest.raises(ValueError, match="slots_per_step = 0: means NUM_REPLICA_GROUPS, which is not set"):
        lighthouse = Environment.read({"TORCHFT_LIGHTHOUSE": "http://localhost:1"})
        lighthouse.check(FaultTolerance(enable=True, keep_global_batch=True))
