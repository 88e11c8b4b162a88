"""torchft.coordination, under its names. A group's server and its client belong to the Manager."""

from typing import NoReturn

from ft import absent
from ft.compat.lighthouse import LighthouseClient, LighthouseServer, QuorumMember
from ft.compat.lighthouse import LighthouseQuorum as Quorum

__all__ = ["LighthouseClient", "LighthouseServer", "Quorum", "QuorumMember"]


def __getattr__(name: str) -> NoReturn:  # says why ManagerClient and ManagerServer are absent
    raise absent(__name__, name)
