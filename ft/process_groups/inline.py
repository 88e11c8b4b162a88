"""Groups in this process: torch's gloo and NCCL, each of which can be woken.

gloo: its sockets are shut (gloo.py). NCCL: it is aborted in a thread that has a deadline (nccl.py).
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

from ft.device import current_device
from ft.process_groups import sockets
from ft.process_groups.base import ProcessGroup
from ft.process_groups.gloo import form_gloo
from ft.process_groups.group_init import Engine, GroupInit
from ft.process_groups.nccl import form_nccl
from ft.process_groups.rendezvous import Rendezvous


class ProcessGroupGloo(ProcessGroup):
    """gloo in this process. `interface`: its network interface, such as eth0; by default the one that leads to the store."""

    KIND = "ft_gloo"

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, interface: str | None = None
    ) -> None:
        if not sockets.can_be_found():
            raise RuntimeError("in-process gloo needs /proc to find its sockets: use ProcessGroupBabyGloo here")
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self._interface = interface

    def _build(self, group_init: GroupInit, store: Store | str, rank: int, size: int) -> Engine:
        rendezvous = Rendezvous(group_init, store, rank, size, self.rendezvous_s)
        return form_gloo(group_init, rendezvous, self._interface, timedelta(seconds=self.timeout_s + 1))


class ProcessGroupNCCL(ProcessGroup):
    """NCCL in this process. `timeout` is kept by this process; NCCL's own watchdog is off. `device`: by default the current one of the
    thread that makes the group. A generation is formed in another thread, and in CUDA each thread begins with device 0."""

    KIND = "ft_nccl"

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, device: int | None = None
    ) -> None:
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self.device = current_device() if device is None else device

    def _build(self, group_init: GroupInit, store: Store | str, rank: int, size: int) -> Engine:
        return form_nccl(group_init, Rendezvous(group_init, store, rank, size, self.rendezvous_s), self.device)
