"""The fused layer: bits of its single steps, whatever is kept for backward and however a batch is cut."""

import re
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import formulas
import pytest
import torch
from dispatched import DispatchedOps
from float_error import assert_error_at_most_twice
from layer_bytes import CHOICES as SHOWN
from layer_bytes import SIZES as SHOWN_SIZES
from layer_bytes import layer_with, saved_bytes, single_ops, workload

from tritonrec import ops
from tritonrec.kernels.hstu_layer import cpu_hstu_layer as whole
from tritonrec.nn import FuXiConfig, FuXiLayer, GradientAccumulator, HSTUConfig, HSTULayer, Tokens, hstu_layer

SIZES = {"dim": 10, "heads": 2, "qk_dim": 5, "v_dim": 7, "max_seq_len": 21, "dropout": 0.3, "time_buckets": 6}
LAYERS = {
    "hstu": (HSTULayer, HSTUConfig(**SIZES)),
    "biased": (HSTULayer, HSTUConfig(**SIZES, relative_bias=True)),
    "product": (partial(HSTULayer, norm_product=True), HSTUConfig(**SIZES)),
    "fuxi": (FuXiLayer, FuXiConfig(**SIZES, ffn_dim=13)),
}
LENGTHS = [5, 0, 1, 21, 3, 0, 7]
SEED = 77
NAMES = hstu_layer.RECOMPUTED
CHOICES = [names for count in (1, 4, 5) for names in combinations(NAMES, count)]


def make_layer(name, recompute=()):
    torch.manual_seed(0)
    build, config = LAYERS[name]
    layer = build(replace(config, recompute=recompute))
    for parameter in layer.parameters():  # large enough for SiLU not to be a line, no bias at zero
        parameter.data = parameter.data * 1.5 + 0.2 * torch.randn_like(parameter)
    return layer


def make_tokens(name, lengths=LENGTHS, samples=None):
    """x (L, d) and tokens; of some samples only, the draws are those of all."""
    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = sum(lengths)
    x = torch.randn(tokens, SIZES["dim"], generator=generator)
    times = (torch.randint(0, 5, (tokens,), generator=generator) ** 2).cumsum(0) - 9
    targets = torch.tensor([length // 3 for length in lengths])
    ids = torch.arange(len(lengths)) * 1000 - 5
    if samples is not None:
        rows = torch.cat([torch.arange(0), *(torch.arange(offsets[b], offsets[b + 1]) for b in samples)])
        x, times, targets, ids = x[rows], times[rows], targets[samples], ids[samples]
        offsets = torch.tensor([0, *(lengths[b] for b in samples)]).cumsum(0)
    placed = Tokens.place(offsets, ids, SIZES["max_seq_len"], times, None if name == "fuxi" else targets)
    return x, placed.with_next_query_timestamps() if name == "biased" else placed


def run(layer, x, tokens, exactly=False, call=None, trainer=False):
    """Output, dx, and the parameters' gradients or exact sums, by name."""
    accumulator = GradientAccumulator(layer, ops.FRACTION_BITS if exactly else None)
    x = x.clone().requires_grad_()
    with accumulator.active() if exactly or trainer else nullcontext():
        out = (call or layer)(x, tokens, SEED)
        dout = torch.randn(1000, out.shape[1], generator=torch.Generator().manual_seed(2))
        out.backward(dout[tokens.positions * 7 + (tokens.sample_ids + 5) // 1000])  # goes with its token
    named = accumulator.take()
    layer.zero_grad(set_to_none=True)
    return {"out": out.detach(), "dx": x.grad, **named}


def assert_equal(got, want, what=""):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{what} {name}"


@pytest.mark.parametrize(
    ("name", "exactly"), [(name, exactly) for name in LAYERS for exactly in (False, True)]
)
def test_bits_are_those_of_the_single_steps(name, exactly):
    layer = make_layer(name)
    x, tokens = make_tokens(name)
    got = run(layer, x, tokens, exactly)
    assert all(value.any() for value in got.values())
    assert_equal(got, run(layer, x, tokens, exactly, single_ops(layer)))


@pytest.fixture
def one_by_one(monkeypatch):
    """Switches the layer to ops one by one, and counts the calls of the whole layer before."""
    calls = []
    forward = whole.Bound.forward

    def counted(self, *arguments):
        calls.append(self)
        return forward(self, *arguments)

    monkeypatch.setattr(whole.Bound, "forward", counted)

    def switch():
        monkeypatch.setattr(hstu_layer.whole, "bind", lambda *arguments: None)
        return len(calls)

    return switch


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("recompute", [(), ("norm",)])
@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("name", ["hstu", "biased"])
def test_a_trainer_runs_the_whole_layer_in_one_call(
    name, exactly, recompute, threads, one_by_one, monkeypatch
):
    """With the bits of the ops one by one, also in ranges of samples and with a weight not trained."""
    layer = make_layer(name, recompute)
    layer.gate.weight.requires_grad_(threads == 1 or not exactly)
    x, tokens = make_tokens(name)
    if threads == 2:
        monkeypatch.setattr(whole, "over_ranges", lambda run, count, cost: [run(0, 2), run(2, count)])
        monkeypatch.setattr(whole.Bound, "is_small", lambda self: False)
    got = run(layer, x, tokens, exactly, trainer=True)
    assert one_by_one() == 1
    assert_equal(got, run(layer, x, tokens, exactly, trainer=True))
    assert all(value.any() for value in got.values())


def test_the_whole_layer_asks_at_the_tokens_own_times_where_there_are_no_others(one_by_one):
    layer, (x, tokens) = make_layer("biased"), make_tokens("biased")
    own = tokens._replace(query_timestamps=None)
    got = run(layer, x, own, trainer=True)
    assert one_by_one() == 1
    assert_equal(got, run(layer, x, own, trainer=True))
    assert not torch.equal(got["out"], run(layer, x, tokens, trainer=True)["out"])


@pytest.mark.parametrize("what", ["full", "nan", "large"])
def test_a_sum_that_fails_is_named_as_by_the_ops(what, one_by_one):
    layer = make_layer("biased")
    x, tokens = make_tokens("biased")
    if what == "nan":
        x[7, 3] = float("nan")
    factor = 1e9 if what == "large" else 1.0

    def errors():
        found = []
        for name, _ in layer.named_parameters() if what == "full" else [(what, None)]:
            accumulator = GradientAccumulator(layer)
            if what == "full":
                accumulator.sums[name].fill_(2**63 - 1)
            with accumulator.active(), pytest.raises(ops.ExactSumError) as caught:
                (factor * layer(x.clone().requires_grad_(), tokens, SEED)).sum().backward()
            found.append((str(caught.value), caught.value.name, caught.value.index))
            assert what != "full" or f"gradient of {name}" in found[-1][0]
        return found

    got = errors()
    assert one_by_one() == len(got)
    assert got == errors()


def test_a_layer_with_other_arguments_takes_the_ops(one_by_one):
    """float64, an offset of 32 bits, strided rows: with the ops' results, and their errors."""
    layer = make_layer("hstu")
    x, tokens = make_tokens("hstu")
    want = run(layer, x, tokens, trainer=True)
    short = tokens._replace(seq_offsets=tokens.seq_offsets.int())
    assert_equal(run(layer, x, short, trainer=True), want)
    with GradientAccumulator(layer, None).active():
        for wrong, kind in ((x.double(), "must be torch.float64 like x"), (x[:, :9], "x must be")):
            with pytest.raises(ValueError, match=kind):
                layer(wrong, tokens, SEED)
        fewer = tokens._replace(sample_ids=tokens.sample_ids[:36], positions=tokens.positions[:36])
        with pytest.raises(ValueError, match="must end at the 36 tokens"):
            layer(x[:36], fewer, SEED)
        with pytest.raises(ValueError, match="num_targets"):
            layer(x, tokens._replace(num_targets=tokens.num_targets + 30), SEED)
        strided = torch.cat([x, x], 1)[:, :10]
        assert torch.equal(layer(strided, tokens, SEED), want["out"])
    assert one_by_one() == 1


@pytest.mark.parametrize("in_a_trainer", [False, True])
def test_a_second_derivative_is_refused(in_a_trainer):
    layer, (x, tokens) = make_layer("hstu"), make_tokens("hstu")
    x.requires_grad_()
    with GradientAccumulator(layer, None).active() if in_a_trainer else nullcontext():
        out = layer(x, tokens, SEED)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(out.sum(), x, retain_graph=True)[0])
        with pytest.raises(
            RuntimeError, match="norm_linear_silu_backward_into writes to dy and has no deriv"
        ):
            torch.autograd.grad(out.sum(), x, create_graph=True)


def test_nothing_is_left_of_a_batch_of_other_sizes():
    """Many short samples, one long one, empty ones at both ends: chunks begin and end anywhere."""
    layer = make_layer("biased")
    for lengths in ([0] * 70 + [1] * 70, [21] * 30, [0, 21, 0], [1], [7, 0, 20, 3] * 9):
        x, tokens = make_tokens("biased", lengths)
        got = run(layer, x, tokens, exactly=True)
        assert_equal(got, run(layer, x, tokens, True, single_ops(layer)), str(lengths[:4]))


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_recomputed_changes_no_bit(name):
    """One stage, all but one, and all of HSTU; the others where they differ from it."""
    x, tokens = make_tokens(name)
    want = {exactly: run(make_layer(name), x, tokens, exactly) for exactly in (False, True)}
    for names in CHOICES if name == "hstu" else [("attention",), ("attention", "uvqk"), NAMES]:
        layer = make_layer(name, recompute=names)
        for exactly, expected in want.items():
            assert_equal(run(layer, x, tokens, exactly), expected, f"{names}")


@pytest.mark.parametrize("name", ["hstu", "biased"])
def test_bytes_kept_for_backward(name):
    x, tokens = make_tokens(name)
    x = x.requires_grad_()
    layer = make_layer(name)
    columns = sum(layer.sizes)
    numbers = {"norm": 10, "uvqk": columns, "silu": columns, "attention": 14, "gate": 14}
    rows = 4 * len(x)
    for names in [(), *((one,) for one in NAMES), NAMES]:
        kept = sum(count for stage, count in numbers.items() if stage not in names)
        assert saved_bytes(make_layer(name, recompute=names), x, tokens) == rows * (4 + kept), names
    # means and deviations of two norms are the 4; the single steps keep as much as the layer that keeps all
    assert saved_bytes(layer, x, tokens) == saved_bytes(layer, x, tokens, single_ops(layer))


def test_nothing_is_kept_without_gradients():
    layer = make_layer("hstu")
    x, tokens = make_tokens("hstu")
    want = layer(x, tokens, SEED).detach()
    with torch.no_grad():
        assert saved_bytes(layer, x, tokens) == 0
        assert torch.equal(layer(x, tokens, SEED), want)


@pytest.mark.parametrize("names", [(), NAMES])
@pytest.mark.parametrize("name", LAYERS)
def test_every_element_of_the_gradient_buffer_is_written(name, names, monkeypatch):
    layer = make_layer(name, recompute=names)
    x, tokens = make_tokens(name)
    want = run(layer, x, tokens)
    poisoned = []

    def empty_like(tensor):
        poisoned.append(torch.full_like(tensor, float("nan")))
        return poisoned[-1]

    monkeypatch.setattr(hstu_layer.torch, "empty_like", empty_like)
    assert_equal(run(layer, x, tokens), want)
    assert [tuple(buffer.shape) for buffer in poisoned] == [(sum(LENGTHS), sum(layer.sizes))]
    assert torch.equal(want["uvqk.bias"], poisoned[0].sum(0))  # and that buffer is what uvqk's gradients read


CUTS = [[[6, 5, 4, 3, 2, 1, 0]], [[b] for b in range(7)], [[3, 1], [], [0, 6], [5, 2, 4]]]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_exact_sums_do_not_depend_on_the_cut(name, cut):
    """Rows of output and dx, too, belong to their sample alone: dropout and times ask for nobody else."""
    layer = make_layer(name, recompute=("norm", "attention"))
    x, tokens = make_tokens(name)
    whole = run(layer, x, tokens, exactly=True)
    sums = {key: torch.zeros_like(value) for key, value in whole.items() if value.dtype == torch.int64}
    bounds = list(pairwise(torch.tensor([0, *LENGTHS]).cumsum(0).tolist()))
    for samples in cut:
        some = run(layer, *make_tokens(name, samples=samples), exactly=True)
        rows = torch.cat([torch.arange(0), *(torch.arange(*bounds[b]) for b in samples)])
        for key, value in some.items():
            if key in sums:
                sums[key] += value
            else:
                assert torch.equal(value, whole[key][rows]), (samples, key)
    assert sums.keys() == dict(layer.named_parameters()).keys()
    for key, value in sums.items():
        assert value.any() and torch.equal(value, whole[key]), key


@pytest.mark.parametrize("name", ["hstu", "biased", "product"])
def test_error_is_that_of_plain_float32(name):
    layer = make_layer(name, recompute=("norm", "uvqk")).eval()
    x, tokens = make_tokens(name)

    def formula(module):
        def call(some, at, seed):
            bounds = list(pairwise(at.seq_offsets.tolist()))
            asked = at.timestamps if at.query_timestamps is None else at.query_timestamps
            parts = [
                formulas.hstu_layer(some[a:b], module, int(t), at.timestamps[a:b], asked[a:b])
                for (a, b), t in zip(bounds, at.num_targets, strict=True)
            ]
            return torch.cat(parts)

        return call

    def runs(module, some, call=None):
        leaf = some.clone().requires_grad_()
        out = (call or module)(leaf, tokens, SEED)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
        parameters = dict(module.named_parameters())
        values = torch.autograd.grad(out, [leaf, *parameters.values()], dout)
        return dict(zip(["out", "dx", *parameters], [out.detach(), *values], strict=True))

    double = deepcopy(layer).double()
    plain, right = runs(layer, x, formula(layer)), runs(double, x.double(), formula(double))
    for what, got in runs(layer, x).items():
        assert_error_at_most_twice(got, plain[what], right[what], what, largest=10.0)


def test_exact_gradients_of_the_tables_are_those_of_autograd():
    layer = make_layer("biased")
    x, tokens = make_tokens("biased")
    floats, sums = run(layer, x, tokens), run(layer, x, tokens, exactly=True)
    for name in ("bias.pos_weights", "bias.ts_weights"):
        torch.testing.assert_close(floats[name], ops.from_fixed_point(sums[name]), rtol=1e-5, atol=1e-6)


def test_a_token_asks_at_the_time_of_its_next():
    offsets, times = torch.tensor([0, 3, 3, 4, 6]), torch.tensor([5, 7, 9, -3, 2, 2**62])
    tokens = Tokens.place(offsets, torch.arange(4), 9, times).with_next_query_timestamps()
    assert tokens.query_timestamps.tolist() == [7, 9, 9, -3, 2**62, 2**62]
    assert tokens.timestamps is times
    empty = Tokens.place(torch.tensor([0]), torch.arange(0), 9, times[:0]).with_next_query_timestamps()
    assert empty.query_timestamps.shape == (0,)


def test_a_relative_bias_needs_timestamps():
    layer = make_layer("biased")
    x, tokens = make_tokens("biased")
    with pytest.raises(ValueError, match="relative bias needs the tokens' timestamps"):
        layer(x, tokens._replace(timestamps=None), SEED)


def test_without_a_bias_there_are_no_tables():
    assert not any("bias.pos" in name for name, _ in make_layer("hstu").named_parameters())
    plain, biased = make_layer("hstu"), make_layer("biased")
    assert biased.bias.pos_weights.shape == (21,) and biased.bias.ts_weights.shape == (6,)
    for table in biased.bias.parameters():
        table.data.zero_()
    for parameter, other in zip(plain.parameters(), biased.parameters(), strict=False):
        other.data = parameter.data
    x, tokens = make_tokens("hstu")
    torch.testing.assert_close(plain(x, tokens, SEED), biased(x, tokens, SEED))


@pytest.mark.parametrize("config", [HSTUConfig, FuXiConfig])
def test_what_to_recompute_is_checked(config):
    with pytest.raises(ValueError, match=r"recompute takes some of norm, uvqk, silu, .*, got attn, normed"):
        config(recompute=("normed", "gate", "attn"))
    with pytest.raises(TypeError, match=r"recompute must be several names, .* write \['gate'\]"):
        config(recompute="gate")
    assert config(recompute=["gate"]).recompute == ("gate",)


def test_the_page_shows_the_bytes_that_are_kept():
    """docs/models.md has a table for each size, and in it a row for each choice."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    shown = page.split("<!-- layer -->")[1].split("<!-- end layer -->")[0]
    for title, config in SHOWN_SIZES.items():
        part = shown.split(title)[1]
        x, tokens = workload(config)
        for names in SHOWN:
            found = re.search(rf"\| {', '.join(names) or 'nothing'} \| ([\d,]+) \|", part)
            size = saved_bytes(layer_with(config, names), x, tokens) / len(x)
            assert found is not None and float(found[1].replace(",", "")) == size, names


@pytest.mark.parametrize("name", LAYERS)
def test_ops_are_met_where_somebody_watches(name):
    """A plain step leaves the dispatcher out; it and a watched one have the same bits."""
    layer, (x, tokens) = make_layer(name), make_tokens(name)
    plain = run(layer, x, tokens)
    with DispatchedOps() as dispatched:
        watched = run(layer, x, tokens)
    ops_of_a_layer = {
        "norm_linear_silu", "norm_linear_silu_backward_into", "norm_mul_dropout",
        "norm_mul_dropout_backward_into", "hstu_attention", "hstu_attention_backward_into",
    }  # fmt: skip
    assert ops_of_a_layer <= set(dispatched.names)
    assert_equal(watched, plain)


def test_what_is_recomputed_has_no_room_in_what_is_kept():
    sizes = {"dim": 5, "heads": 2, "qk_dim": 3, "v_dim": 4, "max_seq_len": 9}
    rest = {"eps": 1e-6, "gate_eps": 1e-6, "dropout": 0.0}
    widths = [whole.Shape(**sizes, **rest, keep_normed=keep).kept_widths for keep in (False, True)]
    assert widths == [(28, 28, 8, 8, 1, 1, 1, 1), (28, 28, 8, 8, 1, 1, 1, 1, 5)]
