"""What has cases and faults of its own beside the core of verify, and every fault of both.

A tool's file says how its case runs (`Run`, `Variant.tool`) and what its faults break, and adds both to the
core's. This is the one place that loads them.
"""

from importlib import import_module

from ..corpus import CORPUS, PUBLIC
from ..faults import FAULTS, Fault

TOOLS = ("exported", "served", "cached", "deltas", "server", "slipstream", "replay", "lost")
"""In the order of the table: of two that add before one name, the first comes first."""
for tool in TOOLS:
    import_module(f"{__package__}.{tool}")

SELECTIONS: dict[tuple[bool, bool], list[Fault]] = {
    (False, False): [],
    (True, False): FAULTS,
    (False, True): PUBLIC,
    (True, True): [*FAULTS, *CORPUS],
}
"""Faults by the options ``--inject-faults`` and ``--corpus``."""
