"""Two members, one per device: one is killed inside a collective. NCCL itself does not notice; a notice ends the other at once."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from ft.process_groups.store import serve
from tests.gpu.devices import two_devices
from tests.multiproc.test_process_group_deaths import LIMIT_S, Member, told

pytestmark = [two_devices, pytest.mark.timeout(600)]


def test_a_member_is_killed_inside_a_sum_and_the_other_goes_on_alone() -> None:
    with ExitStack() as stack:
        members = [stack.enter_context(closing(Member())) for _ in range(2)]
        told(members, "prepare_nccl", ranked=True)
        store = f"127.0.0.1:{serve().port}"
        told(members, "form", kind="baby_nccl", store=f"{store}/both", size=2, ranked=True)
        sums = [
            member.tell("sums", count=1_000_000, elements=1 << 26, device=f"cuda:{number}")
            for number, member in enumerate(members)
        ]
        assert all(member.first.wait(LIMIT_S) for member in members)
        members[1].kill()
        # as the Manager does, when the lighthouse tells it
        told(members[:1], "abandon", reason="the other member is gone")
        ended = sums[0].result(LIMIT_S)
        assert "the other member is gone" in ended["error"] and ended["done"] >= 1
        assert told(members[:1], "reaped")[0]["ended"]
        told(members[:1], "form", kind="baby_nccl", store=f"{store}/alone", size=1, ranked=True)
        assert told(members[:1], "sums", count=3, elements=1 << 20, device="cuda:0")[0] == {"done": 3}
