"""Healing: a group that is behind receives the state of one that is not. capture.py names the state and finds its bytes, format.py defines
how it is written, transport.py is the interface of http_transport.py and pg_transport.py and keeps the source's offer."""
