"""Jagged batches: sequences of different lengths stored end to end, with no padding.

Three samples of lengths 2, 0 and 3 (the second one is empty, which is legal), so B = 3 and L = 5::

    sample_ids   [  70,          71,  72             ]        (B,)
    offsets      [   0,           2,   2,           5]        (B + 1,)
                     |            |    |            |
    ids          [ 10, 11,             20,  21,  22  ]        (L,)   offsets[b] : offsets[b + 1] is sample b
    labels       [ 11, 12,             21,  22,  23  ]        (L,)   the item that follows
    timestamps   [  5,  9,              1,   4,   4  ]        (L,)
    negatives    [ .., ..,             ..,  ..,  ..  ]        (L, K) sampled items the label is ranked against
    token_positions()
                 [  0,  1,              0,   1,   2  ]        (L,)
    token_sample_ids()
                 [ 70, 70,             72,  72,  72  ]        (L,)

An empty batch has ``offsets = [0]`` and nothing else.

Dimensions: B samples, L tokens, K negatives per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_TENSORS = ("sample_ids", "offsets", "ids", "timestamps", "labels", "negatives")


def token_indices(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of given ranges, range after range, and the ranges' new offsets.

    `starts` and `lengths` are (B,) int64. Returns indices (sum of lengths,) and offsets (B + 1,)::

        starts [7, 3, 0]  lengths [2, 0, 3]  ->  indices [7, 8,  0, 1, 2]   offsets [0, 2, 2, 5]
    """
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return torch.arange(len(shift), dtype=torch.int64, device=lengths.device) + shift, offsets


class Lookup(NamedTuple):
    """What one feature looks up in a batch: ids (n,) int64, and where they are pooled the bags' offsets.

    With ``offsets`` (m + 1,) int64, bag j is ``ids[offsets[j] : offsets[j + 1]]``; it may be empty.
    """

    ids: Tensor
    offsets: Tensor | None = None


class Batch(Protocol):
    """What the scheduler asks of a batch; `JaggedBatch` and `ImpressionBatch` have it."""

    @property
    def step(self) -> int: ...

    @property
    def sample_ids(self) -> Tensor: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def loss_terms(self) -> int:
        """Terms of the batch's loss; the sum of the losses is divided by their number over all ranks."""

    def lookups(self) -> dict[str, Lookup]:
        """What each feature looks up; the features are the same for every batch of a run."""

    def sample_keys(self) -> tuple[Tensor, Tensor]:
        """Offsets (B + 1,) and keys (n,) int64 that tell which samples share keys; repeats are allowed."""

    def select(self, indices: Tensor) -> Any: ...

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any: ...

    def pin_memory(self) -> Any: ...

    def validate(self) -> Any: ...


def check_offsets(offsets: Tensor, total: int, name: str = "offsets", tokens: str = "ids") -> None:
    """Raise a ValueError unless `offsets` rise from 0 to `total`, the number of entries of `tokens`."""
    if len(offsets) == 0:
        raise ValueError(f"{name} must have one entry more than there are samples, got an empty tensor")
    falls = torch.cat([offsets[:1] < 0, offsets[1:] < offsets[:-1]])
    at = int(falls.byte().argmax())  # the first, if any
    if int(offsets[0]) > 0:
        raise ValueError(f"{name} must start at 0: {name}[0] = {int(offsets[0])}")
    if bool(falls[at]) and int(offsets[at]) < 0:
        raise ValueError(f"{name} must not be negative: {name}[{at}] = {int(offsets[at])}")
    if bool(falls[at]):
        raise ValueError(
            f"{name} must not decrease: {name}[{at}] = {int(offsets[at])} "
            f"comes after {name}[{at - 1}] = {int(offsets[at - 1])}"
        )
    if int(offsets[-1]) != total:
        raise ValueError(
            f"{name} must end at the number of tokens: "
            f"{name}[{len(offsets) - 1}] = {int(offsets[-1])}, but {tokens} has {total}"
        )


def joined_offsets(offsets: Sequence[Tensor]) -> Tensor:
    """Offsets of jagged tensors laid end to end: ``[0, 2, 5]`` and ``[0, 4]`` give ``[0, 2, 5, 9]``."""
    lengths = torch.cat([part[1:] - part[:-1] for part in offsets])
    joined = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=joined[1:])
    return joined


def one_step(batches: Sequence[Batch]) -> int:
    """The step of all `batches`; a ValueError where there are none, or they differ."""
    steps = [batch.step for batch in batches]
    if not steps:
        raise ValueError("concat: needs at least one batch")
    if len(set(steps)) > 1:
        raise ValueError(f"concat: the batches are of different steps: {steps}")
    return steps[0]


@dataclass(frozen=True)
class JaggedBatch:
    """One step's samples. All tensors are int64 on one device; the layout is drawn in the module's docstring.

    ``sample_ids`` tell samples apart wherever a random choice depends on the sample (dropout, negatives), so
    they must not depend on how the batch is cut up.
    """

    step: int
    sample_ids: Tensor  # (B,)
    offsets: Tensor  # (B + 1,)
    ids: Tensor  # (L,)
    timestamps: Tensor  # (L,)
    labels: Tensor  # (L,)
    negatives: Tensor  # (L, K)

    @property
    def num_samples(self) -> int:
        """B."""
        return self.offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.ids.numel()

    @property
    def num_negatives(self) -> int:
        """K."""
        return self.negatives.shape[1]

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: tokens of each sample."""
        return self.offsets[1:] - self.offsets[:-1]

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

    def token_sample_ids(self) -> Tensor:
        """(L,) int64: the sample id of each token."""
        return torch.repeat_interleave(self.sample_ids, self.lengths)

    def token_positions(self) -> Tensor:
        """(L,) int64: the place of each token in its own sequence, from 0."""
        positions = torch.arange(self.num_tokens, dtype=torch.int64, device=self.ids.device)
        return positions - torch.repeat_interleave(self.offsets[:-1], self.lengths)

    def select(self, indices: Tensor) -> JaggedBatch:
        """The samples at `indices` (b,) int64, in that order; an index outside [0, B) is an IndexError."""
        indices = indices.to(self.offsets.device)
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise IndexError(
                f"select: indices must be in [0, {self.num_samples}), "
                f"got values from {int(indices.min())} to {int(indices.max())}"
            )
        tokens, offsets = token_indices(self.offsets[indices], self.lengths[indices])
        return JaggedBatch(
            self.step,
            self.sample_ids[indices],
            offsets,
            self.ids[tokens],
            self.timestamps[tokens],
            self.labels[tokens],
            self.negatives[tokens],
        )

    @staticmethod
    def concat(batches: Sequence[JaggedBatch]) -> JaggedBatch:
        """One batch of all samples, in the order given; all of one step and with as many negatives."""
        step = one_step(batches)
        columns = [batch.num_negatives for batch in batches]
        if len(set(columns)) > 1:
            raise ValueError(f"concat: the batches have different numbers of negatives: {columns}")
        joined: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for batch in batches])
            for name in _TENSORS
            if name != "offsets"
        }
        return JaggedBatch(step, offsets=joined_offsets([batch.offsets for batch in batches]), **joined)

    def with_negatives(self, negatives: Tensor) -> JaggedBatch:
        """The same batch with other negatives (L, K) int64."""
        return replace(self, negatives=negatives)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedBatch:
        """The same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedBatch:
        """The same batch in page-locked memory, from which copies to an accelerator run asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> JaggedBatch:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _TENSORS}
        return replace(self, **changed)

    def validate(self) -> JaggedBatch:
        """Return the batch itself, or raise a ValueError that names the field and the offending values."""
        device = None
        for name in _TENSORS:
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"{name} must be an int64 tensor, got {got}")
            dimensions = 2 if name == "negatives" else 1
            if tensor.dim() != dimensions:
                raise ValueError(
                    f"{name} must have {dimensions} dimension(s), got shape {tuple(tensor.shape)}"
                )
            device = device or tensor.device
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, but sample_ids is on {device}")
        check_offsets(self.offsets, self.num_tokens)
        if len(self.sample_ids) != self.num_samples:
            raise ValueError(
                f"sample_ids has {len(self.sample_ids)} entries, but offsets of length {len(self.offsets)} "
                f"describe {self.num_samples} samples"
            )
        for name in ("timestamps", "labels", "negatives"):
            rows = len(getattr(self, name))
            if rows != self.num_tokens:
                raise ValueError(f"{name} has {rows} rows, but ids has {self.num_tokens} tokens")
        return self
