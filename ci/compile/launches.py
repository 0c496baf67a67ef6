"""What tritonrec launches, without a GPU: every Triton kernel with the arguments it gets in use.

The public ops are called on small CPU tensors while `JITFunction.run` takes notes instead of launching, so a
kernel is compiled later with the signature, constants, alignment and options that its launcher gives it.
An op of a new kernel is added to `CASES`; `uncovered` names every function of Triton's that no case reaches.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default, said so that it stays and nobody warns

import torch
import triton.runtime.jit

import tritonrec.kernels
from tritonrec import ops
from tritonrec.kernels import chunked_rows, dispatch
from tritonrec.kernels.deferred import DeferredErrors
from tritonrec.kernels.dropout.op import DROPOUT_ROWS
from tritonrec.kernels.norm_linear_silu.op import NORM_LINEAR_SILU_BACKWARD_EXACT
from tritonrec.kernels.norm_mul_dropout.op import NORM_MUL_DROPOUT, NORM_MUL_DROPOUT_BACKWARD_EXACT
from tritonrec.kernels.philox.device_seed import DeviceSeed, DeviceSeeds
from tritonrec.kernels.sparse_optimizers.op import SPARSE_UPDATES
from tritonrec.kernels.sparse_optimizers.rules import RULES
from tritonrec.kernels.sparse_optimizers.triton_sparse_optimizers import update_of_tiles

JIT = triton.runtime.jit.JITFunction
# constants by which a kernel knows the interpreter, which is not what is compiled here
FOR_THE_DEVICE = {"WIDEN": False, "INTERPRETED": False}
TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel and everything its compiler is told."""

    kernel: Any
    label: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    aligned: tuple[tuple[int, ...], ...]  # paths of arguments that 16 divides
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """``silu.forward_kernel``: the folder, or the file that lies in none, and the function."""
        return f"{folder_of(self.kernel)}.{self.kernel.__name__.removeprefix('_')}"

    @property
    def key(self) -> str:
        """Name, what the case says beyond it, and the switches that are on: stable when a tile changes."""
        switches = [
            n if v is True else f"{n}={v}" for n, v in self._named_constants() if v is True or type(v) is str
        ]
        return " ".join([self.name, *self.label.split()[1:], *switches])

    def _named_constants(self) -> list[tuple[str, Any]]:
        names = self.kernel.arg_names
        return [(names[path[0]], value) for path, value in self.constants.items() if len(path) == 1]

    @property
    def config(self) -> dict[str, Any]:
        """Tile sizes and launch options."""
        sizes = {n: v for n, v in self._named_constants() if type(v) is int and n.isupper()}
        return sizes | self.options

    @property
    def identity(self) -> str:
        """Equal for launches that compile alike."""
        parts = self.signature, sorted(self.constants.items(), key=str), self.aligned, self.options
        return repr((self.name, *parts))


def folder_of(kernel: Any) -> str:
    return kernel.__module__.removeprefix("tritonrec.kernels.").split(".")[0].removeprefix("triton_")


def note(kernel: Any, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """The signature Triton's own launcher would compile for these arguments."""
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    bound = kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in kernel.arg_names})
    bound.apply_defaults()
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: list[tuple[int, ...]] = []

    def align(value: int, path: tuple[int, ...]) -> None:
        parameter = kernel.params[path[0]]
        free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if value % 16 == 0 and not free:
            aligned.append(path)

    def kind(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            parts = tuple(kind(item, (*path, i)) for i, item in enumerate(value))
            return type(value)(*parts) if hasattr(value, "_fields") else parts  # kernels read fields by name
        if isinstance(value, torch.Tensor):
            align(value.data_ptr(), path)
            return "*" + TYPES[value.dtype]
        if isinstance(value, bool):
            return "i1"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, int) and (value != 1 or kernel.params[path[0]].do_not_specialize):
            align(value, path)
            return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        constants[path] = value
        return "constexpr"

    for i, parameter in enumerate(kernel.params):
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[(i,)] = FOR_THE_DEVICE.get(parameter.name, value)
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = kind(value, (i,))
    return Launch(kernel, label, signature, constants, tuple(aligned), options)


@contextmanager
def recording(notes: list[tuple[Any, ...]]) -> Iterator[None]:
    """Launches are noted as (kernel, args, kwargs), and tensors that a kernel would fill hold zeros."""

    def run(kernel, *args, grid, warmup, **kwargs):
        notes.append((kernel, args, kwargs))

    patches = [
        (JIT, "run", run),
        (torch, "empty", torch.zeros),
        (torch, "empty_like", torch.zeros_like),
        (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
    ]
    before = [getattr(owner, name) for owner, name, _ in patches]
    for owner, name, stand_in in patches:
        setattr(owner, name, stand_in)
    os.environ["TRITON_INTERPRET"] = "1"  # by this the ops take Triton on CPU tensors
    try:
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        for (owner, name, _), original in zip(patches, before, strict=True):
            setattr(owner, name, original)


@contextmanager
def on(architecture: str) -> Iterator[None]:
    """Launchers choose their block sizes as on `architecture`, ``"sm_90"`` for example."""
    before, digits = dispatch.capability, architecture.removeprefix("sm_")
    found = divmod(int(digits), 10) if digits.isdigit() else (0, 0)
    dispatch.capability = lambda tensor: found
    try:
        yield
    finally:
        dispatch.capability = before


def launches(architecture: str, only: str = "") -> list[Launch]:
    """Every distinct launch of every case on an architecture."""
    modules()  # before the ops are told that they are interpreted
    found: dict[str, Launch] = {}
    for label, case in CASES.items():
        if only not in label:
            continue
        notes: list[Any] = []
        with recording(notes), on(architecture):
            case()
        if not notes:
            raise AssertionError(f"the case {label!r} launches nothing")
        for kernel, args, kwargs in notes:
            launch = note(kernel, label, args, kwargs)
            found.setdefault(launch.identity, launch)
    return list(found.values())


def modules() -> list[Any]:
    """Every module of ``tritonrec.kernels`` that holds Triton code."""
    names = [
        module.name for module in pkgutil.walk_packages(tritonrec.kernels.__path__, "tritonrec.kernels.")
    ]
    return [importlib.import_module(name) for name in names if name.split(".")[-1].startswith("triton_")]


def functions() -> dict[str, Any]:
    """``module.function`` -> JITFunction, each under the module that defines it."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, JIT) and value.__module__ == module.__name__
    }


def uncovered(reached: list[Any]) -> list[str]:
    """The ``@triton.jit`` functions that neither are in `reached` nor are called from there."""
    seen, ahead = set(), list(reached)
    while ahead:
        function = ahead.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        tree = ast.parse(textwrap.dedent(function.src))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                with suppress(AttributeError, KeyError):
                    value = _value(node, function.fn.__globals__)
                    ahead += [value] if isinstance(value, JIT) else []
    return sorted(name for name, function in functions().items() if id(function) not in seen)


def _value(node: ast.expr, scope: dict[str, Any]) -> Any:
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, scope), node.attr)
    return scope[node.id]


CASES: dict[str, Callable[[], Any]] = {}
# Rows, occurrences or tokens of every case, and the longest sequence: small to compile, large to be timed.
size, longest = 99, 64


@contextmanager
def sized(rows: int, most: int) -> Iterator[None]:
    """Cases of other sizes, for a measurement."""
    global size, longest
    before, (size, longest) = (size, longest), (rows, most)
    try:
        yield
    finally:
        size, longest = before


def run(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`op` in Triton. Where nothing was launched, zeros may tell of a value that does not fit."""
    with suppress(ops.ExactSumError):
        return op(*args, **options, impl="triton")


def keys(count: int = 0) -> torch.Tensor:
    return torch.arange(count or size)


def ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


def count_of(number: int) -> torch.Tensor:
    return torch.tensor(number)


def here() -> torch.device:
    """Where tensors are made: the caller's `with torch.device(...)`."""
    return torch.empty(0).device


def device_seed() -> DeviceSeed:
    return DeviceSeeds(here(), 1).root()


def offsets() -> torch.Tensor:
    """Of sequences whose lengths run from 0 to the longest, over and over."""
    cuts, length = [0], 0
    while cuts[-1] < size:
        length = (length * 5 + 41) % (longest + 1)
        cuts.append(min(size, cuts[-1] + length))
    return torch.tensor(cuts)


def case(*labels: str, **values: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function under its label, once for each value of its only argument."""

    def add(function):
        for name, choices in values.items():
            for choice in choices:
                text = TYPES.get(choice, f"d{choice}")
                CASES[f"{labels[0]} {text}"] = lambda choice=choice, name=name: function(**{name: choice})
        if not values:
            CASES[labels[0]] = function
        return function

    return add


CASES |= {
    "bucketize": lambda: (run(ops.owner_of, keys(), 8), run(ops.bucketize, keys(), 8)),
    "bucketize padded": lambda: run(ops.bucketize, keys(), 8, count=count_of(size)),
    "counting_sort": lambda: run(ops.counting_sort, keys() % 8, 8),
    "counting_sort padded": lambda: run(ops.counting_sort, keys() % 8, 8, count=count_of(size)),
    "unique": lambda: run(ops.unique, keys() // 3),
    "unique padded": lambda: run(ops.unique, keys() // 3, padded=True, count=count_of(size)),
    "unique table": lambda: run(ops.unique, keys() // 3, padded=True, table=True),
    "intersect": lambda: run(ops.intersect, keys(), keys() + 50),
    "silu": lambda: run(ops.silu, ones(size, grad=True)).sum().backward(),
}


@case("intersect padded")
def _intersect_padded():
    counts = {"left_count": count_of(size), "right_count": count_of(size)}
    run(ops.intersect, keys(), keys() + 50, padded=True, **counts)


@case("hash_table")
def _hash_table():
    slots = 8 << (size // 4).bit_length()
    table = torch.zeros(slots, dtype=torch.int64), torch.full((slots,), -1, dtype=torch.int32)
    with suppress(ValueError):  # a table of zeros may look full
        run(ops.hash_insert, *table, keys(), 0)
    run(ops.hash_find, *table, keys())
    run(ops.hash_erase, *table, keys())
    run(ops.hash_grow, *table)


@case("hash_table padded")
def _hash_table_padded():
    slots = 8 << (size // 4).bit_length()
    table = torch.zeros(slots, dtype=torch.int64), torch.full((slots,), -1, dtype=torch.int32)
    run(ops.hash_insert, *table, keys(), count_of(0), count=count_of(size), status=count_of(0))


@case("fixed_point")
def _fixed_point():
    run(ops.to_fixed_point, ones(size))
    run(ops.from_fixed_point, torch.ones(size, dtype=torch.int64))


@case("sum_of_squares")
def _sum_of_squares():
    run(ops.sum_of_squares, ones(size))
    run(ops.sum_of_squares, ones(size, 64), count_of(size))


@case("gather_rows", dim=(50, 128))
def _rows(dim):
    source, rows = ones(size, dim), keys(size // 2)
    run(ops.scatter_rows, source, rows, run(ops.gather_rows, source, rows))
    run(ops.scatter_rows, source, rows, ones(size, dim), source=rows)


@case("chunked_rows", dim=(50, 128))
def _chunked_rows(dim):
    full = chunked_rows.addresses([ones(size, dim)], here())
    low = chunked_rows.addresses([ones(size, dim, dtype=torch.int16)], here())
    for low_rows in (0, size):
        places = chunked_rows.Chunks(full, low, size, low_rows, size, dim // 2, dim)
        rows = run(chunked_rows.read_rows, places, keys())
        run(chunked_rows.write_rows, places, keys(), rows)
    run(chunked_rows.fits, rows, dim // 2)


@case("segment_sum", dim=(50, 128))
def _segment_sum(dim):
    values, segments = ones(size, dim), keys() // 4
    run(ops.segment_sum, values, segments, size)
    run(ops.segment_sum, values, segments, size, consistency="batch")
    run(ops.segment_sum, values.long(), segments, size, consistency="batch")
    run(ops.segment_sum, values, segments, size, source=segments.flip(0))
    run(ops.segment_sum, values, segments, size, source=segments.flip(0), consistency="batch")
    everything = torch.zeros_like(segments)
    run(ops.segment_sum, values, everything, 1)
    run(ops.segment_sum, values, everything, 1, consistency="batch")
    run(ops.segment_sum, values[:8], segments[:8], size, consistency="batch")  # of more sums than rows
    if dim == 50:  # sums of parts, where nothing is added atomically
        many, keys_of_many = ones(3 * size, dim), keys(3 * size) // 200
        run(ops.segment_sum, many, keys_of_many, size, consistency="batch")
        run(ops.segment_sum, many, torch.zeros_like(keys_of_many), 1, consistency="batch")


@case("packed_rows", dim=(50, 128))
def _packed_rows(dim):
    run(ops.pack_rows, ones(size, dim, dtype=torch.int64), keys(size // 2))
    widths = torch.full((size,), 5, dtype=torch.uint8)
    out, packed = ones(size, dim, dtype=torch.int64), torch.zeros(size * 5 * dim, dtype=torch.uint8)
    run(ops.add_packed_rows, out, keys() // 4, widths, packed)
    if dim == 50:  # sums of parts
        widths = torch.full((3 * size,), 5, dtype=torch.uint8)
        packed = torch.zeros(3 * size * 5 * dim, dtype=torch.uint8)
        run(ops.add_packed_rows, out, keys(3 * size) // 200, widths, packed)


@triton.jit
def own_rule(weight, states, gradient, step, lr):
    return weight - lr * gradient * step, (states[0] + gradient, states[1] + 1)


def by_own_rule(*given, impl):
    """No op: on the CPU nothing of a user's rule is compiled here."""
    if impl == "triton":
        update_of_tiles(*given)


@case("sparse_optimizers", dim=(50, 128))
def _optimizers(dim):
    weight, indices, grad, narrow = ones(size, dim), keys(size // 2), ones(size // 2, dim), ones(size, 1)
    for name, rule in RULES.items():
        states = [ones(size, dim) for _ in rule.states]
        states[-1:] = [narrow] if rule.row_wise else states[-1:]
        for decay in 0.0, 0.1:
            run(SPARSE_UPDATES[name], weight, *states, indices, grad, 0.1, 1e-8, 0.9, 0.999, decay, 3)
    run(ops.sparse_lazy_decay, weight, narrow, indices, ones(9), 9)
    run(by_own_rule, ones(size, 2 * dim + 1), indices, grad, 3, 0.1, None, own_rule, 1, 1)


@case("philox", dim=(50, 128))
def _philox(dim):
    run(ops.initial_rows, 7, 2**31 + 1, keys(), dim, 0.05)
    run(ops.initial_rows_of_tables, 7, keys(), keys(), keys(), ones(size), dim)
    run(ops.random_indices, 7, 2, 3, keys(), keys(), dim, 10**7)


@case("norm_mul_dropout", dim=(50, 256, 1024))
def _norm(dim):
    x, u, weight, bias = ones(size, dim, grad=True), ones(size, dim), ones(dim), ones(dim)
    draws = {"dropout": 0.2, "seed": 2**40 + 1, "sample_ids": keys(), "positions": keys()}
    run(ops.norm_mul_dropout, x, None, weight, bias).sum().backward()
    run(ops.norm_mul_dropout, x, u, weight, bias, **draws).sum().backward()


@case("norm_linear_silu", dtype=(torch.float32, torch.bfloat16))
def _norm_linear_silu(dtype):
    x, scale, shift = (ones(*shape, dtype=dtype, grad=True) for shape in ((size, 64), (64,), (64,)))
    weight, bias = ones(128, 64, dtype=dtype, grad=True), ones(128, dtype=dtype, grad=True)
    for recompute in ((), ("norm", "linear")):
        run(ops.norm_linear_silu, x, scale, shift, weight, bias, recompute=recompute).sum().backward()


@case("exact_gradients", dim=(50, 256))
def _exact_gradients(dim):
    x, u, du, vector, rows = *(ones(size, dim) for _ in range(3)), ones(dim), ones(size)
    weight, bias, dy, z = ones(128, dim), ones(128), ones(size, 128), ones(size, 128)
    sums = [torch.zeros(shape, dtype=torch.int64) for shape in ((dim,), (dim,), (128, dim), (128,))]
    names = ["norm weight", "norm bias", "weight", "bias"]
    rest = keys(), keys(), rows, rows, 36, names[:2]
    front = x, vector, vector, weight, bias, 1e-6, z, x[:0], rows, rows, offsets(), 36, names
    with DeferredErrors().active():  # no error ends a call before its last launch
        run(NORM_MUL_DROPOUT_BACKWARD_EXACT.launch, *sums[:2], du, x, x, u, vector, vector, 0.2, 7, *rest)
        given = du, x, x, u, vector, vector, 0.2, device_seed()
        run(NORM_MUL_DROPOUT_BACKWARD_EXACT.launch, *sums[:2], *given, *rest)
        run(NORM_MUL_DROPOUT.launch, x, u, vector, vector, 1e-6, 0.2, device_seed(), keys(), keys())
        run(NORM_LINEAR_SILU_BACKWARD_EXACT.launch, *sums, dy, *front)
        run(ops.linear_weight_grad, sums[2], dy, x, offsets(), bias_accumulator=sums[3])
        # samples of many tokens are shared by programs
        many, cuts = 1024 + size, torch.tensor([0, 600, 1024 + size])
        shared = ones(many, 128), ones(many, dim), cuts
        run(ops.linear_weight_grad, sums[2], *shared, bias_accumulator=sums[3])


@case("sampled_softmax", dim=(50, 256))
def _softmax(dim):
    hidden, valid = ones(size, dim, grad=True), torch.ones(size, 32, dtype=torch.bool)
    run(ops.sampled_softmax, hidden, ones(size, dim), ones(size, 32, dim), valid).sum().backward()
    rows, matrix = keys().unsqueeze(1).expand(-1, 32) % 7, ones(size, dim, grad=True)
    run(ops.sampled_softmax, hidden, ones(size, dim), matrix, valid, rows=rows).sum().backward()


@case("linear", dtype=(torch.float32, torch.bfloat16))
def _linear(dtype):
    x, weight, bias = ones(size, 64, dtype=dtype), ones(128, 64, dtype=dtype), ones(128, dtype=dtype)
    run(ops.linear, x, weight, bias)
    run(ops.linear, ones(size, 128, dtype=dtype), weight.t())
    grid = torch.zeros(128, 64, dtype=torch.int64)
    run(ops.linear_weight_grad, grid, ones(size, 128, dtype=dtype), x, offsets())
    if dtype == torch.float32:
        for rows in (size, 1024 + size):  # many rows are shared by programs
            run(ops.linear_weight_grad, grid, ones(rows, 128), ones(rows, 64))


@case("relative_aggregate", dim=(32, 50, 128))
def _relative(dim):
    v, table, cuts = ones(size, 2, dim, grad=True), ones(2, 64, grad=True), offsets()
    run(ops.relative_aggregate, v, table, cuts, longest).sum().backward()
    run(ops.relative_aggregate, v, table, cuts, longest, keys()).sum().backward()


@case("dot_interaction", dim=(16, 64, 100))
def _dot_interaction(dim):
    run(ops.dot_interaction, ones(size, 27, dim, grad=True)).sum().backward()


@case("softmax_attention", dim=(32, 50, 128))
def _softmax_attention(dim):
    q, k, v = (ones(size, 2, dim, grad=True) for _ in range(3))
    cuts, draws = offsets(), {"dropout": 0.2, "seed": 2**40 + 1, "sample_ids": keys(len(offsets()) - 1)}
    bias = ones(1, 1, 1, longest).expand(len(cuts) - 1, 2, longest, -1)
    run(ops.softmax_attention, q, k, v, cuts, longest, causal=True).sum().backward()
    run(ops.softmax_attention, q, k, v, cuts, longest, bias=bias, **draws).sum().backward()


@case("dropout", dim=(50, 2000))
def _dropout(dim):
    run(ops.dropout, ones(size, dim, grad=True), 0.2, 2**40 + 1, keys(), keys()).sum().backward()
    run(DROPOUT_ROWS.launch, ones(size, dim), 0.2, device_seed(), keys(), keys())


def _attention(dtype, dim_qk, dim_v, **options):
    q, k = (ones(size, 2, dim_qk, dtype=dtype, grad=True) for _ in range(2))
    v = ones(size, 2, dim_v, dtype=dtype, grad=True)
    out = run(ops.hstu_attention, q, k, v, offsets(), longest, alpha=0.1, scaling_seqlen=64, **options)
    out.sum().backward()


def _targets(dtype):
    _attention(dtype, 50, 64, mask=ops.HSTUMask(num_targets=offsets().diff() // 4))


def _options(dtype):
    """Every mask and bias at once; then dq by atomics; then queries for the last tokens only."""
    cuts = offsets()
    lengths = cuts.diff()
    mask = ops.HSTUMask(
        num_targets=lengths // 4, num_contexts=lengths // 8, target_group_size=2, max_attn_len=20,
        min_full_attn_seq_len=3, attn_prefix_len=2,
    )  # fmt: skip
    bias = ops.HSTUBias(
        pos_weights=ones(2 * longest - 1, grad=True), ts_weights=ones(32, grad=True), timestamps=keys()
    )
    _attention(dtype, 64, 64, mask=mask, bias=bias)
    _attention(dtype, 64, 64, deterministic=False)


for _dtype in (torch.float32, torch.bfloat16):
    CASES[f"hstu_attention {TYPES[_dtype]} d64 options"] = lambda dtype=_dtype: _options(dtype)
    for _qk, _v in ((32, 32), (50, 64), (128, 128), (256, 256)):
        _label = f"hstu_attention {TYPES[_dtype]} d{_qk}x{_v}"
        CASES[_label] = lambda dtype=_dtype, qk=_qk, v=_v: _attention(dtype, qk, v)
    CASES[f"hstu_attention {TYPES[_dtype]} d50x64 targets"] = lambda dtype=_dtype: _targets(dtype)


@case("precision lower")
def _lower_precision():
    """What autocast to bfloat16 gives to kernels that the cases above know in float32."""
    low = partial(ones, dtype=torch.bfloat16, grad=True)
    cuts, draws = offsets(), {"seed": 2**40 + 1, "sample_ids": keys()}
    gate = {"dropout": 0.2, "positions": keys(), **draws}
    run(ops.norm_mul_dropout, low(size, 50), None, low(50), low(50)).sum().backward()
    run(ops.norm_mul_dropout, low(size, 50), low(size, 50), ones(50), ones(50), **gate).sum().backward()
    run(ops.silu, low(size, 50)).sum().backward()
    run(ops.dot_interaction, low(size, 27, 64)).sum().backward()
    run(ops.dropout, low(size, 50), 0.2, positions=keys(), **draws).sum().backward()
    v, table = low(size, 2, 50), ones(2, 64, grad=True)
    run(ops.relative_aggregate, v, table, cuts, longest, keys()).sum().backward()
    draws = {"dropout": 0.2, "seed": 2**40 + 1, "sample_ids": keys(len(cuts) - 1)}
    bias = ones(len(cuts) - 1, 2, longest, longest)
    for dim in (32, 128):
        q, k, v = (low(size, 2, dim) for _ in range(3))
        run(ops.softmax_attention, q, k, v, cuts, longest, causal=True).sum().backward()
    run(ops.softmax_attention, q, k, v, cuts, longest, bias=bias, **draws).sum().backward()
    for consistency in ("window", "batch"):
        run(ops.segment_sum, low(size, 50).detach(), keys() % 7, 7, consistency=consistency)
    x, vector, rows, weight = ones(size, 50), ones(50), ones(size), low(128, 50).detach()
    y, bias = run(ops.norm_linear_silu, x, vector, vector, weight), ones(128, dtype=torch.bfloat16)
    sums = [torch.zeros(shape, dtype=torch.int64) for shape in ((50,), (50,), (128, 50), (128,))]
    front = x, vector, vector, weight, bias, 1e-6, y[:0], weight[:0], rows, rows, cuts, 36, list("abcd")
    with DeferredErrors().active():
        run(NORM_LINEAR_SILU_BACKWARD_EXACT.launch, *sums, y, *front)
