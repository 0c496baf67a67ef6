"""What each op of a training step costs, without a GPU: launches, aten ops, waits, bytes and instructions.

    python ci/emulator/per_op.py               a table
    python ci/emulator/per_op.py --only unique
    python ci/emulator/per_op.py --update      ci/baselines/per_op.json and the table in docs/launches.md

Bytes and instructions are those of the emulated sm_90's PTX: bytes that kernels read and write in global
memory, caches or not, beside the least there is to move, every input read once and every output written once.
aten ops move bytes as well, and these are not counted. One realistic size each; instructions are of warps.
The last column has those of the program that has most: however many processors are free, it has to run them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "ci" / "compile")]
os.environ.pop("TRITON_INTERPRET", None)  # kernels are compiled
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch  # noqa: E402
from pretended import GPU, Pretended, pretended  # noqa: E402
from steps import DOCS, markdown, show  # noqa: E402

from tritonrec import ops  # noqa: E402
from tritonrec.harness.emulator import Emulation, Session, emulated  # noqa: E402
from tritonrec.kernels import chunked_rows, launch  # noqa: E402
from tritonrec.kernels.deferred import DeferredErrors  # noqa: E402
from tritonrec.kernels.norm_linear_silu.op import NORM_LINEAR_SILU_BACKWARD_EXACT  # noqa: E402
from tritonrec.kernels.norm_mul_dropout.op import NORM_MUL_DROPOUT_BACKWARD_EXACT  # noqa: E402
from tritonrec.nn import GradientAccumulator  # noqa: E402

BASELINE = ROOT / "ci" / "baselines" / "per_op.json"
KEYS, DISTINCT, DIM, SLOTS, ROWS = 8192, 3000, 64, 16384, 20000
BITS = ops.FRACTION_BITS
SIZES = f"{KEYS:,} keys of {DISTINCT:,}, rows of {DIM}, tables of {ROWS:,} rows in {SLOTS:,} slots"

Measured = tuple[Callable[[], Any], int]
Case = Callable[[], Iterable[Measured]]
CASES: dict[tuple[str, ...], Case] = {}
"""Names of calls -> makes inputs, and gives these calls with the least bytes that each moves."""


def case(*names: str) -> Callable[[Case], Case]:
    """Adds a case."""

    def add(function: Case) -> Case:
        CASES[names] = function
        return function

    return add


def size(*tensors: torch.Tensor) -> int:
    """Bytes of tensors."""
    return sum(each.numel() * each.element_size() for each in tensors)


def on_gpu(values: torch.Tensor) -> torch.Tensor:
    return values.to(GPU, non_blocking=True)


def keys(count: int = KEYS) -> torch.Tensor:
    return on_gpu(torch.randint(0, DISTINCT, (count,)))


def distinct(count: int = DISTINCT) -> torch.Tensor:
    return on_gpu(torch.randperm(2 * count)[:count])


def floats(*shape: int, grad: bool = False) -> torch.Tensor:
    return on_gpu(torch.randn(*shape)).requires_grad_(grad)


def number(value: int) -> torch.Tensor:
    return on_gpu(torch.tensor(value))


def rows_of(count: int) -> torch.Tensor:
    return on_gpu(torch.randperm(ROWS)[:count])


@case("unique")
def _unique():
    given = keys()
    yield lambda: launch.unique_padded(given), 4 * size(given)  # keys in; keys, inverse and counts out


@case("unique with its table", "intersect with that table")
def _intersect_with_table():
    given, left = keys(), distinct()
    right, _, _, count, table = launch.unique_table(given)
    yield lambda: launch.unique_table(given), 4 * size(given) + size(table)
    yield lambda: launch.intersect_padded(left, right, None, count, table), 2 * size(left, left)


@case("intersect")
def _intersect():
    left, right = distinct(), distinct()
    yield lambda: launch.intersect_padded(left, right, None, None), 2 * size(left, right)


@case("owner_of")
def _owner_of():
    given = distinct()
    yield lambda: launch.owner_of(given, 8), 2 * size(given)


@case("bucketize")
def _bucketize():
    given = distinct()
    yield lambda: launch.bucketize(given, 8), 2 * size(given)


@case("counting_sort")
def _counting_sort():
    given = distinct() % 33
    yield lambda: launch.counting_sort(given, 33), 2 * size(given)


def _table(used: int = DISTINCT) -> tuple[torch.Tensor, ...]:
    table = on_gpu(torch.zeros(SLOTS, dtype=torch.int64)), on_gpu(torch.full((SLOTS,), -1, dtype=torch.int32))
    held, count = distinct(used), number(0)
    launch.hash_insert(*table, held, 0, None, None, None, number(0), count)
    return *table, held, count


@case("hash_find")
def _hash_find():
    slot_keys, slot_rows, held, _ = _table()
    yield lambda: launch.hash_find(slot_keys, slot_rows, held), 28 * DISTINCT  # key, slot's key and row, row


@case("hash_insert, half of the keys new")
def _hash_insert():
    slot_keys, slot_rows, held, count = _table()
    given = torch.cat([held[: DISTINCT // 2], held[DISTINCT // 2 :] + 10**6])
    least = 29 * DISTINCT + 12 * DISTINCT // 2
    yield (
        lambda: launch.hash_insert(slot_keys, slot_rows, given, DISTINCT, None, None, None, number(0), count),
        least,
    )


@case("hash_erase")
def _hash_erase():
    slot_keys, slot_rows, held, count = _table()
    yield lambda: launch.hash_erase(slot_keys, slot_rows, held, None, count), 40 * DISTINCT


@case("gather_rows")
def _gather_rows():
    source, rows = floats(ROWS, DIM), rows_of(DISTINCT)
    yield lambda: launch.gather_rows(source, rows), size(rows) + 8 * DISTINCT * DIM


@case("scatter_rows")
def _scatter_rows():
    target, rows, source = floats(ROWS, DIM), rows_of(DISTINCT), floats(DISTINCT, DIM)
    yield lambda: launch.scatter_rows(target, rows, source), size(rows) + 2 * size(source)


def hot(segments: torch.Tensor) -> torch.Tensor:
    """Every second one the same."""
    return torch.where(torch.arange(len(segments), device=GPU) % 2 == 0, 7, segments)


def _segment_sum(consistency: str, segments: torch.Tensor) -> Iterable[Measured]:
    values, dtype = floats(KEYS, DIM), torch.int64 if consistency == "batch" else torch.float32
    out = torch.zeros(DISTINCT, DIM, dtype=dtype, device=GPU)
    args = values, segments, DISTINCT, consistency, BITS, "sums"
    yield lambda: launch.segment_sum_into(out, *args), size(values, segments) + 2 * size(out)


for _consistency in ("batch", "window"):
    case(f"segment_sum, {_consistency}")(lambda each=_consistency: _segment_sum(each, keys()))
    case(f"segment_sum, {_consistency}, a hot key")(lambda each=_consistency: _segment_sum(each, hot(keys())))


@case("segment_sum, batch, one segment")
def _segment_sum_one():
    values, segments = floats(KEYS, DIM), torch.zeros(KEYS, dtype=torch.int64, device=GPU)
    out = torch.zeros(1, DIM, dtype=torch.int64, device=GPU)
    args = values, segments, 1, "batch", BITS, "sums"
    yield lambda: launch.segment_sum_into(out, *args), size(values) + 2 * size(out)


@case("segment_sum, window, bags of eight")
def _pooled():
    table, source = floats(ROWS, DIM), rows_of(KEYS)
    bags = torch.arange(KEYS, device=GPU) // 8
    least = size(source, bags) + (KEYS + KEYS // 8) * DIM * 4
    yield lambda: launch.segment_sum(table, bags, KEYS // 8, "window", BITS, "rows", None, source), least


@case("from_fixed_point")
def _from_fixed_point():
    sums = on_gpu(torch.randint(-(2**30), 2**30, (DISTINCT, DIM)))
    yield lambda: launch.from_fixed_point(sums, 128.0, BITS), size(sums) * 3 // 2


@case("sum_of_squares")
def _sum_of_squares():
    values = floats(KEYS, DIM)
    yield lambda: launch.sum_of_squares(values), size(values)


@case("pack_rows", "add_packed_rows")
def _packed():
    sums, rows = on_gpu(torch.randint(-(2**30), 2**30, (DISTINCT, DIM))), on_gpu(torch.randperm(DISTINCT))
    widths, packed = launch.pack_rows(sums, rows)
    yield lambda: launch.pack_rows(sums, rows), size(sums, rows, widths, packed)
    args = sums, rows, widths, packed, "sums", BITS
    yield lambda: launch.add_packed_rows(*args), size(rows, widths, packed) + 2 * size(sums)


@case("add_packed_rows, a hot key")
def _packed_hot():
    sums, rows = on_gpu(torch.randint(-(2**30), 2**30, (DISTINCT, DIM))), on_gpu(torch.randperm(DISTINCT))
    widths, packed = launch.pack_rows(sums, rows)
    args = sums, hot(rows), widths, packed, "sums", BITS
    yield lambda: launch.add_packed_rows(*args), size(rows, widths, packed) + 2 * size(sums)


@case("initial_rows")
def _initial_rows():
    given = distinct()
    yield lambda: launch.initial_rows(7, 1, given, DIM, 0.05), size(given) + 4 * DISTINCT * DIM


def _updated(columns: int, update: Callable[..., Any]) -> Iterable[Measured]:
    """A rule that reads and writes so many values of a row, and reads its gradient."""
    weight, rows, gradient = floats(ROWS, columns).abs(), rows_of(DISTINCT), floats(DISTINCT, DIM)
    parts = weight[:, :DIM], weight[:, DIM : 2 * DIM], weight[:, 2 * DIM :]
    least = size(rows, gradient) + 8 * DISTINCT * columns
    yield lambda: update(*[each for each in parts if each.shape[1]], rows, gradient), least


NUMBERS = 0.1, 1e-8, 0.9, 0.999, 0.0, 3  # no weight decay
COLUMNS = {"sgd": DIM, "momentum_sgd": 2 * DIM, "nesterov_sgd": 2 * DIM, "adagrad": 2 * DIM}
COLUMNS |= {"rowwise_adagrad": DIM + 1, "adam": 3 * DIM, "adamw": 3 * DIM, "rowwise_adam": 2 * DIM + 1}


def _rule(rule: str, columns: int) -> None:
    update = launch.sparse_update[rule]
    case(f"sparse_{rule}")(lambda: _updated(columns, lambda *given: update(*given, *NUMBERS)))


for _name, _columns in COLUMNS.items():
    _rule(_name, _columns)


@case("sparse_lazy_decay")
def _lazy_decay():
    """Of rows that have missed from none to nine updates."""
    weight, rows = floats(ROWS, DIM), rows_of(DISTINCT)
    last_update = on_gpu(torch.randint(10, 20, (ROWS, 1)).float())
    factors, least = on_gpu(torch.rand(20)), size(rows) + 8 * DISTINCT * (DIM + 1)
    yield lambda: launch.sparse_lazy_decay(weight, last_update, rows, factors, 20), least


@case("read_rows of chunks", "write_rows of chunks")
def _chunked():
    chunks = [floats(4096, 3 * DIM) for _ in range(5)]
    table = chunked_rows.addresses(chunks, GPU)
    places = chunked_rows.Chunks(table, table, ROWS, 0, 4096, DIM, 3 * DIM)
    rows, values = rows_of(DISTINCT), floats(DISTINCT, 3 * DIM)
    least = size(rows) + 2 * size(values)
    yield lambda: chunked_rows.read_rows(places, rows), least
    yield lambda: chunked_rows.write_rows(places, rows, values), least


TOKENS, LENGTH, HEADS = 1024, 128, 2


def _offsets() -> torch.Tensor:
    return on_gpu(torch.arange(0, TOKENS + 1, LENGTH))


@case("linear")
def _linear():
    x, weight, bias = floats(TOKENS, DIM), floats(4 * DIM, DIM), floats(4 * DIM)
    yield lambda: ops.linear(x, weight, bias), size(x, weight, bias) + 16 * TOKENS * DIM


@case("linear_weight_grad")
def _linear_weight_grad():
    grid = torch.zeros(4 * DIM, DIM, dtype=torch.int64, device=GPU)
    dout, x, cuts = floats(TOKENS, 4 * DIM), floats(TOKENS, DIM), _offsets()
    yield lambda: ops.linear_weight_grad(grid, dout, x, cuts), size(dout, x, cuts) + 2 * size(grid)


@case("linear_weight_grad of rows")
def _linear_weight_grad_of_rows():
    (grid,) = _sums((4 * DIM, DIM))
    dout, x = floats(TOKENS, 4 * DIM), floats(TOKENS, DIM)
    yield lambda: ops.linear_weight_grad(grid, dout, x), size(dout, x) + 2 * size(grid)


@case("linear_weight_grad of 8,192 tokens, with bias")
def _linear_weight_grad_of_many():
    grid, bias = _sums((4 * DIM, DIM), (4 * DIM,))
    dout, x = floats(KEYS, 4 * DIM), floats(KEYS, DIM)
    cuts, options = on_gpu(torch.arange(0, KEYS + 1, LENGTH)), {"bias_accumulator": bias, "bias_name": "bias"}
    least = size(dout, x, cuts) + 2 * size(grid, bias)
    yield lambda: ops.linear_weight_grad(grid, dout, x, cuts, **options), least


def _forward_and_backward(
    call: Callable[[], torch.Tensor], least: int, *given: torch.Tensor
) -> Iterable[Measured]:
    """Forward reads all that is given; backward reads that and the result's gradient, and writes theirs."""
    kept: list[torch.Tensor] = []
    yield lambda: kept.append(call()), least
    gradient = torch.ones_like(kept[-1])
    yield lambda: kept[-1].backward(gradient), least + size(*given)


@case("norm_mul_dropout", "norm_mul_dropout, backward")
def _norm():
    x, weight, bias = floats(TOKENS, DIM, grad=True), floats(DIM, grad=True), floats(DIM, grad=True)
    u = floats(TOKENS, DIM, grad=True)
    given = x, u, weight, bias
    yield from _forward_and_backward(
        lambda: ops.norm_mul_dropout(x, u, weight, bias), size(*given, x), *given
    )


@case("norm_linear_silu", "norm_linear_silu, backward")
def _norm_linear_silu():
    x, scale, shift = floats(TOKENS, DIM, grad=True), floats(DIM, grad=True), floats(DIM, grad=True)
    weight, bias = floats(4 * DIM, DIM, grad=True), floats(4 * DIM, grad=True)
    given = x, scale, shift, weight, bias
    least = size(*given) + 16 * TOKENS * DIM
    yield from _forward_and_backward(lambda: ops.norm_linear_silu(*given), least, *given)


@case("norm_mul_dropout, exact backward")
def _exact_norm():
    dy, x, u, du = (floats(TOKENS, DIM) for _ in range(4))
    weight, bias, rows, sums = floats(DIM), floats(DIM), floats(TOKENS), _sums((DIM,), (DIM,))
    given = dy, x, u, weight, bias, 0.0, 0, None, None, rows, rows
    least = size(dy, x, u, weight, bias, rows, rows, du, x) + 2 * size(*sums)
    yield lambda: NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*sums, du, *given, BITS, ["weight", "bias"]), least


@case("norm_linear_silu, exact backward")
def _exact_front():
    dy, z, x, rows = floats(TOKENS, 4 * DIM), floats(TOKENS, 4 * DIM), floats(TOKENS, DIM), floats(TOKENS)
    parameters = [floats(*shape) for shape in ((DIM,), (DIM,), (4 * DIM, DIM), (4 * DIM,))]
    sums, names = _sums(*(each.shape for each in parameters)), ["scale", "shift", "weight", "bias"]
    given = x, *parameters, 1e-6, z, x[:0], rows, rows, _offsets()
    least = size(dy, z, x, rows, rows, *parameters, dy, x) + 2 * size(*sums)
    yield lambda: NORM_LINEAR_SILU_BACKWARD_EXACT.launch(*sums, dy, *given, BITS, names), least


def _sums(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.int64, device=GPU) for shape in shapes]


@case("hstu_attention", "hstu_attention, backward")
def _attention():
    q, k, v = (floats(TOKENS, HEADS, DIM // HEADS, grad=True) for _ in range(3))
    cuts, options = _offsets(), {"alpha": 0.1, "scaling_seqlen": LENGTH}
    yield from _forward_and_backward(
        lambda: ops.hstu_attention(q, k, v, cuts, LENGTH, **options), size(q, k, v, q, cuts), q, k, v
    )


def _softmax_inputs():
    """Hidden states, labels, which negatives count, and 3,000 rows of which each is a negative 11 times."""
    hidden, positives = floats(TOKENS, DIM, grad=True), floats(TOKENS, DIM, grad=True)
    valid = torch.ones(TOKENS, 32, dtype=torch.bool, device=GPU)
    rows = torch.arange(TOKENS * 32, device=GPU).mul(7919).remainder(DISTINCT).view(TOKENS, 32)
    return hidden, positives, floats(DISTINCT, DIM, grad=True), valid, rows


@case("sampled_softmax, gathered", "sampled_softmax, gathered, backward")
def _gathered_softmax():
    hidden, positives, matrix, valid, rows = _softmax_inputs()

    def call():
        negatives = ops.gather_rows(matrix, rows.flatten()).view(TOKENS, 32, DIM)
        return ops.sampled_softmax(hidden, positives, negatives, valid)

    given = hidden, positives, matrix
    yield from _forward_and_backward(call, size(*given, valid, rows) + 4 * TOKENS, *given)


@case("sampled_softmax by rows", "sampled_softmax by rows, backward")
def _softmax_by_rows():
    hidden, positives, matrix, valid, rows = _softmax_inputs()
    given = hidden, positives, matrix
    least = size(*given, valid, rows) + 4 * TOKENS
    yield from _forward_and_backward(
        lambda: ops.sampled_softmax(hidden, positives, matrix, valid, rows=rows), least, *given
    )


@case("sampled_softmax", "sampled_softmax, backward")
def _softmax():
    hidden, negatives = floats(TOKENS, DIM, grad=True), floats(TOKENS, 32, DIM, grad=True)
    positives, valid = floats(TOKENS, DIM, grad=True), torch.ones(TOKENS, 32, dtype=torch.bool, device=GPU)
    given = hidden, positives, negatives
    least = size(*given, valid) + 4 * TOKENS
    yield from _forward_and_backward(lambda: ops.sampled_softmax(*given, valid), least, *given)


def measure(names: tuple[str, ...], session: Session, gpu: Pretended) -> list[dict[str, Any]]:
    """A row for each call of a case, the second time that it runs: the first may choose tiles."""
    rows = []
    for turn in ("first", "counted"):
        torch.manual_seed(3)
        for name, (call, least) in zip(names, CASES[names](), strict=True):
            session.history.clear()
            with gpu.stage(f"{name}, {turn}"):
                call()
            if turn == "first":
                continue
            stage, counts = f"{name}, counted", [count for _, count in session.history]
            rows.append(
                {
                    "op": name,
                    "launches": gpu.launches[stage],
                    "calls": gpu.calls[stage],
                    "waits": gpu.waits_of(stage),
                    "read": sum(count.bytes_read for count in counts),
                    "written": sum(count.bytes_written for count in counts),
                    "least": least,
                    "instructions": sum(count.instructions for count in counts),
                    "most": max((count.most for count in counts), default=0),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of text, below their titles; bytes in KiB."""
    titles = ["op", "launches", "aten calls", "waits"]
    titles += ["KiB read", "KiB written", "least KiB", "ratio", "instructions", "most of one program"]
    lines = []
    for row in rows:
        moved = row["read"] + row["written"]
        kib = [f"{row[what] / 1024:,.0f}" for what in ("read", "written", "least")]
        numbers = [str(row[what]) for what in ("launches", "calls", "waits")]
        instructions = (f"{row[what]:,}" for what in ("instructions", "most"))
        lines.append([row["op"], *numbers, *kib, f"{moved / row['least']:.2f}", *instructions])
    return [titles, *lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="ops whose name contains this")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    rows = []
    quiet = Emulation("sm_90", races=False, uninitialised=False)
    with emulated(quiet) as session, pretended() as gpu:
        session.keep_history = True
        with GradientAccumulator(torch.nn.Module(), BITS).active(), DeferredErrors().active():  # as in a step
            for names in CASES:
                if not options.only or any(options.only in name for name in names):
                    rows += measure(names, session, gpu)
    show(table(rows), SIZES)
    if options.update:
        if options.only:  # others keep their figures
            measured = {row["op"]: row for row in rows}
            rows = [measured.get(row["op"], row) for row in json.loads(BASELINE.read_text())]
        from compile_matrix import put_between

        BASELINE.write_text(json.dumps(rows, indent=1) + "\n")
        DOCS.write_text(put_between(DOCS.read_text(), "per op", markdown(table(rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
