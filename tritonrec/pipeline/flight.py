"""From the first window in flight to the last: what belongs to the lanes meanwhile, and how it is given back.

Between runs the caller owns the model, tables and optimizer. During a run the trainer does, and any other
access raises RuntimeError: its values would belong to no step, or to one that depends on timing. Three
objects share this, each for as long as it is there::

    PendingWindows   of a trainer    reads the next window's batches; those not finished, oldest first
    Flight           of a trainer    begins with the first of these and ends with the last: takes over the
                                     model, tables and optimizer, checks what the caller does, gives them back
    InFlight         of each table,  what others ask before they touch it: is it in flight, and in which steps
                     model, optimizer

    time ---->  window 4 ------------.        read, begun, finished
                      window 5 ------------.
                            window 6 ------------.
                |<------- one flight ----------->|<- the caller's turn: save, load, evaluate, change rates

They are not one: tables and optimizers outlive a trainer and may have several, so each carries the mark by
which the second is refused. Stages get the `Flight`, but not the queue that the caller's thread still fills.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch

from .. import ops
from ..data import Batch
from ..distributed import Communicator, Communicators
from ..embedding import HashTableCollection
from ..embedding.in_flight import InFlight, as_lane, in_flight_message, is_lane
from ..kernels.dispatch import is_compiling, runs_on
from ..nn import GradientAccumulator
from ..nn.context import only_refuses, reads_indexed_rows
from .caller_state import refusal, structure_of
from .compiled import Compilation
from .dense import DenseModel
from .dense_checks import validate_hooks
from .early import EarlyDense
from .graphs import MicroBatchGraphs
from .guard import Guard
from .guard_of_losses import LossGuard
from .model_call import (
    CallerSettings,
    Represented,
    Shown,
    modes_kept,
    represent,
    train_micro_batch,
    versions,
)
from .window_loss import BatchLoss, WindowLoss

_models: WeakKeyDictionary[torch.nn.Module, InFlight] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Communicator, InFlight] = WeakKeyDictionary()


class Flight:
    """Guards a model, its tables and its optimizer while windows are in flight.

    Args:
        tables, dense: what is trained.
        bits: fraction bits of the dense gradients, None for float32 ones.
        shared: the caller's code runs while windows are in flight.
        steps: says which, for messages.
        graphs: run the model's calls; None: they run one kernel after the other.
        guard: compares calls of the model.
        communicators: whose groups the lanes have; those of two trainers would take each other's messages.
    """

    def __init__(
        self,
        tables: HashTableCollection,
        dense: DenseModel,
        bits: int | None,
        shared: bool,
        steps: Callable[[], str],
        graphs: MicroBatchGraphs | None,
        guard: Guard,
        communicators: Communicators,
    ):
        self._graphs, self.guard, self.loss_guard = graphs, guard, LossGuard(guard)
        self.model, self.dense, self._bits = dense.model, dense, bits
        self._shared, self._steps = shared, steps
        self._tables = [group.table.in_flight for group in tables.groups]
        self._groups = [communicators.control] if communicators.world_size > 1 else []
        self._inside = ExitStack()
        self._modules: list[tuple[str, torch.nn.Module]] = []
        self._modes: list[bool] = []
        self._trained: list[bool] = []
        self._structure: object = None  # where the caller's code runs meanwhile
        self._buffers: list[tuple[str, torch.Tensor]] = []
        self._written: list[int] = []  # how often each was, by the model's calls too
        self._caller: int  # the thread of the trainer's caller
        self.reader = 0  # the thread that reads the caller's batches
        self.under_way = False
        self.early = EarlyDense()
        self.calls = threading.RLock()  # a lane holds it while it calls the model
        self.called = self.returned = 0  # how often lanes have, and how often that ended, in this flight
        self._compilation = Compilation(dense.model, bits)
        self.accumulator: GradientAccumulator  # of the dense gradients in flight

    @property
    def last_update(self) -> int:
        """The last update that tables or optimizer have seen, counted from 0; -1 if there is none."""
        return max(guard.update for guard in [*self._tables, *self.dense.in_flight])

    @property
    def written(self) -> int:
        """How often updates of tables or optimizer have begun."""
        return sum(guard.written for guard in [*self._tables, *self.dense.in_flight])

    def updated(self, update: int) -> None:
        """Tables and optimizer have seen this update."""
        for guard in [*self._tables, *self.dense.in_flight]:
            guard.update = update

    def begin(self) -> None:
        """Take over model, tables and optimizer, unless they are taken over already."""
        if self.under_way:
            return
        self._validate()
        self.called = self.returned = 0
        # Each guard that has begun is ended again where a later one refuses; `end` closes all of them.
        with ExitStack() as inside:
            groups = [_groups.setdefault(each, InFlight("the ranks' groups")) for each in self._groups]
            for guard in [_models.setdefault(self.model, InFlight("the model")), *self._tables, *groups]:
                guard.begin(self._steps)
                inside.callback(guard.end)
            self.dense.begin(self._steps, self._shared)
            inside.callback(self.dense.end)
            self.accumulator = GradientAccumulator(self.model, self._bits)
            inside.enter_context(self.accumulator.empty_gradients())
            if self._graphs is None:  # which call no hooks
                inside.callback(self.early.end)
                self.early.watch(self.model, self.accumulator)
            self._modules = list(self.model.named_modules())
            self._modes = self._training()
            self._trained = self._requires_grad()
            self.guard.begin()
            self._buffers = list(self.model.named_buffers()) if self._shared else []
            self._written = versions(each for _, each in self._buffers)
            if self._shared:
                self._caller = threading.get_ident()
                for _name, module in self._modules:
                    for handle in (
                        module.register_forward_pre_hook(self._refuse_forward),
                        module.register_state_dict_pre_hook(self._refuse_state_dict),
                        module.register_load_state_dict_pre_hook(self._refuse_loading),
                    ):
                        inside.callback(handle.remove)
                self._structure = structure_of(self.model)
            # Nothing is refused any more: the guards stay until `end`.
            self._inside = inside.pop_all()
        self.under_way = True

    def check_end(self) -> None:
        """Raise RuntimeError where parameters or buffers were changed after their last use in a flight."""
        if self._shared:
            self.dense.check_unchanged(at_once=True)
            self._check_buffers()

    def _check_buffers(self) -> None:
        for (name, _), before, now in zip(
            self._buffers, self._written, versions(each for _, each in self._buffers), strict=True
        ):
            if before != now:
                raise refusal(f"buffer {name} was changed", self._steps())

    def end(self) -> None:
        """Give model, tables and optimizer back as they were, but for what was trained."""
        self.under_way = False
        if self._graphs is not None:
            self._graphs.release()
        self._inside.close()

    def train_micro_batch(
        self,
        batch: Batch,
        rows: dict[str, torch.Tensor],
        seed: int,
        settings: CallerSettings,
        scale_exponent: int,
        given: WindowLoss | None = None,
    ) -> torch.Tensor:
        """`train_micro_batch` of the model, or its backward from what is `given`; returns the losses.

        Raises RuntimeError where somebody has changed the model meanwhile.
        """
        with self._model_call(scale_exponent):
            graphs, call = self._graphs, (self.model, self.accumulator, batch, rows)
            if graphs is not None and graphs.takes(*call, settings, self.called):
                return graphs.train(*call, seed, settings)
            with self._compilation.call(batch, rows, seed, settings), self.accumulator.active():
                again = None if given is None else given.again
                own = self.model, batch, rows, seed, settings, scale_exponent
                losses = train_micro_batch(*own, gradients_of=again, see=self.guard.see)
                return losses if given is None else given.losses

    def represent(
        self, batch: Batch, rows: dict[str, torch.Tensor], seed: int, settings: CallerSettings
    ) -> Represented:
        """`model_call.represent` of the model; RuntimeError as `train_micro_batch`."""
        with self._model_call(0), self._compilation.call(batch, rows, seed, settings):
            return represent(self.model, batch, rows, seed, settings)

    def window_loss(
        self, batch: Batch, positions: torch.Tensor, loss: BatchLoss, sums: Shown
    ) -> tuple[torch.Tensor, Shown]:
        """`loss.of` the samples of a micro-batch, inside of `loss_guard.around`."""
        if not batch.num_samples:
            return torch.zeros(0, dtype=torch.float32, device=positions.device), {}
        with self._model_call(loss.scale_exponent):
            return loss.of(batch, positions, self.accumulator, sums, self.loss_guard.see)

    @contextmanager
    def _model_call(self, scale_exponent: int) -> Iterator[None]:
        self.called += 1
        self.check_modes()
        self._check_buffers()
        self.accumulator.scale_exponent = scale_exponent
        self.dense.gather()
        try:
            with modes_kept(self._modules):
                yield
        except RuntimeError:  # autograd's, say, where a parameter changed between forward and backward
            self.dense.check_unchanged(at_once=True)
            self._check_buffers()
            raise
        # The model's own writes are not the caller's.
        self._written = versions(each for _, each in self._buffers)
        self.returned = self.called

    def reads_indexed_rows(self, impls: Collection[str]) -> bool:
        """Whether the model takes rows that are not gathered (`nn.context.takes_indexed_rows`).

        Args:
            impls: that compute ops of the rows.
        """
        if self._graphs is not None or self._compilation.compiles:
            return False
        if "cpu" in impls and self.dense.shards is not None:  # parameters move between calls
            return False
        return reads_indexed_rows(self.model, impls)

    @contextmanager
    def beside(self, random: torch.Tensor) -> Iterator[GradientAccumulator]:
        """Inside, a call of `train_micro_batch` leaves no trace: its gradients go to the accumulator yielded,
        and the model's buffers and torch's random numbers on the host are put back.

        No micro-batch of the step may be under way, and no parameter may be sharded.

        Args:
            random: of ``torch.get_rng_state()``, where the call starts from.
        """
        own, buffers = self.accumulator, [each.clone() for each in self.model.buffers()]
        graphs, self._graphs = self._graphs, None  # a graph adds to the accumulator that it was recorded with
        active, self.guard.active = self.guard.active, False
        self.accumulator = GradientAccumulator(self.model, self._bits)
        try:
            with self.accumulator.empty_gradients(), torch.random.fork_rng(devices=[]):
                torch.set_rng_state(random.cpu().clone())  # a view of a message ends the process
                yield self.accumulator
        finally:
            self.accumulator, self.guard.active, self._graphs = own, active, graphs
            with torch.no_grad():
                for each, before in zip(self.model.buffers(), buffers, strict=True):
                    each.copy_(before)

    @property
    def replicated(self) -> list[str] | None:
        """Names of the parameters that are not sharded; None: none is."""
        return None if self.dense.shards is None else self.dense.shards.replicated

    def views(self, gradients: torch.Tensor) -> dict[str, torch.Tensor]:
        """By name the parts of `DenseMeans.gradients`, shaped like parameters and shards."""
        shards, accumulator = self.dense.shards, self.accumulator
        if shards is None:
            return accumulator.views(gradients)
        size = shards.size
        return {
            **shards.views(gradients[:size]),
            **accumulator.views(gradients[size:], shards.replicated),
        }

    def name_at(self, position: int) -> str:
        """The parameter at a position of `DenseMeans.gradients`, with the index in it."""
        shards, accumulator = self.dense.shards, self.accumulator
        if shards is None:
            return accumulator.name_at(position)
        if position < shards.size:
            return shards.name_at(position)
        return accumulator.name_at(position - shards.size, shards.replicated)

    def check_caller(self) -> None:
        """Raise RuntimeError where the caller has changed which parameters are trained, or how, in flight."""
        if self.under_way:
            self.check_modes()
            self.dense.check_settings()
            if self._structure is not None and structure_of(self.model) != self._structure:
                raise refusal("a module, a buffer or a hook of the model was replaced", self._steps())
            if self.dense.shards is None:  # whose parameters the lanes put in and out of the model
                self._validate()
            if self._requires_grad() != self._trained:
                raise RuntimeError(in_flight_message("requires_grad_() of a parameter", self._steps()))

    def _validate(self) -> None:
        self.dense.validate()
        if self._bits is not None:
            validate_hooks(self.model)

    def check_modes(self) -> None:
        """Raise RuntimeError naming a module switched by train() or eval() since the flight began."""
        now = self._training()
        if now != self._modes:
            at = next(i for i, mode in enumerate(self._modes) if mode != now[i])
            name, module = self._modules[at]
            which = "train" if now[at] else "eval"
            raise RuntimeError(
                in_flight_message(f"{which}() of module {name or type(module).__name__}", self._steps())
            )

    def _training(self) -> list[bool]:
        return [module.training for _, module in self._modules]

    def _requires_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.dense.parameters.values()]

    @only_refuses
    def _refuse_forward(self, module: torch.nn.Module, args: object) -> None:
        # A lane's backward may compute a forward again on a thread of autograd, so that only the threads of
        # the caller's code are told apart from the lanes.
        if is_compiling():
            return
        if threading.get_ident() in (self._caller, self.reader) and not is_lane():
            raise RuntimeError(in_flight_message(f"a call of {type(module).__name__}", self._steps()))

    def _refuse_state_dict(self, module: torch.nn.Module, *args: object) -> None:
        if not is_lane():
            raise RuntimeError(in_flight_message(f"state_dict of {type(module).__name__}", self._steps()))

    def _refuse_loading(self, module: torch.nn.Module, *args: object) -> None:
        if not is_lane():
            raise RuntimeError(
                in_flight_message(f"load_state_dict of {type(module).__name__}", self._steps())
            )

    def __reduce_ex__(self, protocol: object) -> str:
        """Hooks of the model hold this object: copying or pickling the model comes here."""
        raise RuntimeError(in_flight_message(f"a copy of {type(self.model).__name__}", self._steps()))


def validate_groups(communication: Communicator, device: torch.device) -> None:
    """Raise ValueError where the ranks' groups have no backend for tensors on `device`."""
    if not communication.supports(device):
        raise ValueError(
            f"the ranks' groups cannot exchange tensors on {device}: make Communicators with a "
            f"backend that can, such as 'cpu:gloo,cuda:nccl'"
        )


def validate_model_place(model: torch.nn.Module, device: torch.device) -> None:
    """Raise ValueError naming a parameter that is elsewhere than the trainer works."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            raise ValueError(
                f"parameter {name} is on {parameter.device}, and the trainer works on {device}: move the "
                "model there before its optimizer is made, or pass its device"
            )


def validate_places(tables: HashTableCollection, device: torch.device) -> None:
    """Raise ValueError naming a table on another device, unless it is in host memory.

    Warns of one that is there because nobody said where.
    """
    for group in tables.groups:
        table = group.table
        if device.type != "cpu" and not table.padded and table.placement.storage == "auto":
            warnings.warn(
                f"{group.layout} has {table.placement}, while the trainer works on {device}: "
                f"HashTableCollection(placement=Placement(device={str(device)!r})) keeps its keys there, and "
                'Placement("host") says that they stay',
                stacklevel=3,
            )
        if table.padded and table.device != device:
            raise ValueError(
                f"{group.layout} is on {table.device}, and the trainer works on {device}: make them with "
                f"Placement({table.placement.storage!r}, device={str(device)!r}), or in host memory"
            )


class lane_work(as_lane):
    """A lane's work: it may use what is in flight, and its ops run on `impl`."""

    def __init__(self, impl: ops.Impl) -> None:
        self._impl = runs_on(impl)

    def __enter__(self) -> None:
        super().__enter__()
        self._impl.__enter__()

    def __exit__(self, *error: object) -> None:
        self._impl.__exit__()
        super().__exit__()


@contextmanager
def on_the_callers_thread(impl: ops.Impl) -> Iterator[None]:
    """A lane's work on the caller's thread, whose default device is for the model alone."""
    elsewhere = torch.get_default_device().type != "cpu"
    with lane_work(impl), torch.device("cpu") if elsewhere else nullcontext():
        yield
