"""The reference runs: what every pipelined mode must equal. Plain loops, to be read and believed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Event

import torch

from .. import ops
from ..data import Batch
from ..distributed import Communicator
from ..embedding import DynamicTable, HashTableCollection
from ..kernels.dispatch import default_impl
from ..nn import GradientAccumulator
from ..nn.context import recording
from ..trace import SupportsRecording
from .clipping import clamp, dropped, norm_of, scale_of, squares
from .compiled import Compilation
from .dense import DenseModel
from .guard import Guard
from .model_call import CallerSettings, Represented, Shown, modes_kept, sees_window, train_micro_batch
from .places import DenseMeans, DeviceSamples, GradientNorm, Losses, Outputs, Routes, WindowPlaces
from .precision import rounded_rows, unscaled
from .program import Program
from .stages.window import DROPOUT_STREAM
from .streams import to_device, to_host
from .sums import LOSS_BITS, Sums
from .window import Window, WindowConfig
from .window_loss import BatchLoss, gather


class ReferenceTrainer:
    """The reference of ``"batch"`` consistency: one process, the whole global batch at once, no overlap.

    It shares the kernels, the tables and the call of the model with the pipelined modes, and nothing else: no
    executor, no buffers, no exchange.

    Args:
        tables, dense: what is trained.
        config: its seed, fraction bits, accumulation and limits of gradients.
        impl: of every op, as of `Trainer`. device: of the model and of tables that are not in host memory.
        guard: compares calls of the model; by default none does.
    """

    def __init__(
        self,
        tables: HashTableCollection,
        dense: DenseModel,
        config: WindowConfig | None = None,
        impl: ops.Impl = "auto",
        device: torch.device | None = None,
        guard: Guard | None = None,
    ):
        self.model, self.tables, self.dense = dense.model, tables, dense
        self.config = config or WindowConfig()
        self.fraction_bits = self.config.fraction_bits
        self._guard = guard
        self._updates = 0
        self._compilation = Compilation(dense.model, self.fraction_bits)
        self.grad_norm = math.nan  # of the last update, where it is measured
        self.outputs: list[dict[str, torch.Tensor]] = []  # of its batches, what the model recorded
        self.impl = default_impl() if impl == "auto" else impl
        self.device = device or torch.device("cpu")

    def step(self, batches: list[Batch], settings: CallerSettings | None = None) -> list[torch.Tensor]:
        """One update from `batches`, the whole global batch of each; returns their losses (B,).

        `settings` hold while the model computes; by default those of the config's precision.
        """
        accumulator = GradientAccumulator(self.model, self.fraction_bits)
        with accumulator.empty_gradients(), ops.use_impl(self.impl):
            settings = settings or CallerSettings.of_precision(self.config.precision, self.device)
            return self._step(batches, settings, accumulator)

    def _step(
        self, batches: list[Batch], settings: CallerSettings, accumulator: GradientAccumulator
    ) -> list[torch.Tensor]:
        update = batches[0].step // self.config.accumulate
        window, self._updates = Window(self._updates, batches, update, settings), self._updates + 1
        terms = float(max(sum(batch.validate().loss_terms for batch in batches), 1))
        # on the host, which looks at the ids
        # By batch and then by table; `places` below has, for each batch, the row of each occurrence.
        asked = [self.tables.keys(batch.lookups()) for batch in batches]
        batches = [batch.to(self.device) for batch in batches]

        shards = []
        for index, group in enumerate(self.tables.groups):
            every = to_device(torch.cat([keys[index] for keys in asked]), self.device)
            distinct, inverse, _ = ops.unique(every)
            keys = _to_table(distinct, group.table)
            found = group.table.lookup(keys, update)
            values = to_device(group.table.gather(found.handles, keys), self.device)
            # Over all batches of the update: rows are frozen in the window here as there.
            sums = torch.zeros(len(keys), group.table.dim, dtype=torch.int64, device=self.device)
            places = inverse.split([len(keys[index]) for keys in asked])
            shards.append((group, keys, found, values, sums, places))

        losses, precision = [], self.config.exchange.precision
        see = self._guard.see if self._guard else lambda _: None
        self.outputs = []
        exponent = accumulator.scale_exponent = self.dense.scale_exponent(int(terms), self.fraction_bits)
        for number, batch in enumerate(batches):
            rows = []
            for group, _keys, _found, values, _sums, places in shards:
                # Weights alone; the optimizer's state stands behind them
                # in a row. Rounded as an exchange would round them.
                sent = rounded_rows(values[:, : group.table.dim], precision).to(torch.float32)
                rows.append(ops.gather_rows(sent, places[number]).requires_grad_())
            seed = ops.derive_seed(self.config.seed, DROPOUT_STREAM, batch.step)
            by_feature = self.tables.by_feature(rows, batch.lookups())
            looked_up = [values[:, : group.table.dim] for group, _keys, _found, values, *_ in shards]
            own = [places[number] for *_, places in shards]
            guarded = self._guard and self._guard.around(
                window, number, batch, looked_up, own, seed, exponent
            )
            with (
                guarded or nullcontext(),
                modes_kept([*self.model.named_modules()]),
                self._compilation.call(batch, by_feature, seed, settings),
                accumulator.active(),
                recording() as recorded,
            ):
                call = self.model, batch, by_feature, seed, settings, exponent
                if sees_window(self.model):
                    loss = _LossOfBatch(*call[:2], seed, settings, exponent, accumulator)
                    train_micro_batch(*call, gradients_of=loss, see=see)
                    losses.append(loss.losses)
                else:
                    losses.append(train_micro_batch(*call, see=see))
            self.outputs.append(recorded)
            for leaf, (_group, keys, _found, _values, sums, places) in zip(rows, shards, strict=True):
                if leaf.grad is not None:
                    sums += ops.segment_sum(
                        unscaled(leaf.grad, exponent), places[number], len(keys), consistency="batch",
                        fraction_bits=self.fraction_bits, name="embedding gradient",
                    )  # fmt: skip

        means = [
            clamp(ops.from_fixed_point(sums, terms, self.fraction_bits), self.config)
            for *_, sums, _places in shards
        ]
        flat = ops.from_fixed_point(accumulator.take_flat(), terms, self.fraction_bits)
        dense = clamp(flat, self.config)
        rows = [
            to_device((found.handles >= 0).nonzero().squeeze(1), self.device)
            for _group, _keys, found, *_ in shards
        ]
        if self.config.clips:
            if self.config.skips:  # a loss without an exact sum, too, leaves the update out
                every = torch.cat(losses).unsqueeze(1)
                one = torch.zeros(len(every), dtype=torch.int64, device=self.device)
                ops.segment_sum(every, one, 1, consistency="batch", fraction_bits=LOSS_BITS)
            trained = [group.table.requires_grad for group, *_ in shards]
            admitted = [
                mean[chosen] for mean, chosen, wanted in zip(means, rows, trained, strict=True) if wanted
            ]
            norm = norm_of(squares([*admitted, dense], self.device) + dropped(self.device))
            scale, self.grad_norm = scale_of(norm, self.config), float(norm)
            means, dense = [mean * scale for mean in means], dense * scale
        skipped = self.config.skips and math.isinf(self.grad_norm)

        for (group, _keys, found, values, _sums, _places), mean, chosen in zip(
            shards, means, rows, strict=True
        ):
            if not skipped and group.table.requires_grad:
                group.optimizer.update(values, chosen, mean[chosen], update + 1)
            if found.low_precision is not None and not skipped:
                group.table.round_low_precision(values, found.low_precision)
            # Handle -1, a key that is not admitted, writes nothing.
            group.table.update(found.handles, _to_table(values, group.table), found.low_precision)

        if skipped:
            self.dense.skip()
        else:
            self.dense.step(accumulator.views(dense))
        return losses


@dataclass
class _LossOfBatch:
    """From what the samples of a batch show, their losses (B,) and the gradients of that."""

    model: torch.nn.Module
    batch: Batch
    seed: int
    settings: CallerSettings
    scale_exponent: int
    accumulator: GradientAccumulator
    losses: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32, device="cpu"))

    def __call__(self, represented: Represented) -> Shown:
        gathered = gather([represented], Communicator())
        sums = gathered.zeros(exact=True)
        loss = BatchLoss(self.model, gathered, self.seed, self.settings, self.scale_exponent)
        self.losses, own = loss.of(self.batch, gathered.positions, self.accumulator, sums)
        bits = self.accumulator.fraction_bits
        assert bits is not None
        return {
            name: each + ops.from_fixed_point(sums[name], 1.0, bits)[gathered.positions]
            for name, each in own.items()
        }


def _to_table(values: torch.Tensor, table: DynamicTable) -> torch.Tensor:
    """`values` in host memory for a table there, as they are for one on the device."""
    return values if table.padded else to_host(values)


def run_reference(
    reference: ReferenceTrainer, places: WindowPlaces, sums: Sums, stop: Event, recorder: SupportsRecording
) -> None:
    """A window's update by the reference of ``"batch"``, with what its results are made of in its places."""
    window, asked = places.window, stop.is_set()
    with places.errors.active():
        with recorder.span("compute", "compute", batch=window.step):
            losses = reference.step(window.batches, window.settings)
        total = sums.total(torch.cat(losses))
    places[DeviceSamples] = DeviceSamples(window.batches)
    places[Losses] = Losses(dict(enumerate(losses)))
    places[Outputs] = Outputs(dict(enumerate(reference.outputs)))
    places[Routes] = Routes([], [], window.loss_terms, window.loss_terms, asked)
    places[DenseMeans] = DenseMeans(total[:0], sums.divide(total, window.loss_terms), total)
    if reference.config.clips:
        norm = torch.tensor(reference.grad_norm, dtype=torch.float64, device="cpu")
        places[GradientNorm] = GradientNorm(norm, norm)


def run_sequentially(
    program: Program, places: WindowPlaces, span=lambda lane, task, places: nullcontext()
) -> None:
    """The reference of ``"window"`` consistency: the same cut on the same ranks, one stage after another.

    Nothing overlaps and nothing is kept from the window before: each reads the tables after the last one has
    written to them.
    """
    schedule = program.schedule
    for task in program.tasks.of(places.window.number):
        with span(schedule[task.stage].lane, task, places):
            program.actions[task.stage](places, task.micro_batch)
