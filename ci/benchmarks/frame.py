"""What measurements share: options, contenders that take turns, examples, and the file of ``--json``.

options = options_of(__doc__, rows=400_000, ranks=(1, 2))   # --rows N --ranks 1,2 --json FILE
seconds = by_turns({"ours": ours, "peer": peer}, options.rounds, same=torch.equal)
print(over(seconds["peer"].cpu, seconds["ours"].cpu))
record(options, rows=...)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from tritonrec.files import save_json
from tritonrec.harness.environment import environment_of_times


def options_of(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The command line: ``--json FILE``, and an option of each name, whose values are of the default's type.

    Of a list's values there may be any number, a tuple's stand between commas, and a dict has argparse's own
    arguments, its ``default`` among them.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=layout)
    for name, default in {"json": {"type": Path}, **defaults}.items():
        how = default if isinstance(default, dict) else {"default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **{**_reader(how.get("default")), **how})
    return parser.parse_args()


def _reader(default: Any) -> dict[str, Any]:
    if isinstance(default, list):
        return {"nargs": "+", "type": type(default[0])}
    if isinstance(default, tuple):
        return {"type": lambda text: tuple(map(type(default[0]), text.split(",")))}
    return {} if default is None else {"type": type(default)}


@dataclass
class Times:
    """Seconds of a contender's calls, by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def by_turns(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    same: Callable[[Any, Any], bool] | None = None,
    warm: int = 1,
) -> dict[str, Times]:
    """The times of all calls, which take turns and begin a round by turns.

    Rounds before the first that counts compile. What the first of them gave is compared by `same`, the first
    contender's with each other one's; SystemExit where it differs.
    """
    found = {name: Times() for name in calls}
    for number in range(-warm, rounds):
        results = {}
        for name in calls if number % 2 else reversed(calls):
            wall, cpu = time.perf_counter(), time.process_time()
            results[name] = calls[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number >= 0:
                found[name].wall.append(wall)
                found[name].cpu.append(cpu)
        first, *others = calls
        for name in others if number == -warm else ():
            if same and not same(results[first], results[name]):
                raise SystemExit(f"{name} gives something else than {first}; no time is printed")
    return found


def example(name: str = "sasrec") -> Any:
    """``docs/examples/NAME.py`` as a module."""
    folder = str(Path(__file__).resolve().parents[2] / "docs" / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module(name)


def over(theirs: list[float], ours: list[float]) -> float:
    """The median of the rounds' ratios."""
    return median(a / b for a, b in zip(theirs, ours, strict=True))


def record(options: argparse.Namespace, environment: dict[str, Any] | None = None, **found: Any) -> None:
    """Write what was found if the options name a file; `environment` is that of the machine unless given."""
    if options.json:
        plan = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        whence = {**(environment or environment_of_times()), "plan": plan}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        save_json({"environment": whence, **found}, options.json)
