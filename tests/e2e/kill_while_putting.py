"""A program that is killed while it puts a checkpoint into an object store, once per request: for test_object_store.py.

    python kill_while_putting.py FOLDER URL

FOLDER has the checkpoints of steps 4 and 6. For n = 1, 2, ... a forked copy puts 4 into URL/n, then 6, and removes 4, under a hook that
sends it SIGKILL just before its n-th request. It ends with the first n that the copy outlives and prints how many kills there were.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from s3fs import S3FileSystem

from training.checkpoint_files import step_folder
from training.object_store import ObjectStore

PART_BYTES = 1000  # of multipart uploads


def main(folder: Path, url: str) -> int:
    instant = 0
    put_in_parts()  # before the first file system, which takes its methods from the class
    while True:
        instant += 1
        pid = os.fork()
        if pid == 0:
            store = ObjectStore(f"{url}/{instant}")
            store.put(step_folder(folder, 4))
            kill_at(instant)
            store.put(step_folder(folder, 6))
            store.remove_older(1, written=6)
            store.remove_leftovers()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            print(instant - 1)
            return os.waitstatus_to_exitcode(status)


def kill_at(instant: int) -> None:
    call, count = S3FileSystem._call_s3, 0

    async def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == instant:
            os.kill(os.getpid(), signal.SIGKILL)
        return await call(self, *arguments, **options)

    S3FileSystem._call_s3 = watched


def put_in_parts() -> None:
    """Puts one part at a time, so that each run has the same order of requests."""
    put_file = S3FileSystem._put_file

    async def put_parts(self: Any, *arguments: Any, **options: Any) -> Any:
        return await put_file(self, *arguments, **{**options, "chunksize": PART_BYTES, "max_concurrency": 1})

    S3FileSystem._put_file = put_parts


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
