"""Slipstream beside a trainer: snapshots of hot rows during training, then one classification (Figure 4).

::

    step 0        warmup       + every      + 2 every           + N every
    |--- warm-up ---|----------- s1 ----------- s2 ---- ... -------- sN |---- inputs that still vary ----
                     hot rows are copied                           classification: the pipeline is empty

After the update of each window a rank copies the hot rows that it owns from the window's buffer. A snapshot
is this copy at one step. So no table is read, the pipeline is not drained before the classification, and
snapshots do not depend on mode, timing, eviction, storage in 16 bits or rows kept in buffers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..embedding import HashTableCollection
from ..pipeline import Trainer, Window
from ..pipeline.places import Buffer, OwnedRows
from ..pipeline.stage import Read
from ..settings import MOST, seed_setting, setting, typed
from .classify import Classification, Judgement, classify
from .rows import HotRows, hot_rows, owned

if TYPE_CHECKING:
    from ..data import ClickLoader
    from ..distributed import Communicators


@typed
@dataclass(frozen=True)
class SlipstreamConfig:
    """Settings of Slipstream; **approximate** unless `threshold` is 0.

    Args:
        warmup: steps before the snapshots; their inputs decide which rows are hot.
        snapshots: N, at least 2. every: steps between snapshots.
        hot_share: lambda, least share of its table's accesses of a hot row.
        drop: largest share of the hot inputs to drop.
        threshold: T, instead of `drop`; 0 drops nothing.
        alpha: least number of stale rows of a dropped input; 0 for all its rows.
        sample: share of the hot inputs to find T on. confidence: of the interval.
        snapshot_mb: megabytes for snapshots, of all ranks together; the rows accessed least are left out.
        seed: of the sample.

    Raises ValueError naming a setting out of range.
    """

    warmup: int = setting(100, "Steps before hot rows are followed.", 1, MOST)
    snapshots: int = setting(3, "Snapshots of hot rows.", 2, 65_536)
    every: int = setting(50, "Steps between snapshots.", 1, MOST, option="snapshot_every")
    hot_share: float = setting(1e-4, "Share of a table's accesses that makes a row hot.", 0, 1)
    drop: float = 0.5
    threshold: float | None = setting(None, "Call a row stale below this change; 0 is exact.", 0)
    alpha: int = setting(0, "Stale rows of a dropped input at least; 0: all.", 0, MOST)
    sample: float = setting(1e-3, "Share of the hot inputs to sample, 1000 at least.", 0, 1)
    confidence: float = 0.999
    snapshot_mb: float = setting(256.0, "Megabytes for snapshots, of all ranks.", 0, 1e9)
    seed: int = seed_setting()

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1:
            raise ValueError(f"drop must be in [0, 1], got {self.drop}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be in (0, 1), got {self.confidence}")
        if self.threshold == math.inf:
            raise ValueError("threshold must be finite")
        if not self.snapshot_mb > 0:
            raise ValueError(f"snapshot_mb must be positive, got {self.snapshot_mb}")

    @property
    def classify_at(self) -> int:
        """The step before which inputs are classified."""
        return self.warmup + self.snapshots * self.every


@dataclass
class _Followed:
    """This rank's hot rows of one group of tables: current values, and values at the last snapshot."""

    keys: torch.Tensor  # (h,) int64 ascending
    places: torch.Tensor  # (h,) int64, of each in the hot rows
    now: torch.Tensor  # (h, dim)
    before: torch.Tensor  # (h, dim)
    trained: torch.Tensor  # (h,) bool, since the last snapshot
    known: torch.Tensor  # (h,) bool, whether the last snapshot holds it
    changes: list[torch.Tensor] = field(default_factory=list)  # (h,) for each snapshot but the first


class Slipstream:
    """Takes snapshots of a run's hot rows and classifies inputs.

    Call `attach` before training, train exactly the steps up to ``config.classify_at``, then `judge` and
    `classify`.

    Args:
        config: see `SlipstreamConfig`. loader: of the run. communicators: of this rank.
        tables: this rank's shard.

    Raises ValueError where `alpha` is larger than the number of features.
    """

    def __init__(
        self,
        config: SlipstreamConfig,
        loader: ClickLoader,
        tables: HashTableCollection,
        communicators: Communicators,
    ):
        self.config, self.tables, self.communicators = config, tables, communicators
        self.alpha = config.alpha or len(loader.features)
        if self.alpha > len(loader.features):
            raise ValueError(f"alpha must be at most {len(loader.features)}, the features, got {self.alpha}")
        self.seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.hot = self._hot_rows(loader)
        self._groups = self._follow()
        self._taken = 0

    def _hot_rows(self, loader: ClickLoader) -> HotRows:
        inputs = loader.epoch_order(0)[: self.config.warmup * loader.batch_size]
        started = time.process_time()
        features = [self.tables.features[name] for name in loader.features]
        dim = max(feature.dim for feature in features)
        row = 2 * 4 * dim + 4 * (self.config.snapshots - 1) + 2 * 8 + 2  # bytes of `_Followed` for one row
        hot = hot_rows(
            loader.categories()[inputs],
            [feature.table or feature.name for feature in features],
            self.config.hot_share,
            int(self.config.snapshot_mb * 1e6 / row),
        )
        self.seconds += time.process_time() - started
        return hot

    def _follow(self) -> list[_Followed]:
        mine = owned(self.hot, self.communicators.shard, self.communicators.shards)
        starts, followed = self.hot.starts, []
        for group in self.tables.groups:
            keys, places = (
                [torch.empty(0, dtype=torch.int64, device="cpu")],
                [torch.empty(0, dtype=torch.int64, device="cpu")],
            )
            for number, name in enumerate(self.hot.tables):
                if name in group.layout.names:
                    here = mine[(mine >= starts[number]) & (mine < starts[number + 1])]
                    ids = self.hot.ids[number][here - starts[number]]
                    keys.append(group.layout.pack(group.layout.names.index(name), ids, name))
                    places.append(here)
            every, order = torch.cat(keys).sort()
            rows = torch.zeros(len(every), group.table.dim, dtype=torch.float32, device="cpu")
            flags = torch.zeros(len(every), dtype=torch.bool, device="cpu")
            followed.append(
                _Followed(every, torch.cat(places)[order], rows, rows.clone(), flags, flags.clone())
            )
        return followed

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps for snapshots."""
        return sum(
            value.numel() * value.element_size()
            for group in self._groups
            for value in (*[v for v in vars(group).values() if isinstance(v, torch.Tensor)], *group.changes)
        )

    def attach(self, trainer: Trainer) -> None:
        """Copy hot rows after the trainer's updates; ValueError for mode ``"reference"``, without stages."""
        if trainer.mode == "reference":
            raise ValueError("Slipstream follows the stages of a rank: mode 'reference' has none")
        if self.config.classify_at % trainer.config.accumulate:
            raise ValueError(
                f"the classification after step {self.config.classify_at} would fall into an update of "
                f"{trainer.config.accumulate} batches: choose warmup and every so that it does not"
            )
        trainer.program.after("sparse_update", self.follow)

    def follow(self, window: Window, owned: Read[OwnedRows], buffer: Read[Buffer]) -> None:
        """Copy the hot rows of a window that has just been updated; take the snapshots that are due."""
        config = self.config
        if not config.warmup <= window.step < config.classify_at:
            return
        started = time.thread_time()
        for group, table, whole in zip(self._groups, owned.tables, buffer, strict=True):
            keys, rows = table.keys.cpu(), whole[:, : group.now.shape[1]]
            admitted = (table.handles >= 0).cpu()
            if not bool(admitted.all()):
                keys, rows = keys[admitted], rows[admitted.to(rows.device)]
            if len(group.keys):
                at = torch.searchsorted(group.keys, keys).clamp(max=len(group.keys) - 1)
                here = (group.keys[at] == keys).nonzero().squeeze(1)
                group.now[at[here]] = rows[here.to(rows.device)].cpu()
                group.trained[at[here]] = True
        due = (window.step + 1 - config.warmup) // config.every
        if due > self._taken:
            self._take()
            self._taken = due
        self.seconds += time.thread_time() - started

    def _take(self) -> None:
        """Take a snapshot: compare it with the last one, and replace that one."""
        for group in self._groups:
            if self._taken:
                moved = (group.now - group.before).square()
                # `ops.linear` adds up a row the same way among any other rows, as on other world sizes.
                change = ops.linear(moved, moved.new_ones(1, moved.shape[1])).squeeze(1).sqrt()
                seen = group.known & group.trained
                group.changes.append(torch.where(seen, change, math.inf))
            group.known |= group.trained
            group.trained.zero_()
            group.before.copy_(group.now)

    def history(self) -> list[torch.Tensor]:
        """Changes (H,) float32 of all ranks' hot rows at each snapshot but the first; collective."""
        count = {len(group.changes) for group in self._groups}.pop()
        if count != self.config.snapshots - 1:
            raise RuntimeError(
                f"{self._taken} of {self.config.snapshots} snapshots were taken: train up to step "
                f"{self.config.classify_at} first"
            )
        mine = [group.places for group in self._groups] if self.communicators.saves else []
        places = torch.cat([*mine, torch.empty(0, dtype=torch.int64, device="cpu")])
        every = torch.cat(self.communicators.control.all_gather(places))
        history = []
        for number in range(count):
            part = [group.changes[number] for group in self._groups] if self.communicators.saves else []
            changes = torch.full((len(self.hot),), math.inf, dtype=torch.float32, device="cpu")
            part.append(torch.empty(0, dtype=torch.float32, device="cpu"))
            values = self.communicators.control.all_gather(torch.cat(part))
            changes[every] = torch.cat(values)
            history.append(changes)
        return history

    def judge(self) -> Judgement:
        """The last change of every hot row; collective, and the same on every rank."""
        return Judgement(self.hot, self.history()[-1])

    def classify(
        self, judgement: Judgement, loader: ClickLoader, drop: float | None = None
    ) -> Classification:
        """Classify the samples of `loader` for further training; `drop` replaces the setting.

        Adds to ``counts``: rows judged, hot inputs, and dropped inputs.
        """
        config = self.config
        found = classify(
            judgement,
            loader.categories(),
            drop=config.drop if drop is None else drop,
            threshold=config.threshold,
            alpha=self.alpha,
            sample=config.sample,
            confidence=config.confidence,
            seed=config.seed,
        )
        self.counts.update(judged=judgement.judged, hot_inputs=found.hot_inputs, dropped=found.dropped)
        return found

    def as_json(self) -> dict[str, Any]:
        """Hot rows and bytes, as a report shows them."""
        accesses: Sequence[torch.Tensor] = self.hot.accesses
        return {
            "hot_rows": len(self.hot),
            "hot_rows_left_out": self.hot.left_out,
            "accesses_of_hot_rows": int(sum(int(part.sum()) for part in accesses)),
        }
