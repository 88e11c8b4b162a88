"""The words of the protocol, by who hears them; ft/protocol/messages.py gathers them."""
