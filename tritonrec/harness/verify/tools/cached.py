"""Whether inference with cached keys and values scores as the trainer's own model does, and faults of it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from ....data import Batch, NextItemLoader
from ....embedding import HashTableCollection
from ....nn import HSTUConfig, NextItemModel
from ....ops import use_impl
from ....pipeline import next_item_scores
from ....serving import Predictor, export
from ....serving.cached import CachedPredictor
from ....serving.cached.pages import Cached, Pages, pages_of
from ....serving.device import DevicePredictor
from ...train.gather import whole_tables
from ..faults import case, fault
from ..variants import MADE, RESTART, Run, Variant, add_variants
from .exported import USERS, exporting

PART = "scores, cached"
"""What rank 0 compares."""
PAGES = 5
"""Of the memory: less than the users need, so that they take pages from each other."""
BEHIND = 7
"""Of the host behind a device: with `PAGES` less than the users need, too."""


def cached(run: Run, device: str = "") -> Iterator[Sequence[Batch]]:
    """Serve held-out users in pieces, over two versions, and compare their scores with the trainer's.

    They begin with the export of the checkpoint half way, get some events, are scored, go on with the export
    of the last one, and get the others between further scores. Scores on the way are compared with those of
    `Predictor`, the last ones with the trainer's. A fault's tool takes the place of `CachedPredictor`.
    Collective; rank 0 serves, and counts how many tokens were not computed again. With a `device`, layers,
    items and pages are there, and further pages on the host.
    """
    run.due += [PART][run.trainer.program.communicators.rank :]
    yield from exporting(run)
    trained, tables = run.trainer.dense.evaluated, whole_tables(run.trainer.rows_of_ranks())
    if run.trainer.program.communicators.rank == 0:
        with use_impl(run.job.target.impl if device else "auto"):
            _serve(run, trained, tables, device)


def cached_on_a_device(run: Run) -> Iterator[Sequence[Batch]]:
    """As `cached`, on the device of the run, by the implementation of its ops."""
    return cached(run, run.job.target.device)


def _serve(run: Run, trained: Any, tables: HashTableCollection, device: str) -> None:
    trainer, loader, folder, step = run.trainer, run.loader, run.folder, run.steps[-1]
    half = run.steps[0] + len(run.steps) // 2
    server: type[CachedPredictor] = run.injected or CachedPredictor
    assert isinstance(loader, NextItemLoader) and isinstance(trained, NextItemModel)
    model, before, after = deepcopy(trained).cpu(), Path(folder, "before"), Path(folder, "export")

    def loaded(path: Path) -> Predictor:
        full = Predictor.load(path)
        return DevicePredictor(full, device) if device else full

    export(Path(folder, "checkpoint"), before, model, step=half)
    history = next(iter(loader.evaluation_batches(USERS))).history
    events = [
        (history.ids[first:last], history.timestamps[first:last])
        for first, last in pairwise(history.offsets.tolist())
    ]
    draw, users, seen = Random(step), range(len(events)), [0] * len(events)
    full, pages = loaded(before), PAGES * pages_of(model.config.max_seq_len)
    page_bytes = server(full, model, "64MiB").stats().page_bytes
    behind = BEHIND * pages_of(model.config.max_seq_len) * page_bytes if device else 0
    served = server(full, model, pages * page_bytes, behind)
    want: list[Tensor] = []
    got: list[Tensor] = []

    def append(user: int, count: int) -> None:
        (ids, times), first = events[user], seen[user]
        seen[user] = min(first + count, len(ids))
        served.append(user, ids[first : seen[user]], times[first : seen[user]])

    def score(full: Predictor, users: Sequence[int]) -> None:
        ids, times = ([events[user][part][: seen[user]] for user in users] for part in (0, 1))
        want.append(full.scores(ids, loader.catalogue, torch.cat(times)))
        got.append(served.scores(users, loader.catalogue))

    for user in users:
        append(user, draw.randint(1, 4))
    score(full, users[: PAGES - 1])
    served.reload(after)
    full = loaded(after)
    score(full, users[: PAGES - 1])
    score(full, draw.sample(users, len(users)))
    for user in users:
        score(full, [user])
        while seen[user] < len(events[user][0]):
            append(user, draw.randint(1, 9))
            score(full, [user, *draw.sample(users, 2)])
    score(full, users)
    model = deepcopy(trained).to(device or "cpu").eval()
    scores = next_item_scores(model, tables, loader.catalogue, trainer.config.precision)
    want[-1] = scores(history).cpu()
    run.comparison.compare_part(step, PART, torch.cat(want), torch.cat(got))
    stats = served.stats()
    run.counts |= {"reused_tokens": stats.reused, "host_pages": stats.host_pages_used}


add_variants(
    {
        "cached": Variant(
            "an export of HSTU with biases of position and time is served with cached keys and values",
            {"sizes": HSTUConfig(relative_bias=True), "data": MADE},
            shows=("reused_tokens",),
            tool=cached,
        ),
    },
    before="balanced",
)
add_variants(
    {
        "cached-sasrec": Variant(
            "an export of SASRec is served with cached keys and values",
            {"model": "sasrec", "data": MADE},
            shows=("reused_tokens",),
            tool=cached,
        ),
        "cached-device": Variant(
            "an export of HSTU is served with cached keys and values in pages of a device, then of the host",
            {"data": MADE},
            shows=("reused_tokens", "host_pages"),
            tool=cached_on_a_device,
        ),
    },
    before=RESTART,
)


@fault(case(variant="cached", steps=8), of="tool")
class PageReusedEarly(CachedPredictor):
    """A page of cached keys and values goes to another user while its user still reads it."""

    def _use(self, *arguments: Any) -> None:
        super()._use(*arguments)
        pages = self._pages

        def lent(user: Hashable) -> None:
            pages._free += pages._cached[user].pages
            pages._cached.move_to_end(user)

        pages.drop = lent  # type: ignore[method-assign]


@fault(case(variant="cached-device", steps=8), of="tool")
class DevicePageReusedEarly(CachedPredictor):
    """What a user loses on a device is copied to the host after its pages went to another."""

    def _use(self, *arguments: Any) -> None:
        super()._use(*arguments)
        pages, behind, taken = self._pages, self._pages.behind, self._pages.take
        if behind is None:
            return
        lost: list[tuple[Hashable, Cached]] = []

        def lose(user: Hashable) -> None:
            lost.append((user, pages._cached[user]))
            pages.drop(user)

        def take(user: Hashable, tokens: int, spared: Collection[Hashable]) -> Cached:
            while lost:
                other, cached = lost.pop()
                behind._write(behind.take(other, cached.known, ()), *pages._read(cached))
            return taken(user, tokens, spared)

        pages._evict, pages.take = lose, take  # type: ignore[method-assign]


@fault(case(variant="cached", steps=8), of="tool")
class CacheOfTheOldVersion(CachedPredictor):
    """Keys and values of the model before are used with a new one."""

    def reload(self, *arguments: Any, **options: Any) -> None:
        pages: Pages = self._pages
        super().reload(*arguments, **options)
        self._pages = pages


@fault(case(variant="cached", steps=8), of="tool")
class AppendLost(CachedPredictor):
    """A user's cached vector stays when events come."""

    def _put(self, user: Hashable, whole: Any) -> None:
        cached = self._pages.find(user)
        vector = None if cached is None else cached.vector
        super()._put(user, whole)
        if cached is not None:
            cached.vector = vector


@fault(case(variant="cached", steps=8), of="tool")
class CachedPositionOffByOne(CachedPredictor):
    """Tokens behind cached ones stand one place late."""

    def _use(self, predictor: Predictor, model: NextItemModel) -> None:
        super()._use(predictor, model)
        _, _, shared, at, *_ = self._encoder.__self__._arguments  # type: ignore[attr-defined]
        positions = shared[: at[0, 1]].reshape(-1, model.config.dim)  # a view
        positions[:-1] = positions[1:].copy()


@fault(case(variant="cached", steps=8), of="tool")
class LastTimeForgotten(CachedPredictor):
    """The last cached token goes on asking at its own time when the next one's is known."""

    def _put(self, user: Hashable, whole: Any) -> None:
        cached = self._pages.find(user)
        known = 0 if cached is None else cached.known
        super()._put(user, whole)
        if cached is not None:
            cached.known = known
