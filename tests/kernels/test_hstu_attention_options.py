"""HSTU attention with masks, bias and delta queries together: held to float64, and mutants are found out.

`judge` is the check: worst element and worst block of every result against twice the error of plain float32.
The mutants at the end are attentions that are wrong in one term; each must fail it.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from float_error import assert_error_at_most_twice
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.kernels.hstu_attention import (
    attention_backward,
    attention_forward,
    checks,
    hstu_attention,
    masks,
    reference,
)
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.hstu_attention.triton_bias import log2_of_difference
from tritonrec.kernels.numba_sequences import log2_of_difference as log2_on_cpu

GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
IMPLS = ["reference", "cpu", TRITON]
RESULTS = ("out", "dq", "dk", "dv", "dpos", "dts")
N = 11

# name: lengths, targets, contexts, (group, window, full, prefix), queries, bias, further options
CASES = {
    "contexts": ([70, 5, 0, 9, 1], [3, 1, 0, 0, 0], [4, 2, 0, 9, 1], (1, 0, 0, 0), None, "", ""),
    "groups": ([40, 9, 1], [23, 9, 1], None, (5, 0, 0, 0), None, "", ""),
    "window": ([70, 0, 33], [4, 0, 1], None, (1, 7, 0, 0), None, "", ""),
    "window_of_blocks": ([150], [20], [3], (1, 33, 0, 0), None, "", ""),
    "semi_local": ([90, 6, 40], [9, 0, 40], [3, 6, 0], (4, 9, 0, 12), None, "", ""),
    "full_rows": ([90, 6, 40], [9, 2, 0], [3, 0, 1], (1, 9, 20, 0), None, "", ""),
    "positions": ([40, 1, 0, 18], [3, 0, 0, 0], None, (1, 0, 0, 0), None, "one", ""),
    "positions_both_ways": ([66, 9], [3, 2], [5, 4], (1, 8, 0, 3), None, "two", ""),
    "times": ([50, 1, 0, 20], None, None, (1, 0, 0, 0), None, "times", ""),
    "both": ([34, 0, 40], [5, 0, 0], [2, 0, 3], (2, 12, 4, 2), None, "two times", "nvidia scales shifted"),
    "delta": ([70, 0, 33, 12], [3, 0, 1, 2], None, (1, 0, 0, 0), [5, 0, 33, 0], "", ""),
    "delta_of_everything": (
        [70, 0, 33, 12], [9, 0, 1, 2], [2, 0, 0, 1], (3, 9, 3, 2), [6, 0, 33, 0], "two times", "scales",
    ),
    "one_scale": ([20, 3], None, None, (1, 0, 0, 0), None, "", "scale"),
}  # fmt: skip


def on_triton(name):
    return pytest.param("triton", name, marks=TRITON.marks)


def on(impl, tensor):
    return tensor.cuda() if impl == "triton" and GPU and isinstance(tensor, torch.Tensor) else tensor


def make(lengths, targets, contexts, numbers, queries, bias, options, dims=(2, 8, 6), seed=7):
    """(do, q, k, v) and the call; |alpha q k| up to 8."""
    heads, dim_qk, dim_v = dims
    generator = torch.Generator().manual_seed(seed)
    tokens, rows = sum(lengths), sum(lengths if queries is None else queries)
    longest = max(lengths)

    def draw(*shape):
        return torch.randn(shape, generator=generator) * 1.5 + 0.2

    tensors = (draw(rows, heads, dim_v), draw(rows, heads, dim_qk), draw(tokens, heads, dim_qk))
    tensors = (*tensors, draw(tokens, heads, dim_v))
    top = max((torch.einsum("ihd,jhd->hij", *tensors[1:3]).abs().max().item(), 1e-3)) if rows else 1.0
    alpha = 8 / top
    positions = {"one": longest, "two": 2 * longest - 1}.get(bias.split(" ")[0])
    has_times = "times" in bias
    times = torch.randint(-3, 300, (tokens,), generator=generator).cumsum(0) if has_times else None
    scale = {"scales": torch.rand(rows, generator=generator) / N, "scale": torch.tensor(0.3)}
    return tensors, Call(
        torch.tensor([0, *np.cumsum(lengths)]), longest, alpha, 1 if "scale" in options else N, list(numbers),
        None if targets is None else torch.tensor(targets),
        None if contexts is None else torch.tensor(contexts),
        None if queries is None else torch.tensor([0, *np.cumsum(queries)]),
        next((scale[word] for word in options.split() if word in scale), None),
        draw(positions) if positions else None, draw(9) if has_times else None, times,
        torch.cat([times[1:], times[-1:]]) if has_times and "shifted" in options else None,
        alpha if "nvidia" in options else 1.0,
    )  # fmt: skip


def run(impl, tensors, call):
    do, q, k, v = (on(impl, tensor) for tensor in tensors)
    call = Call(*(on(impl, value) for value in call))._replace(impl=impl)
    if q.dtype != torch.float64:
        checks.check_arguments(q, k, v, call, 0)
    checks.check_values(q, k, call)
    results = (attention_forward(q, k, v, call), *attention_backward(do, q, k, v, call))
    return [result.cpu() for result in results]


def doubled(values):
    return [
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in values
    ]


def judge(tensors, call, got, plain, exact):
    """AssertionError unless every result, and every block of 16 rows of one, is as good as plain float32."""
    for what, one, two, three in zip(RESULTS, got, plain, exact, strict=True):
        assert_error_at_most_twice(one, two, three, what)
        for start in range(0, len(three), 16):
            error = (one[start : start + 16].double() - three[start : start + 16]).norm()
            block = three[start : start + 16]
            allowed = 6 * (two.double() - three).norm() / max(1, len(three) / 16) ** 0.5
            assert error <= allowed + 1e-6 * block.norm() + 1e-9, f"{what}, rows from {start}: {error:.3g}"


@lru_cache
def expected(name):
    """Plain float32 and exact results."""
    tensors, call = make(*CASES[name])
    exact = run("reference", doubled(tensors), Call(*doubled(call)))
    return run("reference", tensors, call), exact


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("impl", IMPLS[1:])
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
    out = reference.forward(*leaves, call)
    meant = torch.autograd.grad(out, [*leaves, *tables], do)
    got = reference.backward(do, *(leaf.detach() for leaf in leaves), Call(*map(detached, call)))
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


@pytest.mark.parametrize("impl", [TRITON])
def test_atomic_dq_is_as_exact(impl):
    tensors, call = make(*CASES["both"])
    got = run(impl, tensors, call._replace(deterministic=False))
    judge(tensors, call, got, *expected("both"))
    same = run(impl, tensors, call)
    assert all(map(torch.equal, got[2:], same[2:])) and torch.equal(got[0], same[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
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
        q, k, v, call.seq_offsets, 9, alpha=call.alpha, scaling_seqlen=N, num_targets=targets,
        contextual_seq_len=3,
    )  # fmt: skip
    assert torch.equal(got, attention_forward(q, k, v, call))
    scales = torch.full((16,), np.float32(1 / N))
    for scale in (scales, scales[:1]):
        scaled = hstu_attention(
            q, k, v, call.seq_offsets, 9, alpha=call.alpha, attn_scale=scale, num_targets=targets,
            num_contexts=call.num_contexts,
        )  # fmt: skip
        assert torch.equal(scaled, got)


def test_tables_get_gradients_through_autograd():
    tensors, call = make(*CASES["both"])
    do, q, k, v = tensors
    tables = [table.clone().requires_grad_() for table in (call.pos_weights, call.ts_weights)]
    out = hstu_attention(
        q, k, v, call.seq_offsets, call.max_seq_len, alpha=call.alpha, attn_scale=call.attn_scale,
        num_targets=call.num_targets, num_contexts=call.num_contexts, target_group_size=2, max_attn_len=12,
        min_full_attn_seq_len=4, attn_prefix_len=2, pos_weights=tables[0], ts_weights=tables[1],
        timestamps=call.timestamps, query_timestamps=call.query_timestamps, bias_scaled_by_alpha=True,
    )  # fmt: skip
    by_sample = attention_backward(*tensors, call)[3:]
    for got, parts in zip(torch.autograd.grad(out, tables, do), by_sample, strict=True):
        assert torch.equal(got, parts.sum(0))


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
        assert [int(reference.buckets([a], [b], 64)) for a, b in pairs] == meant


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_host_never_waits_for_the_device(monkeypatch, deterministic):
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
    call = call._replace(impl="triton", deterministic=deterministic)
    with pytest.raises(RuntimeError):
        call.seq_offsets[0].item()
    checks.check_arguments(q, k, v, call, 0)
    checks.check_values(q, k, call)
    attention_forward(q, k, v, call)
    attention_backward(do, q, k, v, call)
    # a list of tiles before each kernel, and the sum of parts
    assert recorder.launches == 2 * (5 if deterministic else 4) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_contexts": torch.tensor([0, 3])}, r"num_contexts\[1\] = 3 .* 2 tokens left"),
        ({"num_contexts": torch.tensor([2, 0]), "num_targets": torch.tensor([2, 0])}, r"num_contexts\[0\]"),
        ({"num_contexts": torch.tensor([0, 0]), "contextual_seq_len": 1}, "not both"),
        ({"num_contexts": torch.tensor([0.0, 0.0])}, "int32 or int64"),
        ({"contextual_seq_len": -1}, "contextual_seq_len must be at least 0"),
        ({"target_group_size": 0}, "target_group_size must be at least 1"),
        ({"max_attn_len": -1}, "max_attn_len must be at least 0"),
        ({"attn_scale": torch.ones(3), "scaling_seqlen": None}, r"attn_scale must be \(5,\)"),
        ({"attn_scale": torch.ones(5, requires_grad=True), "scaling_seqlen": None}, "no gradient"),
        ({"pos_weights": torch.ones(4)}, "max_seq_len = 3 entries or 5"),
        ({"pos_weights": torch.ones(3), "contextual_seq_len": 1}, "contextual tokens see later tokens"),
        ({"pos_weights": torch.ones(2, 3)}, "one table for all heads"),
        ({"ts_weights": torch.ones(4)}, "go together"),
        ({"timestamps": torch.ones(5, dtype=torch.int64)}, "go together"),
        ({"ts_weights": torch.ones(4), "timestamps": torch.ones(5)}, "int64"),
        ({"q": torch.ones(3, 2, 4)}, "give delta_offsets"),
        ({"q": torch.ones(3, 2, 4), "delta_offsets": torch.tensor([0, 3])}, "delta_offsets must be"),
        ({"q": torch.ones(4, 2, 4), "delta_offsets": torch.tensor([0, 4, 4])}, "number of queries"),
        ({"q": torch.ones(3, 2, 4), "delta_offsets": torch.tensor([0, 1, 2])}, "end at the 3 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    fits = {
        "q": torch.ones(5, 2, 4), "k": torch.ones(5, 2, 4), "v": torch.ones(5, 2, 3), "max_seq_len": 3,
        "seq_offsets": torch.tensor([0, 3, 5]), "alpha": 1.0, "scaling_seqlen": 4,
    }  # fmt: skip
    hstu_attention(**fits)
    with pytest.raises(ValueError, match=message):
        hstu_attention(**{**fits, **change})


def with_mask(change):
    """The reference under a mask that `change` makes of (length, targets, contexts, mask)."""

    def attend(tensors, call, monkeypatch):
        right = masks.visible
        monkeypatch.setattr(reference, "visible", lambda *arguments: change(right, *arguments))
        return run("reference", tensors, call)

    return attend


def with_rule(**steps):
    """The reference with numbers of the mask a step away."""

    def change(visible, length, targets, contexts, mask):
        numbers = {name: getattr(mask, name) + step for name, step in steps.items()}
        return visible(length, targets, contexts, mask._replace(**numbers))

    return with_mask(change)


def with_silu(of_score):
    """Attention with another function of the scores, forward and backward by autograd."""

    def attend(tensors, call, monkeypatch):
        do, *leaves = (tensor.clone() for tensor in tensors)
        for leaf in leaves:
            leaf.requires_grad_()
        out = torch.zeros(len(leaves[0]), *leaves[2].shape[1:])
        for b in range(call.num_sequences):
            sequence = reference._Sequence(call, b, leaves[0])
            for h in range(do.shape[1]):
                s = sequence.scores(call, leaves[0], leaves[1], h)
                p = of_score(s) * sequence.scale
                out[sequence.rows, h] = p @ leaves[2][sequence.columns, h]
        return [out.detach(), *torch.autograd.grad(out, leaves, do), *run("reference", tensors, call)[4:]]

    return attend


def with_results(change):
    """Right results, one of them changed."""

    def attend(tensors, call, monkeypatch):
        results = run("cpu", tensors, call)
        change(dict(zip(RESULTS, results, strict=True)), tensors, call)
        return results

    return attend


def with_call(**changes):
    """The right attention, asked for something else."""

    def attend(tensors, call, monkeypatch):
        return run("cpu", tensors, call._replace(**{k: f(getattr(call, k)) for k, f in changes.items()}))

    return attend


def lost_update(results, tensors, call):
    """dq of 16 rows without the keys of one block of 16."""
    poked = [tensor.clone() for tensor in tensors]
    poked[3][16:32] = 0  # without these values no score gradient
    results["dq"][48:64] = run("cpu", poked, call)[1][48:64]


MUTANTS = {
    "half_of_x": with_silu(lambda s: s / 2),
    "silu_of_half": with_silu(lambda s: torch.nn.functional.silu(s / 2)),
    "relu": with_silu(torch.relu),
    "zero": with_silu(lambda s: 0 * s),
    "no_normaliser": with_call(scaling_seqlen=lambda n: 1),
    "own_length": with_call(scaling_seqlen=lambda n: n + 1),
    "alpha_twice": with_call(alpha=lambda a: a * a),
    "bias_times_alpha": with_call(alpha=lambda a: a, bias_factor=lambda f: f * 0.97),
    "window_longer": with_rule(max_attn_len=1),
    "window_shorter": with_rule(max_attn_len=-1),
    "more_full_rows": with_rule(min_full_attn_seq_len=1),
    "fewer_full_rows": with_rule(min_full_attn_seq_len=-1),
    "longer_prefix": with_rule(attn_prefix_len=1),
    "shorter_prefix": with_rule(attn_prefix_len=-1),
    "larger_groups": with_rule(target_group_size=1),
    "smaller_groups": with_rule(target_group_size=-1),
    "one_target_more": with_mask(lambda f, n, t, c, m: f(n, min(t + 1, n - c), c, m)),
    "one_target_less": with_mask(lambda f, n, t, c, m: f(n, max(t - 1, 0), c, m)),
    "one_context_less": with_mask(lambda f, n, t, c, m: f(n, t, max(c - 1, 0), m)),
    "no_diagonal": with_mask(lambda f, n, t, c, m: f(n, t, c, m) & ~torch.eye(n, dtype=torch.bool)),
    "later_keys": with_mask(lambda f, n, t, c, m: f(n, t, c, m) | torch.eye(n, dtype=torch.bool).roll(1, 1)),
    "dropped_tile": with_mask(
        lambda f, n, t, c, m: (
            f(n, t, c, m) & ~((torch.arange(n)[:, None] // 16 == 3) & (torch.arange(n) // 16 == 3))
        )
    ),
    "lost_dq_update": with_results(lost_update),
    "swapped_gradients": with_results(lambda r, t, c: r["dq"].copy_(r["dk"])),
    "table_of_a_neighbour": with_results(lambda r, t, c: r["dpos"].copy_(r["dpos"].roll(1, 0))),
    "bucket_off_by_one": with_results(lambda r, t, c: r["dts"].copy_(r["dts"].roll(1, 1))),
}

MUTATED = ([70, 0, 40], [5, 0, 7], [3, 0, 2], (3, 9, 6, 5), None, "two times", "")


@lru_cache
def mutated_case():
    tensors, call = make(*MUTATED)
    plain = run("reference", tensors, call)
    return tensors, call, plain, run("reference", doubled(tensors), Call(*doubled(call)))


def test_the_judge_lets_the_right_one_pass():
    tensors, call, plain, exact = mutated_case()
    judge(tensors, call, run("cpu", tensors, call), plain, exact)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_out(name, monkeypatch):
    tensors, call, plain, exact = mutated_case()
    with monkeypatch.context() as patch:
        got = MUTANTS[name](tensors, call, patch)
    with pytest.raises(AssertionError):
        judge(tensors, call, got, plain, exact)
