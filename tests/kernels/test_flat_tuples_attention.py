"""HSTU attention where Triton has no tuples: the bits and the program of the kernels that are read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import CASES, RESULTS, make, run
from impls import GPU, TRITON
from speeds import slow_except

from tritonrec.kernels import flat_tuples
from tritonrec.kernels.flat_tuples import flattened

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [*TRITON.marks]


@pytest.fixture
def without_tuples(monkeypatch):
    """Runs a function as where Triton has no tuples; gives its result, and names of what was rewritten."""

    def run_without(function):
        rewritten = set()

        def noted(kernel, tuples, called=False):
            if tuples:
                rewritten.add(kernel.fn.__name__)
            return flattened(kernel, tuples, called)

        with monkeypatch.context() as patched:
            patched.setattr(flat_tuples, "HAS_TUPLES", False)
            patched.setattr(flat_tuples, "flattened", noted)
            return function(), rewritten

    return run_without


def drawn(seed):
    """A random case: every mask, both biases, scales of tokens and queries for the last tokens only."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    lengths = [integers(0, 45) for _ in range(3)] + [integers(20, 45)]
    contexts = [integers(0, min(length, 4)) for length in lengths]
    targets = [integers(0, length - some) for length, some in zip(lengths, contexts, strict=True)]
    numbers = integers(1, 4), integers(3, 20), integers(0, 5), integers(0, 6)
    queries = [integers(0, length) for length in lengths]
    tensors, call = make(
        lengths, targets, contexts, numbers, queries, "two times", "scales shifted nvidia",
        dims=(integers(1, 3), integers(3, 20), integers(3, 20)), seed=seed,
    )  # fmt: skip
    return tensors, call


def same_without_tuples(tensors, call, without_tuples):
    meant = run("triton", tensors, call)
    got, rewritten = without_tuples(lambda: run("triton", tensors, call))
    for what, one, two in zip(RESULTS, got, meant, strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two), what
    assert "forward_kernel" in rewritten and rewritten & {"columns_kernel", "sequences_kernel"}
    return rewritten


@pytest.mark.parametrize("name", slow_except(["delta"], CASES))
def test_attention_has_the_same_bits(name, without_tuples):
    tensors, call = make(*CASES[name])
    same_without_tuples(tensors, call, without_tuples)


@pytest.mark.parametrize(
    ("seed", "dtype"),
    slow_except(
        [(1, torch.float32)],
        [(1, torch.float32), (2, torch.float32), (3, torch.bfloat16), (4, torch.float16)],
    ),
)
def test_every_option_at_once_has_the_same_bits(seed, dtype, without_tuples):
    tensors, call = drawn(seed)
    rewritten = same_without_tuples([tensor.to(dtype) for tensor in tensors], call, without_tuples)
    assert {"positions_kernel", "times_kernel", "parts_kernel"} <= rewritten
    assert rewritten & {"rows_kernel", "sequences_kernel"}


@pytest.mark.slow
def test_atomic_dq_has_the_same_bits(without_tuples):
    """In the interpreter, where additions have an order."""
    if GPU:
        pytest.skip("atomics add in any order on a GPU")
    tensors, call = make(*CASES["window_of_blocks"])
    same_without_tuples(tensors, call._replace(deterministic=False), without_tuples)


COMPARED = """
import re, sys
sys.path[:0] = ["ci/compile"]
import compile_matrix, launches, triton_ir
from tritonrec.kernels import flat_tuples
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton

readable = launches.launches("sm_90", "hstu_attention")
flat_tuples.HAS_TUPLES = False
flat = launches.launches("sm_90", "hstu_attention")
flat_tuples.HAS_TUPLES = True

def ttir(launch):
    lines = [line for line in triton_ir.texts_of(launch, 90, "ttir")["ttir"].splitlines() if line]
    text = "\\n".join(line for line in lines if not line.startswith("#loc"))
    text = re.sub(r' loc\\((#\\w+|"[^"]*"\\(#\\w+\\)|callsite\\([^()]*\\))\\)', "", text)
    names = {}
    return re.sub(r"%[\\w.]+", lambda found: names.setdefault(found[0], f"%{len(names)}"), text)

def ptx(launch):
    source = ASTSource(
        launch.kernel, launch.signature, launch.constants,
        {path: [["tt.divisibility", 16]] for path in launch.aligned},
    )
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options).asm["ptx"]
    code = text[text.index(".visible .entry"):text.index(".section")]
    lines = [line.split("//")[0].strip() for line in code.splitlines()]
    return [line for line in lines if line and not re.match(r"\\.loc|\\.file|\\$L__tmp|\\$L__func", line)]

tuples = 0
for one, two in zip(readable, flat, strict=True):
    assert one.key == two.key and one.options == two.options
    assert not any(isinstance(kind, tuple) for kind in two.signature.values()), two.key
    tuples += any(isinstance(kind, tuple) for kind in one.signature.values())
    assert ttir(one) == ttir(two), one.key
codes = 0
chosen = "forward_kernel fp32 d64 options", "rows_kernel bf16 d50x64 targets"
for one, two in zip(readable, flat, strict=True):
    if one.key.removeprefix("hstu_attention.") in chosen:
        code = ptx(one)
        assert len(code) > 300 and code == ptx(two), one.key
        codes += 1
print(tuples, codes)
"""


@pytest.mark.slow
def test_the_program_is_the_same(tmp_path):
    """Triton's own form of all launches, and PTX of three, but for names and lines."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPARED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["50", "3"]  # launches with tuples, and those compiled to the end
