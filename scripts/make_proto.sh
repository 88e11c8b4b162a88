#!/usr/bin/env bash
# Renews ft/rpc/generated from ft/rpc/*.proto (for maintainers). Needs grpcio-tools: PROTO_PYTHON names a Python that has it.
# 1.73.1, whose code runs under protobuf 6.31 up to 7.x; a newer one would raise the oldest protobuf that we run with.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
wanted=1.73.1
python=${PROTO_PYTHON:-.venv/bin/python}

have=$("$python" -c 'from importlib.metadata import version; print(version("grpcio-tools"))' 2>/dev/null) || have=none
if [ "$have" != $wanted ]; then
  echo "pharos: $python has grpcio-tools $have; needed: a Python with 'pip install grpcio-tools==$wanted', named by PROTO_PYTHON=..." >&2
  exit 2
fi
# The names of the files inside the descriptors are those of the modules, so that nobody else's torchft.proto clashes with ours.
"$python" -m grpc_tools.protoc -Ift/rpc/generated=ft/rpc --python_out=. --pyi_out=. ft/rpc/torchft.proto ft/rpc/pharos.proto
"$python" - <<'PYTHON'
import hashlib
from pathlib import Path

here = Path("ft/rpc")
files = sorted([*here.glob("*.proto"), *here.glob("generated/*_pb2.py*")])
lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(here)}\n" for path in files]
(here / "generated" / "SHA256SUMS").write_text("".join(lines))  # tests/rpc/test_codec.py compares
PYTHON
