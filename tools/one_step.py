"""Traces the calls of one steady training step: each entry into a Python function of this repository, on the trainer's thread.

    python tools/one_step.py [CONFIG] [--groups 3] [--step 20] [--write PAGE] [--section.key value ...]

Starts a lighthouse and replica groups of one rank on this machine (`--groups 1`: without fault tolerance), traces `Run.train_step` of the
first group at the given step with sys.setprofile, and prints the number of calls, distinct functions and files, and the maximum depth,
without `train_step` itself. Not traced: `EXCLUDED` modules (model, data, metrics, phases, background writer) with all their calls, and
comprehensions and generator expressions, which are frames only in some versions of Python. `--write` writes docs/one_step.md: the calls,
nested, and a digest that a test compares. Exit code: 0; 1 if a group failed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "tools"))]

from bench.pairs import parser  # noqa: E402 (our packages first)

EXCLUDED = ("models/", *(f"training/{name}" for name in ("data/", "metrics", "progress", "sinks", "background_writer")))
EXPRESSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
LIMIT_S = 300.0
PAGE = """\
# One training step, call by call

Written by `make one_step`; do not edit. Each line is a call of a function of this repository during one steady step, on the trainer's
thread, with its file, indented below its caller. Equal consecutive calls are one line with their count.
Not traced: model, data, metrics, phases, background writer, and the other processes (the group's server and the lighthouse).

```
{tree}
```

In all: {totals}.

`Run.train_step` in `train.py`, which makes the outermost calls, is not counted. {digest} is a digest of the names that these
functions call; a test fails when it is out of date.
"""


class TracedCall(NamedTuple):
    """A call of a function. `depth`: number of frames of this repository above it, from `train_step` on."""

    depth: int
    file: str
    function: str


class Tracer:
    """A profile function for sys.setprofile. Each resumption of a generator counts as a call."""

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []
        # frames of this repository, and whether they are excluded or below an excluded frame
        self._stack: list[tuple[FrameType, bool]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            ours = name.startswith(f"{ROOT}{os.sep}") and "site-packages" not in name
            if not ours or frame.f_code.co_name in EXPRESSIONS:
                return
            file = Path(name).relative_to(ROOT).as_posix()
            hidden = file.startswith(EXCLUDED) or bool(self._stack and self._stack[-1][1])
            if not hidden:
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # with its class from Python 3.11 on
                self.calls.append(TracedCall(len(self._stack), file, name))
            self._stack.append((frame, hidden))
        elif event == "return" and self._stack and self._stack[-1][0] is frame:
            self._stack.pop()


def run_group(argv: list[str], at: int, out: Path) -> int:
    """Runs train.py, and writes the calls of step `at` to `out`."""
    import train

    step_of = train.Run.train_step

    def train_step(self: Any) -> bool:
        if self.manager.step != at:
            return step_of(self)
        tracer = Tracer()
        sys.setprofile(tracer)
        try:
            return step_of(self)
        finally:
            sys.setprofile(None)
            # without the first call, which is that of train_step itself
            out.write_text(json.dumps(tracer.calls[1:]))

    train.Run.train_step = train_step  # type: ignore[method-assign]
    return train.main(argv)


def trace(config: str, *overrides: str, groups: int = 3, step: int = 20) -> list[TracedCall]:
    """Runs the groups and returns the calls of `step`, in order. Raises RuntimeError if a group fails."""
    from ft.compat.lighthouse import LighthouseServer

    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        out = Path(folder, "calls.json")
        words = [f"--job.dump_folder={folder}", f"--training.steps={step + 3}", "--lr_scheduler.warmup_steps=2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if groups > 1:
            lighthouse = LighthouseServer("127.0.0.1:0", groups)
            cleanup.callback(lighthouse.shutdown)
            env |= {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "NUM_REPLICA_GROUPS": str(groups)}
            words += ["--fault_tolerance.enable=true"]

        def run(group: int) -> subprocess.CompletedProcess[str]:
            member = ["--member", str(-1 if group else step), str(out), config, *words, *overrides]
            output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": LIMIT_S}
            own = {**env, "REPLICA_GROUP_ID": str(group)}
            return subprocess.run([sys.executable, __file__, *member], cwd=ROOT, env=own, **output)

        with ThreadPoolExecutor(groups) as threads:
            done = list(threads.map(run, range(groups)))
        if any(member.returncode for member in done):
            raise RuntimeError("\n".join(member.stdout[-2000:] for member in done))
        return [TracedCall(*call) for call in json.loads(out.read_text())]


def tree(calls: list[TracedCall]) -> list[str]:
    """Returns indented lines; equal consecutive calls become one line with their number."""
    runs = groupby(f"{'  ' * (call.depth - 1)}{call.function}  {call.file}" for call in calls)
    return [line + (f"  x{count}" if (count := len([*same])) > 1 else "") for line, same in runs]


def digest_of(functions: Iterable[tuple[str, str]]) -> str:
    """Digests the names that each function calls (no properties, no calls by libraries). Raises LookupError: a function is missing."""
    digest, trees = hashlib.sha256(), dict[str, ast.AST]()
    for file, function in sorted(functions):
        if file not in trees:
            path = ROOT / file
            trees[file] = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
        node = trees[file]
        for name in function.partition(".<locals>")[0].split("."):
            inner = (child for child in ast.walk(node) if child is not node and getattr(child, "name", "") == name)
            found = next((child for child in inner if not isinstance(child, ast.alias)), None)
            if found is None:
                raise LookupError(f"{file} has no {function}")
            node = found
        calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
        names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
        digest.update(f"{file} {function}: {' '.join(sorted(names))}\n".encode())
    return digest.hexdigest()[:16]


def main(argv: list[str]) -> int:
    if argv[:1] == ["--member"]:
        return run_group(argv[3:], int(argv[1]), Path(argv[2]))
    flags = parser(__doc__, groups=3, step=20, write=(Path, "page to write"))
    flags.add_argument("config", nargs="?", default="configs/llama.toml")
    given, overrides = flags.parse_known_args(argv)
    try:
        calls = trace(given.config, *overrides, groups=given.groups, step=given.step)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    functions = {(call.file, call.function) for call in calls}
    files, deepest = {file for file, _ in functions}, max(call.depth for call in calls)
    totals = f"{len(calls)} calls, {len(functions)} functions, {len(files)} files, depth {deepest}"
    totals += f"; {given.groups} group{'s' * (given.groups > 1)}, step {given.step}"
    print(totals)
    if given.write:
        lines, digest = "\n".join(tree(calls)), digest_of(functions)
        given.write.write_text(PAGE.format(tree=lines, totals=totals, digest=digest), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
