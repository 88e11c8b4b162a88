"""Made by scripts/make_proto.sh from ft/rpc/*.proto; do not edit (this file is written by hand)."""

from importlib import metadata

# Required by the code that the protoc of scripts/make_proto.sh writes; protobuf's own error names no package and no remedy.
OLDEST = (6, 31)

for _each in metadata.distributions(name="protobuf"):
    if tuple(int(number) for number in _each.version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"replica groups need protobuf >= 6.31; this Python has {_each.version}: pip install 'protobuf>=6.31'"
        )
    break  # the first is the one that an import finds
