"""Stores that this library serves: each listens at one address, and its keys need a token that ranks share.

A store knows no users: a program that reaches its port may write any key whose name it knows. So local ranks
listen on the loopback interface, other ones on that of their network only, and what decides about ranks (who
has joined, who is left behind, whose failure ends a task) has names that begin with a secret.
"""

from __future__ import annotations

import errno
import secrets
import socket
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def serve_store(address: str, port: int = 0, timeout: timedelta | None = None) -> dist.TCPStore:
    """A store at an address of this machine, at a free port by default; `timeout` is of its calls.

    Where the address belongs to a gateway before this machine, it listens on all interfaces.

    Raises ValueError for a port that is in use, or may not be used.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        listener = socket.create_server((where[0], port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            listener = socket.create_server(("", port))
        else:
            raise ValueError(
                f"port {port} of {address} is in use or may not be used ({error.strerror}): give MASTER_PORT "
                "another one, the same for all ranks, or end the process that listens there"
            ) from error
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        str(where[0]), port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    if timeout is not None:
        store.set_timeout(timeout)
    return store


def token() -> str:
    """A secret, for the names of keys."""
    return secrets.token_hex(16)
