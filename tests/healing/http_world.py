"""Groups in threads of one process that heal over HTTP, for tests/healing/test_http*.py; `world` in conftest.py makes one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from ft.healing.http_transport import HttpTransport
from ft.healing.transport import HealConfig, HealEndpoint
from ft.rpc.access import Access
from tests.healing.proxy import Proxy, Spoil
from tests.healing.states import Group

TOKEN = Access(token="a token of the test's own")
ONE_STREAM = HealConfig(heal_streams=1)  # so that what passes a proxy has an order
QUICK = HealConfig(heal_streams=1, heal_copy_bytes=0, heal_grace_s=0.5)
MIB = 1 << 20


class World:
    """Transports, proxies and threads, all ended with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._events: list[threading.Event] = []
        self._threads = stack.enter_context(ThreadPoolExecutor(8))

    def transport(self, name: str, access: Access = TOKEN, config: HealConfig | None = None) -> HttpTransport:
        """Opens a transport with short stripes, so that small states have several."""
        transport = HttpTransport("127.0.0.1", name, access, config or ONE_STREAM)
        transport.min_stripe = 8
        self._stack.callback(transport.close)
        return transport

    def source(self, group: Group, name: str = "a", config: HealConfig | None = None, **offer: Any) -> HttpTransport:
        transport = self.transport(name, config=config)
        transport.offer(group.view(), **({"quorum_id": 3, "step": 7, "joiners": ["j"]} | offer))
        return transport

    def proxy(self, to: Any, spoil: Spoil, asked: Callable[[bytes], Any] = lambda data: None) -> Proxy:
        proxy = Proxy(to.address, spoil, asked)
        self._stack.callback(proxy.close)
        return proxy

    def start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(call, *args, **kwargs)

    def event(self) -> threading.Event:
        self._events.append(threading.Event())
        return self._events[-1]

    def open_gates(self) -> None:
        for event in self._events:
            event.set()


def heal(
    joiner: HttpTransport, group: Group, *sources: Any, quorum_id: int = 3, step: int = 7, progress: Any = None
) -> None:
    """Heals as a joiner does: fetches, then loads."""
    named = [HealEndpoint(f"source-{i}", source.address) for i, source in enumerate(sources)]
    group.state.load(joiner.fetch(named, group.view(), quorum_id=quorum_id, step=step, progress=progress))


def commit(group: Group) -> None:
    """Changes every tensor, as an optimizer does."""
    for tensor in group.values["model"].values():
        tensor.add_(1)
