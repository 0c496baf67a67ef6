"""TorchRec on a CPU, as a peer: where it is, its tables with our initial rows, its loops, equal losses.

`bash ci/benchmarks/torchrec.sh` puts TorchRec and FBGEMM into out/torchrec.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from tritonrec import ops
from tritonrec.data import Batch
from tritonrec.harness.environment import environment_of_times
from tritonrec.harness.job import Job, dense_optimizer

TORCHREC = Path(__file__).resolve().parents[2] / "out" / "torchrec"
TOLERANCE = 1e-4
"""Relative, of a step's mean loss: the sums' order differs."""


def find_torchrec() -> None:
    """Let this process and its ranks import TorchRec."""
    if not (TORCHREC / "torchrec").is_dir():
        raise SystemExit(f"no TorchRec under {TORCHREC}: run bash ci/benchmarks/torchrec.sh first")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TORCHREC), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(TORCHREC))


def environment_beside_torchrec() -> dict[str, Any]:
    return {**environment_of_times(), "torchrec": "1.8.0"}


def quiet() -> None:
    """Leave out what TorchRec says about its own parts."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)


@dataclass
class Run:
    """Seconds of each step that counts, and every step's mean loss."""

    seconds: list[float]
    losses: list[float]


def compare(runs: dict[str, Run], baseline: str) -> dict[str, float]:
    """Largest relative difference of a step's loss from the baseline's; SystemExit beyond `TOLERANCE`."""
    expected, worst = runs[baseline].losses, {}
    for name, run in runs.items():
        if len(run.losses) != len(expected):
            raise SystemExit(f"{name} finished {len(run.losses)} steps, {baseline} {len(expected)}")
        differences = [abs(a - b) / abs(b) for a, b in zip(run.losses, expected, strict=True)]
        for step, difference in enumerate(differences):
            if not difference <= TOLERANCE:  # also where it is no number
                raise SystemExit(
                    f"{name}, step {step}: loss {run.losses[step]:.7f}, but {expected[step]:.7f} in "
                    f"{baseline}; no time is printed"
                )
        worst[name] = max(differences)
    return worst


Took = Callable[[str, float], None]


class Features:
    """A batch as TorchRec's pipeline moves it.

    Args:
        names: of the features that are looked up: one long sequence of each, or in `bags` an id for each
            sample. scale: of the loss, a sum: DDP takes means over ranks. dedup: the ids of the one feature.
    """

    def __init__(
        self, batch: Batch, names: Sequence[str], scale: float, dedup: bool = False, bags: bool = False
    ):
        from torchrec import KeyedJaggedTensor

        self.began, self.batch, self.scale, self.inverse = perf_counter(), batch, scale, None
        lookups = batch.lookups()
        ids = [lookups[name].ids for name in names]
        if dedup:
            values, self.inverse, _counts = ops.unique(*ids)
            ids = [values]
        sizes = [1] * sum(map(len, ids)) if bags else [*map(len, ids)]
        self.ids = KeyedJaggedTensor(list(names), torch.cat(ids), lengths=torch.tensor(sizes))

    def to(self, device: torch.device, non_blocking: bool = False) -> Features:
        return self

    def record_stream(self, stream: object) -> None:
        pass


class Behind(torch.nn.Module):
    """What follows TorchRec's lookup, of which its pipeline sees no more than that it is a module."""

    def __init__(self, model: torch.nn.Module, losses: Callable[..., torch.Tensor], bag_dim: int, took: Took):
        super().__init__()
        self.model, self.losses, self.bag_dim, self.took = model, losses, bag_dim, took

    def forward(self, features: Features, found: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.bag_dim:
            rows = found.values().unflatten(1, (-1, self.bag_dim))
        else:
            rows = {name: each.values() for name, each in found.items()}
        if features.inverse is not None:
            rows = {name: ops.gather_rows(each, features.inverse) for name, each in rows.items()}
        then = perf_counter()
        losses = self.losses(self.model, features.batch, rows)
        self.took("retrieve", then - features.began)
        self.took("forward", perf_counter() - then)
        return (losses.sum() * features.scale).reshape(1), losses.detach().double().sum()


class TorchRecModel(torch.nn.Module):
    """Tables of TorchRec before a dense model: (loss to differentiate (1,), loss sum) of `Features`.

    Args:
        sizes: ids of each feature, from 0. dim: of rows. model: the dense one.
        losses: (model, batch, rows) -> those of samples; rows are by feature, of bags (B, features, dim).
        took: takes the seconds of ``retrieve``, since the features were made, and of ``forward``.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        dim: int,
        model: torch.nn.Module,
        losses: Callable[..., torch.Tensor],
        bags: bool = False,
        took: Took = lambda name, seconds: None,
    ):
        super().__init__()
        import torchrec

        config = torchrec.EmbeddingBagConfig if bags else torchrec.EmbeddingConfig
        tables = [
            config(name=f"t_{name}", embedding_dim=dim, num_embeddings=size, feature_names=[name])
            for name, size in sizes.items()
        ]
        kind = torchrec.EmbeddingBagCollection if bags else torchrec.EmbeddingCollection
        self.embeddings = kind(tables, device=torch.device("meta"))
        self.behind, self.bags = Behind(model, losses, dim * bags, took), bags

    def forward(self, features: Features) -> tuple[torch.Tensor, torch.Tensor]:
        return self.behind(features, self.embeddings(features.ids))


def sharded(
    whole: TorchRecModel, job: Job, sizes: dict[str, int], rule: str, world: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with our initial rows over all ranks, and the optimizer of its dense parameters.

    Tables are divided by rows, and those of bags dealt whole; they update their rows in the backward pass.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.streamable import Pipelineable

    Pipelineable.register(Features)
    if not dist.is_initialized():  # a rank on its own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kinds = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    fused = {"optimizer": kinds[rule], "learning_rate": job.lr, "eps": job.eps}
    sharder = (EmbeddingBagCollectionSharder if whole.bags else EmbeddingCollectionSharder)(
        fused_params=fused
    )
    # in blocks, so that rows come back in the order of the features
    ways = {
        f"t_{name}": table_wise(rank=at * world // len(sizes), compute_kernel="fused")
        if whole.bags
        else row_wise(compute_kernel="fused")
        for at, name in enumerate(sizes)
    }
    plan = construct_module_sharding_plan(
        whole.embeddings, ways, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        whole, device=torch.device("cpu"), plan=ShardingPlan({"embeddings": plan}), sharders=[sharder]
    )
    initial = job.tables("sgd")  # whose rows are weights alone
    for name, tensor in model.state_dict().items():
        if name.startswith("embeddings"):
            feature = name.split(".")[-2].removeprefix("t_")
            rows = initial.initial_rows(feature, torch.arange(sizes[feature]))
            for shard in tensor.local_shards():
                first = shard.metadata.shard_offsets[0]
                shard.tensor.copy_(rows[first : first + len(shard.tensor)])
    dense = [value for name, value in model.named_parameters() if "embeddings" not in name]
    return model, dense_optimizer(dense, rule, job.lr, job.eps)


def trained(
    model: torch.nn.Module, dense: torch.optim.Optimizer, inputs: Iterable[Features], pipelined: bool = False
) -> Iterator[float]:
    """The loss sum of each step on this rank, in a plain loop or `TrainPipelineSparseDist`."""
    if pipelined:
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        every = [*inputs]
        coming = iter(every)
        pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"), execute_all_batches=True)
        yield from (float(pipeline.progress(coming)) for _ in every)
        return
    for features in inputs:
        dense.zero_grad()
        loss, total = model(features)
        loss.sum().backward()
        dense.step()
        yield float(total)
