"""The place where all sections meet: TOML and overrides into one frozen Config; errors that teach, before anything starts."""
