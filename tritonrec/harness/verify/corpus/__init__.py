"""The corpus: public bugs of recommender and distributed training, each injected into our code.

Every fault names the thread that reports or repairs the bug. Most were found in other systems' caches,
exchanges, optimizers or checkpoints; here each is the same mistake in the place that does that work.
"""

from __future__ import annotations

from ..faults import FAULTS
from . import dense, gradients, restarts, rows, tables  # noqa: F401 (they add to the corpus)
from .bug import CORPUS, SOURCES

SOURCES |= {
    "dropout-by-place": "ecmwf/anemoi-core#595",
    "evicts-rows-in-a-buffer": "pytorch/FBGEMM#5480",
    "local-token-count": "meta-pytorch/torchtune#1875",
    "merged-tables-share-ids": "NVIDIA-Merlin/HugeCTR#289",
    "missed-decay-forgotten": "pytorch/FBGEMM#5908",
    "norm-of-one-rank": "areal-project/AReaL#312",
    "read-before-write-back": "meta-pytorch/torchrec#2598",
    "reduce-before-last-micro-batch": "NVIDIA/Megatron-LM#1012",
    "restart-without-scores": "NVIDIA/recsys-examples#298",
    "rows-handed-out-in-reverse": "meta-pytorch/torchrec#1895",
    "schedule-per-micro-batch": "huggingface/accelerate#963",
    "update-inside-window": "dmlc/dgl#2596",
}
"""With those of `FAULTS` that are public bugs too."""

PUBLIC = [*(fault for fault in FAULTS if fault.name in SOURCES), *CORPUS]
"""Every fault that has a source."""
