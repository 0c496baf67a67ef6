"""Kernels of which Triton would compile another program for another batch, and by which of their arguments.

    python ci/compile/programs.py      prints them as JSON; there are none

Each case of launches.py runs with several numbers of rows, tokens or keys, of which 16 divides some.
"""

from __future__ import annotations

import json

import launches

SIZES = 99, 96, 80, 117
OF_THE_CASE = {"chunk_rows"}  # a table's, which the cases take from their size
BY_POWERS_OF_TWO = {"hstu_attention.order_kernel"}  # of a batch's blocks: a few


def programs(label: str, rows: int) -> list[launches.Launch]:
    """The launches of a case with so many rows, in their order."""
    notes: list = []
    with launches.sized(rows, 64), launches.recording(notes), launches.on("sm_90"):
        launches.CASES[label]()
    return [launches.note(kernel, label, args, kwargs) for kernel, args, kwargs in notes]


def differing(one: launches.Launch, other: launches.Launch) -> set[str]:
    """Names of the arguments by which the programs differ."""
    names = one.kernel.arg_names
    found = {names[path[0]] for path in {*one.aligned} ^ {*other.aligned}}
    found |= {name for name in names if one.signature[name] != other.signature[name]}
    constants = one.constants, other.constants
    return found | {
        names[path[0]]
        for path in {*constants[0]} | {*constants[1]}
        if constants[0].get(path) != constants[1].get(path)
    }


def by_batch() -> dict[str, list[str]]:
    """Arguments by kernel."""
    launches.modules()  # before the ops are told that they are interpreted
    found: dict[str, set[str]] = {}
    for label in launches.CASES:
        first, *others = (programs(label, rows) for rows in SIZES)
        for other in others:
            for one, again in zip(first, other, strict=True):
                names = differing(one, again) - OF_THE_CASE
                if names and one.name not in BY_POWERS_OF_TWO:
                    found.setdefault(one.name, set()).update(names)
    return {name: sorted(names) for name, names in sorted(found.items())}


if __name__ == "__main__":
    print(json.dumps(by_batch(), indent=1))
