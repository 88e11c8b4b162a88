"""torchft.parameter_server, which is absent: importing it says why."""

from ft import parameter_server  # noqa: F401 (raises ImportError)
