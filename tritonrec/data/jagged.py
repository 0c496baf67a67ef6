"""The one ragged type: for each key and each sample any number of ids, end to end, with no padding.

Two keys and three samples, so F = 2 and B = 3. Sample 1 has no item and sample 2 no genre (both are legal)::

    keys         "item"                        "genre"
    sample          0        1    2              0    1      2
    values       [ 10, 11,       20, 21, 22,     4,   7, 9     ]     (n,)
    offsets      [  0,       2,   2,             5,   6,     8,  8]  (F * B + 1,)

The ids of key f and sample b are ``values[offsets[f * B + b] : offsets[f * B + b + 1]]``. TorchRec's
``KeyedJaggedTensor`` has the same layout, so conversions copy nothing. Without samples, offsets are ``[0]``.

Dimensions: F keys, B samples, n values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tritonrec.settings import typed

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Lookup(NamedTuple):
    """The ids (n,) int64 of a feature's lookup, and for pooling the offsets of their bags.

    With ``offsets`` (m + 1,) int64, bag j is ``ids[offsets[j] : offsets[j + 1]]`` and may be empty.
    """

    ids: Tensor
    offsets: Tensor | None = None


class WeightedLookup(NamedTuple):
    """A `Lookup` whose bags are sums weighted by ``weights`` (n,) float32, one for each id."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """(m + 1,) int64 from lengths (m,): ``[2, 0, 3]`` gives ``[0, 2, 2, 5]``."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def token_indices(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of the given ranges, one range after another, and the new offsets.

    `starts` and `lengths` are (m,) int64. Returns indices (sum of lengths,) and offsets (m + 1,)::

        starts [7, 3, 0]  lengths [2, 0, 3]  ->  indices [7, 8,  0, 1, 2]   offsets [0, 2, 2, 5]
    """
    offsets = offsets_of(lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return torch.arange(shift.numel(), device=lengths.device) + shift, offsets


def order_by_key(sizes: Sequence[Sequence[int]]) -> Tensor:
    """Positions, in the order of keys, of rows stored batch by batch, ``sizes[batch][key]`` of each."""
    lengths = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    starts = offsets_of(lengths.flatten())[:-1].view(lengths.shape)
    return token_indices(starts.t().flatten(), lengths.t().flatten())[0]


class Movable:
    """A frozen dataclass whose tensors are moved between devices together."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """A copy on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory, for asynchronous copies to an accelerator."""
        return self.map(Tensor.pin_memory)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to every tensor, which must keep shapes and values."""
        moved = object.__new__(type(self))  # keeps cached properties, which depend on the values
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                value = change(value)
            elif isinstance(value, Movable):
                value = value.map(change)
            vars(moved)[name] = value
        return moved

    def tensors(self) -> list[Tensor]:
        """The tensors, field by field."""
        found: list[Tensor] = []
        for value in (getattr(self, each.name) for each in fields(self)):  # type: ignore[arg-type]
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, Movable):
                found += value.tensors()
        return found


@dataclass(frozen=True)
class KeyedJaggedTensor(Movable):
    """Ids by key and sample; the layout is drawn in the module's docstring.

    ``features["genre"]`` is a `Lookup`: the key's ids, and the offsets (B + 1,) of its samples from 0; with
    weights a `WeightedLookup`.
    """

    keys: tuple[str, ...]  # F distinct keys, at least one
    values: Tensor  # (n,) int64
    offsets: Tensor  # (F * B + 1,) int64
    weights: Tensor | None = None  # (n,) float32, of the ids in their bags

    @staticmethod
    def from_dict(features: Mapping[str, Lookup | WeightedLookup]) -> KeyedJaggedTensor:
        """One key for each entry, in their order; ids (B,) without offsets are one for each sample.

        Raises ValueError for features of different numbers of samples, for offsets or weights that do not fit
        the ids of their feature, and where some features have weights and others have none.
        """
        samples = {name: _samples_of(name, each) for name, each in features.items()}
        bags = {name: each.offsets for name, each in features.items() if each.offsets is not None}
        totals = [len(features[name].ids) for name in bags]
        alike = len(set(samples.values())) == 1
        # One check of all features; where it fails, one of each says what is wrong.
        together = torch.stack(list(bags.values())) if alike and bags else None
        if together is None or not (together.is_meta or _rise(together, totals)):
            for (name, offsets), total in zip(bags.items(), totals, strict=True):
                if not offsets.is_meta:
                    check_offsets(offsets, total, f"offsets of {name!r}", "ids")
        if not alike:
            raise ValueError(
                f"all features need the same samples, got {_listed(samples) or 'none'}: give each of them as "
                "many ids or bags, empty ones where a sample has none"
            )
        of_bags = iter(() if together is None else together.diff().unbind())
        ids = next(iter(features.values())).ids
        one_each = torch.ones(next(iter(samples.values())), dtype=torch.int64, device=ids.device)
        lengths = [one_each if each.offsets is None else next(of_bags) for each in features.values()]
        values = torch.cat([each.ids for each in features.values()])
        weights = [each.weights for each in features.values() if isinstance(each, WeightedLookup)]
        if weights and len(weights) < len(features):
            raise ValueError(f"all of {list(features)} need weights, or none")
        offsets = offsets_of(torch.cat(lengths))
        return KeyedJaggedTensor(tuple(features), values, offsets, torch.cat(weights) if weights else None)

    @staticmethod
    @typed
    def from_matrix(keys: Sequence[str], ids: Tensor) -> KeyedJaggedTensor:
        """One id for each key and sample: `ids` (B, F) int64; ValueError for other columns."""
        if ids.dim() != 2 or ids.shape[1] != len(keys):
            raise ValueError(
                f"ids must be (B, {len(keys)}), a column for each of {tuple(keys)}, got {tuple(ids.shape)}"
            )
        values = ids.t().flatten()
        return KeyedJaggedTensor(tuple(keys), values, torch.arange(len(values) + 1, device=ids.device))

    @staticmethod
    @typed
    def from_lengths_sync(
        keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """From lengths (F * B,), as TorchRec's constructor; integers of any width.

        Raises ValueError as `validate` does, and for values or lengths that are no integers.
        """
        lengths = _integers("lengths", lengths)
        if lengths.dim() != 1 or lengths.numel() % max(len(keys), 1):
            raise ValueError(
                f"lengths must be (F * B,) for the F = {len(keys)} keys {tuple(keys)} and B samples, got "
                f"{tuple(lengths.shape)}"
            )
        if bool((lengths < 0).any()):
            at = int((lengths < 0).nonzero()[0])
            raise ValueError(f"lengths must be at least 0: lengths[{at}] = {int(lengths[at])}")
        return KeyedJaggedTensor.from_offsets_sync(keys, values, offsets_of(lengths), weights)

    @staticmethod
    @typed
    def from_offsets_sync(
        keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """From offsets (F * B + 1,), as TorchRec's constructor; integers of any width.

        Raises ValueError as `validate` does, and for values or offsets that are no integers.
        """
        values, offsets = _integers("values", values), _integers("offsets", offsets)
        return KeyedJaggedTensor(tuple(keys), values, offsets, weights).validate()

    @staticmethod
    def from_torchrec(features: Any) -> KeyedJaggedTensor:
        """From TorchRec's ``KeyedJaggedTensor``; int64 tensors share its memory.

        Raises ValueError for batch sizes that differ by key, and for values that are not integers.
        """
        if not hasattr(features, "variable_stride_per_key"):
            kind = type(features).__name__
            raise TypeError(
                f"features are a KeyedJaggedTensor, or ids (and offsets) by feature's name, got {kind}"
            )
        if features.variable_stride_per_key():
            raise ValueError(
                f"features {features.keys()} have different batch sizes, {features.stride_per_key()}: "
                "give each of them the same samples"
            )
        values = _integers(f"values of features {features.keys()}", features.values())
        offsets = _integers("offsets", features.offsets())
        weights = features.weights_or_none()
        weights = None if weights is None else weights.float()
        return KeyedJaggedTensor(tuple(features.keys()), values, offsets, weights)

    def to_torchrec(self) -> Any:
        """TorchRec's ``KeyedJaggedTensor`` over the same memory. Raises ImportError without TorchRec."""
        from torchrec import KeyedJaggedTensor as TorchRecTensor

        lengths = self.lengths.flatten()
        return TorchRecTensor(
            keys=list(self.keys), values=self.values, weights=self.weights, lengths=lengths,
            offsets=self.offsets,
        )  # fmt: skip

    @property
    def num_samples(self) -> int:
        """B. Raises ValueError for a number of offsets that gives the keys different ones."""
        samples, rest = divmod(self.offsets.numel() - 1, len(self.keys))
        if rest:
            raise ValueError(
                f"offsets must have F * B + 1 entries for the F = {len(self.keys)} keys {self.keys} and B "
                f"samples, got {self.offsets.numel()}"
            )
        return samples

    @property
    def lengths(self) -> Tensor:
        """(F, B) int64: ids of each key and sample."""
        return self.offsets.diff().view(len(self.keys), self.num_samples)

    @cached_property
    def length_per_key(self) -> tuple[int, ...]:
        """Ids of each key, on the host; cached, since a read from an accelerator waits for it."""
        if len(self.keys) == 1 or not self.num_samples:
            return (self.values.numel(),) * len(self.keys)
        ends = self.offsets[:: self.num_samples].tolist()
        return tuple(end - start for start, end in pairwise(ends))

    @cached_property
    def is_dense(self) -> bool:
        """Whether each key has one id for each sample, so that values are a matrix (F, B)."""
        return self.values.numel() == self.offsets.numel() - 1 and bool((self.offsets.diff() == 1).all())

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to values and offsets, which must keep shapes and values."""
        _ = self.length_per_key  # read before the move
        return super().map(change)

    def span(self, *keys: str) -> slice:
        """The part of `values` of `keys`. Raises ValueError unless these keys are consecutive."""
        first = self.keys.index(keys[0]) if keys and keys[0] in self.keys else 0
        if self.keys[first : first + len(keys)] != keys:
            raise ValueError(f"expected the keys {keys} to be consecutive, got {self.keys}")
        return slice(self._ends[first], self._ends[first + len(keys)])

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Where the values of each key begin, and their number."""
        return (0, *accumulate(self.length_per_key))

    def __getitem__(self, key: str) -> Lookup | WeightedLookup:
        if key not in self.keys:
            raise KeyError(f"there is no key {key!r}; the keys are {', '.join(self.keys)}")
        # By itself: `to_dict` makes all keys, and a loop over 1,000 keys would make a million.
        at, samples, own = self.keys.index(key), self.num_samples, self.span(key)
        offsets = self.offsets[at * samples : (at + 1) * samples + 1] - own.start
        if self.weights is None:
            return Lookup(self.values[own], offsets)
        return WeightedLookup(self.values[own], offsets, self.weights[own])

    def to_dict(self) -> dict[str, Any]:
        """``self[key]`` of every key."""
        rows = self.offsets.unfold(0, self.num_samples + 1, self.num_samples or 1).expand(len(self.keys), -1)
        parts = self.values.split_with_sizes(self.length_per_key), (rows - rows[:, :1]).unbind()
        if self.weights is None:
            return dict(zip(self.keys, map(Lookup, *parts), strict=True))
        weights = self.weights.split_with_sizes(self.length_per_key)
        return dict(zip(self.keys, map(WeightedLookup, *parts, weights), strict=True))

    def places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Positions, key by key, of the values of the samples at `indices` (b,), and offsets (F * b + 1,).

        Raises IndexError for an index outside [0, B).
        """
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise IndexError(
                f"select: indices must be in [0, {self.num_samples}), "
                f"got values from {int(indices.min())} to {int(indices.max())}"
            )
        return self._places(lambda entries: entries.index_select(1, indices))

    def _places(self, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """As `places`, for the keys and samples that `choose` selects from a matrix (F, B)."""
        size = len(self.keys), self.num_samples
        starts = choose(self.offsets[:-1].view(size)).flatten()
        if self.is_dense:
            return starts, torch.arange(starts.numel() + 1, device=starts.device)
        return token_indices(starts, choose(self.offsets[1:].view(size)).flatten() - starts)

    def select(self, indices: Tensor) -> KeyedJaggedTensor:
        """The samples at `indices` (b,) int64, in that order; IndexError for an index outside [0, B)."""
        return self.taken(*self.places(indices.to(self.offsets.device)))

    def taken(self, places: Tensor, offsets: Tensor) -> KeyedJaggedTensor:
        """The values, and weights, at `places` (n,) int64 under new `offsets` (F * b + 1,)."""
        weights = None if self.weights is None else self.weights.index_select(0, places)
        return KeyedJaggedTensor(self.keys, self.values.index_select(0, places), offsets, weights)

    @staticmethod
    def concat(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """All samples of `parts`, in the order given.

        Raises ValueError where the keys differ, or only some parts have weights.
        """
        keys = common_value("features", [part.keys for part in parts])
        values, lengths = torch.cat([part.values for part in parts]), [part.lengths for part in parts]
        weights = [part.weights for part in parts if part.weights is not None]
        if weights and len(weights) < len(parts):
            raise ValueError("concat: all batches need weights of their features, or none")
        offsets = offsets_of(torch.cat(lengths, 1).flatten())
        joined = KeyedJaggedTensor(keys, values, offsets, torch.cat(weights) if weights else None)
        if len(keys) == 1:
            return joined
        order = order_by_key([part.length_per_key for part in parts]).to(values.device)
        return joined.taken(order, offsets)

    def by_sample(self, *keys: str) -> tuple[Tensor, Tensor]:
        """The ids of `keys` sample by sample: offsets (B + 1,) and ids, key after key within a sample."""
        at = [self.keys.index(key) for key in keys]
        places, offsets = self._places(lambda entries: entries[at].t())
        return offsets[:: len(keys)].contiguous(), self.values.index_select(0, places)

    def validate(self, name: str = "features", device: torch.device | None = None) -> Self:
        """Return the tensor itself, or raise a ValueError that names the offending values of `name`."""
        offsets, field = self.offsets, f"{name}.offsets"
        if not self.keys or len(set(self.keys)) != len(self.keys):
            raise ValueError(f"{name} must have one or more different keys, got {self.keys}")
        check_tensor(f"{name}.values", self.values, device=device)
        check_tensor(field, offsets, device=self.values.device)
        if (len(offsets) - 1) % len(self.keys):
            raise ValueError(
                f"{field} must have F * B + 1 entries for the F = {len(self.keys)} keys {self.keys} "
                f"and B samples, got {len(offsets)}"
            )
        if not offsets.is_meta:
            check_offsets(offsets, len(self.values), field, f"{name}.values", self.keys)
        if self.weights is not None:
            check_tensor(f"{name}.weights", self.weights, torch.float32, device=self.values.device)
            if len(self.weights) != len(self.values):
                raise ValueError(
                    f"{name}.weights must have one entry for each of the {len(self.values)} ids, "
                    f"got {len(self.weights)}"
                )
        return self

    def validate_unweighted(self) -> None:
        """Raise a ValueError where there are weights, for a kind of batch whose lookups have none."""
        if self.weights is not None:
            raise ValueError(
                f"features {list(self.keys)} have weights, which this kind of batch does not use: drop them"
            )

    def validate_dense(self, *keys: str) -> None:
        """Raise a ValueError that names the first of `keys` and samples without exactly one id."""
        if self.is_dense:
            return
        lengths = self.lengths[[self.keys.index(key) for key in keys]]
        wrong = (lengths != 1).nonzero()
        if len(wrong):
            at, sample = wrong[0].tolist()
            raise ValueError(
                f"feature {keys[at]!r} must have one id for each sample: "
                f"sample {sample} has {int(lengths[at, sample])}"
            )


def _samples_of(name: str, feature: Lookup | WeightedLookup) -> int:
    """Number of samples of a feature, whose parts must fit each other: totals would hide them."""
    ids, offsets = feature[:2]
    if ids.dim() != 1:
        raise ValueError(f"ids of feature {name!r} must be (n,), got {tuple(ids.shape)}")
    if isinstance(feature, WeightedLookup) and feature.weights.shape != ids.shape:
        raise ValueError(
            f"weights of feature {name!r} must be {tuple(ids.shape)}, one for each id, got "
            f"{tuple(feature.weights.shape)}"
        )
    return len(ids) if offsets is None else len(offsets) - 1


def _rise(offsets: Tensor, totals: Sequence[int]) -> bool:
    """Whether row f of `offsets` (F, B + 1) rises from 0 to ``totals[f]``, for all of them."""
    if not offsets.shape[1]:
        return False
    ends = torch.tensor(totals, dtype=torch.int64, device=offsets.device)
    wrong = (offsets[:, 1:] < offsets[:, :-1]).any(1) | (offsets[:, 0] != 0) | (offsets[:, -1] != ends)
    return not bool(wrong.any())


def _listed(samples: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} with {count}" for name, count in samples.items())


def _integers(name: str, tensor: Tensor) -> Tensor:
    """`tensor` as int64, if it holds integers."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGERS:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be integers, got {got}")
    return tensor.long()


def check_offsets(offsets: Tensor, total: int, name: str, tokens: str, keys: Sequence[str] = ()) -> None:
    """Raise a ValueError unless `offsets` rise from 0 to `total`, the number of entries of `tokens`."""
    if len(offsets) == 0:
        raise ValueError(f"{name} must have one entry more than there are samples, got an empty tensor")
    if int(offsets[0]) != 0:
        raise ValueError(f"{name} must start at 0: {name}[0] = {int(offsets[0])}")
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        at = int(falls.nonzero()[0])
        key, sample = divmod(at, (len(offsets) - 1) // max(len(keys), 1))
        raise ValueError(
            f"{name} must not decrease: {name}[{at + 1}] = {int(offsets[at + 1])} comes after "
            f"{name}[{at}] = {int(offsets[at])} ({f'key {keys[key]!r}, ' if keys else ''}sample {sample})"
        )
    if int(offsets[-1]) != total:
        raise ValueError(
            f"{name} must end at the number of {tokens}: {name}[{len(offsets) - 1}] = {int(offsets[-1])}, "
            f"but there are {total}"
        )


def check_tensor(
    name: str,
    tensor: object,
    dtype: torch.dtype = torch.int64,
    dim: int = 1,
    device: torch.device | None = None,
) -> None:
    """Raise a ValueError unless `tensor` is a tensor of that dtype, number of dimensions and device."""
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a tensor of {dtype}, got {got}")
    if tensor.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimension(s), got shape {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but the batch is on {device}")


def common_value(name: str, values: Sequence[Any]) -> Any:
    """The value shared by all batches; raises ValueError for `concat` where values differ."""
    for value in values:
        if value != values[0]:
            raise ValueError(f"concat: the batches have different {name}: {values[0]} and {value}")
    return values[0]
