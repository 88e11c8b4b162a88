"""Each planted bug is found: by the seed that found it first, with the words that name it."""

from __future__ import annotations

import pytest

from tests.sim.planted import BUGS
from tests.simulator import runs


@pytest.mark.timeout(600)  # seconds on an idle machine
@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found(name: str):
    bug = BUGS[name]
    found = runs.run(bug.seed, bug.groups, bug.steps, bug.fault_class, machines=bug.machines)
    assert bug.found in found.failure
    assert not runs.run(bug.seed, bug.groups, bug.steps, bug.fault_class).failure  # it is the bug that was found
