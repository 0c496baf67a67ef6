"""Whether the order of every float sum follows from the shape alone, read from the TTGIR of every launch.

    python ci/compile/sum_layouts.py                          every launch with float sums
    python ci/compile/sum_layouts.py --only softmax --targets sm_90

`tl.sum` adds in the order of its operand's layout, and Triton chooses layouts by what it knows of pointers,
strides and options. So each launch is compiled as it is, with nothing aligned, with one argument at a time
not aligned, and with strides of 1 that are not known to be 1. Over all of these and over all options of a
case, a line of Python may sum in one layout only. Products on matrix units are compared by their instruction:
other products add along K in order, whatever the layout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from triton_ir import TARGETS, Operation, check_launches, parse, texts_of

Layouts = dict[str, set[str]]
DOTS = ("tt.dot", "ttng.warp_group_dot")


def layouts_of(text: str) -> Layouts:
    """The layouts of what each line of Python sums, and the instructions of its products."""
    found: Layouts = {}
    for operation in parse(text).walk():
        if sums_floats(operation):
            operand = re.search(r"\((tensor<.*>)\) ->", operation.text)
            assert operand, operation.text
            found.setdefault(f"{operation.source}: sum", set()).add(operand[1])
        elif operation.name in DOTS:
            unit = re.search(r"nvidia_mma<\{versionMajor = (\d).*?instrShape = (\[[\d, ]*\])", operation.type)
            found.setdefault(f"{operation.source}: product", set()).add(
                f"mma v{unit[1]} {unit[2]}" if unit else "in order"
            )
    return found


def sums_floats(operation: Operation) -> bool:
    return operation.name == "tt.reduce" and any(
        each.name == "arith.addf" for each in operation.regions[0].operations
    )


def variants(launch: Any) -> Iterator[tuple[str, Any]]:
    """What Triton may be told of the same call with tensors at other places, or with other strides."""
    yield "as it is", launch
    if launch.aligned:
        yield "nothing aligned", replace(launch, aligned=())
    for path in launch.aligned:
        name = ".".join([launch.kernel.arg_names[path[0]], *map(str, path[1:])])
        rest = tuple(one for one in launch.aligned if one != path)
        yield f"{name} not aligned", replace(launch, aligned=rest)
    if general := unspecialised(launch):
        yield "strides unknown", replace(general, aligned=())


def unspecialised(launch: Any) -> Any | None:
    """The launch with every number that is 1 passed as a number; None where there is none."""
    ones = [
        path
        for path, value in launch.constants.items()
        if type(value) is int and value == 1 and not launch.kernel.params[path[0]].is_constexpr
    ]

    def kind(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            parts = tuple(kind(one, (*path, i)) for i, one in enumerate(value))
            return type(value)(*parts) if hasattr(value, "_fields") else parts
        return "i32" if path in ones else value

    signature = {name: kind(one, (i,)) for i, (name, one) in enumerate(launch.signature.items())}
    constants = {path: value for path, value in launch.constants.items() if path not in ones}
    return replace(launch, signature=signature, constants=constants) if ones else None


def check(launches: Iterable[Any], target: str) -> list[str]:
    """What is summed in more than one order: line of Python, case, and who has which layout."""
    orders: dict[tuple[str, str, str], dict[str, str]] = {}
    for launch in launches:
        first = layouts_of(texts_of(launch, TARGETS[target], "ttgir")["ttgir"])
        if not any(line.endswith("sum") for line in first):
            continue
        for name, variant in variants(launch):
            found = (
                first
                if variant is launch
                else layouts_of(texts_of(variant, TARGETS[target], "ttgir")["ttgir"])
            )
            for line, layouts in found.items():
                group = line, f"{launch.name} of {launch.label}", f"{floats_of(launch)} {heads_of(launch)}"
                orders.setdefault(group, {}).setdefault(
                    " and ".join(sorted(layouts)), f"{launch.key}, {name}"
                )
    return [
        f"{line} in {len(found)} orders, {where} for {target}\n"
        + "\n".join(f"    {layout}: {first}" for layout, first in found.items())
        for (line, where, _), found in sorted(orders.items())
        if len(found) > 1
    ]


def heads_of(launch: Any) -> str:
    """The padded dimensions of attention's heads, by which it chooses tiles: others are other sums."""
    sizes = launch.config
    return f"{sizes['BLOCK_D']} {sizes['BLOCK_E']}" if "BLOCK_E" in sizes else ""


def floats_of(launch: Any) -> str:
    """The float types of its tensors: other types are other sums."""
    return " ".join(sorted(set(re.findall(r"\*((?:fp|bf)\d+)", str(launch.signature)))))


if __name__ == "__main__":
    sys.exit(check_launches(__doc__, check, "sums or products have more than one order"))
