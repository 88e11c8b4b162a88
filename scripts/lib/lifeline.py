"""Redirects output to the rank's log, arranges that the rank dies with its launcher, and execs the program.

agent.py has torch's agent start `python -IS lifeline.py LAUNCHER_PID PROGRAM ARGUMENT...`, with PHAROS_RANK_LOG set.
Standard library only and no site, because every rank runs it: 15 ms.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across execve


def main(launcher: int, command: list[str]) -> None:
    log = os.open(os.environ.pop("PHAROS_RANK_LOG"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for to, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(to, stream)
    if sys.platform == "linux":
        # The kernel kills this process when its launcher is killed (SIGKILL, out of memory)
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher died before prctl
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
