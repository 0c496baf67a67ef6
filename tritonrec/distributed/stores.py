"""Stores that this library serves: each listens at one address, and its keys need a token that ranks share.

A store knows no users: a program that reaches its port may write any key whose name it knows. So local ranks
listen on the loopback interface, other ones on that of their network only, and what decides about ranks (who
has joined, who is left behind, whose failure ends a task) has names that begin with a secret.
"""

from __future__ import annotations

import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def serve_store(
    address: str | None, port: int = 0, timeout: timedelta | None = None, named: str = ""
) -> dist.TCPStore:
    """A store at an address of this machine, None: at all of them; at a free port by default.

    `timeout` is of its calls, `named` what the address is called in an error.

    Raises ValueError for a port that is in use, or may not be used.
    """
    both = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (address or "") else socket.AF_INET
    try:
        listener = socket.create_server((address or "", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"port {port} of {named or address} is in use or may not be used ({error.strerror}): give "
            "MASTER_PORT another one, the same for all ranks, or end the process that listens there"
        ) from error
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address or LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    if timeout is not None:
        store.set_timeout(timeout)
    return store


def connect_to(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A client of a store; TimeoutError where nobody listens there in time.

    Where nobody does, torch goes on for four times its limit, also while the process ends, which aborts it.
    """
    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((address, port), max(until - time.monotonic(), 0.1)).close()
            return dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        except OSError as error:
            if time.monotonic() >= until:
                raise TimeoutError(f"nobody listens there: {error}") from error
            time.sleep(0.05)


def token() -> str:
    """A secret, for the names of keys."""
    return secrets.token_hex(16)


def loopback_interface() -> str:
    """The name of the loopback interface, empty where it is unknown."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")
