"""A member of process groups, in a process that a test may kill or stop. Reads one JSON command a line, answers each with one JSON line.

Commands run in threads of their own, so that one can end what another waits for: {"id": 1, "do": "form", ...} -> {"id": 1, ...}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from ft.children import die_with


def main() -> None:
    die_with(int(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    member = Member()
    for line in sys.stdin:
        command = json.loads(line)
        threading.Thread(target=_answer, args=(member, command), daemon=True).start()
    os._exit(0)


class Member:
    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.kind = ""

    def prepare(self) -> dict[str, Any]:
        """Returns when torch is imported here and in the fork server."""
        from ft.process_groups.baby import ProcessGroupBabyGloo
        from ft.process_groups.gloo import ProcessGroupGloo

        if not self.groups:
            classes = {"gloo": ProcessGroupGloo, "baby_gloo": ProcessGroupBabyGloo}
            for kind, made in classes.items():
                self.groups[kind] = made(timeout=60.0, rendezvous_s=120.0)
        self.groups["baby_gloo"].prepare()
        return {}

    def prepare_nccl(self, rank: int) -> dict[str, Any]:
        """The same with NCCL, on the device of that number."""
        import torch

        from ft.process_groups.baby import ProcessGroupBabyNCCL

        torch.cuda.set_device(rank)  # of this thread alone, in which the group is made
        self.groups["baby_nccl"] = ProcessGroupBabyNCCL(timeout=60.0, rendezvous_s=120.0)
        self.groups["baby_nccl"].prepare()
        return {}

    def form(self, kind: str, store: str, rank: int, size: int) -> dict[str, Any]:
        self.kind = kind
        group = self.groups[kind]
        group.configure(store, rank, size)
        child = getattr(group, "child", None)
        return {"child": child.pid if child else 0, "fork_server": child.fork_server.pid if child else 0}

    def sums(self, count: int, elements: int, device: str = "cpu") -> dict[str, Any]:
        """Sums of this member's rank + 1, `count` of them or until one fails."""
        import torch

        from ft.process_groups import shared

        group = self.groups[self.kind]
        # a child maps no memory of an expandable segment, which torch.empty may give on a GPU
        done, value = 0, (torch.empty if device == "cpu" else shared.empty)(elements, device=device)
        while done < count:
            value.fill_(group.rank() + 1.0)
            try:
                group.allreduce([value]).wait()
            except RuntimeError as problem:
                return {"done": done, "error": str(problem), "errored": str(group.errored())}
            expected = sum(range(group.size() + 1))
            assert value.eq(expected).all(), f"sum {done} is not {expected}"
            done += 1
            if done == 1 and count > 1:
                _say({"id": 0, "first": True})
        return {"done": done}

    def abandon(self, reason: str) -> dict[str, Any]:
        self.groups[self.kind].abandon(reason)
        return {}

    def reaped(self) -> dict[str, Any]:
        return {"ended": self.groups[self.kind].reaper.wait(240)}


def _answer(member: Member, command: dict[str, Any]) -> None:
    number, do = command.pop("id"), command.pop("do")
    try:
        answer = getattr(member, do)(**command)
    except Exception as problem:  # noqa: BLE001 (the test wants to know)
        answer = {"raised": f"{type(problem).__name__}: {problem}"}
    _say({"id": number, **answer})


_saying = threading.Lock()


def _say(answer: dict[str, Any]) -> None:
    """One line, whole: commands end in several threads at once."""
    with _saying:
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
