"""Lines of each package, and of its tests: what a reader has before them (`make size`)."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    longest: list[tuple[int, str]] = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.suffix not in (".py", ".sh") or not path.exists():
            continue
        count = path.read_text(encoding="utf-8").count("\n")
        part = name.split("/")[0] if "/" in name else "(top)"
        lines[part] += count
        files[part] += 1
        longest.append((count, name))
    for part, count in lines.most_common():
        print(f"{count:6d}  {files[part]:3d} files  {part}")
    print(f"{sum(lines.values()):6d}  {sum(files.values()):3d} files  in all; {lines['tests']} of the lines are tests")
    print("longest: " + ", ".join(f"{name} {count}" for count, name in sorted(longest, reverse=True)[:5]))


if __name__ == "__main__":
    main()
