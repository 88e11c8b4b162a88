"""One side of goodput.py --no-kills: the default job in three processes, with fault tolerance (ft) or without (ddp), some steps at a time.

    python goodput_worker.py ft|ddp             {"steps": n} on a line -> {"seconds": of one step, of the slowest process}
    python goodput_worker.py ft|ddp rank        one of the processes, started by the other kind

Both sides are train.py's own step, with the same batch a process. ft: three groups of one rank and a lighthouse. ddp: one group of three.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROCESSES = 3
CONFIG = ROOT / "configs" / "llama.toml"
SETTINGS = {
    "ft": ["--fault_tolerance.enable=true", f"--fault_tolerance.min_replica_size={PROCESSES}"],
    "ddp": [f"--parallelism.data_parallel_replicate_degree={PROCESSES}", "--parallelism.data_parallel_shard_degree=1"],
}


def lead(side: str) -> None:
    """Starts the processes, and hands each request on to all of them."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder, ExitStack() as cleanup:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "NUM_REPLICA_GROUPS": str(PROCESSES), "CUDA_VISIBLE_DEVICES": ""}
        env["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        if side == "ft":
            from ft.compat.lighthouse_server import LighthouseServer

            lighthouse = LighthouseServer("127.0.0.1:0", PROCESSES)
            cleanup.callback(lighthouse.shutdown)
            env["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
            places = [{"REPLICA_GROUP_ID": str(number)} for number in range(PROCESSES)]
        else:
            meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(PROCESSES)}
            places = [{**meet, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(PROCESSES)]
        command = [sys.executable, __file__, side, "rank", folder]
        ranks = [
            cleanup.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**env, **place}
                )
            )
            for place in places
        ]
        for rank in ranks:
            cleanup.callback(rank.kill)
        print(json.dumps(_all(ranks)), flush=True)
        for line in sys.stdin:
            for rank in ranks:
                assert rank.stdin
                print(line.strip(), file=rank.stdin, flush=True)
            print(json.dumps(_all(ranks)), flush=True)


def _all(ranks: list[subprocess.Popen[str]]) -> dict[str, float]:
    """The answer of the slowest."""
    answers = []
    for rank in ranks:
        assert rank.stdout
        answers.append(next(json.loads(line) for line in rank.stdout if line.startswith("{")))
    return {"seconds": max(answer["seconds"] for answer in answers)}


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def rank(side: str, folder: str) -> None:
    """Steps on request."""
    from configs.load import load
    from ft.config import Environment
    from parallelisms.distributed import launched_rank, process_group
    from train import Run
    from training.log import Log
    from training.signals import Signals

    # as long as it takes, without a pause: validation and checkpoints are not in train_step
    config = load([str(CONFIG), f"--job.dump_folder={folder}", "--training.steps=1000000", *SETTINGS[side]])
    log = Log(global_rank=launched_rank(), stream=sys.stderr)
    log.attach_to("pharos")
    with closing(Signals(log=log)) as signals, process_group(config.comm) as world, ExitStack() as cleanup:
        run = Run(config, Environment.read(os.environ), world, signals, log, cleanup)
        print(json.dumps({"seconds": _steps(run.train_step, 1)}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"seconds": _steps(run.train_step, json.loads(line)["steps"])}), flush=True)


def _steps(step: object, count: int) -> float:
    assert callable(step)
    began = time.perf_counter()
    for _ in range(count):
        while not step():
            pass
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    if len(sys.argv) > 2:
        rank(sys.argv[1], sys.argv[3])
    else:
        lead(sys.argv[1])
