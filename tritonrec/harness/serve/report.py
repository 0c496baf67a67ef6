"""Tables and JSON of `tritonrec serve-bench`, the paper's figures beside ours."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from ..environment import environment
from ..shown import say, table
from .collectives import REPEATED_BYTES
from .mpi import Cells
from .rounds import BACKENDS, Result, Series, interval

PAPER = {
    "delays": "latency 17 -> 12 ms with k > 0, on either backend (8 nodes, mean delay 5 ms, Fig. 7)",
    "balanced": "no benefit from any k, on either backend (Mini-Kaggle and Ali-CCP, Fig. 8)",
    "straggler": "cannot be masked (section VI-B); no figure",
    "sizes": "latency 7 % lower, throughput 6 % higher on BLS, none on MPI (Fig. 7)",
}
PAPER_COLLECTIVES = "paper: MPI faster up to 4 KB a rank, BLS above (8 nodes, Infiniband, Fig. 6a)"
TITLES = {
    "delays": "Random delays",
    "balanced": "Balanced",
    "straggler": "One consistent straggler",
    "sizes": "Messages of drawn sizes",
}
TIMED = ("gloo", "bls", "bls by MPI", "MPI")


def saved(result: Result, setting: Series) -> list[float]:
    """Seconds a batch less than gloo with k = 0 in the same round, by round."""
    reference = result.of(setting.scenario, "gloo", 0).latency
    return [before - now for before, now in zip(reference, setting.latency, strict=True)]


def verdict(result: Result, scenario: str, backend: str) -> str:
    """What the best k saves over k = 0 of the same backend, beside what the delays leave to be saved.

    The best of several is chosen after the fact, so its interval flatters a little.
    """
    synchronous = result.of(scenario, backend, 0)
    others = [result.of(scenario, backend, bound) for bound in result.plan.bounds if bound]
    if not others:
        return f"{backend}: only k = 0 was run"
    best = min(others, key=lambda each: interval(each.latency)[0])
    gained, half = interval([a - b for a, b in zip(synchronous.latency, best.latency, strict=True)])
    mean = interval(synchronous.latency)[0]
    text = (
        f"{backend}, k = {best.bound}: {_ms(gained, half)} ms a batch less than k = 0 ({gained / mean:.0%})"
    )
    if not gained - half > 0:
        text = (
            f"{backend}: no k saves time beyond the interval; best k = {best.bound}, {_ms(gained, half)} ms"
        )
    if scenario == "delays":
        possible = interval([a - b for a, b in zip(synchronous.by_delays, best.by_delays, strict=True)])[0]
        if not gained - half > 0:
            masked = "nothing of it is shown to be masked"
        elif gained - half >= possible:
            masked = "all of it is masked"
        else:
            masked = "the interval allows all of it" if gained + half >= possible else "part of it is masked"
        text += (
            f"; the others' delays cost {possible * 1e3:.2f} ms, {masked} (delays alone: "
            f"{interval(synchronous.by_delays)[0] * 1e3:.2f} ms with k = 0, "
            f"{interval(best.by_delays)[0] * 1e3:.2f} with this k)"
        )
    return text


def print_report(result: Result, console: Console) -> None:
    """One table for each scenario, and one of plain all-to-alls."""
    plan = result.plan
    console.print(
        f"{plan.world_size} ranks, {plan.rounds} interleaved rounds; mean and 95 % interval over rounds"
    )
    if plan.scenarios:
        say(
            console,
            f"{result.served}; batches of {plan.batch_size}\n"
            f"{plan.steps} batches a run; predictions of all settings equal, bit for bit\n"
            "latency: time per batch; saved: against gloo with k = 0 of the same round; delays: latency if "
            "only delays took time; response: a batch's turn to its prediction, ms; lag: the largest seen",
        )
    for scenario in plan.scenarios:
        columns = "backend", "k", "latency ms", "saved ms", "delays", "batches/s", "response", "lag"
        rows = [
            (
                each.backend, str(each.bound), _ms(*interval(each.latency)),
                _ms(*interval(saved(result, each))), f"{interval(each.by_delays)[0] * 1e3:.2f}",
                "{:.0f} ± {:.0f}".format(*interval(each.throughput)),
                f"{interval(each.response)[0] * 1e3:.1f}",
                str(each.largest_lag) if each.backend == "bls" else "-",
            )
            for each in result.settings if each.scenario == scenario
        ]  # fmt: skip
        console.print(table(TITLES[scenario], columns, rows, fold=()))
        for backend in BACKENDS:
            say(console, verdict(result, scenario, backend))
        say(console, f"paper: {PAPER[scenario]}\n")
    if result.collectives:
        _print_collectives(result, console)
    if result.repetitions:
        _print_repetitions(result, console)


def _print_repetitions(result: Result, console: Console) -> None:
    names = _backends(result.repetitions)
    rows = []
    for count, cells in result.repetitions.items():
        ratio = "-"
        if "gloo" in cells and "bls" in cells:
            ratio = "{:.2f} ± {:.2f}".format(
                *interval([b / g for b, g in zip(cells["bls"], cells["gloo"], strict=True)])
            )
        times = [_ms(*interval(cells[name])) if name in cells else "-" for name in names]
        rows.append((f"{count:,}", *times, ratio))
    title = f"All-to-alls in a row, {REPEATED_BYTES // 1024} KiB from each rank, ms together"
    console.print(table(title, ("calls", *names, "bls / gloo"), rows))
    say(console, "-: more than a minute; paper: MPI 2 to 3 times as fast as BLS beyond one call (Fig. 6b)")


def _print_collectives(result: Result, console: Console) -> None:
    names = _backends(result.collectives)
    rows = []
    for size, cells in result.collectives.items():
        ratios = [
            "{:.2f}±{:.2f}".format(
                *interval([b / g for b, g in zip(cells["bls" + of], cells["gloo" + of], strict=True)])
            )
            for of in ("", " cpu")
        ]
        times = ["{:.0f}±{:.0f}".format(*(x * 1e6 for x in interval(cells[name]))) for name in names]
        rows.append((f"{size:,}", *times, *ratios))
    columns = "bytes", *names, "bls / gloo", "processor"
    console.print(table("Synchronous all-to-all, k = 0, us", columns, rows))
    say(
        console,
        "bytes: to each rank; bls / gloo: of time, and of the processor's time in the slowest rank\n"
        f"{PAPER_COLLECTIVES}",
    )
    if "MPI" not in names:
        say(console, "MPI is left out: it needs mpi4py and mpiexec")


def _backends(found: Cells) -> list[str]:
    """Those whose collectives were timed."""
    return [name for name in TIMED if name in next(iter(found.values()))]


def as_json(result: Result) -> dict[str, Any]:
    """Every number by round, and where they come from."""
    return {
        "environment": {
            **environment(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "plan": {**asdict(result.plan), "checkpoint": str(result.plan.checkpoint or "")},
        "served": result.served,
        "settings": [asdict(each) for each in result.settings],
        "collectives": {str(size): cells for size, cells in result.collectives.items()},
        "repetitions": {str(count): cells for count, cells in result.repetitions.items()},
        "paper": {**PAPER, "collectives": PAPER_COLLECTIVES},
    }


def _ms(mean: float, half: float) -> str:
    return f"{mean * 1e3:.2f} ± {half * 1e3:.2f}"
