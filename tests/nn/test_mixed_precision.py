"""Mixed precision: modules and models under autocast, over float32 parameters with exact gradients."""

import pytest
import test_hstu_layer as fused
import test_models as models
import test_torch_modules as plain
import torch
from speeds import slow_except

from tritonrec import nn, ops
from tritonrec.kernels.autocast import autocast
from tritonrec.nn.padding import _label_against_negatives

LOW = [torch.bfloat16, torch.float16]


def mixed(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype, **options)


def run(layer, x, tokens, bits, call=None):
    """Output, dx and the sums of the parameters' gradients: int64, or float32 with None for `bits`."""
    accumulator = nn.GradientAccumulator(layer, bits)
    x = x.clone().requires_grad_()
    with accumulator.active():
        out = (call or layer)(x, tokens, fused.SEED)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return {"out": out.detach(), "dx": x.grad, **accumulator.take()}


def test_a_weight_that_changes_is_cast_again():
    weight = torch.randn(3, 4, requires_grad=True)
    with autocast("bf16", weight.device):
        before = torch.nn.functional.linear(torch.ones(1, 4), weight)
        with torch.no_grad():
            weight += 1
        assert not torch.equal(torch.nn.functional.linear(torch.ones(1, 4), weight), before)


@pytest.mark.parametrize("dtype", LOW)
def test_scores_of_a_binary_loss_stay_float32(dtype):
    draw = torch.Generator().manual_seed(3)
    hidden, labels, negatives = (torch.randn(5, *each, 8, generator=draw) for each in ((), (), (3,)))
    given = hidden, labels, negatives, torch.ones(5, 3, dtype=torch.bool)
    expected = _label_against_negatives(*given)
    with mixed(dtype):
        assert torch.equal(_label_against_negatives(*given), expected)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("name", "bits"),
    slow_except(
        [("biased", ops.FRACTION_BITS), ("fuxi", ops.FRACTION_BITS), ("hstu", None)],
        [(name, bits) for name in fused.LAYERS for bits in (None, ops.FRACTION_BITS)],
    ),
)
def test_a_fused_layer_has_the_bits_of_its_single_steps(name, bits, dtype):
    layer = fused.make_layer(name)
    x, tokens = fused.make_tokens(name)
    with mixed(dtype):
        got = run(layer, x, tokens, bits)
        assert got["out"].dtype == got["dx"].dtype == torch.float32
        fused.assert_equal(got, run(layer, x, tokens, bits, fused.single_ops(layer)))
    assert not torch.equal(got["out"], run(layer, x, tokens, bits)["out"])


FLOAT32 = {
    "layer_norm", "layer_norm_eps", "layer_norm_plain", "rms_norm", "rms_norm_plain", "embedding",
    "embedding_padding", "silu", "gelu", "gelu_tanh", "gelu_of_one", "sigmoid", "gru", "gru_layers",
    "encoder", "encoder_of_one", "encoder_first",
}  # fmt: skip


@pytest.mark.parametrize("dtype", slow_except([torch.bfloat16], LOW))
@pytest.mark.parametrize("name", plain.MODULES)
def test_a_sample_keeps_its_bits_and_parameters_their_exact_sums(name, dtype):
    _, ours, x = plain.pair(name)
    with mixed(dtype):
        y = ours(x)
        assert y.dtype == (torch.float32 if name in FLOAT32 else dtype)
        dy = plain.cotangent(y)
        whole, sums = plain.exactly(ours, x, dy, [range(len(x))])
        assert all(each.any() for each in sums.values())
        for cut in ([[1, 2, 3], [4, 0]], [[4, 3, 2, 1, 0]], [[each] for each in range(len(x))]):
            found, others = plain.exactly(ours, x, dy, cut)
            for sample, values in found.items():
                assert all(map(torch.equal, values, whole[sample])), (cut, sample)
            fused.assert_equal(others, sums, str(cut))
    # beside float32: what the rounding of inputs and results to a few bits allows
    eps = torch.finfo(dtype).eps
    wide = plain.run(ours, x, dy.float())
    named = dict(zip(sums, wide[1 + x.is_floating_point() :], strict=True))
    pairs = [(y.detach().float(), wide[0])]
    if name != "encoder":  # whose ReLU has an input near 0, that rounding brings to its other side
        pairs += [(ops.from_fixed_point(sums[key]), named[key]) for key in sums]
    for got, want in pairs:
        assert (got - want).square().mean().sqrt() < 6 * eps * want.square().mean().sqrt()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["dlrm criteo", "dlrm no_dense", "grm full", "grm biased", "mmoe 3"])
def test_a_model_keeps_its_bits_in_any_batch(accumulate, same_sums, name, dtype):
    with mixed(dtype):
        models.test_a_sample_keeps_its_bits_in_any_batch(accumulate, name, True)
        models.test_exact_sums_do_not_depend_on_the_split(same_sums, name, False)
