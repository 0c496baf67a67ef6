"""TorchRec on a CPU, as a peer: where it is, and its models with our initial rows.

`bash ci/benchmarks/torchrec.sh` puts TorchRec and FBGEMM into out/torchrec.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tritonrec.harness.environment import environment_of_times

TORCHREC = Path(__file__).resolve().parents[2] / "out" / "torchrec"


def find_torchrec() -> None:
    """Let this process and its ranks import TorchRec."""
    if not (TORCHREC / "torchrec").is_dir():
        raise SystemExit(f"no TorchRec under {TORCHREC}: run bash ci/benchmarks/torchrec.sh first")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TORCHREC), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(TORCHREC))


def environment_beside_torchrec() -> dict[str, Any]:
    return {**environment_of_times(), "torchrec": "1.8.0"}


def fused(optimizer: str, rate: float, eps: float) -> dict[str, Any]:
    """Parameters of a sharder, whose tables update their rows in the backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    kinds = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    return {"optimizer": kinds[optimizer], "learning_rate": rate, "eps": eps}


def sharded(
    whole: torch.nn.Module,
    sharder: Any,
    tables: dict[str, Callable[..., Any]],
    initial: Callable[[str], torch.Tensor],
    world: int,
) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    """The model with its `embeddings` sharded over all ranks, and its dense parameters.

    Args:
        tables: the way each table is sharded. initial: a table's name -> all of its rows.
    """
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan

    if not dist.is_initialized():  # a rank on its own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plan = construct_module_sharding_plan(
        whole.embeddings, tables, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        whole, device=torch.device("cpu"), plan=ShardingPlan({"embeddings": plan}), sharders=[sharder]
    )
    for name, tensor in model.state_dict().items():
        if name.startswith("embeddings"):
            rows = initial(name.split(".")[-2])
            for shard in tensor.local_shards():
                first = shard.metadata.shard_offsets[0]
                shard.tensor.copy_(rows[first : first + len(shard.tensor)])
    return model, [value for name, value in model.named_parameters() if "embeddings" not in name]
