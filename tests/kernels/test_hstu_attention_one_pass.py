"""HSTU attention's backward in one pass: the bits of the two kernels, and when a batch takes it."""

import pytest
import torch
import triton
from attention_cases import CASES, RESULTS, doubled, judge, make, run
from impls import GPU, TRITON, on
from speeds import slow_except

from tritonrec.kernels import dispatch
from tritonrec.kernels.hstu_attention import triton_attention
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.hstu_attention.triton_attention import (
    configuration,
    fills_the_device,
    may_take_one_pass,
)

pytestmark = [*TRITON.marks]
AT_ONCE = 264  # programs
# blocks of 64 take the interpreter long
LARGE = [] if GPU or dispatch.emulated else [pytest.mark.slow]

# beside those of `attention_cases`: one block and more of 64 or 32 keys, and queries for blocks of them
LONG = {
    "blocks": ([200, 1, 64, 0, 65, 130], None, None, (1, 0, 0, 0), None, "", ""),
    "blocks_of_targets": ([140, 70], [75, 70], None, (3, 0, 0, 0), None, "", ""),
    "blocks_of_contexts": ([150, 140], [5, 0], [80, 140], (1, 40, 0, 0), None, "", "scales"),
    "blocks_of_queries": (
        [150, 190, 66, 40],
        [70, 0, 3, 0],
        [2, 0, 1, 0],
        (2, 50, 20, 70),
        [90, 130, 0, 5],
        "",
        "scales",
    ),
}


@pytest.fixture
def passes(monkeypatch):
    """Runs a case in one pass or in two."""

    def passed(one_pass, tensors, call):
        monkeypatch.setattr(triton_attention, "may_take_one_pass", lambda *given: one_pass)
        monkeypatch.setattr(triton_attention, "fills_the_device", lambda *given: one_pass)
        launched = []
        launch = triton_attention.launch

        def noted(kernel, *given, **named):
            launched.append(getattr(kernel, "fn", kernel).__name__)
            return launch(kernel, *given, **named)

        with monkeypatch.context() as patched:
            patched.setattr(triton_attention, "launch", noted)
            results = run("triton", tensors, call)
        assert ("sequences_kernel" in launched, "rows_kernel" in launched) == (one_pass, not one_pass)
        return results

    return passed


def narrow(name):
    """A case with heads of 8 and 6 features; (tensors, call)."""
    return make(*(CASES | LONG)[name])


def same_bits(passes, tensors, call):
    q = on("triton", tensors[1])
    if not may_take_one_pass(q, configuration(*tensors[1].shape[2:], *tensors[3].shape[2:], q.dtype)):
        pytest.skip("numpy adds in an order of its own: run with --emulate")
    for what, one, two in zip(RESULTS, *(passes(each, tensors, call) for each in (True, False)), strict=True):
        assert torch.equal(one, two), what


@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_one_pass_has_the_bits_of_two(passes, name):
    same_bits(passes, *narrow(name))


@pytest.mark.parametrize("dims", [(2, 64, 64), (1, 30, 10), (1, 20, 60)])
def test_one_pass_has_the_bits_of_two_with_wide_heads(passes, dims):
    same_bits(passes, *make(*LONG["blocks_of_queries"], dims=dims))


@pytest.mark.parametrize("name", slow_except(["delta_of_everything"], [*CASES, *LONG]))
def test_one_pass_is_as_exact(passes, name):
    tensors, call = narrow(name)
    exact = run("reference", doubled(tensors), Call(*doubled(call)))
    judge(tensors, call, passes(True, tensors, call), run("reference", tensors, call), exact)


@pytest.mark.parametrize("name", [pytest.param("blocks_of_queries", marks=LARGE)])
def test_a_sequence_keeps_its_bits_in_one_pass(passes, name):
    """Alone, with room in `max_seq_len` and behind an odd number of tokens, it has those of its batch."""
    lengths, targets, contexts, _, queries, *_ = LONG[name]
    tensors, call = narrow(name)
    whole = passes(True, tensors, call)
    for b, length in enumerate(lengths):
        if queries[b] == 0:
            continue
        tokens, rows = slice(*call.seq_offsets[b : b + 2]), slice(*call.delta_offsets[b : b + 2])
        alone = call._replace(
            seq_offsets=torch.tensor([0, 3, 3 + length]), delta_offsets=torch.tensor([0, 0, queries[b]]),
            num_targets=torch.tensor([0, targets[b]]), num_contexts=torch.tensor([0, contexts[b]]),
            attn_scale=call.attn_scale[rows], max_seq_len=call.max_seq_len + 1000,
        )  # fmt: skip
        do, q, k, v = (tensor[cut] for tensor, cut in zip(tensors, (rows, rows, tokens, tokens), strict=True))
        k, v = (torch.cat([torch.full((3, *side.shape[1:]), 9.0), side]) for side in (k, v))
        _, dq, dk, dv, *_ = passes(True, (do, q, k, v), alone)
        for got, meant in ((dq, whole[1][rows]), (dk[3:], whole[2][tokens]), (dv[3:], whole[3][tokens])):
            assert torch.equal(got, meant), f"sequence {b}"
        assert dk[:3].eq(0).all() and dv[:3].eq(0).all()


@pytest.mark.parametrize("name", [pytest.param("blocks_of_queries", marks=LARGE)])
def test_one_pass_writes_every_element_and_nothing_else(passes, name):
    tensors, call = narrow(name)
    meant = passes(True, tensors, call)[1:4]
    do, q, k, v = (on("triton", tensor) for tensor in tensors)
    call = Call(*(on("triton", value) for value in call))
    guarded = [
        torch.full([size + 2 for size in tensor.shape], float("nan"), device=q.device) for tensor in (q, k, v)
    ]
    inner = [buffer[1:-1, 1:-1, 1:-1] for buffer in guarded]
    triton_attention.backward(do, q, k, v, call, *inner, *call.new_table_gradients())
    for what, got, value, buffer in zip(RESULTS[1:], inner, meant, guarded, strict=False):
        assert torch.equal(got.cpu(), value), what
        assert buffer.isnan().sum() == buffer.numel() - got.numel(), f"guard band of {what}"


@pytest.mark.parametrize(
    ("dtype", "found", "dims", "expected"),
    [
        (torch.float32, (8, 0), (64, 64), True), (torch.float32, (9, 0), (50, 7), True),
        (torch.float32, (12, 0), (16, 64), True), (torch.float32, (7, 5), (64, 64), False),
        (torch.float32, (0, 0), (64, 64), False), (torch.bfloat16, (9, 0), (64, 64), False),
        (torch.float16, (8, 0), (64, 64), False), (torch.float32, (9, 0), (65, 64), False),
        (torch.float32, (9, 0), (16, 128), False),
    ],
)  # fmt: skip
def test_one_pass_is_for_products_that_add_in_order(monkeypatch, dtype, found, dims, expected):
    monkeypatch.setattr(dispatch, "capability", lambda tensor: found)
    config = configuration(*dims, dtype, True, found)
    assert may_take_one_pass(torch.empty(1, 1, 1, dtype=dtype), config) is expected


@pytest.mark.parametrize(
    ("sequences", "mean", "longest", "heads", "own", "expected"),
    [
        (1, 10, 64, 1, 64, True),  # a block is the work of a program either way
        (1, 65, 65, 1, 64, False),
        (66, 256, 256, 4, 64, True),  # one round that is full
        (40, 256, 256, 4, 64, False),  # six tenths of one
        (67, 256, 256, 4, 64, False),  # the second round has 4 programs
        (110, 256, 256, 4, 64, True),
        (66, 128, 128, 4, 32, True),
        (300, 256, 1024, 4, 64, False),  # one sequence may be as long as all others of its processor
        (4000, 256, 1024, 4, 64, True),
    ],
)
def test_one_pass_is_taken_where_it_ends_earlier(sequences, mean, longest, heads, own, expected):
    call = Call(torch.empty(sequences + 1, device="meta"), longest, 1.0)
    assert fills_the_device(call, sequences * mean, heads, own, AT_ONCE) is expected


def test_it_never_ends_later_by_the_count_of_pairs():
    """Programs of drawn lengths, the longest first, each on the processor that is free first."""
    generator = torch.Generator().manual_seed(0)
    at_once, own, taken = 8, 64, 0
    for _ in range(300):
        longest, sequences, heads = (
            int(torch.randint(1, most, (), generator=generator)) for most in (600, 60, 4)
        )
        draws = torch.rand(sequences, generator=generator) ** float(torch.rand((), generator=generator))
        lengths = [max(1, int(draw * longest)) for draw in draws]
        call = Call(torch.empty(sequences + 1, device="meta"), longest, 1.0)
        if longest <= own or not fills_the_device(call, sum(lengths), heads, own, at_once):
            continue
        taken += 1
        blocks = [triton.cdiv(length, own) for length in lengths for _ in range(heads)]
        one = 0.8 * makespan([n * (n + 1) / 2 for n in blocks], at_once)
        # two kernels in perfect balance, but no shorter than their longest programs
        two = sum(n * (n + 1) / 2 for n in blocks) / at_once
        assert one <= max(two, max(blocks)) + 1e-9, lengths
    assert taken > 50


def makespan(works, at_once):
    ends = [0.0] * at_once
    for work in sorted(works, reverse=True):
        ends[ends.index(min(ends))] += work
    return max(ends)
