"""Batches: ids by feature and sample, with labels; nothing is padded.

A `Batch` is a step, sample ids and a `KeyedJaggedTensor`. A kind of batch is a subclass with columns: a row
for each sample, or for each id of a key. Three samples of next-item training, the second one empty, which is
legal, so B = 3 and L = 5::

    sample_ids         [  70,         71,  72             ]   (B,)
    features["item"]
      offsets          [   0,          2,   2,           5]   (B + 1,)
                           |           |    |            |
      ids              [ 10, 11,            20,  21,  22  ]   (L,)   offsets[b] : offsets[b + 1] is sample b
    labels             [ 11, 12,            21,  22,  23  ]   (L,)   the item that follows
    timestamps         [  5,  9,             1,   4,   4  ]   (L,)
    negatives          [ .., ..,            ..,  ..,  ..  ]   (L, K) sampled items beside the label
    token_positions()  [  0,  1,             0,   1,   2  ]   (L,)
    token_sample_ids() [ 70, 70,            72,  72,  72  ]   (L,)

An empty batch has ``offsets = [0]`` and nothing else.

Dimensions: B samples, L tokens, K negatives per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tritonrec.data.jagged import KeyedJaggedTensor, Lookup, Movable, check_tensor, common_value, order_by_key


class Column(NamedTuple):
    """Rows and type of a field of a batch."""

    keys: tuple[str, ...]  # a row for each id of these keys, one key after another; (): for each sample
    dtype: torch.dtype | None  # None: a `KeyedJaggedTensor` with a bag for each row, or None
    dim: int  # dimensions of the tensor, the first one included


def per_sample(dtype: torch.dtype = torch.int64, dim: int = 1) -> dict[str, Column]:
    """Metadata of a field with a row for each sample: ``field(metadata=per_sample())``."""
    return {"column": Column((), dtype, dim)}


def per_token(*keys: str, dtype: torch.dtype | None = torch.int64, dim: int = 1) -> dict[str, Column]:
    """Metadata of a field with a row for each id of `keys`; with dtype None the row is a bag of ids."""
    return {"column": Column(keys, dtype, dim)}


@dataclass(frozen=True)
class Shard:
    """Of which batch of all ranks a rank's is a part: ranks that train together have the same.

    Args:
        settings: names and values of what the batch of all ranks depends on, and the number of ranks.
        bordered: one epoch ends before the next one begins, so that no sample is in two ranks' parts.
    """

    settings: Mapping[str, str]
    bordered: bool = True


@dataclass(frozen=True)
class Batch(Movable):
    """The samples of a step, with all tensors on one device: the interface of batches for the trainer.

    Random choices that depend on the sample (dropout, negatives) use ``sample_ids``, so these must not depend
    on the cut into micro-batches.

    A kind of batch is a frozen dataclass with further fields: columns (`per_sample`, `per_token`), and values
    shared by all samples. It may override the lookups and the number of loss terms.

    Args:
        shard: of loaders that divide their batches among ranks; trainers compare it.
    """

    step: int
    sample_ids: Tensor  # (B,) int64
    features: KeyedJaggedTensor  # ids by feature and sample
    shard: Shard | None = field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def num_samples(self) -> int:
        """B."""
        return self.sample_ids.numel()

    @property
    def loss_terms(self) -> int:
        """Number of the loss's terms; the sum of losses is divided by the number over all ranks."""
        return self.num_samples

    def lookups(self) -> dict[str, Lookup]:
        """The `Lookup` of each feature; all batches of a run have the same features."""
        return self.features.to_dict()

    def sample_keys(self) -> tuple[Tensor, Tensor]:
        """Keys of each sample, for clustering: offsets (B + 1,) and keys (n,) int64, repeats allowed.

        Equal ids of different features give different keys.
        """
        keys, values, count = self.features.keys, self.features.values, len(self.features.keys)
        numbers = torch.arange(count, device=values.device)
        if self.features.is_dense:
            of_samples = (values.view(count, self.num_samples) * count + numbers[:, None]).t()
            return torch.arange(self.num_samples + 1, device=values.device) * count, of_samples.flatten()
        lengths = torch.tensor(self.features.length_per_key, dtype=torch.int64, device=values.device)
        numbered = values * count + torch.repeat_interleave(numbers, lengths)
        return KeyedJaggedTensor(keys, numbered, self.features.offsets).by_sample(*keys)

    def select(self, indices: Tensor) -> Self:
        """The samples at `indices` (b,) int64, in that order; IndexError for an index outside [0, B)."""
        indices, old = indices.to(self.sample_ids.device), self.features
        places, offsets = old.places(indices)
        new = old.taken(places, offsets)
        rows: dict[tuple[str, ...], Tensor] = {(): indices}
        chosen: dict[str, Any] = {}
        for name, (keys, _dtype, _dim) in self._columns():
            if keys not in rows:
                part, start = places[new.span(*keys)], old.span(*keys).start
                rows[keys] = part - start if start else part
            chosen[name] = _take(getattr(self, name), rows[keys])
        return replace(self, sample_ids=self.sample_ids.index_select(0, indices), features=new, **chosen)

    def parts(self, cut: Sequence[Tensor]) -> list[Self]:
        """`select` of each of `cut`, which name different samples; of one key they share one copy."""
        plain = all(
            len(keys) <= 1 and not isinstance(getattr(self, name), KeyedJaggedTensor)
            for name, (keys, _dtype, _dim) in self._columns()
        )
        if len(cut) == 1 or len(self.features.keys) > 1 or not plain:
            return [self.select(samples) for samples in cut]
        whole, parts, start, first = self.select(torch.cat(list(cut))), list[Self](), 0, 0
        old, ends = whole.features, list(accumulate(samples.numel() for samples in cut))
        for stop, last in zip(ends, old.offsets[ends].tolist(), strict=True):
            rows, of_samples = slice(first, last), slice(start, stop)
            chosen: dict[str, Any] = {}
            for name, (keys, _dtype, _dim) in self._columns():
                value = getattr(whole, name)
                chosen[name] = None if value is None else value[rows if keys else of_samples]
            weights = None if old.weights is None else old.weights[rows]
            offsets = old.offsets[start : stop + 1] - first
            features = KeyedJaggedTensor(old.keys, old.values[rows], offsets, weights)
            parts.append(replace(whole, sample_ids=whole.sample_ids[of_samples], features=features, **chosen))
            start, first = stop, last
        return parts

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """One batch of all samples, in the order given.

        Raises ValueError without batches, and for different steps, features or shapes of columns.
        """
        if not batches:
            raise ValueError("concat: needs at least one batch")
        joined: dict[str, Any] = {
            each.name: common_value(each.name, [getattr(batch, each.name) for batch in batches])
            for each in fields(cls)
            if each.name not in ("sample_ids", "features", "shard") and "column" not in each.metadata
        }
        shards = [batch.shard for batch in batches]
        joined["shard"] = shards[0] if all(each == shards[0] for each in shards) else None
        joined["sample_ids"] = torch.cat([batch.sample_ids for batch in batches])
        joined["features"] = features = KeyedJaggedTensor.concat([batch.features for batch in batches])
        for name, (keys, _dtype, _dim) in cls._columns():
            values = [getattr(batch, name) for batch in batches]
            joined[name] = values[0]
            if common_value(f"rows of {name}", [_row(value) for value in values]) is not None:
                is_tensor = isinstance(values[0], Tensor)
                joined[name] = torch.cat(values) if is_tensor else KeyedJaggedTensor.concat(values)
            if len(keys) > 1:
                at = [features.keys.index(key) for key in keys]
                sizes = [[batch.features.length_per_key[key] for key in at] for batch in batches]
                joined[name] = _take(joined[name], order_by_key(sizes).to(features.values.device))
        return cls(**joined)

    def validate(self) -> Self:
        """Return the batch itself, or raise a ValueError that names the field and the offending values."""
        check_tensor("sample_ids", self.sample_ids)
        device, features = self.sample_ids.device, self.features
        if not isinstance(features, KeyedJaggedTensor):
            raise ValueError(
                f"features must be a tritonrec.data.KeyedJaggedTensor, got {type(features).__module__}."
                f"{type(features).__name__}; KeyedJaggedTensor.from_torchrec makes one of TorchRec's"
            )
        features.validate("features", device)
        if features.num_samples != self.num_samples:
            raise ValueError(
                f"sample_ids has {self.num_samples} entries, but features.offsets of length "
                f"{len(features.offsets)} describes {features.num_samples} samples"
            )
        for name, (keys, dtype, dim) in self._columns():
            value = getattr(self, name)
            span = features.span(*keys) if keys else slice(0, self.num_samples)
            if dtype is not None:
                check_tensor(name, value, dtype, dim, device)
                rows = len(value)
            elif isinstance(value, KeyedJaggedTensor):
                rows = value.validate(name, device).num_samples
            elif value is not None:
                raise ValueError(f"{name} must be a KeyedJaggedTensor, got {type(value).__name__}")
            if value is not None and rows != span.stop - span.start:
                owner = f"{' and '.join(keys)} ids" if keys else "samples"
                raise ValueError(f"{name} has {rows} rows, but there are {span.stop - span.start} {owner}")
        return self

    @classmethod
    @cache
    def _columns(cls) -> list[tuple[str, Column]]:
        """Name and kind of each column."""
        return [(each.name, each.metadata["column"]) for each in fields(cls) if "column" in each.metadata]


def _take(value: Tensor | KeyedJaggedTensor | None, rows: Tensor) -> Tensor | KeyedJaggedTensor | None:
    if isinstance(value, Tensor):
        return value.index_select(0, rows)
    return None if value is None else value.select(rows)


def _row(value: Any) -> Any:
    """Shape of a column's rows, keys of its bags, or None."""
    return value.shape[1:] if isinstance(value, Tensor) else value and value.keys


def iterator_of(batches: Any, taker: str = "run") -> Iterator[Any]:
    """An iterator of an iterable of batches; TypeError naming what else was given to the `taker`."""
    if isinstance(batches, Batch):
        raise TypeError(f"{taker} takes batches one after the other, and got one: {taker}([batch])")
    if hasattr(batches, "__iter__") or hasattr(batches, "__getitem__"):
        return iter(batches)
    if hasattr(batches, "batch"):
        raise TypeError(f"a loader has no end: {taker}(loader.batch(step) for step in range(steps))")
    called = ": call it first" if callable(batches) else ""
    raise TypeError(
        f"{taker} takes an iterable of batches, as a list, a generator or a DataLoader, got "
        f"{type(batches).__name__}{called}"
    )


def require_iterator(batches: Any) -> Iterator[Any]:
    """What gives the next batch; TypeError for an iterable, which would begin anew each time."""
    if hasattr(batches, "__next__"):
        return batches
    kind = type(batches).__name__
    raise TypeError(f"progress takes an iterator, the same one each time, got {kind}: iter(batches)")


def check_binary(labels: Tensor, tasks: Sequence[str] = ()) -> None:
    """Raise a ValueError that names the first of `labels` (n,) or (n, tasks) that is neither 0 nor 1."""
    wrong = (labels != 0) & (labels != 1)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        task = f" (task {tasks[at[1]]!r})" if tasks else ""
        raise ValueError(f"labels must be 0 or 1: labels{at} = {int(labels[tuple(at)])}{task}")


@dataclass(frozen=True)
class JaggedBatch(Batch):
    """Samples of next-item training; the layout is drawn in the module's docstring."""

    timestamps: Tensor = field(metadata=per_token("item"))  # (L,)
    labels: Tensor = field(metadata=per_token("item"))  # (L,)
    negatives: Tensor = field(metadata=per_token("item", dim=2))  # (L, K)

    @staticmethod
    def from_sequences(
        step: int,
        sample_ids: Tensor,
        offsets: Tensor,
        ids: Tensor,
        timestamps: Tensor,
        labels: Tensor,
        negatives: Tensor,
    ) -> JaggedBatch:
        """From offsets (B + 1,) and ids (L,) of the items, all int64."""
        features = KeyedJaggedTensor(("item",), ids, offsets)
        return JaggedBatch(step, sample_ids, features, timestamps, labels, negatives)

    @property
    def ids(self) -> Tensor:
        """(L,) int64: the items."""
        return self.features.values

    @property
    def offsets(self) -> Tensor:
        """(B + 1,) int64."""
        return self.features.offsets

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.ids.numel()

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: tokens of each sample."""
        return self.offsets.diff()

    @property
    def loss_terms(self) -> int:
        """One term for each token."""
        return self.num_tokens

    def lookups(self) -> dict[str, Lookup]:
        """Feature ``item``, (L + L + L*K,) ids: the batch's ids, labels, and negatives row by row."""
        return {"item": Lookup(torch.cat([self.ids, self.labels, self.negatives.reshape(-1)]))}

    def sample_keys(self) -> tuple[Tensor, Tensor]:
        """Offsets (B + 1,) and each sample's ids, labels and negatives, token by token."""
        keys = torch.cat([self.ids[:, None], self.labels[:, None], self.negatives], 1)
        return self.offsets * keys.shape[1], keys.flatten()

    def validate(self) -> Self:
        """Return the batch itself, or raise a ValueError that names the field and the offending values."""
        super().validate()
        if len(self.features.keys) > 1:
            raise ValueError(f"features must have the one key 'item', got {self.features.keys}")
        self.features.validate_unweighted()
        return self

    def token_sample_ids(self) -> Tensor:
        """(L,) int64: the sample id of each token."""
        return torch.repeat_interleave(self.sample_ids, self.lengths)

    def token_positions(self) -> Tensor:
        """(L,) int64: the position of each token in its sequence, from 0."""
        positions = torch.arange(self.num_tokens, dtype=torch.int64, device=self.ids.device)
        return positions - torch.repeat_interleave(self.offsets[:-1], self.lengths)
