"""Healing: the format, the captured state, both transports, and what goes wrong on the way."""
