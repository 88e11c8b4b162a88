"""Configuration: TOML and overrides are read into one frozen RunConfig, and checked before any process starts."""
