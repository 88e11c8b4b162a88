"""gRPC shells around the machines of ft.protocol. They hold no rule: events go in, effects are carried out.

Read in this order: driver.py (one machine, one loop), codec.py (messages <-> words), lighthouse_server.py, group_server.py, clients.py.
"""
