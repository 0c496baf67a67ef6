"""Whose rows a module sees: the samples that a trainer computes, how they lie, and the seed of dropout.

A module of torch gets a tensor and nothing else. Its exact gradient is a sum of one term for each sample, and
its dropout a function of (seed, sample, position), so it has to know which rows are whose. The trainer sets
`samples` around each call of the model, by thread, and modules ask it::

    jagged   (L, ...)      token t belongs to the sample b with seq_offsets[b] <= t < seq_offsets[b + 1]
    padded   (B, T, ...)   row b is sample b, position is the second dimension; T is the same in every batch

A batch with ``offsets`` starts jagged, any other one padded; `padded` and `jagged` change it for a block.
Explicit seq_offsets of a call come before both.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

import torch

from .. import ops
from ..kernels import gradients
from ..kernels.dispatch import is_compiling
from ..kernels.philox.device_seed import Seed

_of_thread = threading.local()
Hook = TypeVar("Hook", bound=Callable[..., None])
Forward = TypeVar("Forward", bound=Callable[..., torch.Tensor])
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
STREAM = -7  # of the seed; layers of `tritonrec.nn` models count their streams from 0


class Samples:
    """The samples of one call of a model.

    Args:
        model: whose modules draw; each has the number of its place in ``model.modules()``.
        sample_ids: (B,) int64. seq_offsets: (B + 1,) of the tokens, or None: rows are padded.
        seed: of the step. num_tokens: L, by which jagged rows are checked.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sample_ids: torch.Tensor,
        seq_offsets: torch.Tensor | None,
        seed: Seed,
        num_tokens: int | None = None,
    ):
        self.sample_ids, self.seq_offsets, self.num_tokens = sample_ids, seq_offsets, num_tokens
        self.backward = False
        self._model, self._seed = model, seed
        self._numbers: dict[int, tuple[int, str]] | None = None
        self._calls: Counter[int] = Counter()

    def name_of(self, module: torch.nn.Module) -> str:
        """A module's name in the model, with its type."""
        name = self._find().get(id(module), (0, ""))[1]
        return f"{name} ({type(module).__name__})" if name else type(module).__name__

    def draw_seed(self, module: torch.nn.Module | None) -> Seed:
        """The seed of this call of a module: of the step, its number, and its calls before; None: a function.

        Raises RuntimeError where a backward pass computes a part of the model again (checkpointing) and the
        module was called more than once, so that nobody knows which call this is.
        """
        number = -1
        if module is not None:
            found = self._find().get(id(module))
            if found is None:
                raise RuntimeError(
                    f"{type(module).__name__} is no part of the model, and draws need its number: make it "
                    "an attribute of the model"
                )
            number = found[0]
        call = self._calls[number]
        if self.backward:
            if call > 1:
                what = "scaled_dot_product_attention" if module is None else self.name_of(module)
                raise RuntimeError(
                    f"{what} draws {call} times in a forward and again in backward (checkpointing), which "
                    "does not know which draw to repeat: give each call a module of its own"
                )
            call = 0
        else:
            self._calls[number] += 1
        return ops.derive_seed(ops.derive_seed(self._seed, STREAM, number), 0, call)

    def row_offsets(self, leading: tuple[int, ...], module: torch.nn.Module) -> torch.Tensor:
        """Offsets (B + 1,) of the samples among the rows of a tensor (\\*leading, D), flattened to (rows, D).

        Raises ValueError for a tensor that does not lie as the batch does.
        """
        self.check(leading, module)
        return self._offsets() * math.prod(leading[1:])

    def check(self, leading: tuple[int, ...], module: torch.nn.Module) -> None:
        """Refuse leading dimensions that are not those of the batch."""
        tokens, samples = self.num_tokens, len(self.sample_ids)
        again = " inside of what is checkpointed, which backward computes again" if self.backward else ""
        if self.seq_offsets is None:
            if leading[:1] != (samples,):
                raise ValueError(
                    f"{self.name_of(module)} got rows {(*leading,)} of {samples} samples: the first "
                    "dimension of padded rows is the samples; for jagged rows give seq_offsets, or enter "
                    f"nn.jagged(seq_offsets){again}"
                )
        elif len(leading) == 0 or (tokens is not None and leading[0] != tokens):
            raise ValueError(
                f"{self.name_of(module)} got rows {(*leading,)} of a batch with {tokens} tokens in {samples} "
                f"samples: give seq_offsets, or enter nn.padded() where rows are (B, T, D){again}"
            )

    def places(self, leading: tuple[int, ...], module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids and positions (n,) of the rows of a tensor (\\*leading, D): tokens, or (B, T)."""
        self.check(leading, module)
        if self.seq_offsets is not None:
            lengths = self.seq_offsets.diff()
            owners = torch.repeat_interleave(self.sample_ids, lengths, output_size=leading[0])
            starts = torch.repeat_interleave(self.seq_offsets[:-1], lengths, output_size=leading[0])
            return owners, torch.arange(leading[0], device=owners.device) - starts
        most = leading[1] if len(leading) > 1 else 1
        positions = torch.arange(most, device=self.sample_ids.device).repeat(len(self.sample_ids))
        return self.sample_ids.repeat_interleave(most), positions

    def _offsets(self) -> torch.Tensor:
        if self.seq_offsets is not None:
            return self.seq_offsets
        return torch.arange(len(self.sample_ids) + 1, device=self.sample_ids.device)

    def _find(self) -> dict[int, tuple[int, str]]:
        if self._numbers is None:
            named = enumerate(self._model.named_modules())
            self._numbers = {id(module): (number, name) for number, (name, module) in named}
        return self._numbers


def current() -> Samples | None:
    """The samples of the call of a model on this thread; None outside of a trainer."""
    return getattr(_of_thread, "samples", None)


@contextmanager
def samples(
    model: torch.nn.Module,
    sample_ids: torch.Tensor,
    seq_offsets: torch.Tensor | None,
    seed: Seed,
    num_tokens: int | None = None,
) -> Iterator[Samples]:
    """Inside, on this thread, modules of `model` compute these samples; a trainer does this for every call.

    Args:
        sample_ids: (B,) int64. seq_offsets: (B + 1,), or None: rows are padded, (B, T, D).
        seed: of dropout. num_tokens: L, by which jagged rows are checked.
    """
    before, now = current(), Samples(model, sample_ids, seq_offsets, seed, num_tokens)
    _of_thread.samples = now
    try:
        yield now
    finally:
        _of_thread.samples = before


@contextmanager
def padded() -> Iterator[None]:
    """Inside, the first dimension of rows is the samples, (B, T, D); nothing outside of a trainer."""
    with _lying(None, None):
        yield


@contextmanager
def jagged(seq_offsets: torch.Tensor, num_tokens: int | None = None) -> Iterator[None]:
    """Inside, rows are (L, D), and `seq_offsets` (B + 1,) tell whose; nothing outside of a trainer."""
    with _lying(seq_offsets, num_tokens):
        yield


@contextmanager
def _lying(seq_offsets: torch.Tensor | None, num_tokens: int | None) -> Iterator[None]:
    now = current()
    if now is None:
        yield
        return
    before = now.seq_offsets, now.num_tokens
    now.seq_offsets, now.num_tokens = seq_offsets, num_tokens
    try:
        yield
    finally:
        now.seq_offsets, now.num_tokens = before


def record(**outputs: torch.Tensor) -> None:
    """In a model's `forward`: give `StepResult.outputs` tensors (n, ...) by name, such as logits and labels.

    Their rows are in the order of the samples, any number for each. Outside of a trainer, and in a compiled
    model, nothing is recorded. Raises TypeError for anything else.
    """
    if is_compiling():
        return
    recorded = getattr(_of_thread, "recorded", None)
    if recorded is None:
        return
    for name, values in outputs.items():
        if not isinstance(values, torch.Tensor) or values.dim() < 1:
            raise TypeError(f"nn.record takes tensors with rows of the samples; {name} is {values!r:.60}")
        recorded[name] = values.detach()


@contextmanager
def recording() -> Iterator[dict[str, torch.Tensor]]:
    """Inside, on this thread, the dictionary gets what a model's `forward` gives to `record`."""
    before = getattr(_of_thread, "recorded", None)
    _of_thread.recorded = {}
    try:
        yield _of_thread.recorded
    finally:
        _of_thread.recorded = before


def only_refuses(hook: Hook) -> Hook:
    """A hook of modules that changes nothing: a trainer's guard, which refuses calls of other threads."""
    hook.only_refuses = True  # type: ignore[attr-defined]
    return hook


def hooks_of(modules: Iterable[torch.nn.Module]) -> list[Sized]:
    """The hooks around calls of modules by kind, to count them; empty where torch keeps them elsewhere."""
    return [getattr(module, name, ()) for module in modules for name in HOOKS]


def has_global_hooks() -> bool:
    """Whether all modules run hooks. torch does not list them in public; kept elsewhere, there are some."""
    anywhere = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return anywhere is None or anywhere()


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs hooks beside its `forward`, of its own or of all modules.

    A trainer's guards are none. torch lists no hooks in public; kept elsewhere, there are some.
    """
    if has_global_hooks():
        return True
    for name in HOOKS:
        hooks = getattr(module, name, None)
        if hooks is None or not all(getattr(hook, "only_refuses", False) for hook in hooks.values()):
            return True
    return False


def takes_indexed_rows(forward: Forward, on_the_cpu: bool = False) -> Forward:
    """A model's `forward` that takes a feature's rows as `ops.IndexedRows`, too, on an accelerator.

    Args:
        on_the_cpu: it takes them there as well, and reads those of a feature by one op, which adds gradients
            in the order of the occurrences: float32 sums depend on it.
    """
    forward.takes_indexed_rows = ("triton", "cpu")[: 1 + on_the_cpu]  # type: ignore[attr-defined]
    return forward


def reads_indexed_rows(model: torch.nn.Module, impls: Iterable[str]) -> bool:
    """Whether a call of the model takes `ops.IndexedRows` where its rows' ops are computed by `impls`, and
    nobody else sees its rows.
    """
    where = getattr(type(model).forward, "takes_indexed_rows", ())
    return {*impls} <= {*where} and "forward" not in vars(model) and not has_hooks(model)


def sums_exactly(parameter: torch.Tensor) -> bool:
    """Whether an exact accumulator takes the gradient of a parameter on this thread."""
    accumulator = gradients.current()
    return accumulator is not None and accumulator.holds(parameter)


def row_offsets(
    leading: tuple[int, ...], weight: torch.Tensor, module: torch.nn.Module, device: torch.device
) -> torch.Tensor | None:
    """Offsets of the samples among flattened rows for an exact sum of `weight`; None where none is needed.

    Rows (B, D), one a sample, are summed row by row. Outside of a trainer, rows of (B, T, D) belong to the
    sample of the first dimension.
    """
    if not sums_exactly(weight):
        return None
    now = current()
    if now is not None:
        now.check(leading, module)
        if len(leading) > 1 or now.seq_offsets is not None:
            return now.row_offsets(leading, module)
    if len(leading) < 2:
        return None
    return torch.arange(leading[0] + 1, device=device) * math.prod(leading[1:])
