"""Consistency "batch" needs a model whose samples do not see each other; `Guard` refuses others.

Samples are computed twice beside their training: together, and in another order as a sample alone, two
samples where there are many, and the rest. They are those of the rank's batch, which synchronous training
takes at once, or of a micro-batch that was drawn; few are joined by some of earlier windows. Losses, exact
gradients of rows by key and exact dense sums must have the same bits. Nothing of it stays: gradients and
buffers are as before, and nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import ops
from ..data import Batch
from ..embedding import HashTableCollection
from ..kernels import launch
from ..kernels.checksums import checksum, same_bits
from ..kernels.compilation import say_once
from ..kernels.deferred import DeferredErrors
from ..kernels.philox.device_seed import Seed
from ..nn import GradientAccumulator
from ..nn.context import HOOKS
from .attributes import Attributes, Contents, put_back, without_traces
from .by_place import Call, first_by_place
from .diagnosis import Diagnosis, NotBatchInvariantError, blame_buffer, blame_gradient, diagnose_with
from .known_rows import KnownRows
from .looks import DrawError, Ops, path_of
from .model_call import CallerSettings, Shown, modes_kept, sees_window, train_micro_batch, versions
from .precision import unscaled
from .window import Window, WindowConfig

STREAM = 0x67756172  # one Philox stream for draws of the guard
EARLY = 16
"""The window of a run in which a micro-batch is compared too: by then parameters have moved."""
EVERY = 2000
"""In one of so many windows a micro-batch is drawn, and compared. Of a model that keeps something between
its calls so is one in every window from `EARLY` on whose number is a power of two."""
LOOKED_AT = 8
"""In one of so many windows, which the seed draws, the functions of a call are looked at."""
MOST_PATHS = 16
"""Ways through a model that are compared, after which none is looked at."""
MOST_SAMPLES, FEW_SAMPLES = 512, 8
"""That are compared at most: the first time and of a new size; of a micro-batch that was drawn."""
NAME = "embedding gradient"
ALONE = 0, 0
"""The size of a sample whose batch has no other: it shows draws and what calls keep."""


class Guard:
    """Compares calls of a model in training, on the thread that computes.

    Args:
        model, tables: that a trainer trains. config: of its run.
        trusted: nothing is compared; nor is at consistency ``"window"``.

    Attributes:
        active: whether it compares. checks: comparisons so far. sizes: that were compared.
    """

    def __init__(
        self, model: torch.nn.Module, tables: HashTableCollection, config: WindowConfig, trusted: bool
    ):
        self.active = config.consistency == "batch" and not trusted
        if config.consistency == "batch" and trusted:
            say_once("trust_model: nobody checks that samples do not see each other")
        self.checks = 0
        self.model, self._tables, self.config = model, tables, config
        self._path: list[Any] = []
        self._moved: list[int] = []
        self._first: Attributes | None = None  # before any call, where calls change attributes of modules
        self.sizes: set[tuple[int, int]] = set()
        self._company: list[Batch] = []  # of one sample each, of small batches
        self._constant: set[str] = set()  # buffers that calls write, each the same values
        self._buffers: dict[str, torch.Tensor] = {}  # all others
        self._paths: set[frozenset[tuple[str, str]]] = set()  # of calls, by `path_of`
        self._way: frozenset[tuple[str, str]] | None = None  # of the call under way, once `see` knows it
        self._looks, self._looks_next = False, True

    def begin_run(self) -> None:
        """What no module shows may have changed, as an attribute: the next call is looked at."""
        self._looks_next = True

    def see(self, shown: torch.Tensor | Shown) -> None:
        """The losses of a training call, or what its samples show, before their backward."""
        if self._looks:
            self._way = path_of(shown)

    def begin(self) -> None:
        """The model may be another one: if its modules, hooks, switches, parameters or buffers are, sizes
        that were compared are to be compared again.
        """
        if not self.active:
            return
        # Looked at for each result: one walk, of a list that grows, and names only where something is new.
        modules, known = [self.model], {id(self.model)}
        for module in modules:
            inside = [each for each in module._modules.values() if each is not None]
            modules += [each for each in inside if id(each) not in known]
            known.update(map(id, inside))
        path: list[Any] = modules.copy()
        for module in modules:
            path += module.training, *(len(getattr(module, name, ())) for name in HOOKS)
            for each in module._parameters.values():
                path += (each is not None and (id(each), each.requires_grad),)
            path += map(id, module._buffers.values())
        if path != self._path:
            own = self.model.named_buffers()
            self._buffers = {name: each for name, each in own if name not in self._constant}
        moved = versions(self._buffers.values())
        if path != self._path or moved != self._moved:
            self._path, self._moved, self._first = path, moved, None
            self.sizes.clear()

    @contextmanager
    def around(
        self,
        window: Window,
        micro_batch: int,
        batch: Batch,
        embeddings: Sequence[torch.Tensor],
        inverses: Sequence[torch.Tensor],
        seed: Seed,
        scale_exponent: int,
    ) -> Iterator[None]:
        """Around the training of a micro-batch, which is compared before, where that is due.

        Args:
            embeddings: by table (S, dim), rows. inverses: by table (n,), which of them the keys have that the
                batch looks up.
            seed: of dropout. scale_exponent: of the loss.

        Raises `NotBatchInvariantError`, also for a buffer that has changed meanwhile.
        """
        if not self.active:
            yield
            return
        most = self._due(window, micro_batch, batch)
        if most:
            self._compare(window, micro_batch, batch, embeddings, inverses, seed, scale_exponent, most)
        drawn = ops.derive_seed(self.config.seed, STREAM + 1, window.update) % LOOKED_AT == 0
        due = micro_batch == 0 and len(self._paths) < MOST_PATHS
        self._looks = due and (self._looks_next or drawn)
        self._way = None
        with self.unchanged_buffers("call"):
            yield
        self._looks = False
        if self._way is not None:  # there were samples, and no graph was replayed
            self._looks_next = False
            # By a way that no call before has gone, through a loss that a later step adds, say, or because
            # of an attribute: compared at once, still before the update.
            if self._way not in self._paths:
                self._paths.add(self._way)
                if not most:
                    few = FEW_SAMPLES
                    self._compare(window, micro_batch, batch, embeddings, inverses, seed, scale_exponent, few)

    @contextmanager
    def unchanged_buffers(self, what: str) -> Iterator[None]:
        """Inside of `what`, no buffer of the model may change; NotBatchInvariantError."""
        before = versions(self._buffers.values())
        yield
        if before != versions(self._buffers.values()):
            changed = zip(self._buffers, before, versions(self._buffers.values()), strict=True)
            name = next(name for name, old, new in changed if old != new)
            raise NotBatchInvariantError(
                f"whose {what} changed buffer {name}", blame_buffer(self.model, name)
            )

    def _due(self, window: Window, micro_batch: int, batch: Batch) -> int:
        """How many samples are to be compared."""
        if not batch.num_samples:
            return 0
        if _size(batch) not in self.sizes:
            return MOST_SAMPLES
        drawn = ops.derive_seed(self.config.seed, STREAM, window.update)
        number = window.number
        # what calls keep may show late, as a queue does once it is full
        # Powers of two: a model that keeps more and more is looked at again and again, at a falling rate.
        early = number == EARLY or (self._first and number > EARLY and not number & (number - 1))
        if drawn % EVERY and not early:
            return 0
        # One draw for window and micro-batch: the quotient is
        # independent of the remainder that chose the window.
        return FEW_SAMPLES if drawn // EVERY % self.config.window_micro_batches == micro_batch else 0

    def _compare(
        self,
        window: Window,
        micro_batch: int,
        batch: Batch,
        embeddings: Sequence[torch.Tensor],
        inverses: Sequence[torch.Tensor],
        seed: Seed,
        scale_exponent: int,
        most: int,
    ) -> None:
        # `batch` is the micro-batch that is trained, `whole` the rank's batch that it was cut from.
        together, whole = batch, window.batches[micro_batch // self.config.micro_batches]
        # Synchronous training takes the batch at once.
        if whole.num_samples > batch.num_samples and (batch.num_samples == 1 or most > FEW_SAMPLES):
            together = whole.to(batch.sample_ids.device)
        if together.num_samples < FEW_SAMPLES:
            together = self._in_company(together)
        size = _size(batch) if together.num_samples > 1 else ALONE
        if size == ALONE and size in self.sizes:
            return
        generator = torch.Generator().manual_seed(window.update)
        if together.num_samples > most:
            chosen = (
                torch.randperm(together.num_samples, generator=generator, dtype=torch.int64, device="cpu")[
                    :most
                ]
                .sort()
                .values
            )
            together = together.select(chosen)
        rows = []
        own = zip(self._tables.groups, self._tables.keys(batch.lookups()), embeddings, inverses, strict=True)
        for (group, keys, values, inverse), wanted in zip(
            own, self._tables.keys(together.lookups()), strict=True
        ):
            # Samples from outside the micro-batch look up rows that have not come. Any rows do for a
            # comparison, as long as both calls get the same: these take the initial rows of their keys.
            known = KnownRows.of(keys, values, inverse)
            if together is not batch:
                known = known.restricted(wanted, group.table)
            rows.append(known)
        calls = _Calls(self.model, self._tables, self.config, rows, seed, window.settings, scale_exponent)
        self.checks += 1
        deferred = DeferredErrors()  # which drops no error
        try:
            with deferred.active():
                again, first = most == FEW_SAMPLES, self._first
                written, kept = calls.compare(
                    together, batch.num_samples, generator, deferred.check, again, first
                )
                self._constant |= written
                self._first = first or (kept if kept.blamed else None)
        except ArithmeticError:  # a gradient without an exact sum, which training reports by itself
            return
        self.sizes.add(size)
        for name in self._constant & self._buffers.keys():
            del self._buffers[name]
        self._moved = versions(self._buffers.values())

    def _in_company(self, batch: Batch) -> Batch:
        """With samples of earlier windows, `FEW_SAMPLES` in all; the batch's first is kept for later."""
        ids, place = set(batch.sample_ids.tolist()), batch.sample_ids.device
        others = [each for each in self._company if each.sample_ids.item() not in ids]
        if len(self._company) < FEW_SAMPLES:
            self._company.append(batch.select(torch.zeros(1, dtype=torch.int64, device="cpu")))
        others = [replace(each, step=batch.step).to(place) for each in others]
        try:
            return type(batch).concat([batch, *others][: 1 + FEW_SAMPLES - len(ids)])
        except ValueError:  # batches whose columns differ do not join
            return batch


@dataclass
class _Outcome:
    """What training takes from calls of the model.

    Args:
        losses: of all calls. rows: by table, exact sums by key. dense: by parameter, checksums of exact sums.
        buffers: their checksums after each call.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _Calls:
    """Calls of a model beside its training."""

    model: torch.nn.Module
    tables: HashTableCollection
    config: WindowConfig
    rows: list[KnownRows]
    seed: Seed
    settings: CallerSettings
    scale_exponent: int

    def compare(
        self,
        batch: Batch,
        trained: int,
        generator: torch.Generator,
        check: Callable[[], None],
        again: bool,
        first: Attributes | None,
    ) -> tuple[set[str], Attributes]:
        """Names of the buffers that calls write, and each the same values; and attributes, as they were.

        Args:
            trained: samples of the micro-batch. check: raises errors put off.
            again: nothing is looked at op by op, which costs as much as a call.
            first: attributes of the first comparison: the second call begins with these, so that what was
                kept since shows.

        Raises `NotBatchInvariantError`, and what the model raises for the whole batch, ArithmeticError for a
        gradient without an exact sum among it.
        """
        count = batch.num_samples
        order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
        # the shortest alone: what is padded to the longest shows there
        order = order[batch.features.lengths.sum(0).cpu()[order].argsort(stable=True)]
        # One sample alone, two together and the rest: kernels often differ for one row, for few and for many.
        # And as many as training computes together, where there are others.
        sizes = [1, count - 1] if count <= FEW_SAMPLES else [1, 2, count - 3]
        if 2 < trained < sizes[-1]:
            sizes[-1:] = [trained, sizes[-1] - trained]
        elif count > FEW_SAMPLES:  # halves: nearly all samples have what all have, as the largest one
            sizes[-1:] = [sizes[-1] // 2, sizes[-1] - sizes[-1] // 2]
        parts = order.split(sizes)
        with without_traces(self.model) as (buffers, attributes):
            # A batch of its own: what a call sets on it, or writes into it, is not what training gets.
            own_batch = batch.select(torch.arange(count, dtype=torch.int64, device="cpu"))
            moves = {name: versions([each]) for name, each in self.model.named_buffers()}
            parameters = Contents(dict(self.model.named_parameters()))
            try:
                with nullcontext() if again else Ops() as ops_of_whole:
                    whole = self._outcome([own_batch])
                check()
            except DrawError as error:
                self._refuse(f"which draws from torch's global generator ({error})", batch)
            edited = zip(own_batch.tensors(), batch.tensors(), strict=True)
            if not all(same_bits(one, other) for one, other in edited):
                self._refuse("which changes its batch in place: give it a copy", batch)
            if changed := parameters.put_back(dict(self.model.named_parameters())):
                what = f"whose calls change parameter {changed}"
                if not parameters.copied(changed):
                    what += (
                        " (which keeps the call's values: it is too large to be copied, so load them anew)"
                    )
                raise NotBatchInvariantError(what, Diagnosis(None, None, ""))
            own = dict(self.model.named_buffers())
            written = {name for name, old in moves.items() if versions([own[name]]) != old}
            if count > 1:  # a sample without others is called twice on end instead
                put_back(self.model, buffers)
                attributes.put_back()
                if first is not None:
                    first.put_back_changed()
            # The second call is watched only where the first one
            # called such a function: watching costs as much as a call.
            watch = ops_of_whole is not None and ops_of_whole.by_place
            try:
                with Ops() if watch else nullcontext() as ops_of_cut:
                    cut = self._outcome([batch.select(part) for part in parts])
                check()
            except NotBatchInvariantError:
                raise
            except Exception as error:
                self._refuse(
                    f"which raises {type(error).__name__} for some samples of a batch ({error})", batch
                )
            self._judge(batch, order, whole, cut, (first or attributes).blamed)
            if ops_of_whole is not None and ops_of_cut is not None:
                self._judge_places(ops_of_whole.by_place, ops_of_cut.by_place)
            for name in buffers:
                after, *others = (each[name] for each in [*whole.buffers, *cut.buffers])
                if any(int(after) != int(each) for each in others):
                    raise NotBatchInvariantError(
                        f"whose calls change buffer {name}", blame_buffer(self.model, name)
                    )
            return written, attributes

    def _judge_places(self, whole: list[Call], cut: list[Call]) -> None:
        found = first_by_place(whole, cut)
        if found is None:
            return
        names = {module: name for name, module in self.model.named_modules()}
        kind = type(self.model).__name__
        name = found.func.overloadpacket.__name__
        reason = (
            "of some values its last bit depends on where in its array a value stands, and so on the cut: "
            "take tritonrec.nn's Sigmoid, SiLU, GELU (nn.convert) or binary_cross_entropy, or exp and log1p"
        )
        module = kind if found.module is None else names.get(found.module) or kind
        where = "" if found.module is not None else " in its backward pass"
        raise NotBatchInvariantError(f"which calls torch's {name}{where}", Diagnosis(None, module, reason))

    def _judge(
        self, batch: Batch, order: torch.Tensor, whole: _Outcome, cut: _Outcome, otherwise: Diagnosis | None
    ) -> None:
        losses, others = whole.losses[0][order.to(batch.sample_ids.device)], torch.cat(cut.losses)
        # Bytes, so that -0.0 differs from 0.0 and NaN equals itself.
        differ = losses.view(len(losses), -1).view(torch.uint8) != others.view(len(losses), -1).view(
            torch.uint8
        )
        if bool(differ.any()):
            where = differ.any(1).nonzero()[0, 0]
            sample, shown = int(batch.sample_ids[order[int(where)]]), sees_window(self.model)
            what = f"whose loss of sample {sample} is"
            what = f"which shows of sample {sample}" if shown else f"{what} {float(losses[where])!r}"
            value = "other values" if shown else f"{float(others[where])!r}"
            self._refuse(
                f"{what} in a batch of {len(order)} and {value} beside fewer samples", batch, otherwise
            )
        for name, sums in whole.dense.items():
            if int(sums) != int(cut.dense[name]):
                self._refuse(f"whose gradient of {name} depends on the cut of a batch", batch, otherwise)
        for group, one, other in zip(self.tables.groups, whole.rows, cut.rows, strict=True):
            if not torch.equal(one, other):
                what = f"whose gradients of rows of {group.layout} depend on the cut of a batch"
                self._refuse(what, batch, otherwise)

    def _outcome(self, batches: Sequence[Batch]) -> _Outcome:
        """Of calls for these, one after the other."""
        accumulator = GradientAccumulator(self.model, self.config.fraction_bits)
        accumulator.scale_exponent = self.scale_exponent
        found = _Outcome()
        with accumulator.empty_gradients():
            for batch in batches:
                leaves, places, by_feature = self._leaves(batch)
                with modes_kept([*self.model.named_modules()]), accumulator.active():
                    losses = train_micro_batch(
                        self.model, batch, by_feature, self.seed, self.settings, self.scale_exponent
                    )
                for name, parameter in self.model.named_parameters():
                    # With exact sums no parameter gets a gradient of torch's:
                    # one that does has a path around the accumulator.
                    if parameter.grad is not None:
                        parameter.grad = None
                        what = f"which gives parameter {name} an ordinary float32 gradient"
                        self._refuse(what, batch, blame_gradient(self.model, name))
                found.losses.append(losses)
                found.buffers.append({name: checksum(each) for name, each in self.model.named_buffers()})
                sums = []
                for leaf, known, at in zip(leaves, self.rows, places, strict=True):
                    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    terms = unscaled(gradient, self.scale_exponent)
                    # Sums by key, which are alike for any cut; gradients by occurrence are not comparable.
                    bits = self.config.fraction_bits
                    sums.append(launch.segment_sum(terms, at, len(known.keys), "batch", bits, NAME))
                found.rows = [a + b for a, b in zip(found.rows, sums, strict=True)] if found.rows else sums
            found.dense = {name: checksum(each) for name, each in accumulator.sums.items()}
        return found

    def _leaves(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
        """By table the rows (n, dim) of a batch's keys, whose gradients are wanted, and where they are known
        (n,); and rows by feature.
        """
        lookups = batch.lookups()
        places = [
            known.places(keys) for known, keys in zip(self.rows, self.tables.keys(lookups), strict=True)
        ]
        leaves = [known.values[at].requires_grad_() for known, at in zip(self.rows, places, strict=True)]
        return leaves, places, self.tables.by_feature(leaves, lookups)

    def _refuse(self, what: str, batch: Batch, otherwise: Diagnosis | None = None) -> None:
        """Raise `NotBatchInvariantError` with the module to blame; `otherwise` where none is found."""

        def rows_of(part: Batch) -> dict[str, torch.Tensor]:
            return {name: each.detach().requires_grad_() for name, each in self._leaves(part)[2].items()}

        found = diagnose_with(self.model, batch, rows_of, self.seed, self.settings)
        if otherwise is not None and (batch.num_samples == 1 or found.module is None):
            found = otherwise
        raise NotBatchInvariantError(what, found)


def _size(batch: Batch) -> tuple[int, int]:
    """The size class of a batch, by powers of two of its samples and powers of four of its tokens."""
    return batch.num_samples.bit_length(), getattr(batch, "num_tokens", 0).bit_length() // 2
