"""Histories of users in every form that a `Predictor` takes, as ids and offsets; of words as well.

::

    a tensor (L,) int64, a list of ids, a list of words         one user
    a list of such tensors or lists                             several users
    a JaggedBatch, a KeyedJaggedTensor, {"item": Lookup}        several users
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.jagged import KeyedJaggedTensor, WeightedLookup, check_offsets
from ..data.vocabulary import Vocabulary


class Ids(NamedTuple):
    """Ids (n,) int64 of B users by offsets (B + 1,) int64, and whether they were given as words."""

    ids: Tensor
    offsets: Tensor
    words: bool


def ids_of(value: Any, what: str, vocabulary: Vocabulary | None) -> Ids:
    """Ids of any form.

    Args:
        what: they are, for errors: ``"history"``. vocabulary: of words.

    Raises ValueError for another dtype or shape, offsets that do not fit, and unknown words.
    """
    for name in ("to_pylist", "to_list"):  # Arrow's arrays, and columns of pandas and Polars
        value = getattr(value, name)() if hasattr(value, name) else value
    found = _jagged(value, what)
    if found is None:
        parts = [value] if _is_one(value) else list(value)
        arrays = [array_of(part, what, vocabulary) for part in parts]
        offsets = torch.from_numpy(np.cumsum([0, *(len(ids) for ids, _ in arrays)], dtype=np.int64))
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        flat = arrays[0][0] if len(arrays) == 1 else torch.cat([none, *(each for each, _ in arrays)])
        return Ids(flat, offsets, any(words for _, words in arrays))
    ids, offsets = found
    _check_int64(f"ids of the {what}", ids)
    _check_int64(f"offsets of the {what}", offsets)
    check_offsets(offsets, len(ids), "offsets of 'item'", "ids")
    return Ids(ids, offsets, False)


def _jagged(value: Any, what: str) -> tuple[Tensor, Tensor] | None:
    """Ids and offsets, of a form that has both."""
    if isinstance(value, KeyedJaggedTensor):
        value = value.to_dict()
    if isinstance(value, Mapping):
        if "item" not in value:
            raise ValueError(f"the {what} has features {list(value)}, and the model needs 'item'")
        value = value["item"]
        if isinstance(value, WeightedLookup):
            raise ValueError(f"the {what} 'item' has weights, which this model does not take: leave them out")
        if not isinstance(value, tuple) or len(value) != 2:
            raise ValueError(
                f"the {what} 'item' must be a Lookup of ids and offsets, got {type(value).__name__}: give a "
                "list without the name"
            )
        return value
    return (value.ids, value.offsets) if hasattr(value, "ids") and hasattr(value, "offsets") else None


def _is_one(value: Any) -> bool:
    """Whether it is one user's: a tensor or an array, or a sequence of words or numbers."""
    several = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return not several or isinstance(value[0], (str, int, float, np.number))


def _check_int64(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 1:
        raise ValueError(f"{name} must be (n,) int64, got {told(value)}")


def told(value: Any) -> str:
    """Shape and dtype of a tensor, or the type of anything else."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def array_of(value: Any, what: str, vocabulary: Vocabulary | None) -> tuple[Tensor, bool]:
    """One user's ids (L,), and whether they were words."""
    if isinstance(value, Tensor):
        _check_int64(f"ids of the {what}", value)
        return value, False
    if isinstance(value, str):
        raise ValueError(f"the {what} is one word, {value!r}: give a list of words")
    array = np.asarray(value)
    if array.size == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu"), False
    if array.dtype.kind in "iu" and array.ndim == 1 and array.max() < 2**63:
        return torch.from_numpy(array.astype(np.int64)), False
    if array.dtype.kind not in "UTO" or array.ndim != 1:
        got = f"{array.dtype} {array.shape}" if array.ndim else type(value).__name__
        raise ValueError(
            f"ids of the {what} must be int64 or words, got {got}: give (n,), or a list of these for users"
        )
    if any(not isinstance(each, str) for each in value):
        kind = str if isinstance(value[0], str) else (int, np.integer)
        others = [each for each in value if not isinstance(each, kind)]
        strange = others[0] if others else max(value, key=abs)  # beyond int64
        raise ValueError(f"ids of the {what} must all be int64, or all words, got {strange!r}")
    if vocabulary is None:
        name = what if what.startswith("feature") else "'item'"
        raise ValueError(f"the {what} has words, and the export has no vocabulary of {name}: give int64 ids")
    try:
        ids = vocabulary.encode(list(value), unknown=-1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"ids of the {what} must all be int64, or all words: {error}") from error
    if (ids < 0).any() and what != "exclude":  # what nobody knows is not retrieved
        row = int((ids < 0).argmax())
        raise ValueError(
            f"the {what} has {list(value)[row]!r} in row {row}, which is not among the {len(vocabulary)} "
            "words of the export: leave out those for which Predictor.vocabularies[...].encode(words, "
            "unknown=-1) is -1"
        )
    return torch.from_numpy(ids), True


def times_of(value: Any, history: Any, ids: Tensor, needed: bool) -> Tensor:
    """Timestamps (L,) int64 of ids (L,): given, the history's own, or zeros where none are `needed`."""
    value = getattr(history, "timestamps", None) if value is None else value
    if value is None:
        if needed:
            raise ValueError("this model goes by times: give timestamps (L,) int64")
        return torch.zeros_like(ids)
    if not isinstance(value, Tensor):
        nested = len(value) > 0 and not isinstance(value[0], (int, float, np.number))
        flat = np.asarray(list(chain.from_iterable(value)) if nested else list(value))
        if flat.size and (flat.dtype.kind not in "iu" or flat.ndim != 1):
            raise ValueError(f"timestamps must be integers, got {flat.dtype} {flat.shape}")
        value = torch.from_numpy(flat.astype(np.int64))
    if value.shape != ids.shape or value.dtype != torch.int64:
        raise ValueError(f"timestamps must be {tuple(ids.shape)} int64, got {told(value)}")
    return value
