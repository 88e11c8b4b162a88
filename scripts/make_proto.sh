#!/usr/bin/env bash
# Regenerates ft/rpc/generated from ft/rpc/*.proto (for maintainers). Needs grpcio-tools: PROTO_PYTHON names a Python that has it.
# Version 1.73.1, as its output runs with protobuf 6.31 to 7.x; newer versions raise the minimum protobuf version.
set -euo pipefail
case ${1-} in --help | -h) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac # the text above
cd "${BASH_SOURCE[0]%/*}/.."
wanted=1.73.1
python=${PROTO_PYTHON:-.venv/bin/python}

have=$("$python" -c 'from importlib.metadata import version; print(version("grpcio-tools"))' 2>/dev/null) || have=none
if [ "$have" != $wanted ]; then
  echo "pharos: $python has grpcio-tools $have; needed: a Python with 'pip install grpcio-tools==$wanted', named by PROTO_PYTHON=..." >&2
  exit 2
fi
# File names in the descriptors are the module names, so that they do not clash with torchft's own torchft.proto.
"$python" -m grpc_tools.protoc -Ift/rpc/generated=ft/rpc --python_out=. --pyi_out=. ft/rpc/torchft.proto ft/rpc/pharos.proto
cd ft/rpc
sha256sum generated/*_pb2.py* *.proto >generated/SHA256SUMS # tests/rpc/test_codec.py compares
