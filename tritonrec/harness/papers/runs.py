"""The runs: each a command of its own, or a computation here, and what is kept of its figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...nn import HSTUConfig
from ...nn.grm import GRM_SIZES
from ...nn.hstu import HSTULayer
from ...nn.tokens import Tokens
from ..network import why_no_user_namespace
from .computed import cluster_sizes, inflations, shapes, synchronisation

ROOT = Path(__file__).resolve().parents[3]
"""Of a clone of the repository, whose scripts some runs are."""
Document = dict[str, Any]
TOKENS = 600
"""Of a sequence of MTGRBoost's log, on average."""


class UnavailableError(Exception):
    """This machine cannot do the run; what it had recorded before stays."""


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        command: what to type for it alone; ``OUT`` is the JSON file that it writes. Empty: `made` computes.
        figures: of the JSON that the command writes, the part that is kept.
        made: the figures, where there is no command.
        root: whether it makes network namespaces, for which a user needs some of his own.
        torchrec: whether it runs TorchRec too.
    """

    command: str = ""
    figures: Callable[[Document], Document] = lambda document: document
    made: Callable[[], Document] | None = None
    root: bool = False
    torchrec: bool = False

    def measure(self) -> Document:
        """The figures; raises UnavailableError, or RuntimeError with the end of a failed command's output."""
        if self.root and os.geteuid() != 0 and (why := why_no_user_namespace()):
            raise UnavailableError(f"needs root, for network namespaces ({why})")
        if self.made is not None:
            return json.loads(json.dumps(self.made()))  # names are texts, as in the file that keeps them
        if self.torchrec and not (ROOT / "out/torchrec/torchrec").is_dir():
            raise UnavailableError("needs TorchRec: bash ci/benchmarks/torchrec.sh")
        if not self.command.startswith("tritonrec") and not (ROOT / self.command.split()[1]).exists():
            raise UnavailableError(f"needs a clone of the repository, for {self.command.split()[1]}")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            words = [str(out) if word == "OUT" else word for word in self.command.split()]
            words = [sys.executable, *(["-m", *words] if words[0] == "tritonrec" else words[1:])]
            folder_of_scripts = None if "-m" in words[:2] else ROOT
            done = subprocess.run(words, cwd=folder_of_scripts, capture_output=True, text=True, check=False)
            if done.returncode or not out.exists():
                end = (done.stderr or done.stdout)[-2000:]
                raise RuntimeError(f"{self.command} ended with {done.returncode}:\n{end}")
            return self.figures(json.loads(out.read_text()))


def _simulated(document: Document) -> Document:
    cells = {
        f"{c['table']}, {c['row']}, {c['column']}, {c['workers']} {c['cluster']}": {
            "paper": c["paper"], "model": round(c["model"], 4), "fitted": c["fitted"],
        }
        for c in document["cells"]
    }  # fmt: skip
    return {"cells": cells, "summary": document["summary"]}


def _verified(document: Document) -> Document:
    cases = document["cases"]
    return {
        "cases": len(cases),
        "identical": sum(case["identical"] for case in cases),
        "modes": sorted({case["mode"] for case in cases}),
        "world_sizes": sorted({case["world_size"] for case in cases}),
    }


def _lab(document: Document) -> Document:
    kept = (
        "mode micro_batches step speedup speedups exposed_ratio hidden_lookup exposed_lookup exposed row_copy"
    )
    rows = [{name: row[name] for name in [*kept.split(), "losses"]} for row in document["rows"]]
    return {"environment": {**document["environment"], "job": None}, "rows": rows}


def _collapse(document: Document) -> Document:
    kept = "mode micro_batches switches step communication exposed compute lookup speedup losses"
    return {"rows": [{name: row[name] for name in kept.split()} for row in document["rows"]]}


def _switches(document: Document) -> Document:
    return {name: document[name] for name in ("payload", "replicas")}


def _served(document: Document) -> Document:
    """Of each setting milliseconds a batch, mean and half the width of the interval, and the largest lag."""
    from ..serve.rounds import interval

    rows = [
        {
            "scenario": each["scenario"], "backend": each["backend"], "k": each["bound"],
            "ms": [1e3 * value for value in interval(each["latency"])],
            "largest_lag": each["largest_lag"],
        }
        for each in document["settings"]
    ]  # fmt: skip
    return {"rows": rows}


def _exchanged(document: Document) -> Document:
    """By size or number of calls: bls over the others, mean of the rounds."""
    rows = []
    for at, seconds in (document["collectives"] or document["repetitions"]).items():
        over = {
            peer: sum(a / b for a, b in zip(seconds["bls"], seconds[peer], strict=True)) / len(seconds["bls"])
            for peer in ("gloo", "MPI")
            if peer in seconds
        }
        rows.append({"at": int(at), "bls over": over})
    return {"rows": rows}


def _slipstream(document: Document) -> Document:
    from ..slipstream.report import whole_speedup

    rows = []
    for run in document["runs"]:
        rows.append(
            {
                "drop": run["drop"],
                "at_random": run["at_random"],
                "whole_speedup": whole_speedup(document, run),
                "metrics": run["metrics"],
            }
        )
    return {"rows": rows}


def _curves(document: Document) -> Document:
    return {"environment": document["environment"], "summary": document["summary"]}


def probing() -> Document:
    """The slots that a key visits in tables of up to 4,096 slots; equation 8 for 2 to 64 tables."""
    from ...embedding.key_layout import KeyLayout
    from ...kernels.hash_table.op import probe

    generator, sequences = torch.Generator().manual_seed(0), 0
    for power in range(3, 13):
        slots = 2**power
        for key in torch.randint(-(2**63), 2**63 - 1, (256,), generator=generator).tolist():
            met = [slot for group in probe(key, slots) for slot in group]
            assert sorted(met) == list(range(slots)), (slots, key)
            sequences += 1
    for tables in range(2, 65):
        layout = KeyLayout(tuple(f"t{i}" for i in range(tables)))
        bits = math.ceil(math.log2(tables + 1))
        largest = (1 << (63 - bits)) - 1
        ids = torch.tensor([0, 1, largest], dtype=torch.int64)
        keys = [layout.pack(member, ids, "f") for member in range(tables)]
        for member, own in enumerate(keys):
            assert own.tolist() == [(member << (63 - bits)) | x for x in ids.tolist()], (tables, member)
        assert len(torch.cat(keys).unique()) == len(ids) * tables and int(torch.cat(keys).min()) == 0
    return {"probe_sequences": sequences, "largest_table": slots, "merged_tables": tables}


def growth() -> Document:
    """Load of a growing key index, and chunks that never move."""
    from ...embedding.key_index import KeyIndex

    index, largest = KeyIndex(), 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        index.find_or_insert(torch.randint(-(2**63), 2**63 - 1, (1000,), generator=generator))
        largest = max(largest, len(index) / index.slots)
    return {"keys": len(index), "slots": index.slots, "largest_load": largest}


class Operations(TorchDispatchMode):
    """Counts multiplications and additions of products with weights, and of attention's visible pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = {"weights": 0, "attention": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.tritonrec.linear.default, torch.ops.tritonrec.norm_linear_silu.default):
            weight = next(each for each in args[1:] if isinstance(each, torch.Tensor) and each.dim() == 2)
            self.counted["weights"] += 2 * args[0].numel() * weight.shape[0]
        if func is torch.ops.tritonrec.hstu_attention.default:
            lengths = args[3].diff()
            pairs = int((lengths * (lengths + 1)).sum()) // 2  # a token sees itself and those before it
            self.counted["attention"] += 2 * pairs * (args[0][0].numel() + args[2][0].numel())
        return func(*args, **(kwargs or {}))


def operations(size: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Of the blocks of a GRM in a forward pass of one sequence; one block runs, and all are alike."""
    one: dict[str, Any] = {**size, "layers": 1}
    layer = HSTULayer(HSTUConfig(max_seq_len=tokens, dropout=0.0, **one), norm_product=True)
    ends, ids = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in ([0, tokens], [0]))
    values = torch.zeros(tokens, size["dim"], dtype=torch.float32, device="cpu")
    with torch.no_grad(), Operations() as counts:
        layer(values, Tokens.place(ends, ids, tokens), 0)
    return {name: size["layers"] * count for name, count in counts.counted.items()}


def complexity() -> Document:
    """Table 1: operations of a forward pass at the text's mean length, and the length that has its figure."""
    rows = []
    for (name, size), printed in zip(GRM_SIZES.items(), (4e9, 110e9), strict=True):
        counted = operations(size, TOKENS)
        whole = sum(counted.values())
        # Weights cost as many operations for each token, attention for each pair.
        a, b = 2 * counted["attention"] / (TOKENS * (TOKENS + 1)), counted["weights"] / TOKENS
        length = (math.sqrt((b + a / 2) ** 2 + 2 * a * printed) - b - a / 2) / a
        rows.append({"size": name, "tokens": TOKENS, **counted, "operations": whole, "length": length})
    return {"rows": rows}


def window() -> Document:
    """Bytes of a rank's window under each bound, for the batch, rows and tables of the text's section V.F."""
    from ...serving.bounded_lag.window import Layout
    from ..serve.served import Served, served_dlrm

    ranks, samples = 8, 512
    capacity = served_dlrm(Served(26_000, 64), 0, ranks, samples, 0).capacity(samples)
    return {"bytes": {k: Layout(ranks, 2 * (k + 1), capacity).end for k in (0, 1, 2, 4, 8)}, "ranks": ranks}


def balance() -> Document:
    """Tokens of the ranks under round robin and Algorithm 1, MovieLens-100K, 128 samples, 200 tokens."""
    from ...data import DynamicBatchLoader, NextItemLoader, load_interactions
    from ...data.balancing import token_spread

    log, rows = load_interactions("ml-100k"), []
    for ranks in (2, 4, 8):
        plain = NextItemLoader(log, 128, 200, 0, seed=0, world_size=ranks)
        dynamic = DynamicBatchLoader(plain)
        for name, loader in (("round robin", plain), ("Algorithm 1", dynamic)):
            found = token_spread(loader, range(loader.steps_per_epoch))
            rows.append({"ranks": ranks, "dealt": name, "ratio": found.ratio, "spread": found.spread})
    return {"rows": rows}


RUNS = {
    "contract": Run("tritonrec verify --quick --json OUT", _verified),
    "simulate": Run("tritonrec simulate --json OUT", _simulated),
    "lab": Run(
        "tritonrec lab --proportions paper --rate 30 --rounds 3 --steps 6 --micro-batches 8 "
        "--modes dbp,fwp,nestpipe --json OUT",
        _lab,
        root=True,
    ),
    "collapse": Run(
        "tritonrec lab --proportions paper --rate 30 --rounds 1 --steps 6 --micro-batches 2,4,8,16,32,64 "
        "--modes nestpipe --switch clustering --json OUT",
        _collapse,
        root=True,
    ),
    "sync": Run(made=synchronisation),
    "shapes": Run(made=shapes, root=True),
    "cluster-sizes": Run(made=cluster_sizes, root=True),
    "switches": Run("python ci/benchmarks/measure_switches.py --steps 6 --json OUT", _switches),
    "clustering": Run(made=inflations),
    "probing": Run(made=probing),
    "growth": Run(made=growth),
    "balance": Run(made=balance),
    "complexity": Run(made=complexity),
    "grm": Run("python ci/benchmarks/grm_throughput.py --json OUT"),
    "grm-links": Run(
        "python ci/benchmarks/grm_throughput.py --sizes small --ranks 4 --rate 100 --json OUT", root=True
    ),
    "torchrec": Run(
        "python ci/benchmarks/grm_beside_torchrec.py --json OUT --png docs/grm_beside_torchrec.png",
        torchrec=True,
    ),
    "scaling": Run("python ci/benchmarks/simulate_grm.py --json OUT"),
    "mch": Run("python ci/benchmarks/bench_mch.py --json OUT", torchrec=True),
    "curves": Run(
        "python ci/benchmarks/consistency_curves.py --model fuxi,hstu --json OUT --png docs/curves.png",
        _curves,
    ),
    "averaging": Run(
        "python ci/benchmarks/consistency_curves.py --optimizer adagrad --lr 0.03 "
        "--methods synchronous,averaged,averaged-4,averaged-16,scaled,scaled-4,scaled-16,"
        "late,late-4,late-16,scaled-late,scaled-late-4,scaled-late-16 --json OUT",
        _curves,
    ),
    "serve": Run("tritonrec serve-bench --world-size 2 --rounds 8 --largest 0 --json OUT", _served),
    "hosts": Run(
        "tritonrec serve-bench --world-size 8 --rate 100 --bounds 0,1,4 --scenarios delays,balanced "
        "--rounds 5 --steps 40 --largest 0 --json OUT",
        _served,
        root=True,
    ),
    "hosts-computing": Run(
        "tritonrec serve-bench --world-size 8 --rate 100 --bounds 0,1,4 --scenarios delays,balanced "
        "--compute 40 --rounds 3 --steps 30 --largest 0 --json OUT",
        _served,
        root=True,
    ),
    "links": Run(
        "tritonrec serve-bench --world-size 2 --rate 100 --scenarios none --rounds 5 --largest 4194304 "
        "--json OUT",
        _exchanged,
        root=True,
    ),
    "window": Run(made=window),
    "all-to-alls": Run(
        "tritonrec serve-bench --world-size 2 --scenarios none --rounds 10 --largest 67108864 --json OUT",
        _exchanged,
    ),
    "repetitions": Run(
        "tritonrec serve-bench --world-size 2 --scenarios none --rounds 2 --largest 0 --repetitions 100000 "
        "--json OUT",
        _exchanged,
    ),
    "frontier": Run(
        "python ci/benchmarks/slipstream_frontier.py --json OUT", lambda document: {"rows": document["rows"]}
    ),
    "rest": Run("python ci/benchmarks/slipstream_rest.py --json OUT"),
    "long": Run(
        "tritonrec train --model dlrm --data criteo:samples=500000 --dim 16 --batch-size 256 --optimizer "
        "rowwise_adagrad --lr 0.01 --steps 3500 --slipstream --warmup 800 --snapshot-every 100 "
        "--drop 0.5,0.9 --control --json OUT",
        _slipstream,
    ),
    "online": Run(
        "tritonrec train --model dlrm --data criteo:samples=100000 --dim 16 --batch-size 256 --optimizer "
        "rowwise_adagrad --lr 0.01 --slipstream --online 0.3 --warmup 50 --snapshot-every 40 "
        "--hot-share 1e-5 --drop 0.5,0.9 --control --json OUT",
        _slipstream,
    ),
}
"""Name -> run, in the order in which they are done."""
