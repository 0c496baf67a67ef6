"""HSTU attention with masks, bias and delta queries together: held to float64, twice plain float32's error.

`judge` is the check; attentions that are wrong in one term, of `ci/mutants/intentions.jsonl`, must fail it.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_cases import CASES, RESULTS, N, doubled, grouped, judge, make, run
from hypothesis import given
from hypothesis import strategies as st
from impls import IMPLS, TRITON, on
from speeds import slow_except, slow_on_triton

from tritonrec.kernels.hstu_attention import checks, op
from tritonrec.kernels.hstu_attention.call import Call, HSTUMask, describe
from tritonrec.kernels.hstu_attention.checks import check_counts
from tritonrec.kernels.hstu_attention.op import HSTU_ATTENTION, HSTU_ATTENTION_BACKWARD, hstu_attention
from tritonrec.kernels.hstu_attention.triton_bias import log2_of_difference
from tritonrec.kernels.numba_sequences import log2_of_difference as log2_on_cpu

QUICK = ("contexts", "times", "delta", "one_scale")


def on_triton(name):
    return pytest.param("triton", name, marks=[*TRITON.marks, pytest.mark.slow])


@lru_cache
def expected(name):
    """Plain float32 and exact results."""
    tensors, call = make(*CASES[name])
    exact = run("reference", doubled(tensors), Call(*doubled(call)))
    return run("reference", tensors, call), exact


@pytest.mark.parametrize(("impl", "name"), slow_on_triton(IMPLS[1:], CASES, QUICK))
def test_error_is_that_of_plain_float32(impl, name):
    tensors, call = make(*CASES[name])
    judge(tensors, call, run(impl, tensors, call), *expected(name))


@pytest.mark.parametrize("name", ["semi_local", "both", "delta_of_everything"])
def test_the_reference_agrees_with_autograd(name):
    """float64: the reference's own gradients against those of its forward."""
    tensors, call = make(*CASES[name])
    do, *leaves = (tensor.double() for tensor in tensors)
    call = Call(*doubled(call))
    tables = [table for table in (call.pos_weights, call.ts_weights) if table is not None]
    for leaf in (*leaves, *tables):
        leaf.requires_grad_()
    out = op.hstu_attention_reference(*leaves, *call)
    meant = torch.autograd.grad(out, [*leaves, *tables], do)
    into = op.hstu_attention_backward_into_reference
    got = op.hstu_attention_backward(into, do, *map(detached, (*leaves, *call)))
    got = [*got[:3], *(table.sum(0) for table in got[3:] if table.numel())]
    for one, two in zip(got, meant, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        *(("cpu", name) for name in ("both", "delta_of_everything", "window")),
        on_triton("delta_of_everything"),
    ],
)
def test_a_sequence_keeps_its_bits_in_any_batch(impl, name):
    lengths, _, contexts, _, queries, bias, options = CASES[name]
    tensors, call = make(*CASES[name])
    whole = run(impl, tensors, call)
    for b, length in enumerate(lengths):
        tokens = slice(*call.seq_offsets[b : b + 2].tolist())
        rows = tokens if queries is None else slice(*call.delta_offsets[b : b + 2].tolist())
        alone = call._replace(
            seq_offsets=torch.tensor([0, length]),
            num_targets=call.num_targets[b : b + 1],
            num_contexts=None if contexts is None else call.num_contexts[b : b + 1],
            delta_offsets=None if queries is None else torch.tensor([0, queries[b]]),
            attn_scale=call.attn_scale[rows] if "scales" in options else None,
            timestamps=call.timestamps[tokens] if "times" in bias else None,
            query_timestamps=call.query_timestamps[tokens] if "shifted" in options else None,
        )
        cuts = (rows, rows, tokens, tokens, slice(b, b + 1), slice(b, b + 1))
        chosen = [tensor[cut] for tensor, cut in zip(tensors, (rows, rows, tokens, tokens), strict=True)]
        for what, all_of, part, cut in zip(RESULTS, whole, run(impl, chosen, alone), cuts, strict=True):
            assert torch.equal(all_of[cut], part), f"{what} of sequence {b}"


@pytest.mark.parametrize(
    ("impl", "name"),
    [*(("cpu", name) for name in ("positions_both_ways", "both", "semi_local")), on_triton("semi_local")],
)
def test_delta_queries_have_the_bits_of_the_full_call(impl, name):
    tensors, call = make(*CASES[name])
    full = run(impl, tensors, call)[0]
    lengths = call.seq_offsets.diff()
    deltas = torch.minimum(lengths, torch.tensor([7, 1, 33][: len(lengths)]))
    stops = zip(call.seq_offsets[1:], deltas, strict=True)
    rows = torch.cat([torch.arange(stop - delta, stop) for stop, delta in stops])
    delta = call._replace(
        delta_offsets=torch.tensor([0, *deltas.cumsum(0)]),
        attn_scale=None if call.attn_scale is None else call.attn_scale[rows],
    )
    got = run(impl, (tensors[0][rows], tensors[1][rows], *tensors[2:]), delta)[0]
    assert torch.equal(got, full[rows])


@pytest.mark.parametrize(("impl", "name"), slow_on_triton([TRITON], ["one_scale", "both"], ["one_scale"]))
def test_atomic_dq_is_as_exact(impl, name):
    tensors, call = make(*CASES[name])
    got = run(impl, tensors, call._replace(deterministic=False))
    judge(tensors, call, got, *expected(name))
    same = run(impl, tensors, call)
    assert all(map(torch.equal, got[2:], same[2:])) and torch.equal(got[0], same[0])


@pytest.mark.parametrize("dtype", slow_except([torch.float16], [torch.float16, torch.bfloat16]))
@pytest.mark.parametrize("impl", [TRITON])
def test_half_precision_takes_every_option(impl, dtype):
    tensors, call = make(*CASES["delta_of_everything"])
    tensors = [tensor.to(dtype) for tensor in tensors]
    exact = run("reference", doubled(tensors), Call(*doubled(call)))
    for what, one, other in zip(RESULTS, run(impl, tensors, call), exact, strict=True):
        allowed = (0.05 if dtype == torch.bfloat16 else 0.005) * float(other.abs().max())
        assert (one.double() - other).abs().max() <= allowed, what


def test_conveniences_say_the_same():
    lengths, targets = [9, 0, 2, 5], torch.tensor([2, 0, 1, 5])
    tensors, call = make(lengths, targets.tolist(), [3, 0, 1, 0], (1, 0, 0, 0), None, "", "")
    _, q, k, v = tensors
    got = hstu_attention(
        q, k, v, call.seq_offsets, 9, alpha=call.alpha, scaling_seqlen=N,
        mask=HSTUMask(targets, contextual_seq_len=3),
    )  # fmt: skip
    assert torch.equal(got, HSTU_ATTENTION(q, k, v, *call))
    scales = torch.full((16,), np.float32(1 / N))
    for scale in (scales, scales[:1]):
        scaled = hstu_attention(
            q, k, v, call.seq_offsets, 9, alpha=call.alpha, attn_scale=scale,
            mask=HSTUMask(targets, num_contexts=call.num_contexts),
        )  # fmt: skip
        assert torch.equal(scaled, got)


@triton.jit
def log2_kernel(late_ptr, early_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, log2_of_difference(tl.load(late_ptr + at), tl.load(early_ptr + at)))


@pytest.mark.parametrize("impl", IMPLS)
def test_buckets_are_exact_at_powers_of_two(impl):
    """Differences 2**k and 2**k - 1, and what leaves int64."""
    least, most = -(2**63), 2**63 - 1
    pairs = [(2**k - d, 0) for k in range(63) for d in (0, 1)] + [(most, 0), (0, 5), (-7, -7), (5, 4)]
    pairs += [(most, least), (most, -1), (0, least), (-1, least), (least, most), (most - 1, -2)]
    late, early = (torch.tensor(side) for side in zip(*pairs, strict=True))
    meant = [max(1, a - b).bit_length() - 1 for a, b in pairs]
    if impl == "triton":
        room = 256
        late, early = (torch.nn.functional.pad(side, (0, room - len(side))) for side in (late, early))
        out = torch.empty(room, dtype=torch.int32)
        late, early, out = (on(impl, tensor) for tensor in (late, early, out))
        log2_kernel[(1,)](late, early, out, N=room)
        assert out.tolist()[: len(meant)] == meant
    elif impl == "cpu":
        assert [log2_on_cpu(np.int64(a), np.int64(b)) for a, b in pairs] == meant
    else:
        assert [int(op.buckets([a], [b], 64)) for a, b in pairs] == meant


@given(st.data(), st.integers(0, 2**31))
def test_any_options_together(data, seed):
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any))
    targets = [data.draw(st.integers(0, length)) for length in lengths]
    contexts = [data.draw(st.integers(0, min(5, n - t))) for n, t in zip(lengths, targets, strict=True)]
    some = st.integers(0, 20)
    numbers = (data.draw(st.integers(1, 5)), data.draw(some), data.draw(some), data.draw(some))
    queries = data.draw(st.sampled_from([None, [data.draw(st.integers(0, n)) for n in lengths]]))
    bias = data.draw(st.sampled_from(["", "two", "times", "two times"]))
    options = data.draw(st.sampled_from(["", "scales", "scale", "nvidia", "shifted"]))
    dims = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    tensors, call = make(lengths, targets, contexts, numbers, queries, bias, options, dims, seed)
    exact = run("reference", doubled(tensors), Call(*doubled(call)))
    for what, one, other in zip(RESULTS, run("cpu", tensors, call), exact, strict=True):
        limit = 2e-5 * (1 + other.abs().amax()) if other.numel() else 0
        torch.testing.assert_close(one.double(), other, rtol=0, atol=float(limit), msg=what)


class Recorder:
    """Stands for a kernel: takes any launch."""

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        return lambda *arguments, **options: None


@pytest.mark.parametrize("backward", ["two kernels", "atomics"])
def test_the_host_never_waits_for_the_device(monkeypatch, backward):
    """On meta tensors, which have no values, reading one raises."""
    from tritonrec.kernels.hstu_attention import triton_attention, triton_tiles

    kernels = ["forward_kernel", "rows_kernel", "columns_kernel", "positions_kernel", "times_kernel"]
    recorder = Recorder()
    for name in (*kernels, "parts_kernel"):
        monkeypatch.setattr(triton_attention, name, recorder)
    monkeypatch.setattr(triton_tiles, "order_kernel", recorder)
    tensors, call = make(*CASES["delta_of_everything"])
    do, q, k, v = (tensor.to("meta") for tensor in tensors)
    call = Call(*(value.to("meta") if isinstance(value, torch.Tensor) else value for value in call))
    call = call._replace(deterministic=backward != "atomics")
    with pytest.raises(RuntimeError):
        call.seq_offsets[0].item()
    checks.check(q, k, v, *call)
    HSTU_ATTENTION.launch(q, k, v, *call, impl="triton")
    HSTU_ATTENTION_BACKWARD.launch(do, q, k, v, *call, impl="triton")
    # a list of tiles before each kernel, and the sum of parts
    assert recorder.launches == 2 * (5 if backward == "two kernels" else 4) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_targets": torch.tensor([0, 3])}, r"num_targets\[1\] = 3"),
        ({"num_targets": torch.tensor([-1, 0])}, r"num_targets\[0\] = -1"),
        ({"scaling_seqlen": None}, "scaling_seqlen or attn_scale"),
        ({"attn_scale": torch.ones(5)}, "scaling_seqlen or attn_scale"),
        ({"num_contexts": torch.tensor([0, 3])}, r"num_contexts\[1\] = 3 .* 2 tokens left"),
        ({"num_contexts": torch.tensor([2, 0]), "num_targets": torch.tensor([2, 0])}, r"num_contexts\[0\]"),
        ({"num_contexts": torch.tensor([0, 0]), "contextual_seq_len": 1}, "not both"),
        ({"contextual_seq_len": -1}, "contextual_seq_len must be at least 0"),
        ({"attn_scale": torch.ones(5, requires_grad=True), "scaling_seqlen": None}, "no gradient"),
        ({"pos_weights": torch.ones(4)}, "max_seq_len = 3 entries or 5"),
        ({"pos_weights": torch.ones(3), "contextual_seq_len": 1}, "contextual tokens see later tokens"),
        ({"pos_weights": torch.ones(2, 3)}, "one table for all heads"),
        ({"ts_weights": torch.ones(4)}, "go together"),
        ({"timestamps": torch.ones(5, dtype=torch.int64)}, "go together"),
        ({"q": torch.ones(3, 2, 4)}, "give delta_offsets"),
        ({"q": torch.ones(3, 2, 4), "delta_offsets": torch.tensor([0, 3])}, "delta_offsets must be"),
        ({"q": torch.ones(4, 2, 4), "delta_offsets": torch.tensor([0, 4, 4])}, "number of queries"),
        ({"q": torch.ones(3, 2, 4), "delta_offsets": torch.tensor([0, 1, 2])}, "end at the 3 tokens"),
    ],
)
@pytest.mark.parametrize("impl", IMPLS[:2])
def test_what_does_not_fit_is_refused(impl, change, message):
    fits = {
        "q": torch.ones(5, 2, 4), "k": torch.ones(5, 2, 4), "v": torch.ones(5, 2, 3), "max_seq_len": 3,
        "seq_offsets": torch.tensor([0, 3, 5]), "alpha": 1.0, "scaling_seqlen": 4, "impl": impl,
    }  # fmt: skip
    hstu_attention(**grouped(**fits))
    with pytest.raises(ValueError, match=message):
        hstu_attention(**grouped(**{**fits, **change}))


@pytest.mark.parametrize(("entries", "index"), [(None, (0, 0)), (5, (0, -1)), (9, (4, 1))])
def test_the_diagonal_is_the_first_weight_of_one_side_and_the_middle_one_of_two(entries, index):
    weights = None if entries is None else torch.zeros(entries)
    call = Call(torch.tensor([0, 5]), 5, 0.5, 3, pos_weights=weights)
    assert call.position_index == index and call.deterministic


@pytest.mark.parametrize(("counts", "fit"), [([0, 3], True), ([1, 4], False), ([-1, 3], False)])
def test_counts_on_a_device_are_checked_there(counts, fit, monkeypatch):
    class There(torch.Tensor):
        device = torch.device("cuda")

    seen = []
    monkeypatch.setattr(torch, "_assert_async", lambda fits, message: seen.append((bool(fits), message)))
    check_counts("num_targets", torch.tensor(counts).as_subclass(There), torch.tensor([2, 3]))
    assert seen == [(fit, "num_targets must lie between 0 and what a sequence has left")]


@pytest.mark.parametrize("length", [2.5, "9"])
def test_a_scaling_length_that_is_no_whole_number_is_refused(length):
    with pytest.raises(TypeError, match="scaling_seqlen must be a whole number"):
        describe(torch.tensor([0, 5]), 5, alpha=0.5, scaling_seqlen=length)


@pytest.mark.parametrize("alpha", ["cpu", "nan", None, pytest.param(10**400, id="huge")])
def test_an_alpha_that_is_no_number_is_refused(alpha):
    with pytest.raises(TypeError, match="alpha must be a number, got"):
        describe(torch.tensor([0, 5]), 5, alpha=alpha, scaling_seqlen=9)


@pytest.mark.parametrize("alpha", [2, np.float32(2), torch.tensor(2)])
def test_an_alpha_of_another_type_is_a_float_for_the_kernel(alpha):
    assert type(describe(torch.tensor([0, 5]), 5, alpha=alpha, scaling_seqlen=9).alpha) is float
