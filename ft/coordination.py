"""torchft.coordination, under its names. A group's server and its client belong to the Manager."""

from ft import __getattr__  # noqa: F401 (says why ManagerClient and ManagerServer are absent)
from ft.compat.lighthouse import LighthouseClient, LighthouseServer, QuorumMember
from ft.compat.lighthouse import LighthouseQuorum as Quorum

__all__ = ["LighthouseClient", "LighthouseServer", "Quorum", "QuorumMember"]
