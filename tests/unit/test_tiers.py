"""tests/conftest.py: pytest without options selects the first tier, which omits the tests listed there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import IN_BOTH, ONLY_WITH_ALL, is_only_with_all

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def test_every_entry_names_tests():
    for beginning in ONLY_WITH_ALL:
        file, _, test = beginning.partition("::")
        assert any(name.startswith(file) for name in FILES), beginning
        assert not test or f"def {test.partition('[')[0]}" in (ROOT / "tests" / file).read_text(), beginning
    for name in IN_BOTH:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), name


def test_the_first_tier_has_most_of_each_suite():
    suites = Counter(file.split("/")[0] for file in FILES)
    later = Counter(file.split("/")[0] for file in FILES if is_only_with_all(f"{file}::"))
    assert {suite for suite, count in suites.items() if 2 * later[suite] > count} == {"e2e", "dryrun"}


@pytest.mark.timeout(240)  # starts pytest four times
def test_the_bare_command_selects_the_first_tier_all_both_and_long_the_rest():
    """Collects a few files of both kinds, as collecting all of them imports torch."""
    plain = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = [
        *plain,
        "--collect-only",
        "-o",
        "testpaths=tests/e2e/test_drill.py tests/e2e/test_spikes.py tests/sim/test_world.py",
    ]
    found = {}
    for option in ([], ["--all"], ["--long"], ["tests/sim/test_world.py"]):
        done = subprocess.run([*command, *option], cwd=ROOT, capture_output=True, text=True, timeout=150, check=True)
        found[" ".join(option)] = re.findall(r"^tests/(.+::.+)", done.stdout, re.MULTILINE)
    assert found[""] == [name for name in found["--all"] if not is_only_with_all(name)]
    assert found["--long"] and not set(found["--long"]) & set(found["--all"])
    assert all(name.startswith("e2e/test_drill.py") for name in found["--long"])
    assert IN_BOTH[0] in found[""] and len(found[""]) < len(found["--all"])
    assert found["tests/sim/test_world.py"] and set(found["tests/sim/test_world.py"]) < set(found["--all"])
