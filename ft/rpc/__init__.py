"""gRPC servers and clients around the state machines of ft.protocol: they feed events and carry out effects, and contain no quorum rule.

Reading order: driver.py (one machine, one loop), codec.py (dataclasses <-> messages), access.py (tokens, TLS, addresses), serving.py
(parts of both servers), lighthouse_service.py (with state_file.py) and lighthouse_main.py (with lighthouse_flags.py), lighthouse_link.py (a
group's connection to it), group_server.py, and clients.py (a rank's calls).
"""

import os

# Set before grpc is imported: its handlers around fork() can hang a process that forks data workers, and no forked child uses grpc.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
