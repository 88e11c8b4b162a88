"""How soon a death is known: from SIGKILL of a group's server until a rank of another group has heard of it.

    python bench/notice.py [--kills 20]

Everything is real and on loopback: the lighthouse, both groups' servers, and a rank that watches are processes of their own. The way is
kernel -> lighthouse (a stream broke) -> the other group's server -> its rank.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from ft.protocol import messages as m
from ft.rpc.clients import GroupClient, GroupProcess
from ft.rpc.group_server import Settings

ROOT = Path(__file__).resolve().parents[1]
LIGHTHOUSE = "import sys; from ft.rpc.lighthouse_main import main; sys.exit(main(sys.argv[1:]))"
FLAGS = ("--min_replicas", "1", "--bind", "127.0.0.1:0", "--http", "none", "--quorum_tick_ms", "20")
WAIT_S = 60.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    kills = parser.parse_args(argv).kills
    command = [sys.executable, "-c", LIGHTHOUSE, *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout
        taken_ms = [1e3 * seconds for seconds in measure(process.stdout.readline().strip(), kills)]
        process.terminate()
    print(
        f"{kills} kills: {statistics.median(taken_ms):.1f} ms (median), {min(taken_ms):.1f}-{max(taken_ms):.1f};"
        f" load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return 0


def measure(lighthouse: str, kills: int) -> list[float]:
    """Seconds, of each kill."""
    stays = NoticeGroup("stays:1", lighthouse)
    heard: queue.Queue[tuple[float, m.Notice]] = queue.Queue()
    stays.rank.watch(lambda notice: heard.put((time.monotonic(), notice)), print, pid=0)
    seconds, known = [], 0
    for number in range(kills):
        victim = NoticeGroup(f"victim:{number}", lighthouse)
        known = together(stays, victim, known)
        began = time.monotonic()
        os.kill(victim.server.pid, signal.SIGKILL)
        seconds.append(told(heard, f"victim:{number}") - began)
        victim.close()
    stays.rank.leave(clean=True, reason="the end")
    stays.close()
    return seconds


class NoticeGroup:
    """A group of one rank, which is in this process."""

    def __init__(self, replica_id: str, lighthouse: str) -> None:
        self.server = GroupProcess(Settings(replica_id, 1, lighthouse))
        self.rank = GroupClient(self.server.address, 0)

    def quorum(self, known: int) -> m.Part:
        part = self.rank.quorum(m.RankCall(0, m.Member(""), known=known, failed=known > 0), WAIT_S)
        assert isinstance(part, m.Part)
        return part

    def close(self) -> None:
        self.rank.close()
        self.server.close()


def together(stays: NoticeGroup, victim: NoticeGroup, known: int) -> int:
    """The id of a quorum that has both. Each asks until it is in one: whoever came first may have had one alone, and then the other waits
    for it, since it beats and half of the groups are no majority."""
    threads = [threading.Thread(target=until_both, args=(victim, 0))]
    threads[0].start()
    known = until_both(stays, known)
    threads[0].join()
    return known


def until_both(group: NoticeGroup, known: int) -> int:
    part = group.quorum(known)
    while len(part.members) < 2:
        part = group.quorum(part.quorum_id)
    return part.quorum_id


def told(heard: queue.Queue[tuple[float, m.Notice]], replica_id: str) -> float:
    while True:
        at, notice = heard.get(timeout=WAIT_S)
        if isinstance(notice, m.MemberLost) and replica_id in notice.replica_ids:
            return at


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
