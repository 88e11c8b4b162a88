"""Made by scripts/make_proto.sh from ft/rpc/*.proto; do not edit (this file is written by hand)."""

from google.protobuf import __version__ as _version

OLDEST = (
    6,
    31,
)  # what the protoc of scripts/make_proto.sh writes asks for; protobuf's own words name no package and no remedy

if tuple(int(number) for number in _version.split(".")[:2]) < OLDEST:
    raise ImportError(f"replica groups need protobuf >= 6.31; this Python has {_version}: pip install 'protobuf>=6.31'")
