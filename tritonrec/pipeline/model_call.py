"""One call of the model: forward and backward of a micro-batch, under the settings of the caller's thread.

Lanes are threads, and torch keeps autocast, the grad mode and the default device by thread. So a window
carries what held where it was read, and its micro-batches are computed under that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import ops
from ..data import Batch
from ..kernels.philox.device_seed import Seed
from ..nn.context import Samples, samples
from .precision import DTYPES, Precision


@dataclass(frozen=True)
class CallerSettings:
    """What torch keeps by thread and a model's result depends on.

    Args:
        autocast: (device type, dtype) wherever autocast is on.
        device: where tensors made without a device go; None for the CPU.
    """

    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    device: torch.device | None = None

    @property
    def plain(self) -> bool:
        """Whether they are torch's own."""
        return not self.autocast and self.device is None

    @classmethod
    def of_precision(cls, precision: Precision, device: torch.device) -> CallerSettings:
        """Autocast on `device` to the dtype of `precision`."""
        return cls() if precision == "float32" else cls(((device.type, DTYPES[precision]),))

    @classmethod
    def of_this_thread(cls, device: torch.device, precision: Precision = "float32") -> CallerSettings:
        """The settings here, for a model on `device`; any `precision` but float32 is that of autocast."""
        autocast = {
            kind: torch.get_autocast_dtype(kind)
            # Autocast is by device type; a model on an accelerator may compute some ops on the CPU too.
            for kind in dict.fromkeys(("cpu", device.type))
            if torch.is_autocast_enabled(kind)
        }
        autocast.update(cls.of_precision(precision, device).autocast)
        default = torch.get_default_device()
        return cls(tuple(autocast.items()), None if default.type == "cpu" else default)

    def applied(self) -> AbstractContextManager[object]:
        """Inside, this thread computes as the caller's would.

        autocast keeps no cast weights: they would outlive the update that changes the weights.
        """
        if self.plain:  # as nearly always: a small micro-batch feels each context
            return nullcontext()
        inside = [torch.autocast(kind, dtype, cache_enabled=False) for kind, dtype in self.autocast]
        return _all_of(inside if self.device is None else [*inside, self.device])

    def backward(self) -> AbstractContextManager[object]:
        """Inside of `applied`, as torch advises: gradients have the dtypes that autocast gave the forward."""
        if not self.autocast:
            return nullcontext()
        return _all_of([torch.autocast(kind, enabled=False) for kind, _dtype in self.autocast])


@contextmanager
def _all_of(contexts: list[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def check_gradients_are_on() -> None:
    """Raise RuntimeError under ``torch.no_grad()`` and ``torch.inference_mode()``."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RuntimeError(
            f"training under torch.{mode}() would learn nothing: run the trainer outside of it"
        )


def samples_of(model: torch.nn.Module, batch: Batch, seed: Seed) -> AbstractContextManager[Samples]:
    """Inside, modules of `tritonrec.nn` know whose rows they get; see `tritonrec.nn.context`."""
    tokens = getattr(batch, "num_tokens", None)
    return samples(model, batch.sample_ids, getattr(batch, "offsets", None), seed, tokens)


Shown = dict[str, torch.Tensor]
"""By name what samples show to the others of their global batch, (b, ...)."""
See = Callable[[Any], None]
"""What sees the results of a call before their backward."""
ID = ""
"""The name of the sample id among what is shown."""
DRAWN = 0x73686F77  # one Philox stream for gradients that are drawn


class ByName(Shown):
    """What `window_loss` gets; ValueError for a name that the model does not show."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise ValueError(f"window_loss reads {name!r}, but the model's forward shows {', '.join(self)}")


class Column(NamedTuple):
    """A tensor of `Shown`: its name and type, the shape of a row, and whether it has a gradient."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool

    @property
    def values(self) -> int:
        """Of a row."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of a row."""
        return self.values * self.dtype.itemsize


@dataclass(frozen=True)
class Represented:
    """What the samples of a micro-batch show, as bytes, so that one message takes columns of any dtypes::

        column 0 | column 1 | ... | sample id, 8 bytes     one row a sample

    Args:
        values: (b, n) uint8. columns: those of the model, and `ID`.
    """

    values: torch.Tensor
    columns: tuple[Column, ...]

    @property
    def words(self) -> str:
        """Of the model's columns."""
        return ", ".join(
            f"{each.name} (b{''.join(f', {size}' for size in each.shape)}) {each.dtype}"
            for each in self.columns[:-1]
        )

    def check_again(self, other: Represented) -> None:
        """Raise ValueError where a second forward of the micro-batch shows something else."""
        if not torch.equal(other.values, self.values):
            raise ValueError(
                "the model's second forward of a micro-batch differs from its first: does it keep something "
                "between calls, or draw from torch's generator (take tritonrec.nn.Dropout)?"
            )

    @classmethod
    def of(cls, shown: Shown, batch: Batch) -> Represented:
        """Raises TypeError or ValueError for anything but tensors with a row for each sample of which one has
        a gradient, and for a gradient of another type than float32.
        """
        expected = "a model with window_loss must return a dict of tensors with a row for each sample"
        if not isinstance(shown, dict):
            raise TypeError(f"{expected}; it returned {type(shown).__name__}")
        columns, parts = [], []
        for name, each in {**shown, ID: batch.sample_ids}.items():
            if not isinstance(each, torch.Tensor) or each.shape[:1] != (batch.num_samples,):
                found = tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
                raise ValueError(f"{expected}; {name} is {found}, of {batch.num_samples} samples")
            if each.requires_grad and each.dtype != torch.float32:
                raise TypeError(f"{expected}; {name} has a gradient and is {each.dtype}: use .float()")
            columns.append(Column(name, each.dtype, tuple(each.shape[1:]), each.requires_grad))
            flat = each.detach().reshape(batch.num_samples, -1).contiguous()
            parts.append(flat.view(torch.uint8))
        if not any(column.trained for column in columns):
            raise ValueError(f"{expected}, one of them with a gradient: does the model detach it?")
        return cls(torch.cat(parts, 1), tuple(columns))


def sees_window(model: torch.nn.Module) -> bool:
    """Whether losses are of the whole global batch: the model has a `window_loss`."""
    return callable(getattr(model, "window_loss", None))


def represent(
    model: torch.nn.Module, batch: Batch, rows: dict[str, Any], seed: Seed, settings: CallerSettings
) -> Represented:
    """What the samples of a micro-batch show, of a model that `sees_window`; its graph is dropped."""
    if not batch.num_samples:
        columns = Column("nothing", torch.float32, (1,), True), Column(ID, torch.int64, (), False)
        return Represented(torch.zeros(0, 12, dtype=torch.uint8, device=batch.sample_ids.device), columns)
    with settings.applied(), samples_of(model, batch, seed):
        return Represented.of(model(batch, rows, seed), batch)


def drawn_gradients(batch: Batch, seed: Seed) -> Callable[[Represented], Shown]:
    """Gradients of what is shown that are a function of the sample, to compare calls."""

    def draw(represented: Represented) -> Shown:
        assert isinstance(seed, int)  # no graph is recorded of such a model
        gradients = {}
        for number, each in enumerate(represented.columns):
            if each.trained:
                drawn = ops.initial_rows(seed, DRAWN + number, batch.sample_ids, each.values, 1.0)
                gradients[each.name] = drawn.view(-1, *each.shape)
        return gradients

    return draw


def train_micro_batch(
    model: torch.nn.Module,
    batch: Batch,
    rows: dict[str, torch.Tensor],
    seed: Seed,
    settings: CallerSettings,
    scale_exponent: int = 0,
    dlosses: torch.Tensor | None = None,
    gradients_of: Callable[[Represented], Shown] | None = None,
    see: See = lambda _: None,
) -> torch.Tensor:
    """Forward, and backward of the losses' sum times ``2**scale_exponent``; returns the losses (B,) float32.

    A batch without samples is not given to the model, which may be unable to take one, and adds nothing.

    Args:
        rows: by feature, as `tritonrec.pipeline.Model` takes them. seed: of dropout; where a graph is
            recorded, one that kernels load.
        dlosses: (B,) float32, gradients of the losses in the place of ``2**scale_exponent``.
        gradients_of: what a model that `sees_window` shows, by name; drawn ones by default. In the place of
            losses `Represented.values` are returned.
        see: gets what the model returns, before backward.

    Raises TypeError or ValueError where the model returns anything but a float32 loss of each sample that a
    backward pass can start from, ValueError where it changes the batch in place.
    """
    if not batch.num_samples:
        dtype = torch.uint8 if sees_window(model) else torch.float32
        return torch.zeros(0, dtype=dtype, device=batch.sample_ids.device)
    tensors = list(batch.tensors())
    before = versions(tensors)
    with settings.applied(), samples_of(model, batch, seed) as now:
        losses = model(batch, rows, seed)
        if sees_window(model):
            own = gradients_of or drawn_gradients(batch, seed)
            losses = _backward_of_shown(losses, batch, now, settings, scale_exponent, own, see)
        else:
            backward_of(losses, batch, now, settings, scale_exponent, dlosses, see)
    if versions(tensors) != before:
        raise ValueError(
            "the model changes its batch in place, which is the caller's, or a copy, by the cut into "
            "micro-batches: let it work on a copy of the tensor (tensor.clone())"
        )
    return losses.detach()


def backward_of(
    losses: torch.Tensor,
    batch: Batch,
    now: Samples,
    settings: CallerSettings,
    scale_exponent: int,
    dlosses: torch.Tensor | None = None,
    see: See = lambda _: None,
) -> None:
    """Backward of what the model returned `now`; errors and arguments as of `train_micro_batch`."""
    check_losses(losses, batch)
    see(losses)
    # What modules record or draw in a forward that is
    # computed again inside backward must not count twice.
    now.backward = True
    if batch.loss_terms:
        # The gradient of the sum of the losses: each sample's
        # is 1, times the power of two of the loss scaler.
        scale = torch.full_like(losses, 2.0**scale_exponent) if dlosses is None else dlosses
        with settings.backward():
            losses.backward(scale)


def _backward_of_shown(
    shown: Shown,
    batch: Batch,
    now: Samples,
    settings: CallerSettings,
    scale_exponent: int,
    gradients_of: Callable[[Represented], Shown],
    see: See,
) -> torch.Tensor:
    represented = Represented.of(shown, batch)
    see(shown)
    gradients = gradients_of(represented)
    now.backward = True
    with settings.backward():
        torch.autograd.backward(
            [shown[name] for name in gradients], [each * 2.0**scale_exponent for each in gradients.values()]
        )
    return represented.values


@contextmanager
def modes_kept(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[None]:
    """Around a call of the model: RuntimeError naming one of its `modules` that it leaves in another mode, or
    a parameter of theirs that it freezes or thaws.
    """
    modes, trained = [module.training for _, module in modules], _trained(modules)
    yield
    for (path, module), mode in zip(modules, modes, strict=True):
        if module.training != mode:
            name = path or type(module).__name__
            raise RuntimeError(_SWITCHED.format(f"module {name}", "eval()" if mode else "train()"))
    if (now := _trained(modules)) != trained:  # in nearly every call all is as it was: no name is made
        names = [f"{path and path + '.'}{name}" for path, module in modules for name in module._parameters]
        for name, old, new in zip(names, trained, now, strict=False):
            if old != new:
                raise RuntimeError(_SWITCHED.format(f"parameter {name}", f"requires_grad_({new})"))


_SWITCHED = (
    "{} was switched by {} during a call of the model, and the next call would find it so: a forward that "
    "switches modules or parameters puts them back before it returns, and others wait until no step is in "
    "flight"
)


def _trained(modules: Sequence[tuple[str, torch.nn.Module]]) -> list[bool]:
    """Of their parameters, one module's after the other's."""
    every = [each for _, module in modules for each in module._parameters.values()]
    return [each is not None and each.requires_grad for each in every]


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was written to; those of inference mode do not count it."""
    return [0 if each.is_inference() else each._version for each in tensors]


def check_losses(losses: object, batch: Batch) -> None:
    """Raise TypeError or ValueError for anything but a float32 loss of each sample, with a gradient."""
    count = batch.num_samples
    expected = f"the model must return one loss per sample, a float32 tensor of shape ({count},)"
    if not isinstance(losses, torch.Tensor):
        raise TypeError(f"{expected}; it returned {type(losses).__name__}")
    if losses.shape != (count,):
        raise ValueError(
            f"{expected}; it returned shape {tuple(losses.shape)}: sum the terms of each sample, and leave "
            "the mean over samples to the trainer"
        )
    if losses.dtype != torch.float32:
        raise TypeError(f"{expected}; it returned {losses.dtype}: convert it with .float()")
    if batch.loss_terms and not losses.requires_grad:
        raise ValueError(
            f"{expected}, with a gradient; it returned one without: does the model detach it, or compute it "
            "under torch.no_grad()?"
        )
