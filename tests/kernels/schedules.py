"""Schedules for interpreted kernels: programs in any order, or interleaved at every access to memory.

Triton's interpreter runs a grid's programs one after another, which hides every race. Here all programs of a
launch run as threads of which one at a time holds the baton. It may pass at each load, store and atomic, to a
program that a seeded generator draws; an atomic of a block takes its lanes in a drawn order as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import threading
import types
from unittest import mock

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, TensorHandle, interpreter_builder

ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_cas", "create_atomic_rmw")


class Baton:
    """One of several threads runs; `offer` lets another one go on."""

    def __init__(self, chance: random.Random):
        self.chance = chance
        self.waiting: dict[int, threading.Semaphore] = {}
        self.mine = threading.local()
        self.done = threading.Semaphore(0)
        self.error: BaseException | None = None

    def run(self, programs, interleave: bool) -> None:
        """Run (index, body) pairs to their ends."""
        self.chance.shuffle(programs)
        self.interleave = interleave
        self.waiting = {number: threading.Semaphore(0) for number in range(len(programs))}
        threads = [
            threading.Thread(target=self._program, args=(number, *program), daemon=True)
            for number, program in enumerate(programs)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        self.done.acquire()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _program(self, number, index, body) -> None:
        self.waiting[number].acquire()
        self.mine.number, self.mine.index = number, index
        interpreter_builder.grid_idx = index
        try:
            body()
        except BaseException as error:
            self.error = self.error or error
        del self.waiting[number]
        self._pass_on()

    def _pass_on(self) -> None:
        if self.waiting:
            least = min(self.waiting)
            number = self.chance.choice(sorted(self.waiting)) if self.interleave else least
            self.waiting[number].release()
        else:
            self.done.release()

    def offer(self) -> None:
        if self.interleave and hasattr(self.mine, "number") and self.chance.random() < 0.5:
            self._pass_on()
            self.waiting[self.mine.number].acquire()
            interpreter_builder.grid_idx = self.mine.index


def _gathering(fn, baton, interleave):
    """`fn`, which the interpreter calls for one program after another; the last call runs them all."""
    programs = []

    def gather(arguments):
        programs.append((interpreter_builder.grid_idx, functools.partial(fn, **arguments)))
        if len(programs) == math.prod(interpreter_builder.grid_dim):
            baton.run(programs, interleave)

    def program(**arguments):
        gather(arguments)

    # the interpreter looks for triton.language among the globals of what it runs, so those are the kernel's
    stand_in = types.FunctionType(program.__code__, fn.__globals__, fn.__name__, None, program.__closure__)
    stand_in.__signature__ = interpreter.inspect.signature(fn)
    stand_in.__annotations__ = fn.__annotations__
    return stand_in


def _lanes(baton, original, first_operand):
    """An atomic that takes its lanes in a drawn order, and lets other programs in half-way."""

    def atomic(*operands):
        *before, pointers = operands[: first_operand + 1]
        flat = [np.ravel(one.data) for one in operands[first_operand:] if isinstance(one, TensorHandle)]
        if pointers.data.size < 2:
            return original(*operands)
        order = np.array(baton.chance.sample(range(pointers.data.size), pointers.data.size))
        result = None
        for part in np.array_split(order, 2):
            handles = [
                TensorHandle(np.ascontiguousarray(values[part]), one.dtype)
                for values, one in zip(flat, operands[first_operand:], strict=False)
            ]
            got = original(*before, *handles, *operands[first_operand + len(handles) :])
            if result is None:
                result = np.empty(pointers.data.size, got.data.dtype)
            result[part] = got.data
            baton.offer()
        return TensorHandle(result.reshape(pointers.data.shape), got.dtype)

    return atomic


@contextlib.contextmanager
def scheduled(seed: int, interleave: bool = True):
    """Launches inside run their programs in an order drawn from `seed`; interleaved, or each to its end."""
    baton = Baton(random.Random(seed))

    class Executor(GridExecutor):
        def __init__(self, fn, *args, **kwargs):
            super().__init__(fn, *args, **kwargs)
            self.fn = _gathering(fn, baton, interleave)

    def offering(original):
        def access(*operands):
            baton.offer()
            return original(*operands)

        return access

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(interpreter, "GridExecutor", Executor))
        for name in ACCESSES:
            original = getattr(interpreter_builder, name)
            if name.startswith("create_atomic"):
                original = _lanes(baton, original, 1 if name.endswith("rmw") else 0)
            stack.enter_context(mock.patch.object(interpreter_builder, name, offering(original)))
        yield
