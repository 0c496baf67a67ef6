"""A table of FBGEMM on the CPU; `bash ci/benchmarks/torchrec.sh` puts it into out/torchrec.

Its library is loaded by the first table: not every process that lists its peers can have it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[2] / "out" / "torchrec"


def installed() -> bool:
    return (FOLDER / "fbgemm_gpu").is_dir() or importlib.util.find_spec("fbgemm_gpu") is not None


def fbgemm_table(pooling: str, weight: torch.Tensor, rate: float = 0.1, eps: float = 1e-8):
    """A table of these weights with row-wise Adagrad, which pools by ``"SUM"`` or ``"NONE"``.

    Raises ImportError where FBGEMM is not there.
    """
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    from fbgemm_gpu import split_embedding_configs as configs
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    place = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(*weight.shape, *place)], optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=rate,
        eps=eps, pooling_mode=training.PoolingMode[pooling],
    )  # fmt: skip
    table.split_embedding_weights()[0].copy_(weight)
    return table
