"""TorchRec's training pipelines and our modes beside their own synchronous training: all tensors, all steps.

    bash ci/benchmarks/torchrec.sh                                           # installs TorchRec
    python ci/oracle/torchrec_pipelines.py --json ci/baselines/oracle.json
    python ci/oracle/torchrec_pipelines.py --table ci/baselines/oracle.json  # the table of docs/verifying.md

A click model with a table for each feature and two hidden layers trains on synthetic clicks, on the CPU, one
thread a rank, over gloo. After each step the loss, the dense parameters, the rows and all optimizer states
are copied. "plain loop" is that of TorchRec's documentation (zero_grad, forward, backward, step). TorchRec's
pipelines are compared with it at the same number of ranks, our modes with sequential training of whole
batches. "Two ranks beside one" compares runs on the same global batches; shards are put together before.
Batches, initial rows and learning rates are the same for both sides; each has a dense model of its own.

Two of the pipelines ask for CUDA's current stream on a CPU too, and would not start: here they are told that
there is none, and recording a stream does nothing. Not run: pipelines that need CUDA or a compiler (PT2,
CompAutograd, EMS), and those that evaluate.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tritonrec.distributed import Communicators, RankPool
from tritonrec.files import save_json
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from torchrec_peer import environment_beside_torchrec, find_torchrec, fused, sharded

DATA = "avazu:samples=4000"
DIM, RATE, EPS = 8, 0.05, 1e-8

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class System:
    """One way to train.

    Args:
        kind: ``plain``, a class of TorchRec's, or a mode of ours. options: of its constructor or window.
        says: how it trains by its documentation.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    ours: bool = False
    says: str = "synchronous"


def systems() -> list[System]:
    """TorchRec's first; the first of each side is what the others of it are compared with."""
    lean = {"enable_inplace_copy_batch": True, "free_features_storage_early": True}
    stale = "parameters of B-2"
    found = [
        System("plain loop", "plain"),
        System("plain loop, again", "plain"),
        System("TrainPipelineBase", "TrainPipelineBase"),
        System("TrainPipelineSparseDist", "TrainPipelineSparseDist"),
        System("TrainPipelineSparseDist, in place, freed early", "TrainPipelineSparseDist", lean),
        System("TrainPipelineSparseDistLite", "TrainPipelineSparseDistLite"),
        System("TrainPipelineFusedSparseDist", "TrainPipelineFusedSparseDist"),
        System("PrefetchTrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"),
        System("TrainPipelineSparseDistT", "TrainPipelineSparseDistT"),
        System("TrainPipelineSemiSync", "TrainPipelineSemiSync", says=f"{stale} after 900 batches"),
        System("TrainPipelineSemiSync, start 0", "TrainPipelineSemiSync", {"start_batch": 0}, says=stale),
        System(
            "TrainPipelineSemiSync, start 0, stash_gradients", "TrainPipelineSemiSync",
            {"start_batch": 0, "stash_gradients": True}, says=stale,
        ),
        System("sequential, N = 1", "sequential", {"micro_batches": 1}, ours=True),
    ]  # fmt: skip
    for mode in ("dbp", "fwp", "nestpipe"):
        for count in (1, 4) if mode != "fwp" else (4,):
            found.append(System(f"{mode}, N = {count}", mode, {"micro_batches": count}, ours=True))
    return found


def run(communicators: Communicators, system: System, steps: int, optimizer: str) -> list[State] | str:
    """This rank's state after every step, or the last line of an error."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    job = Job(DATA, "dlrm", 64, sizes=HSTUConfig(dim=DIM), lr=RATE, eps=EPS)
    loader = job.loader(communicators.rank, communicators.world_size)
    batches = [loader.batch(step) for step in range(steps)]
    try:
        step = ours if system.ours else theirs
        return list(step(communicators, system, job, batches, optimizer))
    except Exception:
        return traceback.format_exc()


def ours(communicators, system: System, job: Job, batches: list, optimizer: str) -> Iterator[State]:
    """The states of a mode of ours."""
    parts = job.build(optimizer)
    with Trainer(*parts, communicators, system.kind, WindowConfig(**system.options)) as trainer:
        for batch in batches:
            for result in trainer.run([batch]):
                loss = torch.tensor(result.loss)
            state = {"loss": loss}
            for name, values in trainer.dense.whole_tensors().items():
                state[f"dense/{name}"] = values.detach().clone()
            for name, (ids, rows) in trainer.tables.export().items():
                state[f"keyed/{name}"] = torch.cat([ids[:, None].double(), rows.double()], 1)
            yield state


def theirs(communicators, system: System, job: Job, batches: list, optimizer: str) -> Iterator[State]:
    """The states of TorchRec's plain loop or of one of its pipelines."""
    from torchrec.distributed.train_pipeline import experimental_pipelines, train_pipelines
    from torchrec.streamable import Pipelineable

    Pipelineable.register(Clicks)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.current_stream = lambda device=None: None
    log = job.loader().log
    ids = {name: torch.from_numpy(log.categories[:, at]).unique() for at, name in enumerate(log.features)}
    model, dense = torchrec_model(job, ids, log.dense.shape[1], optimizer, communicators.world_size)
    inputs = iter([Clicks.of(batch, ids) for batch in batches])
    if system.kind == "plain":
        step = plain_step(model, dense, inputs)
    else:
        module = next(m for m in (train_pipelines, experimental_pipelines) if hasattr(m, system.kind))
        pipeline = getattr(module, system.kind)(model, dense, torch.device("cpu"), **system.options)
        step = lambda: pipeline.progress(inputs)  # noqa: E731
    for _ in batches:
        loss = step()
        yield {"loss": loss.clone(), **torchrec_state(model, dense)}


def plain_step(model, dense, inputs) -> Callable[[], torch.Tensor]:
    """The loop of TorchRec's documentation."""

    def step() -> torch.Tensor:
        dense.zero_grad()
        loss, output = model(next(inputs))
        loss.backward()
        dense.step()
        return output

    return step


@dataclass
class Clicks:
    """A batch as TorchRec's pipelines move it."""

    features: Any  # KeyedJaggedTensor
    dense: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, batch, ids: dict[str, torch.Tensor]) -> Clicks:
        """Ids become their places in `ids`, which is sorted."""
        from torchrec import KeyedJaggedTensor

        rows = [torch.searchsorted(ids[name], lookup.ids) for name, lookup in batch.lookups().items()]
        lengths = torch.ones(len(rows) * len(batch.labels), dtype=torch.int64)
        features = KeyedJaggedTensor(list(batch.lookups()), torch.cat(rows), lengths=lengths)
        return cls(features, batch.dense, batch.labels.float())

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicks:
        return replace(self, features=self.features.to(device, non_blocking))

    def record_stream(self, stream) -> None:
        pass


class ClickModel(torch.nn.Module):
    """Pooled embeddings and dense features through two hidden layers: (loss, its copy)."""

    def __init__(self, embeddings: torch.nn.Module, width: int):
        super().__init__()
        self.embeddings = embeddings
        sizes = [width, 32, 16, 1]
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.top = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])

    def forward(self, clicks: Clicks) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.embeddings(clicks.features).values()
        logits = self.top(torch.cat([clicks.dense, pooled], 1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks.labels)
        return loss, loss.detach()


def torchrec_model(job: Job, ids: dict[str, torch.Tensor], features: int, optimizer: str, world: int):
    """The model with row-wise sharded tables of the job's initial rows, and its dense optimizer."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import row_wise

    configs = [
        EmbeddingBagConfig(num_embeddings=len(rows), embedding_dim=DIM, name=name, feature_names=[name])
        for name, rows in ids.items()
    ]
    sharder = EmbeddingBagCollectionSharder(fused_params=fused(optimizer, RATE, EPS))
    torch.manual_seed(0)
    embeddings = EmbeddingBagCollection(configs, device=torch.device("meta"))
    whole, tables = ClickModel(embeddings, features + DIM * len(ids)), job.tables("sgd")
    rows = {name: row_wise(compute_kernel="fused") for name in ids}
    model, dense = sharded(whole, sharder, rows, lambda name: tables.initial_rows(name, ids[name]), world)
    if optimizer == "sgd":
        return model, torch.optim.SGD(dense, lr=RATE)
    return model, torch.optim.Adagrad(dense, lr=RATE, eps=EPS)


def torchrec_state(model, dense) -> State:
    """Copies of the dense parameters, this rank's rows, and both optimizers' states."""
    state = {}
    states = model.fused_optimizer.state_dict()["state"]
    named = list(model.state_dict().items())
    named += [(f"{name}/{key}", value) for name, each in states.items() for key, value in each.items()]
    for name, value in named:
        for shard in value.local_shards() if hasattr(value, "local_shards") else [value]:
            tensor = getattr(shard, "tensor", shard)
            place = "table" if name.startswith("embeddings") else "dense"
            state[f"{place}/{name}"] = tensor.detach().clone()
    for at, values in dense.state_dict()["state"].items():
        state |= {f"dense/optimizer/{at}/{key}": value.clone() for key, value in values.items()}
    return state


def gathered(ranks: list[list[State]]) -> list[State]:
    """States of all ranks as one: shards below each other, the mean loss, dense parts of the first rank."""
    steps = []
    for states in zip(*ranks, strict=True):
        whole = dict(states[0])
        whole["loss"] = torch.stack([state["loss"] for state in states]).mean()
        for name in whole:
            if name.startswith(("table/", "keyed/")) and whole[name].dim():
                whole[name] = torch.cat([state[name] for state in states])
            if name.startswith("keyed/"):
                whole[name] = whole[name][whole[name][:, 0].argsort()]
        steps.append(whole)
    return steps


def compare(expected: list[State], found: list[State]) -> dict[str, Any]:
    """The first step and tensor that differ, and the largest distance at the end."""
    first = None
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.keys() != b.keys():
            raise SystemExit(f"other tensors: {sorted(a.keys() ^ b.keys())}")
        wrong = [name for name in a if not same_bits(a[name], b[name])]
        if wrong and first is None:
            first = {"step": step, "tensor": wrong[0]}
    last = [(a.double() - b.double()).abs().max().item() for a, b in pairs(expected[-1], found[-1])]
    compared = sum(len(state) for state in expected)
    return {"first_difference": first, "tensors_compared": compared, "largest_difference": max(last)}


def pairs(a: State, b: State) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors of the same shape that are no counts of steps."""
    names = [name for name in a if a[name].numel() and not name.endswith("/step")]
    return [(a[name], b[name]) for name in names if a[name].shape == b[name].shape]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (a, b)))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each system and number of ranks."""
    rows = []
    for optimizer in args.optimizers.split(","):
        whole: dict[str, list[State]] = {}
        for world in (1, 2):
            base: dict[bool, list[list[State]]] = {}
            pool = RankPool((world,))
            for system in systems():
                row: dict[str, Any] = {
                    "system": system.name, "ours": system.ours, "says": system.says, "optimizer": optimizer,
                    "ranks": world,
                }  # fmt: skip
                ranks = pool.run(run, world, system, args.steps, optimizer)
                if isinstance(ranks[0], str):
                    row["error"] = ranks[0].strip().splitlines()[-1]
                    print(ranks[0], file=sys.stderr)
                    pool.restart()
                else:
                    base.setdefault(system.ours, ranks)
                    found = [compare(a, b) for a, b in zip(base[system.ours], ranks, strict=True)]
                    row |= max(found, key=lambda each: each["largest_difference"])
                    if world == 1:
                        whole[system.name] = gathered(ranks)
                    elif system.name in whole:
                        row["one_rank"] = compare(whole[system.name], gathered(ranks))
                rows.append(row)
                print(row, flush=True)
            pool.close()
    return rows


def report(found: dict[str, Any]) -> None:
    """The table of docs/verifying.md, of the first optimizer."""
    print("| system | by its documentation | one rank | two ranks | two ranks beside one |")
    print("| --- | --- | --- | --- | --- |")
    optimizer = found["rows"][0]["optimizer"]
    rows = [row for row in found["rows"] if row["optimizer"] == optimizer]
    for name in dict.fromkeys(row["system"] for row in rows):
        one, two = (next(r for r in rows if (r["system"], r["ranks"]) == (name, n)) for n in (1, 2))
        cells = [name, one["says"], words(one), words(two), words(two.get("one_rank", two))]
        print(f"| {' | '.join(cells)} |")


def words(found: dict[str, Any]) -> str:
    """What a row found, for a table's cell."""
    if "error" in found:
        return "does not run on a CPU"
    if found["first_difference"] is None:
        return "equal bits"
    return (
        f"other from step {found['first_difference']['step']}; {found['largest_difference']:.0e} at the end"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizers", default="rowwise_adagrad,sgd", help="FBGEMM has these on a CPU")
    parser.add_argument("--json", type=Path, help="write here")
    parser.add_argument("--table", type=Path, help="print the table of this file and end")
    args = parser.parse_args()
    if args.table:
        report(json.loads(args.table.read_text()))
        return
    find_torchrec()
    environment = {**environment_beside_torchrec(), "steps": args.steps, "data": DATA}
    found = {"environment": environment, "rows": measure(args)}
    if args.json:
        save_json(found, args.json)
    report(found)


if __name__ == "__main__":
    main()
