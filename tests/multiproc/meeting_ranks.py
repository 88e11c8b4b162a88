"""The program of test_init_methods.py: two ranks per init method, forked from one process that has imported torch.

Prints the sums of each rank for each method. `file://` and `tcp://` are used as under torchrun, whose own store is another one.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback

import torch
import torch.distributed as dist

from parallelisms.distributed import CommConfig, gather_texts, process_group


def main(folder: str) -> int:
    port = _free_port()
    environments = {
        "env://": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())},
        f"file://{folder}/meet": {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        f"tcp://127.0.0.1:{port}": {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "nowhere",
            "MASTER_PORT": "1",
        },
    }
    failed = 0
    for method, environment in environments.items():
        pids = [_fork(rank, method, environment) for rank in range(2)]
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    return 1 if failed else 0


def _fork(rank: int, method: str, environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update({**environment, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
    try:
        config = CommConfig(init_method=method, backend="gloo", init_timeout_seconds=40, train_timeout_seconds=40)
        config.check()
        with process_group(config) as world:
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total)
            texts = gather_texts(world, "names", f"rank {rank}")
            world.watch_store.set(f"watched/{rank}", "yes")
            seen = world.watch_store.get(f"watched/{1 - rank}").decode()
            print(f"{method.partition('://')[0]} {rank}: {total.item()} {texts} {seen}\n", end="", flush=True)
    except BaseException:  # noqa: BLE001 (a fork of this process must not run what is behind main())
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
