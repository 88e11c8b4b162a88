"""For all tests: the seconds of each suite, and what happens to torch's tests where there is no torch (make compat)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    suite = report.nodeid.partition("::")[0].split("/")
    _seconds[suite[1] if len(suite) > 2 else suite[0]] += report.duration  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _seconds:
        spent = ", ".join(f"{suite} {seconds:.1f}" for suite, seconds in _seconds.most_common())
        terminalreporter.write_line(f"seconds per suite: {spent}")


if find_spec("torch") is None:
    # What a run needs is not here, so the tests that need it are skipped. A module of ours that is missing stays an error.

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        collector: pytest.Collector,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr))
        if report.outcome == "failed" and missing and not _is_ours(missing.group(1)):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"needs {missing.group(1)}")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call() -> Generator[None, object, object]:
        try:
            return (yield)
        except ModuleNotFoundError as error:
            if error.name is None or _is_ours(error.name.partition(".")[0]):
                raise
            pytest.skip(f"needs {error.name}")


def _is_ours(package: str) -> bool:
    return (ROOT / package).is_dir() or (ROOT / f"{package}.py").is_file()
