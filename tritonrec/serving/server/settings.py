"""Settings of the server; they need no package."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from ...files.places import local_path
from ...settings import MOST, setting, typed

TOKEN = "TRITONREC_TOKEN"
"""The environment variable of the token."""


@typed
@dataclass(frozen=True)
class ServerConfig:
    """How the server listens, batches and refuses."""

    host: str = "127.0.0.1"
    port: int = setting(8000, "To listen on; 0 takes a free one, which is printed.", 0, 65535)
    workers: int = setting(1, "Processes; with several, users' events cannot be sent.", 1, 256)
    ranks: int = setting(1, "Processes that hold the tables, each a part of them.", 1, 256)
    batch: int = setting(64, "Users that are computed together, at most.", 1, 2**16)
    latency: float = setting(
        0.0, "Milliseconds a request waits for others while none is computed.", 0, 10_000
    )
    queue: int = setting(1024, "Users that wait, at most; more are refused with 429.", 1, 2**24)
    timeout: float = setting(10.0, "Seconds of a request, and of a client to send or read one.", 0.01, 3600)
    max_body: int = setting(2**20, "Bytes of a request, at most.", 1, 2**31 - 1)
    max_values: int = setting(2**20, "Numbers of an answer, at most.", 1, 2**31 - 1)
    max_users: int = setting(100_000, "Users with a history here, at most.", 1, MOST)
    max_connections: int = setting(1000, "At one time; more are refused with 503.", 1, 2**20)
    max_lag: float = setting(0.0, "Seconds behind the trainer from which it is not ready; 0: any.", 0, 1e9)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def token_of(file: Path | None) -> str | None:
    """The token: of a file, or else of the environment variable `TOKEN`; None where there is neither.

    Raises ValueError for a file that cannot be read, and for an empty or a strange one.
    """
    try:
        text = os.environ.get(TOKEN) if file is None else local_path(file, "a token").read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--token-file {file} cannot be read: {error}") from error
    if text is None:
        return None
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"the token of {file or TOKEN} must be one word of printable ASCII")
    return token
