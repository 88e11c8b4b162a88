"""Measures healing of a rank on this machine: both transports compared with a bare socket.

    python bench/healing.py [--gb 2] [--pairs 5]

Two processes, a source and a joiner, have states of the same size in resident memory. The kinds alternate: raw socket, HTTP, process group,
bare gloo (torch's gloo with messages of the same size, an upper bound for a transport over gloo), bare gloo with digests; ratios are
computed per round. The time is the joiner's, from its call to the verified state, including the forming of the process group. Peak memory
is that of each side above its memory before the turn.
"""

from __future__ import annotations

import itertools
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
import torch.distributed as dist

from bench.job import memory_bytes, reset_peak
from bench.pairs import in_turns, parser, ratio, serve, spread, table, workers
from ft.healing.capture import StateRegistry
from ft.healing.format import CHUNK_BYTES, chunk_digest
from ft.healing.http_transport import HttpTransport
from ft.healing.pg_transport import IN_FLIGHT, MESSAGE_CHUNKS, PgTransport
from ft.healing.transport import HealEndpoint, Transport
from ft.process_groups.gloo import ProcessGroupGloo
from ft.process_groups.store import serve as serve_store
from ft.rpc.access import Access

KINDS = ("raw", "http", "process group", "bare gloo", "bare gloo, digests")
LAYERS = 16


class HealingSide:
    """Source or joiner: a state, and a way to transfer it for each kind."""

    def __init__(self, role: str, gb: float, device: str) -> None:
        numbers = int(gb * 1e9 / 4 / LAYERS)
        fill = 1.0 if role == "source" else 0.0
        self.tensors = [torch.full((numbers,), fill, device=device) for _ in range(LAYERS)]  # touches every page
        self.gb, self.device = LAYERS * numbers * 4 / 1e9, device
        # for the raw socket with a device: one pinned buffer, copied without overlap
        self.pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) if device == "cuda" else None
        self.state = StateRegistry()
        self.state.register_state("model", lambda: {str(i): x for i, x in enumerate(self.tensors)}, lambda _: None)
        self.store, self.listener = serve_store(), socket.create_server(("127.0.0.1", 0))
        self.transports: dict[str, Transport] = {
            "http": HttpTransport("127.0.0.1", role, Access(token="a token of the benchmark's own")),
            "process group": PgTransport(lambda: ProcessGroupGloo(60.0), "127.0.0.1", role),
        }

    def offer(self, kind: str, turn: int) -> dict[str, Any]:
        for i, tensor in enumerate(self.tensors):
            tensor.fill_(turn + i / LAYERS)
        self.steady = reset_peak()
        if transport := self.transports.get(kind):
            transport.offer(self.state.view(), quorum_id=1, step=turn, joiners=["joiner"])
            return {"address": transport.address}
        port = self.listener.getsockname()[1] if kind == "raw" else self.store.port
        bare = self._send_raw if kind == "raw" else partial(self._bare_gloo, 0, port, kind, turn)
        self._sending = threading.Thread(target=bare)
        self._sending.start()
        return {"address": port}

    def end(self, kind: str) -> dict[str, float]:
        if transport := self.transports.get(kind):
            transport.fence()
        else:
            self._sending.join()
        return {"peak_mb": (memory_bytes("VmHWM") - self.steady) / 1e6}

    def fetch(self, kind: str, turn: int, address: Any) -> dict[str, Any]:
        for tensor in self.tensors:
            tensor.zero_()
        self.steady = reset_peak()
        start = time.monotonic()
        if transport := self.transports.get(kind):
            transport.fetch([HealEndpoint("source", address)], self.state.view(), quorum_id=1, step=turn)
        elif kind == "raw":
            self._receive_raw(address)
        else:
            self._bare_gloo(1, address, kind, turn)
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
        peak_mb = (memory_bytes("VmHWM") - self.steady) / 1e6
        right = all(bool((tensor == turn + i / LAYERS).all()) for i, tensor in enumerate(self.tensors))
        return {"speed": self.gb / seconds, "peak_mb": peak_mb, "right": right}

    def _messages(self, size: int) -> Iterator[torch.Tensor]:
        return (part for tensor in self.tensors for part in tensor.view(torch.uint8).split(size))

    def _send_raw(self) -> None:
        sock, _ = self.listener.accept()
        with sock:
            for part in self._messages(CHUNK_BYTES):
                sock.sendall((part if self.pinned is None else self.pinned[: len(part)].copy_(part)).numpy().data)

    def _receive_raw(self, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            for part in self._messages(CHUNK_BYTES):
                into = part if self.pinned is None else self.pinned[: len(part)]
                view = into.numpy().data
                while len(view):
                    view = view[sock.recv_into(view) :]
                if into is not part:
                    part.copy_(into)

    def _bare_gloo(self, rank: int, port: int, kind: str, turn: int) -> None:
        """Transfers with the transport's message size and window, with or without digests: an upper bound for a transport over gloo."""
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        group: Any = dist.ProcessGroupGloo(dist.PrefixStore(f"{kind}/{turn}", store), rank, 2, timedelta(seconds=60))
        under_way = deque[tuple[dist.Work, torch.Tensor]]()

        def compare(message: torch.Tensor) -> None:
            for number, chunk in enumerate(message.split(CHUNK_BYTES) if "digests" in kind else ()):
                chunk_digest(number, chunk.numpy().data)

        def complete() -> None:
            work, message = under_way.popleft()
            work.wait()
            if rank:
                compare(message)

        for tag, message in enumerate(self._messages(MESSAGE_CHUNKS * CHUNK_BYTES)):
            if len(under_way) == IN_FLIGHT:
                complete()
            work = group.recv([message], 0, tag) if rank else group.send([message], 1, tag)
            under_way.append((work, message))
            if not rank:
                compare(message)
        while under_way:
            complete()


def measure(kinds: Sequence[str], turns: int, gb: float, device: str = "cpu") -> dict[str, list[dict[str, float]]]:
    """Returns, by kind and turn: "speed" in GB/s, and peak MB above steady of "source" and "joiner"."""
    commands = {role: [sys.executable, __file__, "--worker", role, str(gb), device] for role in ("source", "joiner")}
    numbers = itertools.count(1)
    with workers(commands, OMP_NUM_THREADS="1") as (source, joiner):

        def turn(kind: str) -> dict[str, float]:
            what = {"kind": kind, "turn": next(numbers)}
            got = joiner.ask({"do": "fetch", **what, **source.ask({"do": "offer", **what})})
            sent = source.ask({"do": "end", "kind": kind})
            assert got["right"], f"{kind}: the joiner's state is not the source's"
            return {"speed": got["speed"], "source": sent["peak_mb"], "joiner": got["peak_mb"]}

        return in_turns({kind: partial(turn, kind) for kind in kinds}, turns, warm=1)


def main() -> None:
    options = parser(__doc__, gb=(2.0, "of tensors, in each of the two processes"), pairs=5).parse_args()
    figures, rows = measure(KINDS, options.pairs, options.gb), []
    speeds = {kind: [turn["speed"] for turn in of] for kind, of in figures.items()}
    for kind, of in figures.items():
        peaks = (f"{max(turn[side] for turn in of):.0f}" for side in ("source", "joiner"))
        rows.append([kind, spread(speeds[kind], ".2f"), str(ratio(speeds[kind], speeds["raw"])), *peaks])
    print(table(["transport", "GB/s", "relative to raw", "source: MB above steady", "joiner: MB above steady"], rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        torch.set_num_threads(1)
        side = HealingSide(sys.argv[2], float(sys.argv[3]), sys.argv[4])
        serve(side)
        for transport in side.transports.values():
            transport.close()
    else:
        main()
