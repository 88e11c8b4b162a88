"""A side of bench/healing.py: `healing_worker.py source|joiner GB [DEVICE]`; one JSON request a line, one JSON answer a line."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
import torch.distributed as dist

from ft.healing.capture import State
from ft.healing.format import CHUNK_BYTES, digest
from ft.healing.http_transport import HttpTransport
from ft.healing.pg_transport import MESSAGE_CHUNKS, WINDOW, PgTransport
from ft.healing.transport import StateSource, Transport
from ft.process_groups.gloo import ProcessGroupGloo
from ft.process_groups.store import serve
from ft.rpc.access import Access

LAYERS = 16
BARE_GLOO = ("bare gloo", "bare gloo, digests")
ACCESS = Access(token="a token of the benchmark's own")


class HealingSide:
    """A state, a transport of each kind, a bare socket, and torch's own gloo."""

    def __init__(self, role: str, gb: float, device: str) -> None:
        numbers = int(gb * 1e9 / 4 / LAYERS)
        self.fill = 1.0 if role == "source" else 0.0
        self.tensors = [
            torch.full((numbers,), self.fill, device=device) for _ in range(LAYERS)
        ]  # full touches every page
        self.device = device
        # what a bare socket can do at best for a device: one pinned buffer, copied to or from while nothing else runs
        self.pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) if device == "cuda" else None
        self.gb = LAYERS * numbers * 4 / 1e9
        self.state = State()
        self.state.register("model", lambda: {str(i): tensor for i, tensor in enumerate(self.tensors)}, lambda _: None)
        self.store = serve()
        self.transports: dict[str, Transport] = {
            "http": HttpTransport("127.0.0.1", role, ACCESS),
            "process group": PgTransport(lambda: ProcessGroupGloo(60.0), f"127.0.0.1:{self.store.port}/bench", role),
        }
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.steady_kb = 0

    def offer(self, kind: str, turn: int) -> dict[str, str]:
        for i, tensor in enumerate(self.tensors):
            tensor.fill_(turn + i / LAYERS)
        self.steady_kb = _reset_peak()
        if kind == "raw":
            self._sending = threading.Thread(target=self._send_raw)
            self._sending.start()
            return {"address": f"http://127.0.0.1:{self.listener.getsockname()[1]}"}
        if kind in BARE_GLOO:
            self._sending = threading.Thread(target=self._bare_gloo, args=(0, self.store.port, kind, turn))
            self._sending.start()
            return {"address": f"http://127.0.0.1:{self.store.port}"}
        self.transports[kind].offer(self.state.snapshot(), quorum_id=1, step=turn, readers=["joiner"])
        return {"address": self.transports[kind].address}

    def end(self, kind: str, turn: int) -> dict[str, float]:
        if kind not in self.transports:
            self._sending.join()
        else:
            self.transports[kind].fence()
        return {"peak_mb": (_peak_kb() - self.steady_kb) / 1e3}

    def fetch(self, kind: str, turn: int, address: str) -> dict[str, Any]:
        for tensor in self.tensors:
            tensor.zero_()
        self.steady_kb = _reset_peak()
        start = time.monotonic()
        if kind == "raw":
            self._receive_raw(int(address.rpartition(":")[2]))
        elif kind in BARE_GLOO:
            self._bare_gloo(1, int(address.rpartition(":")[2]), kind, turn)
        else:
            self.transports[kind].fetch([StateSource("source", address)], self.state.snapshot(), quorum_id=1, step=turn)
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
        peak_mb = (_peak_kb() - self.steady_kb) / 1e3
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


def _reset_peak() -> int:
    """The memory held now, from which on the peak is counted (Linux; proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak_kb()


def _peak_kb() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return int(found[1])


def main(role: str, gb: str, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    side = HealingSide(role, float(gb), device)
    calls: dict[str, Callable[..., Any]] = {"offer": side.offer, "fetch": side.fetch, "end": side.end}
    print(json.dumps({"ready": role}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(calls[name](*arguments)), flush=True)
    for transport in side.transports.values():
        transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
