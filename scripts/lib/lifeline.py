"""Arranges that a program gets a signal when its launcher dies, redirects its output to PHAROS_RANK_LOG if that is set, and execs it.

    python -IS lifeline.py LAUNCHER_PID SIGNAL PROGRAM ARGUMENT...

agent.py starts the ranks through it, with SIGKILL; replicas.py starts groups and the lighthouse, with SIGTERM, so that groups save.
Standard library only and no site, because every rank runs it: 15 ms.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across execve


def main(launcher: int, number: int, command: list[str]) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: there is nothing to save until the program has a handler
    if path := os.environ.pop("PHAROS_RANK_LOG", ""):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for to, stream in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(to, stream)
    if sys.platform == "linux":
        # The kernel sends it when the thread of the launcher that started this process ends, as by SIGKILL or out of memory
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != launcher:  # the launcher died before prctl
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), signal.Signals[sys.argv[2]], sys.argv[3:])
