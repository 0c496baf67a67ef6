"""What in somebody's model breaks the promise: the first module whose bits depend on the batch, and why.

The model computes a batch, and each of its samples alone. Every module's inputs and outputs are compared in
the order of execution. A module whose inputs agree and whose output does not is to blame; where an input is
the first thing that differs, the code that made it is, that of the module around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from .. import nn
from ..data import Batch
from ..embedding import FeatureConfig, HashTableCollection
from ..kernels.philox.device_seed import Seed
from .model_call import CallerSettings, Represented, check_losses, samples_of, sees_window
from .precision import DTYPES, Precision

RowsOf = Callable[[Batch], Mapping[str, torch.Tensor]]
"""The rows by feature that a model gets with a batch, as leaves; equal for equal ids."""
MOST_ALONE = 24
"""Samples of a batch that are computed alone, and pieces of a larger one."""
LAST_BITS: dict[Precision, float] = {"float32": 1e-3, "fp16": 0.01, "bf16": 0.05}
"""By precision the largest difference, relative to the largest value, that rounding is taken to explain."""

BATCH_NORM = "batch norm, which mixes the samples of a batch; take LayerNorm"


@dataclass(frozen=True)
class Diagnosis:
    """`error`: what the model raised, and where. `module`: to blame for bits that change; `reason`: why."""

    error: str | None = None
    module: str | None = None
    reason: str | None = None


class NotBatchInvariantError(ValueError):
    """Consistency "batch" cannot train a model: samples see each other, or calls, or a generator.

    Attributes:
        module: the name of the module to blame, None where none was found. reason: why.
    """

    def __init__(self, what: str, found: Diagnosis):
        self.module, self.reason = found.module, found.reason
        blamed = f"; module {found.module}: {found.reason}" if found.module else ""
        super().__init__(
            f"consistency='batch' cannot hold with this model, {what}{blamed}. Let the loss of a sample "
            "depend on that sample alone, give a loss over the whole batch in a window_loss "
            "(docs/in_batch.md), or take consistency='window', whose bits depend on the cut of the batch; "
            "trust_model=True trains without this check"
        )


class _ModelError(Exception):
    """An error of the model, with the module that was running."""

    def __init__(self, where: str, error: Exception):
        text = str(error).partition("\n")[0]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        super().__init__(f"in {where}: {kind}{text}")
        self.where = where


@dataclass
class _Event:
    """A module that begins, with its inputs, or ends, with its outputs; `around` called it."""

    begins: bool
    name: str
    module: torch.nn.Module
    tensors: list[torch.Tensor]
    around: tuple[str, torch.nn.Module] | None


@dataclass
class _Recorder:
    """Hooks on every module of a model."""

    model: torch.nn.Module
    events: list[_Event] = field(default_factory=list)
    running: list[tuple[str, torch.nn.Module]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._begin(name), with_kwargs=True),
                module.register_forward_hook(self._end(name)),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str) -> Any:
        def hook(module, args, kwargs) -> None:
            around = self.running[-1] if self.running else None
            tensors = _floats((args, kwargs)) if around else []  # the model's own are the batch
            self.events.append(_Event(True, name, module, tensors, around))
            self.running.append((name, module))

        return hook

    def _end(self, name: str) -> Any:
        def hook(module, args, output) -> None:
            self.running.pop()
            around = self.running[-1] if self.running else None
            self.events.append(_Event(False, name, module, _floats(output), around))

        return hook

    @property
    def where(self) -> str:
        """The innermost module that is running."""
        return _called(*(self.running[-1] if self.running else ("", self.model)))


def _called(name: str, module: torch.nn.Module) -> str:
    kind = type(module).__name__
    return f"{name} ({kind})" if name else kind


def _floats(value: Any) -> list[torch.Tensor]:
    """Copies of the float tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()] if value.is_floating_point() and value.dim() else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _floats(part)]


def diagnose(
    model: torch.nn.Module,
    batch: Batch,
    features: Sequence[FeatureConfig],
    seed: int = 0,
    cut: bool = True,
    precision: Precision = "float32",
) -> Diagnosis:
    """Compute `batch` twice, then its samples alone, forward and backward, and judge.

    Args:
        features: rows are initial ones of tables for these.
        cut: whether the cut of the batch counts (consistency "batch"); else only errors and draws do.
        precision: of the model's arithmetic.
    """
    tables = HashTableCollection([replace(feature, scale=0.5) for feature in features], seed=seed)

    def rows_of(batch: Batch) -> dict[str, torch.Tensor]:
        rows = tables.peek(batch.lookups())
        return {name: each.detach().requires_grad_() for name, each in rows.items()}

    settings = CallerSettings.of_precision(precision, torch.device("cpu"))
    return diagnose_with(model, batch, rows_of, seed, settings, cut)


def diagnose_with(
    model: torch.nn.Module,
    batch: Batch,
    rows_of: RowsOf,
    seed: Seed,
    settings: CallerSettings,
    cut: bool = True,
) -> Diagnosis:
    """`diagnose` with rows of the caller's."""
    with settings.applied():
        return _diagnosed(model, batch, rows_of, seed, cut, settings)


def _diagnosed(
    model: torch.nn.Module,
    batch: Batch,
    rows_of: RowsOf,
    seed: Seed,
    cut: bool,
    settings: CallerSettings,
) -> Diagnosis:
    try:
        with torch.random.fork_rng(devices=[]):
            # The same batch under two seeds of torch's generator: what differs has drawn from it.
            once, again = (_record(model, batch, rows_of, seed, draws) for draws in (1, 2))
            drawn = _first_change([once], [again])
            if drawn is not None:
                return Diagnosis(None, drawn.name, _reason_of_draws(drawn))
            if not cut:
                return Diagnosis()
            # A few samples alone; then the whole batch in as many pieces, for kernels that take another
            # way from some size on.
            samples = torch.arange(batch.num_samples, device="cpu")
            tries = [(samples[:MOST_ALONE], 1)]
            if batch.num_samples > MOST_ALONE:
                tries.append((samples, -(-batch.num_samples // MOST_ALONE)))
            for chosen, size in tries:
                found = _of_cut(
                    model, batch.select(chosen), [batch.select(each) for each in chosen.split(size)], rows_of,
                    seed, settings,
                )  # fmt: skip
                if found.module is not None:
                    break
            return found
    except _ModelError as error:
        return Diagnosis(str(error))
    except (TypeError, ValueError) as error:  # of `check_losses`
        return Diagnosis(str(error))


def _of_cut(
    model: torch.nn.Module,
    batch: Batch,
    parts: list[Batch],
    rows_of: RowsOf,
    seed: Seed,
    settings: CallerSettings,
) -> Diagnosis:
    """What differs between a batch and its parts."""
    whole = _record(model, batch, rows_of, seed, 1)
    apart: list[list[_Event]] = []
    for part in parts:
        try:
            apart.append(_record(model, part, rows_of, seed, 1))
        except _ModelError as error:
            name = error.where.partition(" ")[0]
            few = "one sample alone" if part.num_samples == 1 else f"{part.num_samples} of its samples"
            why = f"it fails for {few}: {error}"
            if "BatchNorm" in error.where:
                why = f"{BATCH_NORM} ({error})"
            return Diagnosis(None, name, why)
    found = _first_change([whole], apart)
    if found is not None:
        return Diagnosis(None, found.name, _reason(found, _last_bits(settings)))
    return Diagnosis(None, *_judge_gradients(model, batch, parts, rows_of, seed, settings))


def _last_bits(settings: CallerSettings) -> float:
    """The entry of `LAST_BITS` for autocast's dtype."""
    found = [LAST_BITS[name] for name, dtype in DTYPES.items() if dtype in dict(settings.autocast).values()]
    return max([LAST_BITS["float32"], *found])


def _record(model: torch.nn.Module, batch: Batch, rows_of: RowsOf, seed: Seed, draws: int) -> list[_Event]:
    torch.manual_seed(draws)
    recorder, rows = _Recorder(model), rows_of(batch)
    try:
        with recorder.recording(), samples_of(model, batch, seed):
            losses = model(batch, rows, seed)
    except Exception as error:
        raise _ModelError(recorder.where, error) from error
    if sees_window(model):
        Represented.of(losses, batch)
    else:
        check_losses(losses, batch)
    return recorder.events


@dataclass
class _Change:
    """The first event whose tensors changed, the module to blame, and how much."""

    name: str
    module: torch.nn.Module
    code_before: str  # the module before which own code made the difference; "" where the module did
    size: float


def _first_change(together: list[list[_Event]], alone: list[list[_Event]]) -> _Change | None:
    whole = together[0]
    for place, event in enumerate(whole):
        others = [events[place] if place < len(events) else None for events in alone]
        if any(other is None or (other.name, other.begins) != (event.name, event.begins) for other in others):
            return None  # another path through the model: nothing to compare with
        parts = zip_longest(*(other.tensors for other in others if other is not None))
        for tensor, pieces in zip(event.tensors, parts, strict=False):
            size = _difference(tensor, [piece for piece in pieces if piece is not None])
            if size is not None:
                name, module, code = event.name, event.module, ""
                # Inputs changed, and no output before them did: the code between two calls of `around` made
                # the difference.
                if event.begins and event.around is not None:
                    name, module = event.around
                    code = _called(event.name, event.module)
                return _Change(name or type(module).__name__, module, code, size)
    return None


def _difference(whole: torch.Tensor, pieces: list[torch.Tensor]) -> float | None:
    """How far the rows of `pieces` are from those of `whole`, relative to the largest; None: not at all.

    Samples lie along the first or the second dimension, in any order along the first. What lies otherwise is
    passed over, and so is what is the same for all samples.
    """
    if all(piece.shape == whole.shape for piece in pieces):
        # The batch itself, computed twice: equal or not, without a cut.
        if len(pieces) == 1:
            return None if torch.equal(_bits(pieces[0]), _bits(whole)) else _size(pieces[0], whole)
        if whole.shape[0] != len(pieces):
            return None
    # Samples may lie along the first dimension or the second; the pieces say which by their sizes.
    for dim in range(min(whole.dim(), 2)):
        rest = [(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces]
        if any(shape != (*whole.shape[:dim], *whole.shape[dim + 1 :]) for shape in rest):
            continue
        if sum(piece.shape[dim] for piece in pieces) != whole.shape[dim]:
            continue
        joined = torch.cat(pieces, dim)
        if torch.equal(_bits(joined), _bits(whole)):
            return None
        if dim == 0 and _sorted_rows(joined) == _sorted_rows(whole):
            return None
        return _size(joined, whole)
    return None


def _size(one: torch.Tensor, other: torch.Tensor) -> float:
    most = float(other.abs().max())
    return float((one.float() - other.float()).abs().max()) / most if most else 1.0


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().contiguous().view(torch.int32)


def _sorted_rows(values: torch.Tensor) -> list[bytes]:
    return sorted(row.numpy().tobytes() for row in _bits(values))


def _place_of(change: _Change) -> str:
    if not change.code_before:
        return ""
    return f", in the code of {type(change.module).__name__} before it calls {change.code_before}"


def _reason_of_draws(change: _Change) -> str:
    advice = "take tritonrec.nn.Dropout, or draw by the seed that the model gets"
    if isinstance(change.module, torch.nn.modules.dropout._DropoutNd) and not change.code_before:
        return f"it draws from torch's global generator: {advice}"
    return (
        f"a dropout or another draw from a global generator of torch, numpy or Python{_place_of(change)}: "
        f"{advice}"
    )


def _reason(change: _Change, last_bits: float) -> str:
    kind = type(change.module)
    theirs = kind.__module__.startswith("torch.") and not change.code_before
    if isinstance(change.module, torch.nn.modules.batchnorm._NormBase) and theirs:
        return BATCH_NORM
    if change.size > last_bits or change.size != change.size:
        return (
            "it depends on the values of other samples: a mean, a norm or a maximum over the batch, or "
            f"padding to the longest sample{_place_of(change)}"
        )
    if theirs and any(True for _ in change.module.parameters()):
        return (
            "last bits only: a BLAS adds in another order for another number of rows; take "
            f"tritonrec.nn.{kind.__name__}, or tritonrec.nn.convert(model)"
            if hasattr(nn, kind.__name__)
            else "last bits only: a BLAS adds in another order for another number of rows"
        )
    return (
        "last bits only: a matrix product of torch's, a sum over several samples, or sigmoid, silu, softplus "
        f"or pow, which a CPU computes another way at an array's end{_place_of(change)}"
    )


def _judge_gradients(
    model: torch.nn.Module,
    batch: Batch,
    parts: list[Batch],
    rows_of: RowsOf,
    seed: Seed,
    settings: CallerSettings,
) -> tuple[str | None, str | None]:
    """A parameter whose gradient is an ordinary float32 sum, or whose exact sum changes with the cut."""
    of_cut: list[dict[str, torch.Tensor]] = []
    for cut in ([batch], parts):
        # Exact terms go to the accumulator: a gradient that appears at a parameter is an ordinary sum.
        accumulator = nn.GradientAccumulator(model)
        with accumulator.empty_gradients():
            for one in cut:
                torch.manual_seed(1)
                try:
                    with accumulator.active(), samples_of(model, one, seed) as now:
                        losses = model(one, rows_of(one), seed)
                        if sees_window(model):
                            losses = sum(
                                each.flatten(1).sum(1) for each in losses.values() if each.requires_grad
                            )
                        now.backward = True
                        if losses.requires_grad:
                            with settings.backward():
                                losses.sum().backward()
                except Exception as error:
                    raise _ModelError(f"backward of {type(model).__name__}", error) from error
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        return _owner(model, name), _ordinary(model, name)
            of_cut.append(accumulator.take())
    for name in reversed(of_cut[0]):  # the last one in forward is the first one in backward
        if not torch.equal(of_cut[0][name], of_cut[1][name]):
            return _owner(model, name), (
                f"the gradient of parameter {name} changes with the cut, and its output does not: something "
                "behind it sums over samples in backward, such as a broadcast of one row to all samples"
            )
    return None, None


def blame_buffer(model: torch.nn.Module, name: str) -> Diagnosis:
    """A buffer that calls of the model change."""
    owner = model.get_submodule(name.rpartition(".")[0])
    reason = "a buffer is state that one sample leaves to the next; keep none between the calls of a step"
    if isinstance(owner, torch.nn.modules.batchnorm._NormBase):
        reason = BATCH_NORM
    return Diagnosis(None, _owner(model, name), reason)


def blame_gradient(model: torch.nn.Module, name: str) -> Diagnosis:
    """A parameter with an ordinary gradient."""
    return Diagnosis(None, _owner(model, name), _ordinary(model, name))


def _owner(model: torch.nn.Module, parameter: str) -> str:
    return parameter.rpartition(".")[0] or type(model).__name__


def _ordinary(model: torch.nn.Module, parameter: str) -> str:
    owner = model.get_submodule(parameter.rpartition(".")[0])
    kind = type(owner).__name__
    ours = type(owner).__module__.startswith("tritonrec.")
    advice = "take a module of tritonrec.nn, ops.linear or nn.expand"
    if ours:
        advice = f"code outside of it uses it: {advice}"
    elif hasattr(nn, kind):
        advice = f"take tritonrec.nn.{kind}, or tritonrec.nn.convert(model)"
    return (
        f"parameter {parameter} gets an ordinary float32 gradient, whose sum depends on the cut of the "
        f"batch; {advice}"
    )
