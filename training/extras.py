"""Optional packages: found missing by name and with the command that installs them, before anything runs."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def need(package: str, *, extra: str, setting: str) -> None:
    """Raises ValueError, beginning with `setting` ("section.key = value"), when `package` is not installed.

    `extra` is the name under [project.optional-dependencies] in pyproject.toml.
    """
    if find_spec(package) is None:
        raise ValueError(
            f"{setting}: needs the package {package}, which is not installed; "
            f'in the repository: {sys.executable} -m pip install ".[{extra}]"'
        )
