"""Sequence-wise samples of click and conversion models (MTGRBoost, section 2): context, history, exposed.

A sample is what one user did up to some point: features of the user, earlier events with the action taken,
and the items shown afterwards, each with one label per task. Three samples, the second one without a history
and the last one with nothing exposed (both legal), so B = 3, Lh = 3, Le = 3 and T = 2::

    sample_ids          [   70,      71,      72 ]        (B,)
    context
      gender            [    1,       2,       1 ]        (B,)    one id per contextual feature
      user_id           [    4,       9,       5 ]        (B,)
    history_offsets     [    0,       2,       2,    3]   (B + 1,)
    history_items       [10, 11,              12 ]        (Lh,)   history_offsets[b] : [b + 1] is sample b
    history_actions     [ 3,  5,               1 ]        (Lh,)   what the user did, as an id
    history_timestamps  [ 5,  9,               4 ]        (Lh,)
    exposed_offsets     [    0,       1,       3,    3]   (B + 1,)
    exposed_items       [   20,  21, 22          ]        (Le,)
    exposed_timestamps  [   12,   6,  7          ]        (Le,)
    labels              [    1,   0,  1          ]        (Le, T) of task click
                        [    0,   0,  1          ]                and of task conversion
    tasks               ("click", "conversion")
    genres, one bag for each item of the history and then for each exposed item: (Lh + Le) bags
      items               10  11  12  20  21  22
      genres.offsets    [  0,  2,  3,  3,  4,  6,  7]     (Lh + Le + 1,)
      genres.ids        [1, 4, 2,      2, 1, 4,  3  ]     item 12 has none

A model reads a sample's tokens in the order context, history, exposed; a sample's loss is the sum over its
exposed items and tasks. An empty batch has offsets ``[0]`` and nothing else, and keeps its context features.

Dimensions: B samples, Lh tokens of history, Le exposed tokens, T tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tritonrec.data.batch import Lookup, check_offsets, joined_offsets, one_step, token_indices

FEATURES = ("item", "action", "genre")  # names that a contextual feature cannot have

_HISTORY = ("history_items", "history_actions", "history_timestamps")
_EXPOSED = ("exposed_items", "exposed_timestamps", "labels")


@dataclass(frozen=True)
class ImpressionBatch:
    """One step's samples. All tensors are int64 on one device; the layout is drawn in the module's docstring.

    ``sample_ids`` tell samples apart wherever a random choice depends on the sample (dropout), so they must
    not depend on how the batch is cut up.
    """

    step: int
    sample_ids: Tensor  # (B,)
    context: dict[str, Tensor]  # feature -> (B,), in the order of the names
    history_offsets: Tensor  # (B + 1,)
    history_items: Tensor  # (Lh,)
    history_actions: Tensor  # (Lh,)
    history_timestamps: Tensor  # (Lh,)
    exposed_offsets: Tensor  # (B + 1,)
    exposed_items: Tensor  # (Le,)
    exposed_timestamps: Tensor  # (Le,)
    genres: Lookup | None  # Lh + Le bags, or None where the data has no genres
    labels: Tensor  # (Le, T), each 0 or 1
    tasks: tuple[str, ...]  # names of the T tasks

    @property
    def num_samples(self) -> int:
        """B."""
        return self.exposed_offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples: B contextual ones for each feature of the context, Lh and Le."""
        return len(self.context) * self.num_samples + len(self.history_items) + len(self.exposed_items)

    @property
    def history_lengths(self) -> Tensor:
        """(B,) int64: events of each sample's history."""
        return self.history_offsets[1:] - self.history_offsets[:-1]

    @property
    def exposed_lengths(self) -> Tensor:
        """(B,) int64: exposed items of each sample."""
        return self.exposed_offsets[1:] - self.exposed_offsets[:-1]

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: tokens of each sample, context included."""
        return self.history_lengths + self.exposed_lengths + len(self.context)

    @property
    def loss_terms(self) -> int:
        """Le: one term for each exposed item, in which its tasks are summed."""
        return len(self.exposed_items)

    def lookups(self) -> dict[str, Lookup]:
        """Features ``item`` (Lh + Le ids, history first), ``action``, ``genre`` (bags), and the context's."""
        found = {
            "item": Lookup(torch.cat([self.history_items, self.exposed_items])),
            "action": Lookup(self.history_actions),
        }
        if self.genres is not None:
            found["genre"] = self.genres
        return found | {name: Lookup(ids) for name, ids in self.context.items()}

    def sample_keys(self) -> tuple[Tensor, Tensor]:
        """Offsets (B + 1,) and each sample's items, history first.

        Other features are left out: their tables are so small that every micro-batch meets all of them.
        """
        offsets = self.history_offsets + self.exposed_offsets
        keys = self.history_items.new_empty(len(self.history_items) + len(self.exposed_items))
        history, exposed = self._item_places()
        keys[history], keys[exposed] = self.history_items, self.exposed_items
        return offsets, keys

    def _item_places(self) -> tuple[Tensor, Tensor]:
        """Places (Lh,) and (Le,) of the items when each sample's exposed items follow on its history."""
        starts = self.history_offsets[:-1] + self.exposed_offsets[:-1]
        history, _ = token_indices(starts, self.history_lengths)
        exposed, _ = token_indices(starts + self.history_lengths, self.exposed_lengths)
        return history, exposed

    def exposed_context(self, name: str) -> Tensor:
        """(Le,) int64: a contextual feature, for each exposed item that of its sample."""
        return torch.repeat_interleave(self.context[name], self.exposed_lengths)

    def select(self, indices: Tensor) -> ImpressionBatch:
        """The samples at `indices` (b,) int64, in that order; an index outside [0, B) is an IndexError."""
        indices = indices.to(self.exposed_offsets.device)
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise IndexError(
                f"select: indices must be in [0, {self.num_samples}), "
                f"got values from {int(indices.min())} to {int(indices.max())}"
            )
        history, history_offsets = token_indices(self.history_offsets[indices], self.history_lengths[indices])
        exposed, exposed_offsets = token_indices(self.exposed_offsets[indices], self.exposed_lengths[indices])
        moved = {name: getattr(self, name)[history] for name in _HISTORY}
        moved |= {name: getattr(self, name)[exposed] for name in _EXPOSED}
        return replace(
            self,
            sample_ids=self.sample_ids[indices],
            context={name: ids[indices] for name, ids in self.context.items()},
            history_offsets=history_offsets,
            exposed_offsets=exposed_offsets,
            genres=self._bags(torch.cat([history, exposed + len(self.history_items)])),
            **moved,
        )

    def _bags(self, places: Tensor) -> Lookup | None:
        """Those bags of the genres, in that order."""
        if self.genres is None or self.genres.offsets is None:
            return None
        offsets = self.genres.offsets
        ids, new_offsets = token_indices(offsets[places], offsets[places + 1] - offsets[places])
        return Lookup(self.genres.ids[ids], new_offsets)

    @staticmethod
    def concat(batches: Sequence[ImpressionBatch]) -> ImpressionBatch:
        """One batch of all samples, in the order given; all of one step, with the same features and tasks."""
        step = one_step(batches)
        first = batches[0]
        for batch in batches:
            for name, expected, got in (
                ("tasks", first.tasks, batch.tasks),
                ("context features", tuple(first.context), tuple(batch.context)),
                ("genres", first.genres is not None, batch.genres is not None),
            ):
                if expected != got:
                    raise ValueError(f"concat: the batches have different {name}: {expected} and {got}")
        tensors = ("sample_ids", *_HISTORY, *_EXPOSED)
        joined: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for batch in batches]) for name in tensors
        }
        return ImpressionBatch(
            step=step,
            context={name: torch.cat([batch.context[name] for batch in batches]) for name in first.context},
            history_offsets=joined_offsets([batch.history_offsets for batch in batches]),
            exposed_offsets=joined_offsets([batch.exposed_offsets for batch in batches]),
            genres=_joined_genres(batches),
            tasks=first.tasks,
            **joined,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImpressionBatch:
        """The same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ImpressionBatch:
        """The same batch in page-locked memory, from which copies to an accelerator run asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> ImpressionBatch:
        changed: dict[str, Any] = {
            field.name: change(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        genres = self.genres
        if genres is not None:
            genres = Lookup(change(genres.ids), None if genres.offsets is None else change(genres.offsets))
        context = {name: change(ids) for name, ids in self.context.items()}
        return replace(self, context=context, genres=genres, **changed)

    def validate(self) -> ImpressionBatch:
        """Return the batch itself, or raise a ValueError that names the field and the offending values."""
        for name, tensor in self._tensors().items():
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"{name} must be an int64 tensor, got {got}")
            dimensions = 2 if name == "labels" else 1
            if tensor.dim() != dimensions:
                raise ValueError(
                    f"{name} must have {dimensions} dimension(s), got shape {tuple(tensor.shape)}"
                )
            if tensor.device != self.sample_ids.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, but sample_ids is on {self.sample_ids.device}"
                )
        self._validate_features()
        check_offsets(self.history_offsets, len(self.history_items), "history_offsets", "history_items")
        check_offsets(self.exposed_offsets, len(self.exposed_items), "exposed_offsets", "exposed_items")
        samples = {"sample_ids": self.sample_ids, "history_offsets": self.history_offsets[1:]}
        samples |= {f"context[{name!r}]": ids for name, ids in self.context.items()}
        for name, tensor in samples.items():
            if len(tensor) != self.num_samples:
                raise ValueError(
                    f"{name} describes {len(tensor)} samples, but exposed_offsets of length "
                    f"{len(self.exposed_offsets)} describe {self.num_samples}"
                )
        for names in (_HISTORY, _EXPOSED):
            for name in names[1:]:
                if len(getattr(self, name)) != len(getattr(self, names[0])):
                    raise ValueError(
                        f"{name} has {len(getattr(self, name))} rows, "
                        f"but {names[0]} has {len(getattr(self, names[0]))}"
                    )
        self._validate_labels()
        self._validate_genres()
        return self

    def _tensors(self) -> dict[str, Tensor]:
        named = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("step", "context", "genres", "tasks")
        }
        named |= {f"context[{name!r}]": ids for name, ids in self.context.items()}
        if self.genres is not None:
            named |= {"genres.ids": self.genres.ids, "genres.offsets": self.genres.offsets}
        return named

    def _validate_features(self) -> None:
        names = list(self.context)
        if names != sorted(names):
            raise ValueError(f"context must be in the order of its names, got {names}")
        taken = [name for name in FEATURES if name in names]
        if taken:
            raise ValueError(f"context cannot have a feature called {taken[0]!r}: the name is taken")

    def _validate_labels(self) -> None:
        if self.labels.shape[1] != len(self.tasks):
            raise ValueError(
                f"labels has {self.labels.shape[1]} columns, "
                f"but there are {len(self.tasks)} tasks: {self.tasks}"
            )
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks must have different names, got {self.tasks}")
        wrong = (self.labels != 0) & (self.labels != 1)
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"labels must be 0 or 1: labels[{row}, {column}] = {int(self.labels[row, column])} "
                f"(task {self.tasks[column]!r})"
            )

    def _validate_genres(self) -> None:
        if self.genres is None or self.genres.offsets is None:
            return
        check_offsets(self.genres.offsets, len(self.genres.ids), "genres.offsets", "genres.ids")
        bags, items = len(self.genres.offsets) - 1, len(self.history_items) + len(self.exposed_items)
        if bags != items:
            raise ValueError(
                f"genres has {bags} bags, but there are {items} items: {len(self.history_items)} of the "
                f"history and {len(self.exposed_items)} exposed"
            )


def _joined_genres(batches: Sequence[ImpressionBatch]) -> Lookup | None:
    """The bags of all histories, and then those of all exposed items."""
    halves: list[list[Lookup]] = [[], []]
    for batch in batches:
        items = len(batch.history_items) + len(batch.exposed_items)
        places = torch.arange(items, device=batch.sample_ids.device)
        for half, part in zip(halves, places.tensor_split([len(batch.history_items)]), strict=True):
            bags = batch._bags(part)
            if bags is None:
                return None
            half.append(bags)
    parts = [*halves[0], *halves[1]]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Lookup(torch.cat([part.ids for part in parts]), joined_offsets(offsets))
