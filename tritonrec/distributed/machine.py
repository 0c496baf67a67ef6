"""Which processes share a machine: their messages are copies by the processors that compute, over no link."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def machine() -> str:
    """What processes on one machine and in one network have in common; empty where no one can tell.

    Containers and namespaces with a network of their own count as machines: a link may be between them.
    """
    try:
        return f"{BOOT.read_text().strip()} {os.readlink(NETWORK)}"
    except OSError:  # not Linux
        return ""


def count_machines(machines: Sequence[str]) -> int:
    """On how many processes with these `machine`s are; 0 where one of them cannot tell."""
    return 0 if "" in machines else len(set(machines))
