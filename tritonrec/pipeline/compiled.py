"""`torch.compile` of the dense model: it is used only after its output matches eager bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock, RLock

import torch

from ..data import Batch
from ..kernels.compilation import note_compilation
from ..nn import GradientAccumulator
from ..nn.context import recording
from .model_call import CallerSettings, train_micro_batch

ONE_CALLS = RLock()
"""One thread calls a compiled model at a time: `torch.compiler.set_stance` is the process's. Two comparisons
at once, as of ranks that are threads, would compare calls of one kind, and leave all uncompiled for ever."""
SIZES = 2
"""Sizes that are compared, of samples and of tokens: torch compiles for the first, and at the second for any
but 1."""


class Compilation:
    """Watches over a model of which something is compiled by ``torch.compile`` or ``Module.compile``.

    Args:
        model: as the trainer calls it; one of which nothing is compiled is left alone.
        bits: fraction bits of the dense gradients; None: bits may differ.
    """

    def __init__(self, model: torch.nn.Module, bits: int | None):
        self._model, self._bits, self.compiles = model, bits, is_compiled(model)
        self._seen: tuple[set[int], set[int]] = set(), set()  # numbers of samples and of tokens

    @contextmanager
    def call(
        self, batch: Batch, rows: dict[str, torch.Tensor], seed: int, settings: CallerSettings
    ) -> Iterator[None]:
        """Around the model's call for a micro-batch.

        A call in which torch has compiled anything, the first one or a later one whose guards failed, is
        compared afterwards in all bits of losses and gradients with a call that is not compiled
        (``torch.compiler.set_stance``); so is the first call for each of the first `SIZES` numbers of samples
        and of tokens, and for 1. Steps with a comparison count as those that compile kernels.

        Raises ValueError naming what differs, RuntimeError where torch cannot compile.
        """
        if not self.compiles:
            yield
            return
        try:
            with ONE_CALLS:
                # Counted for the process: a compilation of something
                # else at the same time costs a comparison, and no bit.
                before = _COMPILATIONS.count()
                yield
                if batch.num_samples and (self._is_new(batch) | (_COMPILATIONS.count() != before)):
                    note_compilation()
                    if self._bits is not None:
                        self._compare(batch, rows, seed, settings)
        except Exception as error:
            if type(error).__module__ not in ("torch._dynamo.exc", "torch._inductor.exc"):
                raise
            cause = getattr(error, "inner_exception", error)
            what = next((line for line in str(cause).splitlines() if line), type(cause).__name__)
            raise RuntimeError(
                f"torch.compile could not compile the model ({what}): on a CPU inductor needs a C++ "
                "compiler with OpenMP, as g++ is; install one, or take backend='aot_eager'"
            ) from error

    def _is_new(self, batch: Batch) -> bool:
        """Whether torch may compile for the batch's size."""
        new = False
        for seen, size in zip(self._seen, (batch.num_samples, getattr(batch, "num_tokens", 1)), strict=True):
            # torch compiles 1 as a constant of its own; of other sizes the second one makes the code for any.
            if size not in seen and (size == 1 or len(seen - {1}) < SIZES):
                seen.add(size)
                new = True
        return new

    def _compare(
        self, batch: Batch, rows: dict[str, torch.Tensor], seed: int, settings: CallerSettings
    ) -> None:
        buffers = {name: each.clone() for name, each in self._model.named_buffers()}
        found = []
        for stance in (torch.compiler.set_stance("force_eager"), nullcontext()):
            with stance, torch.random.fork_rng(devices=[]):
                found.append(self._gradients(batch, rows, seed, settings))
            for name, each in self._model.named_buffers():
                each.copy_(buffers[name])
        own, compiled = found
        for name, want in own.items():
            got = compiled[name]
            # A parameter without a gradient must have none in both.
            same = want is got if want is None or got is None else torch.equal(_bits(want), _bits(got))
            if not same:
                raise ValueError(
                    f"{name} has other bits under torch.compile than without it ({batch.num_samples} "
                    "samples), so consistency='batch' cannot hold: compile with backend='eager', leave "
                    "torch.compile away, or take consistency='window'"
                )

    def _gradients(
        self, batch: Batch, rows: dict[str, torch.Tensor], seed: int, settings: CallerSettings
    ) -> dict[str, torch.Tensor | None]:
        """Losses, gradients of rows and sums of the dense gradients of one call."""
        leaves = {name: each.detach().clone().requires_grad_() for name, each in rows.items()}
        accumulator = GradientAccumulator(self._model, self._bits)
        with accumulator.empty_gradients():
            with accumulator.active(), recording():  # what a graph leaves out the step must not find here
                losses = train_micro_batch(self._model, batch, leaves, seed, settings)
            sums = accumulator.take()
        found: dict[str, torch.Tensor | None] = {"the loss": losses}
        for name, each in leaves.items():
            # Exact sums know one zero, of which autograd makes either: -0.0 + 0.0 is 0.0.
            gradient = None if each.grad is None else each.grad + 0.0
            found[f"the gradient of the rows of feature {name}"] = gradient
        return found | {f"the gradient of parameter {name}": each for name, each in sums.items()}


class _Compilations:
    """Counts the compilations of this process, by any thread."""

    def __init__(self) -> None:
        self._count, self._lock = 0, Lock()

    def count(self) -> int:
        """Grows where one begins or ends; each call finds out whether torch has forgotten whom to tell."""
        from torch._dynamo.callback import callback_handler

        with self._lock:
            for callbacks in (callback_handler.start_callbacks, callback_handler.end_callbacks):
                if self._add not in callbacks:  # torch.compiler.reset clears them
                    callbacks.append(self._add)
        return self._count

    def _add(self, _about: object) -> None:
        self._count += 1


_COMPILATIONS = _Compilations()


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a module is the result of torch.compile, or was compiled in place."""
    for module in model.modules():
        wraps = "_orig_mod" in dict(module.named_children())  # as torch.compile names what it wraps
        if wraps or getattr(module, "_compiled_call_impl", None) is not None:
            return True
    return False


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32) if values.dtype == torch.float32 else values
