"""Healing: a group that is behind receives the state of one that is not. capture.py names the state, format.py says how it is written,
payload.py where its bytes lie, offer.py what a source owes its readers; transport.py is the face of http_transport.py and
pg_transport.py."""
