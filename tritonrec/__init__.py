"""Train large recommendation models with nested pipelining, and prove it bit for bit.

The names to start from. Each is imported from its package on first use: ``import tritonrec`` stays light.
Ops are in `tritonrec.ops`, models in `tritonrec.nn`, loaders in `tritonrec.data`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import checkpoint, data, nn, ops
    from .callbacks import EarlyStopping, Throughput
    from .data import KeyedJaggedTensor
    from .distributed import Communicators, from_environment
    from .embedding import (
        FeatureConfig,
        HashEmbedding,
        HashEmbeddingBag,
        HashEmbeddingCollection,
        HashOptimizer,
        HashTableCollection,
        RowOptimizer,
        TablePolicy,
    )
    from .harness.verify import verify
    from .loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
    from .pipeline import Trainer, WindowConfig
    from .resilience import PeerCopies, run_elastic
    from .torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        PoolingType,
    )
    from .trace import Recorder

PACKAGE_OF = {
    name: package
    for package, names in {
        "callbacks": "EarlyStopping Throughput",
        "data": "KeyedJaggedTensor",
        "distributed": "Communicators from_environment",
        "embedding": "FeatureConfig HashEmbedding HashEmbeddingBag HashEmbeddingCollection HashOptimizer "
        "HashTableCollection RowOptimizer TablePolicy",
        "harness.verify": "verify",
        "loggers": "CSVLogger JSONLinesLogger TensorBoardLogger",
        "pipeline": "Trainer WindowConfig",
        "resilience": "PeerCopies run_elastic",
        "torchrec": "EmbeddingBagCollection EmbeddingBagConfig EmbeddingCollection EmbeddingConfig "
        "PoolingType",
        "trace": "Recorder",
    }.items()
    for name in names.split()
}
"""By name the package that has it."""

__all__ = [
    "CSVLogger",
    "Communicators",
    "EarlyStopping",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FeatureConfig",
    "HashEmbedding",
    "HashEmbeddingBag",
    "HashEmbeddingCollection",
    "HashOptimizer",
    "HashTableCollection",
    "JSONLinesLogger",
    "KeyedJaggedTensor",
    "PeerCopies",
    "PoolingType",
    "Recorder",
    "RowOptimizer",
    "TablePolicy",
    "TensorBoardLogger",
    "Throughput",
    "Trainer",
    "WindowConfig",
    "__version__",
    "checkpoint",
    "data",
    "from_environment",
    "nn",
    "ops",
    "run_elastic",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import `name` on first use."""
    if name in PACKAGE_OF:
        value = getattr(import_module(f".{PACKAGE_OF[name]}", __name__), name)
    elif name in __all__:
        value = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names to start from, before and after their first use."""
    return sorted({*globals(), *__all__})
