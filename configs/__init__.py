"""Where all sections meet: TOML and overrides into one frozen Config, errors that teach, checks before anything starts."""
