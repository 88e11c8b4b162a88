"""Made by scripts/make_proto.sh from ft/rpc/*.proto; do not edit."""
