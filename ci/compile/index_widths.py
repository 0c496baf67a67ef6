"""Integers of 32 bits that can leave their range, found in the TTIR of every launch by interval arithmetic.

    python ci/compile/index_widths.py                 every launch; fails with the lines of Python at fault
    python ci/compile/index_widths.py --only unique   cases whose label contains this

Triton passes an integer below 2**31 as int32 and a larger one as int64, so each kernel is compiled twice:
with sizes below 2**31, and with sizes up to 2**40. Every value gets the interval of all that it can be, from
the ranges of the arguments (`ARGUMENTS`), of what is loaded (`LOADED`) and of what the ops refuse (`LIMITS`).
A sum, a product, a shift or the counter of a loop in 32 bits that can leave them is at fault, and so is a
conversion to 32 bits. Intervals know no relation between two values: a range that follows from one is a line
of `LIMITS`, with its reason.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from intervals import Fault, Interval, Ranges, every
from triton_ir import parse, texts_of

from tritonrec.kernels.offsets import LONGEST

KERNELS = Path(__file__).resolve().parents[2] / "tritonrec" / "kernels"
MOST = 2**40  # elements of the largest tensor
INT32, INT64 = every(32), every(64)
ARCHITECTURE = 90  # for the options of a launch; TTIR is the same for all
SEQUENCE = (0, LONGEST)
# By name of an argument; any other is a size, a stride or a count: 0 to MOST.
ARGUMENTS: dict[str, Interval] = {
    # of what there is at least one of
    "num_groups": (1, MOST), "num_slots": (1, MOST), "num_heads": (1, MOST), "num_sequences": (1, MOST),
    "chunk_rows": (1, MOST),
    # programs of `sum_of_squares`
    "num_parts": (1, 1024),
    # any integer: they are mixed, not added up
    **dict.fromkeys(("secret", "seed", "table", "tag", "upper", "threshold"), INT64),
    # of a mask and a bias: `hstu_attention.call` brings them below max_seq_len
    "rules.group": (1, LONGEST), "rules.window": SEQUENCE, "rules.full": SEQUENCE, "rules.prefix": SEQUENCE,
    "bias.base": SEQUENCE, "bias.sign": (-1, 1), "bias.most": (0, 2 * LONGEST),
    # `relative_aggregate` refuses larger tables
    "buckets": (1, LONGEST),
}  # fmt: skip
# By name of a pointer argument, what lies behind it; anything of its type elsewhere.
LOADED: dict[str, Interval] = {
    **dict.fromkeys(("offsets_ptr", "q_offsets_ptr", "k_offsets_ptr"), (0, MOST)),
    # of fewer than 2**31 keys
    "rank_ptr": (0, 2**31 - 1),
    "layout.offsets_ptr": (0, MOST), "layout.rows_ptr": (0, MOST),
    # level << 32 | sequence; a level counts blocks of at least 16 places in a sequence
    "tiles_ptr": (0, (LONGEST // 16 << 32) + 2**32 - 1),
}  # fmt: skip
# By function and variable, the range of what is converted to 32 bits there, and of sums of 32 bits.
LIMITS: dict[tuple[str, str], Interval] = {
    # `hash_table` refuses other row numbers; -1 and -2 are none
    ("_claim_kernel", "row"): (-2, 2**31 - 1),
    # `unique` and `intersect` refuse 2**31 keys; lanes behind the last key are masked
    ("_build_kernel", "position"): (0, 2**31 - 1),
    # `check_lengths` refuses a longer sequence, `_check_counts` more targets and contexts than it has
    ("locate", "length"): SEQUENCE, ("other_sequence", "length"): SEQUENCE,
    ("open_sequence", "length"): SEQUENCE,
    ("open_sequence", "hidden"): SEQUENCE, ("open_sequence", "history"): SEQUENCE,
    ("open_sequence", "contexts"): SEQUENCE,
    # blocks of at least 16 rows of a sequence, or entries of a table
    ("locate", ""): (0, LONGEST // 16),
    # the walk's jumps lead past blocks of the sequence, and its count ends at its last one
    ("block_of", "start"): (0, LONGEST // 16),
    # the four bytes of a float32
    ("_load_row", "float_bits"): INT32,
}  # fmt: skip
# Functions that compute with bits modulo 2**32, no index among them.
MODULAR = {"philox4x32", "exp"}


@cache
def functions_of(file: str) -> list[tuple[int, int, str]]:
    """First line, last line and name of each function in a file of `tritonrec.kernels`, none of another."""
    path = next(KERNELS.rglob(file), None)
    tree = ast.parse(path.read_text() if path else "")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [(node.lineno, node.end_lineno or node.lineno, node.name) for node in functions]


def function_at(source: str) -> str:
    """The function of ``file.py:12``."""
    file, _, line = source.partition(":")
    return next((name for first, last, name in functions_of(file) if first <= int(line) <= last), "")


def widened(kind: Any) -> Any:
    """A signature's type, with int64 for int32: what Triton compiles for a number of 2**31 and more."""
    if isinstance(kind, tuple):
        parts = tuple(map(widened, kind))
        return type(kind)(*parts) if hasattr(kind, "_fields") else parts
    return "i64" if kind == "i32" else kind


def faults_of(text: str) -> set[Fault]:
    """What can leave 32 bits in the TTIR of a kernel."""
    ranges = Ranges(
        parse(text),
        lambda name: ARGUMENTS.get(name, (0, MOST)),
        LOADED.get,
        lambda source, variable: LIMITS.get((function_at(source), variable)),
    )
    return {fault for fault in ranges.faults if function_at(fault.source) not in MODULAR}


def check(launches: Iterable[Any]) -> dict[str, list[str]]:
    """Each fault, and the launches that have it."""
    found: dict[str, list[str]] = {}
    for launch in launches:
        wide = replace(launch, signature={name: widened(kind) for name, kind in launch.signature.items()})
        for one, sizes in ((launch, "sizes below 2**31"), (wide, "sizes up to 2**40")):
            for fault in faults_of(texts_of(one, ARCHITECTURE, "ttir")["ttir"]):
                found.setdefault(str(fault), []).append(f"{launch.key}, {sizes}")
    return dict(sorted(found.items()))


def main() -> int:
    import launches

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose label contains this")
    chosen = launches.launches(f"sm_{ARCHITECTURE}", parser.parse_args().only)
    found = check(chosen)
    for fault, where in found.items():
        print(f"{fault}\n    {where[0]}" + (f", and {len(where) - 1} more" if len(where) > 1 else ""))
    print(f"{len(chosen)} launches, {len(found)} lines of Python can leave 32 bits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
