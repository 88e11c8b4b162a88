"""The simulated world: its own physics, planted bugs that it must find, and a thousand seeds."""
