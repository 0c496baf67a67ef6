"""Kernels launched, aten ops called and waits of the host, by stage of one training step, without a GPU.

    python ci/emulator/steps.py                    a table
    python ci/emulator/steps.py --json out.json    the same, and every line of code that waits
    python ci/emulator/steps.py --check            against ci/baselines/steps.json: no launch and no wait more
    python ci/emulator/steps.py --update           writes the baseline and the table in docs/launches.md
    python ci/emulator/steps.py --case device ...  only those columns

The GPU is pretended (pretended.py) and its kernels are emulated. The step is one of mode nestpipe in full
flight: its buffers have rows of the step before, and the next one's keys are routed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "ci" / "compile")]
BASELINE = ROOT / "ci" / "baselines" / "steps.json"
DOCS = ROOT / "docs" / "launches.md"
STAGES = (
    "prefetch", "h2d", "route", "retrieve", "copy_kept_rows", "exchange", "compute", "gradient_exchange",
    "replica_reduce", "early_dense_reduce", "dense_reduce", "sparse_update", "dense_update", "write_back",
    "end of the step",
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "host": {},
    "device": {"storage": "device"},
    "cached": {"storage": "cached"},
    "device, skip_fetch": {"storage": "device", "skip_fetch": True},
    "device, admission": {"storage": "device", "admission": 2},
    "device, eviction": {"storage": "device", "evict": 150},
    "device, tiers": {"storage": "device", "tiers": 2},
    "device, 2 ranks": {"storage": "device", "ranks": 2},
    "device, 2 ranks, packed": {"storage": "device", "ranks": 2, "sums": "packed"},
    "device, 2 replicas": {"storage": "device", "ranks": 2, "replicas": 2},
}
"""Settings of each column: where tables are, and what else is on."""
MICRO_BATCHES, MEASURED, STEPS = 4, 3, 6

Report = dict[str, dict[str, dict[str, Any]]]


def measure(
    storage: str = "host",
    skip_fetch: bool = False,
    admission: int = 1,
    evict: int = 0,
    tiers: int = 0,
    ranks: int = 1,
    replicas: int = 1,
    sums: str = "auto",
) -> dict[str, dict[str, Any]]:
    """By stage of one step: launches, calls, waits, the lines of code that wait, and bytes of rows sent.

    `evict`: rows to keep, by lru. `tiers`: the access count from which on a row is in float32; counts halve
    in the step that is measured. `ranks` are threads, of which the first is measured, with so many
    `replicas` of the tables; `sums` are sent so.
    """
    import torch
    from pretended import pretended

    from tritonrec.distributed import Communicators
    from tritonrec.embedding import Eviction, HashTableCollection, PrecisionTiers, TablePolicy
    from tritonrec.harness.emulator import Emulation, emulated
    from tritonrec.harness.job import Job, dense_optimizer
    from tritonrec.harness.verify.thread_ranks import run_ranks
    from tritonrec.nn import HSTUConfig
    from tritonrec.pipeline import ExchangeConfig, Trainer, WindowConfig

    sizes = HSTUConfig(dim=16, layers=2)
    job = Job(
        "zipf:users=60,items=400,seed=1", batch_size=16, max_seq_len=16, num_negatives=4, sizes=sizes,
        slots=1024, policy=TablePolicy(
            Eviction("lru", capacity=evict) if evict else None, admission,
            PrecisionTiers(tiers, every=MEASURED) if tiers else None,
        ),
    )  # fmt: skip
    placed: dict[str, Any] = {}
    if storage != "host":
        placed = {"placement": replace(job.placement, storage=storage, device="cuda", cache_rows=300)}
    config = WindowConfig(
        MICRO_BATCHES,
        exchange=ExchangeConfig(first_use=True, skip_fetch=skip_fetch, sums=sums, sharing="each"),
    )
    quiet = Emulation("sm_90", races=False, uninitialised=False)
    sent = dict.fromkeys(STAGES, 0)
    with emulated(quiet), pretended() as gpu:
        models = []
        for _ in range(ranks):
            torch.manual_seed(0)
            models.append(job._model().to("cuda"))

        def train(communicators: Communicators) -> None:
            rank = communicators.rank
            model, rule = models[rank], job.rule("adam")
            tables = HashTableCollection(job.features(), rule, slots=job.slots, chunk_rows=1024, **placed)
            optimizer = dense_optimizer(model.parameters(), "adam", job.lr, job.eps)
            loader = job.loader(rank, ranks)

            def name_of(stage: str, step: int) -> str:
                return stage if (step, rank) == (MEASURED, 0) else "another step"

            with Trainer(
                model, tables, optimizer, communicators, "nestpipe", config, device="cuda", trust_model=True
            ) as trainer:

                def seen(name: str, action: Any) -> Any:
                    def stage(places: Any, micro_batch: int | None = None) -> None:
                        with gpu.stage(name_of(name, places.window.step)):
                            action(places, micro_batch)
                        if name_of(name, places.window.step) == name:
                            sent[name] += places.counts(name, micro_batch).row_bytes

                    return stage

                actions = trainer.program.actions
                actions.update({name: seen(name, action) for name, action in actions.items()})
                results = trainer.run(loader.batch(step) for step in range(STEPS))
                for step in range(STEPS):
                    with gpu.stage(name_of("end of the step", step)):
                        next(results)
                list(results)
            counters = tables.groups[0].table.counters
            assert not evict or counters.evicted, "nothing was evicted"
            assert not tiers or (counters.promoted and counters.demoted), "no row moved between the tiers"

        def rank(communicators: Communicators) -> None:
            with gpu.stage("another step"):
                train(communicators)

        run_ranks(ranks, rank, replicas)
    return {
        stage: {
            "sent": sent[stage],
            "launches": gpu.launches[stage],
            "calls": gpu.calls[stage],
            "waits": gpu.waits_of(stage),
            "lines": {line: count for (name, line), count in gpu.waits.items() if name == stage},
        }
        for stage in STAGES
    }


def table(found: Report) -> list[list[str]]:
    """Rows of launches / aten calls / waits by stage, below their titles."""
    rows = [["stage", *found]]
    sums = {case: {"launches": 0, "calls": 0, "waits": 0} for case in found}
    for stage in STAGES:
        for case, by_stage in found.items():
            for what in sums[case]:
                sums[case][what] += by_stage[stage][what]
        rows.append([stage, *(_cell(by_stage[stage]) for by_stage in found.values())])
    return [*rows, ["all", *(_cell(total) for total in sums.values())]]


def _cell(numbers: dict[str, int]) -> str:
    return " / ".join(str(numbers[what]) for what in ("launches", "calls", "waits"))


def markdown(rows: list[list[str]]) -> str:
    """A table of a page."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def worse(found: Report, baseline: Report) -> list[str]:
    """Where a stage launches or waits more often than the baseline says."""
    return [
        f"{case}, {stage}: {found[case][stage][what]} {what}, {baseline[case][stage][what]} in the baseline"
        for case in found
        for stage in STAGES
        for what in ("launches", "waits")
        if found[case][stage][what] > baseline[case][stage][what]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="one of the columns; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # kernels are compiled
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    found = {case: measure(**CASES[case]) for case in options.case or CASES}
    show(table(found), "launches / aten calls / waits of the host")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.update:
        from compile_matrix import put_between

        columns = {**json.loads(BASELINE.read_text()), **found}
        columns = {case: columns[case] for case in CASES if case in columns}
        BASELINE.write_text(json.dumps(columns, indent=1) + "\n")
        DOCS.write_text(put_between(DOCS.read_text(), "steps", markdown(table(columns))))
    if not options.check:
        return 0
    messages = worse(found, json.loads(BASELINE.read_text()))
    print("\n".join(messages))
    return len(messages) > 0


def show(rows: list[list[str]], title: str) -> None:
    """Print a table, its titles first."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(*rows[0], title=title)
    for row in rows[1:]:
        shown.add_row(*row)
    Console(width=160).print(shown)


if __name__ == "__main__":
    sys.exit(main())
