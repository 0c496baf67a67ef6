"""An injected fault: one edit of a Triton module, loaded in its place, and who finds it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from unittest import mock

import pytest
from poison import poisoned_memory

import tritonrec.kernels
from tritonrec import ops

PACKAGE = "tritonrec.kernels."
# a module that is imported inside `mutated` would keep the mutant's kernels
for _module in pkgutil.walk_packages(tritonrec.kernels.__path__, PACKAGE):
    importlib.import_module(_module.name)


@contextlib.contextmanager
def mutated(name: str, edits: list[tuple[str, str]], folder: Path):
    """``tritonrec.kernels.<name>`` with every `old` replaced by `new`, wherever the kernels refer to it.

    The edited file lies in `folder`, since the interpreter reads a kernel's source from its file. An old
    text that is not there, as after a change of the kernel, is an AssertionError that says so.
    """
    original = importlib.import_module(PACKAGE + name)
    source = Path(original.__file__).read_text()
    for old, new in edits:
        assert old in source, f"{name} has no {old!r} any more: the mutant has to follow the kernel"
        source = source.replace(old, new)
    file = folder / f"{name.replace('.', '_')}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(original.__name__, file)
    twin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(twin)
    stand_in = {id(original): twin}
    for key, value in vars(original).items():
        made_of = getattr(value, "fn", value)  # of a kernel, its function
        if getattr(made_of, "__module__", None) == original.__name__:
            stand_in[id(value)] = vars(twin)[key]
    with contextlib.ExitStack() as stack:
        # one entry, since modules imported meanwhile stay
        sys.modules[original.__name__] = twin
        stack.callback(sys.modules.__setitem__, original.__name__, original)
        for module in [m for n, m in sys.modules.items() if n.startswith(PACKAGE) and m is not twin]:
            changed = {k: stand_in[id(v)] for k, v in vars(module).items() if id(v) in stand_in}
            stack.enter_context(
                mock.patch.multiple(module, **changed) if changed else contextlib.nullcontext()
            )
        yield


def each(test, *choices, **fixed):
    """Calls of a test in Triton, one for each choice of its other argument."""
    return [lambda choice=choice: test("triton", choice, **fixed) for choice in choices]


def red(checks):
    """Whether a check fails: by an assertion or an op's own error, not by an accident of the edit."""
    with poisoned_memory():
        for check in checks:
            try:
                check()
            except (
                AssertionError,
                pytest.fail.Exception,
                ops.HashTableFullError,
                ops.ExactSumError,
                ValueError,
            ):
                return True
    return False
