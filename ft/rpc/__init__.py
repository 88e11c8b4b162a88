"""gRPC shells around the machines of ft.protocol. They hold no rule: events go in, effects are carried out.

Read in this order: driver.py (one machine, one loop), codec.py (dataclasses <-> messages), access.py (tokens, TLS, addresses), serving.py
(what both servers share), lighthouse_service.py and lighthouse_main.py, group_server.py, and clients.py for those who call them.
"""

import os

# Before grpc is imported: its handlers around fork() can hang a process that forks data workers, and none of ours forks with grpc in use.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
