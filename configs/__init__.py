"""The place where all sections meet: TOML and overrides into one frozen RunConfig; errors that teach, before anything starts."""
