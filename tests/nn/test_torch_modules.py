"""Promise: torch's modules by name, value and state_dict; a sample alone has its bits of any batch."""

import copy

import pytest
import torch
from float_error import assert_error_at_most_twice
from speeds import slow_except

from tritonrec import nn, ops
from tritonrec.serving import programs

B, T, D, LONG = 5, 6, 8, torch.tensor([0, 6, 0, 1, 3])
GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(B, T, D, generator=GENERATOR) * 1.5
HIDDEN = torch.arange(T) >= torch.tensor([6, 4, 0, 1, 5])[:, None]
IDS = torch.randint(0, 9, (B, T), generator=GENERATOR)
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)


class Attend(torch.nn.Module):
    """Self-attention and attention to other keys, padded and causal."""

    def __init__(self, made, batch_first=True, same=True, values=True):
        super().__init__()
        self.attn = made.MultiheadAttention(D, 2, batch_first=batch_first)
        self.batch_first, self.same, self.values = batch_first, same, values

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        k = x if self.same else x * 0.5
        v = k if self.values else k + 1
        mask = torch.zeros(T, T).masked_fill(CAUSAL, -torch.inf)
        y = self.attn(x, k, v, attn_mask=mask, need_weights=False)[0]
        return y if self.batch_first else y.transpose(0, 1)


class First(torch.nn.Module):
    """The first of a module's results."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Turned(torch.nn.Module):
    """Channels in the middle."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def encoder(made, **options):
    return made.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=True, **options)


# name: a module made of torch.nn or of tritonrec.nn, and what it takes
MODULES = {
    "linear": (lambda made: made.Linear(D, 5), X),
    "linear_plain": (lambda made: made.Linear(D, 5, bias=False), X),
    "linear_non_contiguous": (lambda made: made.Linear(T, 5), X.transpose(1, 2)),
    "layer_norm": (lambda made: made.LayerNorm(D), X),
    "layer_norm_eps": (lambda made: made.LayerNorm([D], eps=1e-2, bias=False), X),
    "layer_norm_plain": (lambda made: made.LayerNorm(D, elementwise_affine=False), X),
    "rms_norm": (lambda made: made.RMSNorm(D), X),
    "rms_norm_plain": (lambda made: made.RMSNorm(D, 1e-3, elementwise_affine=False), X),
    "embedding": (lambda made: made.Embedding(9, 4), IDS),
    "embedding_padding": (lambda made: made.Embedding(9, 4, padding_idx=-8), IDS),
    "silu": (lambda made: made.SiLU(), X),
    "gelu": (lambda made: made.GELU(), X * 3),
    "gelu_tanh": (lambda made: made.GELU("tanh"), X * 3),
    "gelu_of_one": (lambda made: made.GELU(), X[:, 0, :1] * 3),
    "encoder_of_one": (
        lambda made: made.TransformerEncoderLayer(4, 2, 1, 0.0, "gelu", batch_first=True),
        X[:, :1, :4],
    ),
    "sigmoid": (lambda made: made.Sigmoid(), X * 20),
    "prelu": (lambda made: made.PReLU(), X),
    "prelu_channels": (lambda made: made.PReLU(T, init=-0.5), X),
    "conv": (lambda made: Turned(made.Conv1d(D, 5, 3, padding=1)), X),
    "conv_same": (lambda made: Turned(made.Conv1d(D, 5, 4, padding="same", dilation=3, bias=False)), X),
    "conv_strided": (lambda made: Turned(made.Conv1d(D, 5, 2, stride=2)), X),
    "gru": (lambda made: First(made.GRU(D, 5, batch_first=True)), X),
    "gru_layers": (lambda made: First(made.GRU(D, 5, 2, bias=False, batch_first=True)), X),
    "attention": (lambda made: Attend(made), X),
    "attention_turned": (lambda made: Attend(made, batch_first=False), X),
    "attention_keys": (lambda made: Attend(made, same=False), X),
    "attention_values": (lambda made: Attend(made, batch_first=False, same=False, values=False), X),
    "encoder": (lambda made: encoder(made), X),
    "encoder_first": (lambda made: encoder(made, norm_first=True, activation="gelu"), X),
}


def pair(name, seed=1):
    """torch's module and ours with its parameters, none at zero or one."""
    torch.manual_seed(seed)
    make, x = MODULES[name]
    theirs, ours = make(torch.nn), make(nn)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, x


def run(module, x, dy=None):
    """Output, gradient of x where it has one, and of the parameters."""
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    module.zero_grad()
    y = module(x)
    if y.requires_grad:
        y.backward(cotangent(y) if dy is None else dy)
    gradients = [x.grad] if x.is_floating_point() else []
    return [y.detach(), *gradients, *(p.grad for p in module.parameters() if p.grad is not None)]


def cotangent(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)


@pytest.mark.parametrize("name", MODULES)
def test_error_is_that_of_torch(name):
    theirs, ours, x = pair(name)
    got, plain = run(ours, x), run(theirs, x)
    exact = run(copy.deepcopy(theirs).double(), x.double() if x.is_floating_point() else x)
    largest = 4 * max(float(one.abs().max()) for one in exact)  # partial sums on the way are larger
    for place, values in enumerate(zip(got, plain, exact, strict=True)):
        assert_error_at_most_twice(*values, f"result {place}", largest)


@pytest.mark.parametrize("name", MODULES)
def test_state_dict_goes_both_ways(name):
    theirs, ours, _ = pair(name)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(2)
    fresh = MODULES[name][0](nn).state_dict()
    torch.manual_seed(2)
    for key, tensor in MODULES[name][0](torch.nn).state_dict().items():
        assert fresh[key].dtype == tensor.dtype and fresh[key].shape == tensor.shape, key
        assert torch.equal(fresh[key], tensor), f"{key} starts otherwise"


def exactly(ours, x, dy, cut):
    """Results of each sample, and exact sums, of a module that computes the batches of a cut."""
    accumulator, found = nn.GradientAccumulator(ours), {}
    numbers = torch.arange(len(x))
    with accumulator.active():
        for members in cut:
            at = torch.tensor(members)
            with nn.samples(ours, numbers[at], None, seed=3):
                y, *gradients = run(ours, x[at], dy[at])
            for place, sample in enumerate(members):
                found[sample] = [y[place], *(gradient[place] for gradient in gradients)]
    return found, accumulator.take()


SUBSETS = [[2], [4, 0], [1, 2, 3], [4, 3, 2, 1, 0]]


@pytest.mark.parametrize("name", MODULES)
def test_a_sample_keeps_its_bits_and_parameters_their_exact_sums(name):
    _, ours, x = pair(name)
    dy = cotangent(ours(x))
    whole, sums = exactly(ours, x, dy, [range(B)])
    if any(parameter.requires_grad for parameter in ours.parameters()):
        assert sums and all(each.any() for each in sums.values())
    for subset in SUBSETS:
        rest = [[sample] for sample in range(B) if sample not in subset]
        found, others = exactly(ours, x, dy, [subset, *rest])
        for sample, values in found.items():
            assert all(map(torch.equal, values, whole[sample])), (name, subset, sample)
        for key, value in sums.items():
            assert torch.equal(value, others[key]), (name, subset, key)
    plain = dict(zip(sums, run(ours, x, dy)[1 + x.is_floating_point() :], strict=True))
    for key, value in sums.items():
        torch.testing.assert_close(ops.from_fixed_point(value), plain[key], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.interpreter
@pytest.mark.parametrize("name", [*MODULES])
def test_triton_s_kernels_compute_the_same_and_keep_the_bits_of_a_sample(name):
    _, ours, x = pair(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, x, expected = ours.to(device), x.to(device), run(ours, x)
    cut = [torch.tensor([2]), torch.tensor([4, 0, 1, 3])]
    with ops.use_impl("triton"):
        got = run(ours, x)
        sums = []
        for order in ([torch.arange(B)], cut):
            accumulator = nn.GradientAccumulator(ours)
            with accumulator.active():
                outs = [run(ours, x[at], cotangent(got[0])[at])[:1] for at in order]
            sums.append(accumulator.take())
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-4)
    for at, (out,) in zip(cut, outs, strict=True):
        assert torch.equal(out, got[0][at])
    assert all(torch.equal(value, sums[1][key]) for key, value in sums[0].items())


def test_attention_with_padding_is_that_of_torch_where_there_is_a_key():
    theirs = torch.nn.MultiheadAttention(D, 2, batch_first=True)
    ours = nn.MultiheadAttention(D, 2, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    for padding in (HIDDEN, torch.zeros(B, T).masked_fill(HIDDEN, -torch.inf)):
        for mask in (None, CAUSAL, torch.randn(B * 2, T, T, generator=GENERATOR)):
            options = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": False}
            if mask is CAUSAL and padding is not HIDDEN:
                continue  # torch warns of two kinds of masks
            expected, got = theirs(X, X, X, **options)[0], ours(X, X, X, **options)[0]
            some = torch.tensor([True, True, False, True, True])  # sample 2 is empty: torch gives NaN
            torch.testing.assert_close(got[some], expected[some])
            torch.testing.assert_close(got[2], ours.out_proj.bias.expand(T, D))
    causal = ours(X, X, X, is_causal=True)[0]
    torch.testing.assert_close(causal, theirs(X, X, X, attn_mask=CAUSAL, need_weights=False)[0])
    torch.testing.assert_close(ours(X[0], X[0], X[0], is_causal=True)[0], causal[0])


def test_attention_of_jagged_tokens_sees_its_sequence_only():
    ours = nn.MultiheadAttention(D, 2, batch_first=True)
    offsets, tokens = LONG.cumsum(0), X.flatten(0, 1)[:10]
    with nn.samples(ours, torch.arange(4), offsets, 0, num_tokens=10):
        got = ours(tokens, tokens, tokens, is_causal=True)[0]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        alone = tokens[start:stop]
        assert torch.equal(got[start:stop], ours(alone, alone, alone, is_causal=True)[0])


def test_scaled_dot_product_attention_is_that_of_torch():
    q, k, v = torch.randn(3, 2, 3, T, 4, generator=GENERATOR).unbind()
    seen = ~CAUSAL & (torch.arange(T) > 0) | torch.eye(T, dtype=torch.bool)
    for options in ({}, {"is_causal": True, "scale": 0.3}, {"attn_mask": seen}, {"attn_mask": seen.float()}):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(nn.scaled_dot_product_attention(q, k, v, **options), expected)
    short = nn.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3])
    torch.testing.assert_close(short, expected)


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Dropout(0.4), nn.Dropout(0.4)

    def forward(self, x):
        return torch.stack([self.one(x), self.one(x), self.two(x)])


def test_dropout_is_a_function_of_seed_module_call_sample_and_position():
    model, x, numbers = Dropping(), torch.ones(B, T, D), torch.tensor([7, -1, 2**40, 3, 0])

    def dropped(members, seed=1):
        at = torch.tensor(members)
        with nn.samples(model, numbers[at], None, seed):
            return model(x[at])

    whole = dropped(range(B))
    assert torch.equal(dropped([3, 1]), whole[:, [3, 1]])
    for one, other in ((whole[0], whole[1]), (whole[0], whole[2]), (whole, dropped(range(B), 2))):
        assert not torch.equal(one, other)
    assert not torch.equal(whole[0, 0], whole[0, 1]) and not torch.equal(whole[0, 0, 0], whole[0, 0, 1])
    assert 0.3 < float((whole == 0).float().mean()) < 0.5 and whole.max() == torch.tensor(1 / 0.6)
    with nn.samples(model, numbers, torch.arange(B + 1) * T, 1, num_tokens=B * T):
        assert torch.equal(model(x.flatten(0, 1)), whole.flatten(1, 2))  # jagged or padded
    torch.manual_seed(5)
    first = model(x)
    torch.manual_seed(5)
    assert torch.equal(model(x), first)  # outside of a trainer by torch's generator
    assert torch.equal(model.eval()(x), x.expand(3, -1, -1, -1))


def test_dropout_repeats_in_a_checkpointed_backward_or_refuses():
    class Checkpointed(torch.nn.Module):
        def __init__(self, calls):
            super().__init__()
            self.drop, self.calls = nn.Dropout(0.5), calls

        def forward(self, x):
            for _ in range(self.calls):
                x = torch.utils.checkpoint.checkpoint(self.drop, x, use_reentrant=False)
            return x

    for calls in (1, 2):
        model, x = Checkpointed(calls), torch.ones(B, D, requires_grad=True)
        with nn.samples(model, torch.arange(B), None, 3) as now:
            y = model(x * 2)
            now.backward = True
            if calls == 1:
                y.sum().backward()
                assert torch.equal(x.grad, y.detach())
            else:
                with pytest.raises(RuntimeError, match=r"drop \(Dropout\) draws 2 times"):
                    y.sum().backward()


def test_a_broadcast_parameter_is_summed_exactly():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(D))

        def forward(self, x):
            return x * nn.expand(self.scale, *x.shape[:-1])

    model, sums = Scaled(), []
    for cut in ([range(B)], [[3, 1], [0], [4, 2]]):
        accumulator = nn.GradientAccumulator(model)
        with accumulator.active():
            for members in cut:
                model(X[list(members)]).sum().backward()
        sums.append(accumulator.take()["scale"])
    assert torch.equal(*sums)
    torch.testing.assert_close(ops.from_fixed_point(sums[0]), X.sum((0, 1)), rtol=1e-4, atol=1e-5)


REFUSED = {
    "add_bias_kv": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "add_zero_attn": lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True),
    "kdim": lambda: nn.MultiheadAttention(4, 2, kdim=3),
    "need_weights": lambda: nn.MultiheadAttention(D, 2, batch_first=True)(X, X, X, need_weights=True),
    "max_norm": lambda: nn.Embedding(3, 2, max_norm=1.0),
    "sparse": lambda: nn.Embedding(3, 2, sparse=True),
    "padding_idx 3": lambda: nn.Embedding(3, 2, padding_idx=3),
    "groups=2": lambda: nn.Conv1d(4, 4, 1, groups=2),
    "padding_mode": lambda: nn.Conv1d(4, 4, 1, padding_mode="circular"),
    "causal convolution": lambda: nn.Conv1d(4, 4, 3, padding=1, causal=True),
    "bidirectional": lambda: nn.GRU(4, 4, bidirectional=True),
    "normalized_shape": lambda: nn.LayerNorm((2, 3)),
    "p must lie .*got 1.5": lambda: nn.Dropout(1.5),
    "p must lie .*got 2": lambda: nn.GRU(4, 4, dropout=2.0),  # of one layer, which has none
    "mask gets no gradient": lambda: nn.MultiheadAttention(D, 2, batch_first=True)(
        X, X, X, attn_mask=torch.zeros(T, T, requires_grad=True)
    ),
    "enable_gqa": lambda: nn.scaled_dot_product_attention(X, X, X, enable_gqa=True),
    r"query, key and value must be \(B, H": lambda: nn.scaled_dot_product_attention(X, X, X),
    r"must be \(B, 4, T\)": lambda: nn.Conv1d(4, 4, 1)(X),
    r"must be \(B, T, 4\), got .*nn.Padded": lambda: nn.GRU(4, 4)(X[0]),
    "must have 4 features, got 8": lambda: nn.MultiheadAttention(4, 2, batch_first=True)(X, X, X),
    r"\(5, 6, 8\) torch.float64": lambda: nn.RMSNorm(D)(X.double()),
    r"must be \(L, D\) float32, bfloat16 or float16, got \(6, 8\) torch.float64": lambda: nn.LayerNorm(D)(
        X.double()[0]
    ),
    "share a dtype": lambda: nn.Linear(D, 2)(X.double()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_module_cannot_do_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_rows_that_lie_otherwise_are_refused_by_the_name_of_the_layer():
    model = torch.nn.Sequential(nn.Linear(D, 3))
    exactly = nn.GradientAccumulator(model).active()
    with exactly, nn.samples(model, torch.arange(4), LONG.cumsum(0), 0, num_tokens=10):
        model(X.flatten(0, 1)[:10])
        with pytest.raises(ValueError, match=r"0 \(Linear\) got rows \(5, 6\) .* enter nn.padded"):
            model(X)
        with nn.padded():
            model(X[:4])
            with pytest.raises(ValueError, match=r"0 \(Linear\) got rows \(10,\) of 4 samples"):
                model(X.flatten(0, 1)[:10])


def test_one_row_without_leading_dimensions():
    for name in ("Linear", "LayerNorm", "RMSNorm"):
        theirs, ours = (getattr(made, name)(*[D] * (1 + (name == "Linear"))) for made in (torch.nn, nn))
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(X[0, 0]), theirs(X[0, 0]))
    table = nn.Embedding(9, 4)
    assert torch.equal(table(IDS[0, 0].int()), table.weight[IDS[0, 0]])


def test_a_causal_convolution_sees_no_later_place():
    conv, late = nn.Conv1d(D, 4, 3, dilation=2, causal=True), X.transpose(1, 2).clone()
    before = conv(late)
    late[:, :, 4:] += 1
    after = conv(late)
    assert before.shape == (B, 4, T) and torch.equal(before[:, :, :4], after[:, :, :4])
    assert (before[:, :, 4:] != after[:, :, 4:]).any()


@pytest.mark.parametrize("name", ["attention", "encoder", "gru", "conv", "rms_norm", "linear"])
def test_no_samples_and_no_places(name):
    _, ours, _ = pair(name)
    for shape in ((0, T, D), (2, 0, D)):
        if name == "conv" and shape[1] == 0:
            continue
        x = torch.empty(shape, requires_grad=True)
        if name.startswith(("attention", "encoder")) and shape[1] == 0:
            continue  # the mask has T places
        y = ours(x)
        assert y.shape[:2] == shape[:2]
        if y.requires_grad:  # a recurrence without places is the state that it starts from
            y.sum().backward()


@pytest.mark.if_changed
@pytest.mark.parametrize("name", slow_except(["gru_layers", "prelu_channels", "rms_norm"], MODULES))
def test_an_export_takes_any_number_of_samples(name, tmp_path):
    """And has the bits of the module, which `save_program` compares."""
    _, ours, x = pair(name)
    examples = [(each,) for each in (x[:3], x[:1], torch.cat([x, x]))]
    scorer = programs.Scorer(programs.SCORER, torch.nn.Sequential(ours.eval()), examples, {})
    programs.save_program(scorer, tmp_path / "program.pt2")
