"""Healing a group's rank on this machine: both transports beside a bare socket that does nothing but recv_into.

    python bench/healing.py [--gb 2] [--pairs 5]

Two processes, a source and a joiner, hold states of the same size whose memory has been touched. They take turns: raw, HTTP, process
group, bare gloo (torch's own, messages as large: what a transport over gloo could reach), the same with our digests, and again; ratios
are taken inside a turn. Seconds are the joiner's, from its call to the verified state (the process group's
forming included). Peak memory is each side's, above what it held before that turn.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
import torch.distributed as dist

from bench.job import memory_bytes, reset_peak
from bench.pairs import parser, ratio, serve, spread, table, workers
from ft.healing.capture import State
from ft.healing.format import CHUNK_BYTES, digest
from ft.healing.http_transport import HttpTransport
from ft.healing.pg_transport import MESSAGE_CHUNKS, WINDOW, PgTransport
from ft.healing.transport import StateSource, Transport
from ft.process_groups.gloo import ProcessGroupGloo
from ft.process_groups.store import serve as serve_store
from ft.rpc.access import Access

KINDS = ("raw", "http", "process group", "bare gloo", "bare gloo, digests")
LAYERS = 16
ACCESS = Access(token="a token of the benchmark's own")


class HealingSide:
    """A state, a transport of each kind, a bare socket, and torch's own gloo."""

    def __init__(self, role: str, gb: float, device: str) -> None:
        numbers = int(gb * 1e9 / 4 / LAYERS)
        fill = 1.0 if role == "source" else 0.0
        self.tensors = [torch.full((numbers,), fill, device=device) for _ in range(LAYERS)]  # touches every page
        self.device = device
        # what a bare socket can do at best for a device: one pinned buffer, copied to or from while nothing else runs
        self.pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) if device == "cuda" else None
        self.gb = LAYERS * numbers * 4 / 1e9
        self.state = State()
        self.state.register("model", lambda: {str(i): tensor for i, tensor in enumerate(self.tensors)}, lambda _: None)
        self.store = serve_store()
        self.transports: dict[str, Transport] = {
            "http": HttpTransport("127.0.0.1", role, ACCESS),
            "process group": PgTransport(lambda: ProcessGroupGloo(60.0), f"127.0.0.1:{self.store.port}/bench", role),
        }
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.steady = 0

    def offer(self, kind: str, turn: int) -> dict[str, str]:
        for i, tensor in enumerate(self.tensors):
            tensor.fill_(turn + i / LAYERS)
        self.steady = reset_peak()
        if kind not in self.transports:
            raw, port = kind == "raw", self.store.port
            target, arguments = (self._send_raw, ()) if raw else (self._bare_gloo, (0, port, kind, turn))
            self._sending = threading.Thread(target=target, args=arguments)
            self._sending.start()
            return {"address": f"http://127.0.0.1:{self.listener.getsockname()[1] if raw else port}"}
        self.transports[kind].offer(self.state.snapshot(), quorum_id=1, step=turn, readers=["joiner"])
        return {"address": self.transports[kind].address}

    def end(self, kind: str) -> dict[str, float]:
        if kind not in self.transports:
            self._sending.join()
        else:
            self.transports[kind].fence()
        return {"peak_mb": (memory_bytes("VmHWM") - self.steady) / 1e6}

    def fetch(self, kind: str, turn: int, address: str) -> dict[str, Any]:
        for tensor in self.tensors:
            tensor.zero_()
        self.steady = reset_peak()
        start = time.monotonic()
        if kind == "raw":
            self._receive_raw(int(address.rpartition(":")[2]))
        elif kind not in self.transports:
            self._bare_gloo(1, int(address.rpartition(":")[2]), kind, turn)
        else:
            self.transports[kind].fetch([StateSource("source", address)], self.state.snapshot(), quorum_id=1, step=turn)
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
        peak_mb = (memory_bytes("VmHWM") - self.steady) / 1e6
        right = all(bool((tensor == turn + i / LAYERS).all()) for i, tensor in enumerate(self.tensors))
        return {"seconds": seconds, "gb": self.gb, "peak_mb": peak_mb, "right": right}

    def _send_raw(self) -> None:
        sock, _ = self.listener.accept()
        with sock:
            for tensor in self.tensors:
                for part in tensor.view(torch.uint8).split(CHUNK_BYTES):
                    sock.sendall((part if self.pinned is None else self.pinned[: len(part)].copy_(part)).numpy().data)

    def _receive_raw(self, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            for tensor in self.tensors:
                for part in tensor.view(torch.uint8).split(CHUNK_BYTES):
                    into = part if self.pinned is None else self.pinned[: len(part)]
                    view = into.numpy().data
                    while len(view):
                        view = view[sock.recv_into(view) :]
                    if into is not part:
                        part.copy_(into)

    def _bare_gloo(self, rank: int, port: int, kind: str, turn: int) -> None:
        """Messages of the same size, as many under way: what a transport over gloo could reach at best, with the same digests or none."""
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        group = dist.ProcessGroupGloo(dist.PrefixStore(f"{kind}/{turn}", store), rank, 2, timedelta(seconds=60))
        under_way = deque[tuple[dist.Work, torch.Tensor]]()
        tag = 0

        def look_at(message: torch.Tensor) -> None:
            if "digests" not in kind:
                return
            view = message.numpy().data
            for at in range(0, len(view), CHUNK_BYTES):
                digest(at // CHUNK_BYTES, view[at : at + CHUNK_BYTES])

        def arrive() -> None:
            work, message = under_way.popleft()
            work.wait()
            if rank:
                look_at(message)

        for tensor in self.tensors:
            for message in tensor.view(torch.uint8).split(MESSAGE_CHUNKS * CHUNK_BYTES):
                if len(under_way) == WINDOW:
                    arrive()
                work = group.recv([message], 0, tag) if rank else group.send([message], 1, tag)
                under_way.append((work, message))
                if not rank:
                    look_at(message)
                tag += 1
        while under_way:
            arrive()


Turn = tuple[float, float, float]  # GB/s; MB above steady, of source and joiner


def measure(kinds: Sequence[str], turns: int, gb: float, device: str = "cpu") -> dict[str, list[Turn]]:
    """By kind."""
    figures: dict[str, list[Turn]] = {kind: [] for kind in kinds}
    commands = {role: [sys.executable, __file__, "--worker", role, str(gb), device] for role in ("source", "joiner")}
    with workers(commands, OMP_NUM_THREADS="1") as (source, joiner):
        for turn in range(turns + 1):  # the first warms up and is dropped
            for kind in kinds:
                what = {"kind": kind, "turn": turn}
                got = joiner.ask({"do": "fetch", **what, **source.ask({"do": "offer", **what})})
                gave = source.ask({"do": "end", "kind": kind})
                assert got["right"], f"{kind}: the joiner's state is not the source's"
                if turn:
                    figures[kind].append((got["gb"] / got["seconds"], gave["peak_mb"], got["peak_mb"]))
    return figures


def main() -> None:
    options = parser(__doc__, gb=(2.0, "of tensors, in each of the two processes"), pairs=5).parse_args()
    figures, rows = measure(KINDS, options.pairs, options.gb), []
    speeds = {kind: [speed for speed, _, _ in of] for kind, of in figures.items()}
    for kind, of in figures.items():
        peaks = (f"{max(turn[side] for turn in of):.0f}" for side in (1, 2))
        rows.append([kind, spread(speeds[kind], ".2f"), str(ratio(speeds[kind], speeds["raw"])), *peaks])
    print(table(["over", "GB/s", "of raw", "source: MB above steady", "joiner: MB above steady"], rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        torch.set_num_threads(1)
        side = HealingSide(sys.argv[2], float(sys.argv[3]), sys.argv[4])
        serve(side)
        for transport in side.transports.values():
            transport.close()
    else:
        main()
