"""torch's modules in a model replaced by ours, in place: `convert`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from .. import ops
from . import attention, layers, sequence
from .exact import gelu

tnn = torch.nn


@dataclass
class Conversion:
    """What `convert` did. `print` it.

    Attributes:
        replaced: name of a module -> what it is now. left: name of a module or parameter -> why it stays and
            what that means at consistency "batch".
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)} modules"]
        lines += [f"  {name}: {kind}" for name, kind in self.replaced.items()]
        lines.append(
            f"left {len(self.left)}" + (", which consistency 'batch' may refuse" if self.left else "")
        )
        lines += [f"  {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def convert(model: torch.nn.Module) -> Conversion:
    """Replace torch's modules inside of `model` by ours, which train at consistency "batch".

    In place, also in `Sequential`, `ModuleList` and `TransformerEncoder`. A new module holds the same
    parameters under the same names, so `state_dict`, optimizers and tied weights stay as they are. Modules
    that we do not have, subclasses of torch's and modules with hooks are left, and the report says why.

    Raises TypeError where `model` itself is a module to replace, which has no place to be replaced in.
    """
    if type(model) in CONVERTED:
        raise TypeError(f"convert replaces modules inside of a model, and this is a {type(model).__name__}")
    report = Conversion()
    _convert(model, "", report, {})
    return report


def _convert(
    parent: torch.nn.Module, prefix: str, report: Conversion, done: dict[int, torch.nn.Module]
) -> None:
    if isinstance(parent, tnn.TransformerEncoder):
        # its fast path of evaluation would give the layers a nested tensor
        parent.enable_nested_tensor = parent.use_nested_tensor = False
    for own, parameter in parent._parameters.items():
        if parameter is not None and not _is_ours(parent):
            report.left[f"{prefix}{own}"] = f"a parameter of {type(parent).__name__}: {PARAMETER}"
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        place = f"{prefix}{name}"
        if id(child) in done:
            parent._modules[name] = done[id(child)]
            continue
        why = _reason_to_leave(child)
        if why:
            report.left[place] = why
            if type(child) in CONVERTED:
                continue
        elif type(child) in CONVERTED:
            try:
                new = CONVERTED[type(child)](child)
            except ValueError as error:
                report.left[place] = f"{type(child).__name__}: {error}"
                continue
            new.train(child.training)
            parent._modules[name] = done[id(child)] = new
            report.replaced[place] = f"nn.{type(new).__name__}"
            continue
        if not why:
            _convert(child, f"{place}.", report, done)


def _is_ours(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("tritonrec.")


def _reason_to_leave(module: torch.nn.Module) -> str:
    """Why a module that is no container stays; "" for one that converts, or whose children do."""
    kind, name = type(module), type(module).__name__
    if _is_ours(module):
        return ""
    if kind in CONVERTED:
        hooks = (*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks)
        if hooks:
            return f"{name} with hooks, which belong to the module that it is"
        return ""
    for known, why in LEFT.items():
        if isinstance(module, known):
            return f"{name}: {why}"
    for known in CONVERTED:
        if isinstance(module, known):
            return f"{name}, a subclass of torch's {known.__name__} with code of its own"
    if getattr(module, "reduction", "none") == "mean" and kind.__module__.startswith("torch."):
        return f"{name}: its mean is over the batch; return the sum of each sample's terms"
    if getattr(module, "reduction", "none") == "sum" and kind.__module__.startswith("torch."):
        return f"{name}: its sum is over the batch; return the sum of each sample's terms"
    if kind.__module__.startswith("torch.") and module._parameters:
        return f"{name}: tritonrec.nn has none"
    return ""


PARAMETER = "take nn.expand(parameter, rows) where your code broadcasts it, ops.linear where it multiplies"
BATCH = "it mixes the samples of a batch; take LayerNorm or RMSNorm"
ELEMENTWISE = "on a CPU the last elements of an array go another path; take ReLU, nn.GELU or nn.SiLU"
LEFT: dict[type | tuple[type, ...], str] = {
    (tnn.modules.batchnorm._NormBase,): BATCH,
    (tnn.GroupNorm, tnn.LocalResponseNorm): "tritonrec.nn has none; take LayerNorm",
    (tnn.LSTM, tnn.RNN, tnn.LSTMCell, tnn.RNNCell, tnn.GRUCell): "tritonrec.nn has none; take GRU",
    (tnn.ParameterList, tnn.ParameterDict): PARAMETER,
    (tnn.Transformer, tnn.TransformerDecoder, tnn.TransformerDecoderLayer): (
        "tritonrec.nn has none; build it of MultiheadAttention"
    ),
    (tnn.modules.dropout._DropoutNd, tnn.RReLU): (
        "it draws from torch's global generator, so the cut of the batch shows; take nn.Dropout"
    ),
    (tnn.Softplus, tnn.ELU, tnn.SELU, tnn.CELU, tnn.Mish, tnn.GLU): ELEMENTWISE,
}  # fmt: skip


def _holding(new: torch.nn.Module, old: torch.nn.Module) -> torch.nn.Module:
    """`new` with the parameters of `old`."""
    for name, parameter in old._parameters.items():
        assert name in new._parameters or parameter is None, name
        new._parameters[name] = parameter
    return new


def _linear(m) -> torch.nn.Module:
    return _holding(layers.Linear(m.in_features, m.out_features, m.bias is not None, device="meta"), m)


def _layer_norm(m) -> torch.nn.Module:
    has_bias = m.bias is not None
    new = layers.LayerNorm(m.normalized_shape, m.eps, m.elementwise_affine, has_bias, device="meta")
    return _holding(new, m)


def _rms_norm(m) -> torch.nn.Module:
    return _holding(layers.RMSNorm(m.normalized_shape, m.eps, m.elementwise_affine, device="meta"), m)


def _embedding(m) -> torch.nn.Module:
    new = layers.Embedding(
        m.num_embeddings, m.embedding_dim, m.padding_idx, m.max_norm, m.norm_type, m.scale_grad_by_freq,
        m.sparse, device="meta",
    )  # fmt: skip
    return _holding(new, m)


def _conv(m) -> torch.nn.Module:
    new = sequence.Conv1d(
        m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding, m.dilation, m.groups,
        m.bias is not None, m.padding_mode, device="meta",
    )  # fmt: skip
    return _holding(new, m)


def _gru(m) -> torch.nn.Module:
    new = sequence.GRU(
        m.input_size, m.hidden_size, m.num_layers, m.bias, m.batch_first, m.dropout, m.bidirectional,
        device="meta",
    )  # fmt: skip
    return _holding(new, m)


def _attention(m) -> torch.nn.Module:
    new = attention.MultiheadAttention(
        m.embed_dim, m.num_heads, m.dropout, m.in_proj_bias is not None, m.bias_k is not None,
        m.add_zero_attn, m.kdim, m.vdim, m.batch_first, device="meta",
    )  # fmt: skip
    new.in_proj_weight, new.in_proj_bias = m.in_proj_weight, m.in_proj_bias
    _holding(new.out_proj, m.out_proj)
    return new


def _encoder_layer(m) -> torch.nn.Module:
    new = attention.TransformerEncoderLayer(
        m.linear1.in_features, m.self_attn.num_heads, m.linear1.out_features, m.dropout.p,
        m.activation if callable(m.activation) else "relu", m.norm1.eps, m.self_attn.batch_first,
        m.norm_first, m.linear1.bias is not None, device="meta",
    )  # fmt: skip
    if type(m.activation) in CONVERTED:
        new.activation = CONVERTED[type(m.activation)](m.activation)
    elif m.activation in (F.silu, F.gelu):
        new.activation = ops.silu if m.activation is F.silu else gelu
    for name in ("self_attn", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2"):
        old = getattr(m, name)
        setattr(new, name, CONVERTED[type(old)](old).train(old.training))
    return new


CONVERTED: dict[type, Callable[..., torch.nn.Module]] = {
    tnn.Linear: _linear,
    tnn.modules.linear.NonDynamicallyQuantizableLinear: _linear,
    tnn.LayerNorm: _layer_norm,
    tnn.RMSNorm: _rms_norm,
    tnn.Embedding: _embedding,
    tnn.Dropout: lambda m: layers.Dropout(m.p),
    tnn.SiLU: lambda m: layers.SiLU(),
    tnn.GELU: lambda m: layers.GELU(m.approximate),
    tnn.Sigmoid: lambda m: layers.Sigmoid(),
    tnn.PReLU: lambda m: _holding(layers.PReLU(m.num_parameters, device="meta"), m),
    tnn.Conv1d: _conv,
    tnn.GRU: _gru,
    tnn.MultiheadAttention: _attention,
    tnn.TransformerEncoderLayer: _encoder_layer,
}
