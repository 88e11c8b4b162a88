"""Prints the requirements of lock files that this Python lacks: python missing.py LOCK... Run by install.sh (PHAROS_NO_INSTALL=1), and by
run_lighthouse.sh, which uses the training environment if nothing is missing.

Checks the ranges in pyproject.toml, not the pins in the lock files, as a container may bring its own versions. Uses only the standard
library, as nothing may be installed yet, and no TOML reader, which Python 3.10 lacks.
Exit code 1, with one line on standard error, if something is missing.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
EXTRAS = {"requirements.lock": "", "requirements-lighthouse.lock": "lighthouse", "requirements-dev.lock": "dev"}
_NEWER = re.compile(r"python_version < '3\.(\d+)'")  # the only marker we use


def requirements(text: str, extra: str = "") -> list[tuple[str, str]]:
    """Returns (name, range) of each requirement in `dependencies`, or in the extra, that applies to this Python."""
    section = re.search(rf"^{extra or 'dependencies'} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert section, f"no list {extra or 'dependencies'} in pyproject.toml"
    found = []
    for name, bounds, marker in re.findall(r'^ +"([\w.-]+)([^";]*)(?:; *([^"]*))?"', section.group(1), re.MULTILINE):
        below = _NEWER.fullmatch(marker)
        assert below or not marker, f"{name}: unknown marker: {marker}"
        if not below or sys.version_info[1] < int(below.group(1)):
            found.append((name, bounds))
    return found


def lacks(name: str, bounds: str) -> str:
    """Returns a message if the requirement, such as ">=a,<b", is not met, else "". Ignores local parts ("+cpu") and pre-release letters."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return f"{name}{bounds}"
    have = _numbers(installed)
    found = re.findall(r"([<>])=?([\d.]+)", bounds)
    fits = (have < _numbers(limit) if sign == "<" else have >= _numbers(limit) for sign, limit in found)
    return "" if all(fits) else f"{name}{bounds} (it has {installed})"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def main(locks: list[str]) -> int:
    text = PYPROJECT.read_text(encoding="utf-8")
    wanted = dict.fromkeys(one for lock in locks for one in requirements(text, EXTRAS[lock]))
    missing = [message for name, bounds in wanted if (message := lacks(name, bounds))]
    if missing:
        print(
            f"pharos: PHAROS_NO_INSTALL=1 and {sys.executable} lacks {', '.join(missing)}; "
            "install them there, name another Python with PYTHON=..., or unset PHAROS_NO_INSTALL",
            file=sys.stderr,
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
