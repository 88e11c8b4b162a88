#!/usr/bin/env python3
"""Forwards to tools/check_cluster.py."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from tools.check_cluster import main  # noqa: E402 (our packages first)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
