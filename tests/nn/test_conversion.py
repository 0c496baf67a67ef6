"""Promise: `convert` swaps torch's modules in place, keeps their parameters, and says what it left."""

import copy

import pytest
import torch

from tritonrec import nn

tnn = torch.nn


class Model(tnn.Module):
    """A bit of everything."""

    def __init__(self):
        super().__init__()
        self.items = tnn.Embedding(9, 8, padding_idx=0)
        self.drop = tnn.Dropout(0.3)
        layer = tnn.TransformerEncoderLayer(8, 2, 12, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = tnn.TransformerEncoder(layer, 2, tnn.LayerNorm(8), enable_nested_tensor=False)
        self.blocks = tnn.ModuleList([tnn.Sequential(tnn.Linear(8, 8), tnn.SiLU(), tnn.GELU())])
        self.attn = tnn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.conv, self.gru = tnn.Conv1d(8, 8, 3, padding="same"), tnn.GRU(8, 8, 2, batch_first=True)
        self.norm, self.gate, self.slope = tnn.RMSNorm(8), tnn.Sigmoid(), tnn.PReLU(4)
        self.again = self.blocks[0][0]

    def forward(self, ids):
        x = self.drop(self.items(ids))
        hidden = ids == 0
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = self.encoder(x, mask, hidden)
        x = self.blocks[0](x) + self.slope(self.again(x))
        x = self.norm(x + self.attn(x, x, x, key_padding_mask=hidden, need_weights=False)[0])
        return self.gate(self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))[0])


IDS = torch.tensor([[3, 1, 2, 8], [5, 5, 0, 0], [7, 0, 0, 0]])


def test_a_converted_model_computes_the_same():
    torch.manual_seed(0)
    model = Model().eval()
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    other = copy.deepcopy(model)
    report = nn.convert(model)
    assert report.left == {} and report.replaced["encoder.layers.1"] == "nn.TransformerEncoderLayer"
    assert {type(module).__module__ for name, module in model.named_modules() if name} <= {
        "tritonrec.nn.layers", "tritonrec.nn.attention", "tritonrec.nn.sequence",
        "torch.nn.modules.container", "torch.nn.modules.activation", "torch.nn.modules.transformer",
    }  # fmt: skip
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == state
    assert model.again is model.blocks[0][0] and not model.drop.training
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), other(IDS))
    for one in (model, other):
        one(IDS).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda m, name=name: f"{name}: {m}")
    assert nn.convert(model).replaced == {}


def test_no_fast_path_of_torch_is_taken_in_evaluation():
    """Padding alone, on the right, without gradients: where torch's encoder makes a nested tensor."""
    torch.manual_seed(0)
    layer = tnn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    made = tnn.Sequential(tnn.TransformerEncoder(layer, 2)).eval()
    theirs, hidden, x = copy.deepcopy(made[0]), IDS == 0, torch.randn(3, 4, 8)
    nn.convert(made)
    with torch.no_grad():
        found, expected = made[0](x, src_key_padding_mask=hidden), theirs(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(found[~hidden], expected[~hidden])
    assert torch.equal(found, made[0](x, src_key_padding_mask=hidden))


class Scale(tnn.Module):
    def __init__(self):
        super().__init__()
        self.by = tnn.Parameter(torch.ones(3))


class Mine(tnn.Linear):
    pass


LEFT = {
    "BatchNorm1d: it mixes the samples": lambda: tnn.BatchNorm1d(3),
    "BatchNorm1d: it mixes": lambda: tnn.BatchNorm1d(3, affine=False),
    "ParameterList: take nn.expand": lambda: tnn.ParameterList([tnn.Parameter(torch.ones(3))]),
    "LSTM: .* take GRU": lambda: tnn.LSTM(3, 3),
    "Softplus: on a CPU the last elements": lambda: tnn.Softplus(),
    "Dropout1d: it draws": lambda: tnn.Dropout1d(),
    "BCELoss: its mean is over the batch": lambda: tnn.BCELoss(),
    "Bilinear: tritonrec.nn has none": lambda: tnn.Bilinear(3, 3, 3),
    "Mine, a subclass of torch's Linear": lambda: Mine(3, 3),
    r"GRU: nn.GRU has no bidirectional=True": lambda: tnn.GRU(3, 3, bidirectional=True),
    r"Conv1d: nn.Conv1d has no groups=3": lambda: tnn.Conv1d(3, 3, 1, groups=3),
    r"MultiheadAttention: .* no add_zero_attn": lambda: tnn.MultiheadAttention(4, 2, add_zero_attn=True),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_is_said_with_its_reason(why):
    inner = LEFT[why]()
    model = tnn.Sequential(tnn.Linear(3, 3), tnn.Sequential(inner))
    report = nn.convert(model)
    assert model[1][0] is inner and list(report.replaced) == ["0"] and list(report.left) == ["1.0"]
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(report.left["1.0"])
    assert "replaced 1 modules\n  0: nn.Linear\nleft 1, which" in str(report)


def test_parameters_of_own_code_and_hooks_are_said():
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        model = tnn.ModuleDict({"scale": Scale(), "hooked": tnn.Linear(3, 3), "relu": tnn.ReLU()})
        getattr(model["hooked"], f"register_{kind}")(lambda *_: None)
        report = nn.convert(model)
        assert "take nn.expand" in report.left["scale.by"] and "with hooks" in report.left["hooked"]
        assert report.replaced == {}
    with pytest.raises(TypeError, match="this is a Linear"):
        nn.convert(tnn.Linear(3, 3))
