"""Healing: a replica group that is behind receives the state of one that is not. capture.py names the state and finds its bytes, format.py
defines how it is sent, transport.py is the interface of http_transport.py and pg_transport.py, and has the source's offer."""
