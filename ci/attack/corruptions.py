"""Damaged checkpoints: each is refused by name, or gives the true state of its step in every bit.

Real checkpoints, full and incremental, of one to three ranks, are damaged: bits, ranges and lengths of
files, files swapped, renamed, removed or replaced by what is no file, values of headers and manifests. In
half of the cases the checksums are made to fit again, so that only the content can show the damage. Then
every step is loaded at another world size, and one of these has to come out:

    refused     a CheckpointError that names the file, or a ValueError that names what differs from the model
    equal       the state that was saved at this step, bit for bit

Anything else is a defect: another state, an error of a library, a crash, a wait, more memory than a limit.
Out of reach are changes of values alone whose checksums fit again, of tensors or of `meta`: such a checkpoint
is one that another run could have saved.

    python ci/attack/files.py --format checkpoint --count 2000
"""

from __future__ import annotations

import random
import shutil
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import case_runner
import torch
from damage import DAMAGES

from tritonrec import ops
from tritonrec.checkpoint import CheckpointError, Saved, load, save, slices, steps

Table = dict[str, torch.Tensor]

STEPS = (10, 20, 30)


@dataclass(frozen=True)
class State:
    """What was saved at a step."""

    dense: dict[str, torch.Tensor]
    tables: dict[str, Table]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Original:
    """A directory with checkpoints, and the state of each step that it holds."""

    name: str
    directory: Path
    states: dict[int, State]


# Checkpoints to damage.


def originals(folder: Path) -> list[Original]:
    """For one to three ranks a directory of full checkpoints and one of incremental ones, which all load."""
    before, slices.PART_BYTES = slices.PART_BYTES, 2048  # several files a rank
    try:
        made = [_original(folder, ranks, kind) for ranks in (1, 2, 3) for kind in ("full", "incremental")]
    finally:
        slices.PART_BYTES = before
    for each in made:
        for step in each.states:
            assert _end(each.directory, step, 2, each.states, False) == "equal", each.name
    return made


def _original(folder: Path, ranks: int, kind: str) -> Original:
    directory = folder / f"{kind}-{ranks}"
    draw = torch.Generator().manual_seed(ranks)
    items = torch.randint(-(2**63), 2**63 - 1, (150,), generator=draw).unique()
    states, base = {}, None
    tables = {"items": _rows(items, draw), "none": _rows(items[:0], draw), "one": _rows(items[:1], draw)}
    for step in STEPS:
        dense = {"w": torch.randn(3, 2, generator=draw), "b": torch.randn(2, generator=draw)}
        meta = {"seed": step, "sizes": {"dim": 3}, "names": ["a"]}
        if base is None:
            base = _save(directory, ranks, step, dense, tables, meta)
        else:
            changed = {name: _rows(table["keys"][::5], draw) for name, table in tables.items()}
            erased = {name: table["keys"][1::7] for name, table in tables.items()}
            tables = {name: _upon(table, changed[name], erased[name]) for name, table in tables.items()}
            if kind == "full":
                _save(directory, ranks, step, dense, tables, meta)
            else:
                base = _save(directory, ranks, step, dense, changed, meta, base, erased)
        states[step] = State(dense, {name: _ascending(table) for name, table in tables.items()}, meta)
    return Original(directory.name, directory, {step: states[step] for step in steps(directory)})


def _rows(keys: torch.Tensor, draw: torch.Generator) -> Table:
    rows = torch.randn(len(keys), 3, generator=draw)
    return {"keys": keys, "rows": rows, "score": torch.randint(0, 99, (len(keys),), generator=draw).int()}


def _upon(table: Table, changed: Table, erased: torch.Tensor) -> Table:
    stay = ~torch.isin(table["keys"], torch.cat([changed["keys"], erased]))
    return {name: torch.cat([values[stay], changed[name]]) for name, values in table.items()}


def _ascending(table: Table) -> Table:
    order = torch.argsort(table["keys"])
    return {name: values[order] for name, values in table.items()}


def _save(
    directory: Path, ranks: int, step: int, dense: dict[str, torch.Tensor], tables: dict[str, Table],
    meta: dict[str, Any], base: Saved | None = None, erased: dict[str, torch.Tensor] | None = None,
) -> Saved:  # fmt: skip
    """Save with a thread for each rank."""
    texts, barrier = [""] * ranks, threading.Barrier(ranks)

    def work(rank: int) -> Saved:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait(case_runner.SECONDS)
            found = list(texts)
            barrier.wait(case_runner.SECONDS)
            return found

        def mine(keys: torch.Tensor) -> torch.Tensor:
            return ops.owner_of(keys, ranks) == rank

        own = {
            t: {c: values[mine(table["keys"])] for c, values in table.items()} for t, table in tables.items()
        }
        gone = None if erased is None else {name: keys[mine(keys)] for name, keys in erased.items()}
        return save(
            directory,
            step,
            dense,
            own,
            meta,
            rank=rank,
            world_size=ranks,
            gather=gather,
            base=base,
            erased=gone,
        )

    with ThreadPoolExecutor(ranks) as threads:
        return next(iter(threads.map(work, range(ranks))))


# What comes out.


def run_case(number: int, seed: int, made: list[Original], folder: Path) -> dict[str, Any]:
    """Damage a copy of a directory and load what is there; the case in words, and how it ended."""
    draw = random.Random(f"{seed} {number}")
    copy = folder / "copy"
    while True:
        original, fits, change = draw.choice(made), draw.random() < 0.5, draw.choice(DAMAGES)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original.directory, copy)
        words = change(copy, draw, fits, [each.directory for each in made])
        if words is not None:
            break
    ends = {}
    for step in (None, *sorted({*original.states, *steps(copy)})):
        ends[str(step)] = _end(copy, step, draw.choice([1, 2, 3, 5]), original.states, fits)
    kinds = {end.partition(":")[0] for end in ends.values()}
    return {
        "number": number,
        "seed": seed,
        "original": original.name,
        "kind": change.__name__.removeprefix("damage_"),
        "fits": fits,
        "damage": words,
        "ends": ends,
        "defect": bool(kinds - {"refused", "equal"}),
    }


def _end(directory: Path, step: int | None, ranks: int, states: dict[int, State], model: bool) -> str:
    """``equal``, ``refused: ...`` or a defect in words; whether the `model` it is for has a say."""
    some = next(iter(states.values()))
    like: dict[str, Any] = {"like": some.tables, "like_dense": some.dense} if model else {}
    try:
        found = [load(directory, step, rank=rank, world_size=ranks, **like) for rank in range(ranks)]
    except CheckpointError as error:
        named = "step-" in str(error) or "holds no checkpoint" in str(error)
        return f"{'refused' if named else 'no file named'}: {str(error).replace(str(directory), '')[:300]}"
    except ValueError as error:
        if "does not fit this run's" in str(error):
            return f"refused: {str(error).replace(str(directory), '')[:300]}"
        return f"library: {traceback.format_exc()[-2000:]}"
    except Exception:
        return f"library: {traceback.format_exc()[-2000:]}"
    at = found[0].step
    if at not in states or (step is not None and at != step):
        return f"accepted: step {at} was loaded as {step}"
    expected = states[at]
    if any(rank.meta != expected.meta or not _same(rank.dense, expected.dense) for rank in found):
        return "accepted: other dense tensors or meta"
    if any(rank.tables.keys() != expected.tables.keys() for rank in found):
        return "accepted: other tables"
    for name, table in expected.tables.items():
        joined = {column: torch.cat([rank.tables[name][column] for rank in found]) for column in table}
        if not _same(_ascending(joined), table):
            return f"accepted: other rows of table {name!r}"
    return "equal"


def _same(left: Table, right: Table) -> bool:
    return left.keys() == right.keys() and all(
        values.dtype == right[name].dtype
        and values.shape == right[name].shape
        and values.contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(right[name].contiguous().view(-1).view(torch.uint8))
        for name, values in left.items()
    )
