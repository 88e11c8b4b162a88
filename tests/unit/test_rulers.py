"""Rulers of this repository: calls of a step (tools/one_step.py) and lines of the core (tools/size.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from configs.schema import RunConfig
from tools import size
from tools.one_step import TracedCall, Tracer, digest_of, tree
from training.checkpoint_files import manifest_or_problem, read_manifest


def test_calls_are_counted_with_their_depth_and_those_of_libraries_are_not():
    tracer, optimizer = Tracer(), RunConfig().optimizer
    sys.setprofile(tracer)
    try:
        sorted([2, 1], key=lambda value: value)  # of this file
        optimizer.check()
        manifest_or_problem(Path())
    finally:
        sys.setprofile(None)
    calls = [(call.depth, call.file, call.function.rpartition(".")[2]) for call in tracer.calls]
    assert calls[:2] == [(0, "tests/unit/test_rulers.py", "<lambda>")] * 2
    assert calls[2:] == [
        (0, "training/optimizer.py", "check"),
        (0, "training/checkpoint_files.py", manifest_or_problem.__name__),
        (1, "training/checkpoint_files.py", read_manifest.__name__),
    ]


def test_a_tree_of_calls_names_repeated_ones_once():
    f, g = TracedCall(1, "a.py", "f"), TracedCall(2, "a.py", "g")
    assert tree([f, g, g, f]) == ["f  a.py", "  g  a.py  x2", "f  a.py"]


def test_the_page_of_one_step_fits_the_code():
    page = (size.ROOT / "docs" / "one_step.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ *(\S+)  (\S+\.py)(?:  x\d+)?$", page, re.MULTILINE)
    named = {(file, function) for function, file in lines}
    counted = f" {len(named)} functions, {len({file for file, _ in named})} files,"
    assert counted in page and f" {digest_of(named)} is a digest" in page, "out of date: `make one_step` writes it anew"


def test_the_core_is_what_a_run_can_import():
    core = size.modules(size.ROOTS)
    assert {"train.py", "ft/manager.py", "models/llama.py"} <= core
    assert {"ft/rpc/group_server.py", "ft/process_groups/fork_server_main.py"} <= core, "started by name"
    assert not [name for name in core if name.startswith(("tests/", "ft/dashboard/", "ft/rpc/generated/", "tools/"))]
