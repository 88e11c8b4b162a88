"""Measures the detection time of a death: from SIGKILL of a group's server to the notice at a rank of a second group.

    python bench/notice.py [--kills 20]

All on loopback: the lighthouse and both groups' servers are separate processes, the watching rank is this one. The path of the notice is
kernel -> lighthouse (a stream breaks) -> the other group's server -> its rank.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import LighthouseProcess, our_lighthouse
from bench.pairs import machine, parser, spread
from ft.protocol import messages as m
from ft.rpc.clients import GroupClient, GroupServerProcess
from ft.rpc.group_server import Settings

WAIT_S = 60.0


def main() -> None:
    kills = parser(__doc__, kills=20).parse_args().kills
    with closing(LighthouseProcess(our_lighthouse(1, quorum_tick_ms=20))) as lighthouse:
        seconds = measure(f"http://{lighthouse.address}", kills)
    print(f"{kills} kills: {spread(seconds, '.1f', 1e3)} ms; {machine()}")


def measure(lighthouse: str, kills: int) -> list[float]:
    """Returns the seconds from each kill to the notice."""
    stays = NoticeGroup("stays:1", lighthouse)
    heard: queue.Queue[tuple[float, m.Notice]] = queue.Queue()
    stays.rank.watch(lambda notice: heard.put((time.monotonic(), notice)), print, pid=0)
    seconds, known = [], 0
    for number in range(kills):
        name = f"victim:{number}"
        victim = NoticeGroup(name, lighthouse)
        # Both at once: after a quorum of the first alone, the second waits for the first, which sends heartbeats
        with ThreadPoolExecutor(2) as threads:
            known, _ = threads.map(NoticeGroup.until_both, (stays, victim), (known, 0))
        began = time.monotonic()
        os.kill(victim.server.pid, signal.SIGKILL)
        while True:
            at, notice = heard.get(timeout=WAIT_S)
            if isinstance(notice, m.MemberLost) and name in notice.replica_ids:
                break
        seconds.append(at - began)
        victim.close()
    stays.rank.leave(clean=True, reason="the end")
    stays.close()
    return seconds


class NoticeGroup:
    """A replica group with one rank, which is in this process."""

    def __init__(self, replica_id: str, lighthouse: str) -> None:
        self.server = GroupServerProcess(Settings(replica_id, 1, lighthouse))
        self.rank = GroupClient(self.server.address, 0)

    def until_both(self, known: int) -> int:
        """Sends quorum requests until the quorum has two members. Returns its id."""
        while True:
            part = self.rank.quorum(m.RankCall(0, m.Member(""), known=known, failed=known > 0), WAIT_S)
            assert isinstance(part, m.QuorumResult)
            if len(part.members) == 2:
                return part.quorum_id
            known = part.quorum_id

    def close(self) -> None:
        self.rank.close()
        self.server.close()


if __name__ == "__main__":
    main()
