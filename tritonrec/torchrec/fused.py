"""TorchRec's ``FusedEmbeddingBagCollection`` and ``FusedEmbeddingCollection``: the optimizer is an argument.

::

    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from tritonrec.embedding import FusedEmbeddingBagCollection
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..embedding.modules import HashEmbeddingCollection
from ..embedding.row_optimizer import OptimizerName, RowOptimizer
from .collections import EmbeddingBagCollection, EmbeddingCollection

_RULES: dict[str, OptimizerName] = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RowWiseAdagrad": "rowwise_adagrad",
    "Adam": "adam",
}
_TAKEN = ("lr", "learning_rate", "eps", "beta1", "beta2", "betas")
_LR = 0.01
"""FBGEMM's default, which TorchRec's modules have."""


class _Fused:
    """What both collections share."""

    _optimizer: tuple[type, dict[str, Any]]
    embeddings: HashEmbeddingCollection

    def optimizer_type(self) -> type:
        """As given."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """As given."""
        return self._optimizer[1]

    def fused_optimizer(self) -> Any:
        """The `HashOptimizer` of the rows."""
        return self.embeddings.fused_optimizer


class FusedEmbeddingBagCollection(_Fused, EmbeddingBagCollection):
    """An `EmbeddingBagCollection` whose rows are updated in backward passes by a given rule.

    Args:
        tables, is_weighted, device, options: as `EmbeddingBagCollection`.
        optimizer_type: ``torch.optim.SGD``, ``Adagrad`` or ``Adam``, or TorchRec's ``RowWiseAdagrad``.
        optimizer_kwargs: ``lr`` (or ``learning_rate``; 0.01 by default), ``eps`` (1e-8), ``beta1`` and
            ``beta2`` or ``betas``.
        location: of TorchRec's tables; ours are where `placement` says.

    Raises ValueError for another optimizer or argument of it.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        optimizer_type: type,
        optimizer_kwargs: Mapping[str, Any],
        is_weighted: bool = False,
        device: Any = None,
        location: Any = None,
        **options: Any,
    ):
        rule = _rule(optimizer_type, optimizer_kwargs)
        super().__init__(tables, is_weighted, device, optimizer=rule, **options)
        self._optimizer = optimizer_type, dict(optimizer_kwargs)


class FusedEmbeddingCollection(_Fused, EmbeddingCollection):
    """An `EmbeddingCollection` whose rows are updated in backward passes by a given rule.

    Arguments and errors are those of `FusedEmbeddingBagCollection`, and `need_indices`.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        optimizer_type: type,
        optimizer_kwargs: Mapping[str, Any],
        device: Any = None,
        need_indices: bool = False,
        location: Any = None,
        **options: Any,
    ):
        rule = _rule(optimizer_type, optimizer_kwargs)
        super().__init__(tables, device, need_indices, optimizer=rule, **options)
        self._optimizer = optimizer_type, dict(optimizer_kwargs)


def _rule(optimizer_type: type, arguments: Mapping[str, Any]) -> RowOptimizer:
    """The rule of rows that FBGEMM has for an optimizer of torch."""
    name = getattr(optimizer_type, "__name__", repr(optimizer_type))
    if name not in _RULES:
        raise ValueError(f"optimizer_type must be one of {', '.join(_RULES)}, got {name}")
    unknown = [each for each in arguments if each not in _TAKEN]
    if unknown:
        raise ValueError(
            f"optimizer_kwargs may have {', '.join(_TAKEN)}, got {unknown[0]}: give the plain collection an "
            "optimizer=RowOptimizer(...)"
        )
    betas = arguments.get("betas", (0.9, 0.999))
    return RowOptimizer(
        _RULES[name],
        arguments.get("lr", arguments.get("learning_rate", _LR)),
        arguments.get("eps", 1e-8),
        arguments.get("beta1", betas[0]),
        arguments.get("beta2", betas[1]),
    )
