"""torch.compile takes a layer as one graph, with the bits of the layer as it is; a model as several."""

import shutil

import pytest
import torch
from test_nn import make_batch, make_model
from test_transduction import LENGTHS, NAMES, SEED, assert_equal, make_layer, make_tokens, run

from tritonrec.nn import MMoE
from tritonrec.nn.modules import GatedMLP, LayerNorm


def compiled(module, backend="aot_eager", fullgraph=True):
    torch._dynamo.reset()
    wrapped = torch.compile(module, backend=backend, fullgraph=fullgraph)
    return lambda *arguments: wrapped(*arguments)


@pytest.mark.parametrize(
    ("name", "recompute", "grids"),
    [("hstu", NAMES, True), ("biased", ("norm", "attention"), False), ("fuxi", ("uvqk",), True)],
)
def test_a_layer_is_one_graph_with_its_own_bits(name, recompute, grids):
    layer = make_layer(name, recompute)
    call = compiled(layer)
    for lengths in (LENGTHS, [0, 4, 2]):
        x, tokens = make_tokens(name, lengths)
        got, want = run(layer, x, tokens, grids, call), run(layer, x, tokens, grids)
        assert_equal(got, want, f"{lengths}")
        assert all(value.any() for value in want.values())
        with torch.no_grad():
            assert torch.equal(call(x, tokens, SEED), want["out"])


class Encoder(torch.nn.Module):
    """A model as a user writes one: a layer, and heads of experts for two tasks."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = make_layer("hstu"), LayerNorm(10)
        self.inner, self.heads = GatedMLP(10, 6, 5), MMoE(5, 2, experts=2, top_k=1)

    def forward(self, x, tokens, seed):
        rows = self.norm(self.layer(torch.tanh(x), tokens, seed))
        return self.heads(self.inner(rows, tokens.seq_offsets), tokens.seq_offsets)


def test_a_model_that_holds_a_layer_is_one_graph():
    model = Encoder()
    x, tokens = make_tokens("hstu")
    assert_equal(run(model, x, tokens, call=compiled(model)), run(model, x, tokens))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler; aot_eager runs above")
def test_exact_gradients_keep_their_bits_under_inductor():
    layer = make_layer("hstu")
    x, tokens = make_tokens("hstu")
    assert_equal(run(layer, x, tokens, True, compiled(layer, "inductor")), run(layer, x, tokens, True))


def test_our_models_break_where_tokens_are_placed_and_keep_their_bits():
    model, batch = make_model(), make_batch()
    rows = torch.randn(2 * batch.num_tokens + batch.negatives.numel(), 12)
    found = []
    for call in (model, compiled(model, fullgraph=False)):
        leaf = rows.clone().requires_grad_()
        losses = call(batch, {"item": leaf}, SEED)
        found.append([losses.detach(), *torch.autograd.grad(losses.sum(), [leaf, *model.parameters()])])
    assert all(map(torch.equal, *found)) and all(value.any() for value in found[0])
