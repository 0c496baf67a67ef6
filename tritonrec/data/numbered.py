"""Batches of any loader, numbered by step, with a position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, TypeVar

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tritonrec.data.batch import Batch
from tritonrec.data.epochs import check_same
from tritonrec.settings import counts_of, typed

LOADER, SAMPLER = ("batch_size", "drop_last"), ("seed", "num_replicas", "shuffle", "batch_size", "drop_last")
"""Settings of a ``DataLoader``, and of its samplers; `num_replicas` is the number of ranks."""

RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers whose order nobody can draw again."""

AnyBatch = TypeVar("AnyBatch", bound=Batch)


@typed
class NumberedLoader(Generic[AnyBatch]):
    """The batches of `loader`, epoch after epoch, with their steps set; an iterator with a position.

    For a ``torch.utils.data.DataLoader``, say, whose ``collate_fn`` makes batches and does not know the step.
    Before an epoch ``loader.sampler.set_epoch`` is called with its number, where there is one.

    Args:
        loader: an iterable of batches that begins anew each time. All ranks' must have equally many.
        epochs: after which it ends; None: never.

    Attributes:
        step: of the next batch.

    A position has the state of `loader` where it has ``state_dict`` and ``load_state_dict`` (torchdata's
    StatefulDataLoader). Any other loader is begun anew at a position, and the batches before it in its epoch
    are dropped, so its epochs must be the same each time. Raises ValueError for an epoch without batches.
    """

    def __init__(self, loader: Iterable[AnyBatch], epochs: int | None = None) -> None:
        self.loader, self.epochs = loader, epochs
        self.step = self._epoch = self._place = 0
        self._batches: Iterator[AnyBatch] | None = None

    def __iter__(self) -> Iterator[AnyBatch]:
        return self

    def __next__(self) -> AnyBatch:
        while self.epochs is None or self._epoch < self.epochs:
            if self._batches is None:
                self._batches = self._begin()
            batch = next(self._batches, None)
            if batch is not None:
                numbered = replace(batch, step=self.step)
                self.step, self._place = self.step + 1, self._place + 1
                return numbered
            if not self._place:
                raise ValueError(f"epoch {self._epoch} of the loader has no batches")
            self._epoch, self._place, self._batches = self._epoch + 1, 0, None
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The position, with that of `loader` if it has one.

        Raises ValueError for samplers of torch that draw another order each time, so that there is no place.
        """
        if not self._has_state():
            for sampler in self._samplers():
                if isinstance(sampler, RANDOM):
                    raise ValueError(
                        f"a {type(sampler).__name__} (shuffle=True) draws another order when the loader "
                        "begins anew, so a position in it says nothing: give the DataLoader "
                        "sampler=DistributedSampler(dataset, num_replicas=1, rank=0, seed=...), or take "
                        "torchdata's StatefulDataLoader"
                    )
        place = {
            "step": self.step,
            "epoch": self._epoch,
            "batches": self._place,
            "settings": self._settings(),
        }
        if self._has_state():
            place["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position.

        Raises ValueError for one of a loader of another kind, and naming what differs from the loader that
        was saved, where it tells; nothing is changed then.
        """
        check_same(state.get("settings", {}), self._settings())
        place = counts_of(state, "step", "epoch", "batches")
        if ("loader" in state) != self._has_state():
            kinds = "with", "without"
            there, here = kinds if "loader" in state else kinds[::-1]
            raise ValueError(f"the position is one of a loader {there} a state, and this one is {here}")
        batches = None
        if "loader" in state:
            try:
                self._set_epoch(place[1])
                self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
                batches = iter(self.loader)
            except BaseException:
                self._set_epoch(self._epoch)
                raise
        (self.step, self._epoch, self._place), self._batches = place, batches

    def _begin(self) -> Iterator[AnyBatch]:
        self._set_epoch(self._epoch)
        return islice(self.loader, self._place, None)

    def _set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def _settings(self) -> dict[str, Any]:
        """What a place depends on, as far as loader and samplers of `torch.utils.data` tell."""
        parts = [self.loader, *self._samplers()[:2], getattr(self.loader, "dataset", None)]
        found: dict[str, Any] = {}
        for part, names in zip(parts, (LOADER, SAMPLER, SAMPLER, ()), strict=True):
            values = {name: getattr(part, name, None) for name in names}
            found |= {name: value for name, value in values.items() if isinstance(value, (int, bool))}
        if isinstance(parts[-1], Sized):
            found["samples"] = len(parts[-1])
        return found

    def _samplers(self) -> list[Any]:
        """Sampler, sampler of batches, and that one's own."""
        own, batches = (getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))
        return [own, batches, getattr(batches, "sampler", None)]

    def _has_state(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")
