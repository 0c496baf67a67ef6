"""torch.compile leaves the layers as they are and keeps a model's bits, step after step."""

import pytest
import torch
from test_hstu_layer import LENGTHS, assert_equal, make_layer, make_tokens, run
from test_nn import make_batch, make_model

from tritonrec.nn.modules import GatedMLP, LayerNorm

SEEDS = [3, 7, -(2**63), 2**63 - 1]  # no two steps have one in common


def compiled(module):
    torch._dynamo.reset()
    wrapped = torch.compile(module, backend="aot_eager")
    return lambda *arguments: wrapped(*arguments)


class Encoder(torch.nn.Module):
    """A model as a user writes one."""

    def __init__(self, name):
        super().__init__()
        self.layer, self.norm = make_layer(name), LayerNorm(10)
        self.head = GatedMLP(10, 6, 5)

    def forward(self, x, tokens, seed):
        return self.head(self.norm(self.layer(x + x, tokens, seed)), tokens.seq_offsets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exactly"), [("hstu", False), ("biased", False), ("fuxi", False), ("hstu", True)]
)
def test_a_model_that_holds_a_layer_keeps_its_bits(name, exactly):
    model = Encoder(name)
    call = compiled(model)
    for lengths in (LENGTHS, [0, 4, 2]):
        x, tokens = make_tokens(name, lengths)
        got, want = run(model, x, tokens, exactly, call), run(model, x, tokens, exactly)
        assert_equal(got, want, f"{lengths}")
        assert all(value.any() for value in want.values())


@pytest.mark.slow
def test_our_models_keep_their_bits_with_a_new_seed_in_every_step():
    model, batch = make_model(), make_batch()
    rows = torch.randn(2 * batch.num_tokens + batch.negatives.numel(), 12)
    calls = model, compiled(model)
    for seed in SEEDS:
        found = []
        for call in calls:
            leaf = rows.clone().requires_grad_()
            losses = call(batch, {"item": leaf}, seed)
            found.append([losses.detach(), *torch.autograd.grad(losses.sum(), [leaf, *model.parameters()])])
        assert all(map(torch.equal, *found)) and all(value.any() for value in found[0])


def test_a_graph_ends_at_the_layer_and_goes_on_behind_it():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model, (x, tokens) = Encoder("hstu"), make_tokens("hstu", LENGTHS)
    torch._dynamo.reset()
    got = torch.compile(model, backend=backend)(x, tokens, 3)
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert torch.equal(got, model(x, tokens, 3)) and len(graphs) > 1
    assert not any("attention" in name or "norm_linear" in name for name in called), called
