"""torch's modules over padded sequences: convolution and recurrence, with exact gradients.

Dimensions: B samples, T places, C channels, D features, H hidden features.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..kernels.autocast import widen
from . import context
from .exact import differentiable_sigmoid, product
from .layers import Dropout, new_parameter, refuse


class Conv1d(torch.nn.Module):
    """``torch.nn.Conv1d`` as a product of windows with the weight: (B, C, T) -> (B, C', T').

    Args:
        padding: zeros at both ends, or "same". causal: instead zeros in front only, so that place t sees the
            places up to t; needs padding 0 and stride 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | str | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
        *,
        causal: bool = False,
    ):
        super().__init__()
        if groups != 1:
            raise ValueError(f"nn.Conv1d has no groups={groups}")
        if padding_mode != "zeros":
            raise ValueError(f"nn.Conv1d has no padding_mode={padding_mode!r}")
        self.in_channels, self.out_channels, self.causal = in_channels, out_channels, causal
        self.kernel_size, self.stride, self.dilation = map(_single, (kernel_size, stride, dilation))
        span = self.dilation * (self.kernel_size - 1)
        if causal:
            if padding not in (0, (0,)) or self.stride != 1:
                raise ValueError(
                    f"a causal convolution needs padding 0 and stride 1, got {padding}, {stride}"
                )
            self.ends = span, 0
        elif isinstance(padding, str):
            if padding not in ("same", "valid") or (padding == "same" and self.stride != 1):
                raise ValueError(
                    f"padding must be a number, 'valid' or, with stride 1, 'same', got {padding!r}"
                )
            self.ends = (span // 2, span - span // 2) if padding == "same" else (0, 0)
        else:
            self.ends = _single(padding), _single(padding)
        self.weight = new_parameter(out_channels, in_channels, self.kernel_size, device=device, dtype=dtype)
        self.bias = new_parameter(out_channels, device=device, dtype=dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch's: uniform within (in_channels * kernel_size) ** -0.5."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = max(self.in_channels * self.kernel_size, 1) ** -0.5
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, T), or one sample (C, T)."""
        if x.dim() == 2 and context.current() is None:
            return self(x[None])[0]
        if x.dim() != 3 or x.shape[1] != self.in_channels:
            raise ValueError(f"x must be (B, {self.in_channels}, T), got {tuple(x.shape)}")
        x = F.pad(x, self.ends)
        last = x.shape[2] - self.dilation * (self.kernel_size - 1)
        if last < 1:
            raise ValueError(
                f"{x.shape[2]} padded places are fewer than the {self.kernel_size} of the kernel"
            )
        windows = torch.stack(
            [
                x[:, :, k * self.dilation : k * self.dilation + last : self.stride]
                for k in range(self.kernel_size)
            ],
            -1,
        )
        rows = windows.transpose(1, 2).flatten(2)  # (B, T', C * kernel)
        offsets = context.row_offsets(tuple(rows.shape[:2]), self.weight, self, x.device)
        out = product(rows.flatten(0, 1), self.weight, self.bias, offsets)
        return out.unflatten(0, rows.shape[:2]).transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"ends={self.ends}, dilation={self.dilation}, bias={self.bias is not None}"
        )


def _single(value: int | str | tuple[int]) -> int:
    number = value if isinstance(value, int) else value[0]
    assert isinstance(number, int)
    return number


class GRU(torch.nn.Module):
    """``torch.nn.GRU``, place by place: (B, T, D) -> (B, T, H), and the last states (layers, B, H)."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        refuse("GRU", bidirectional=bidirectional)
        Dropout(dropout)  # checks it, where one layer has none
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, dropout
        for layer in range(num_layers):
            inner = hidden_size if layer else input_size
            for name, shape in (("ih", (3 * hidden_size, inner)), ("hh", (3 * hidden_size, hidden_size))):
                setattr(self, f"weight_{name}_l{layer}", new_parameter(*shape, device=device, dtype=dtype))
            for name in ("ih", "hh"):
                vector = new_parameter(3 * hidden_size, device=device, dtype=dtype) if bias else None
                if vector is not None:
                    setattr(self, f"bias_{name}_l{layer}", vector)
        for layer in range(num_layers - 1):  # modules, since each draws by its place in the model
            setattr(self, f"dropout_l{layer}", Dropout(dropout))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch's: uniform within hidden_size ** -0.5."""
        bound = self.hidden_size**-0.5 if self.hidden_size else 0.0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor, hx: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T, D), or (T, B, D) without `batch_first`; hx: (layers, B, H)."""
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[2] != self.input_size:
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                f"x must be (B, T, {self.input_size}), got {got}: nn.Padded makes it of jagged rows"
            )
        x = x if self.batch_first else x.transpose(0, 1)
        states = []
        for layer in range(self.num_layers):
            state = x.new_zeros(x.shape[0], self.hidden_size) if hx is None else hx[layer]
            x, state = self._layer(x, state, layer)
            states.append(state)
            if layer < self.num_layers - 1:
                x = getattr(self, f"dropout_l{layer}")(x)
        return x if self.batch_first else x.transpose(0, 1), torch.stack(states)

    def _layer(self, x: torch.Tensor, state: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """r, z = sigmoid(..), n = tanh(in + r * hn), h = (1 - z) * n + z * h.

        Gates and states are float32 under autocast; the products are not.
        """
        of_input, of_state = (getattr(self, f"weight_{name}_l{layer}") for name in ("ih", "hh"))
        biases = [getattr(self, f"bias_{name}_l{layer}") if self.bias else None for name in ("ih", "hh")]
        offsets = context.row_offsets(tuple(x.shape[:2]), of_input, self, x.device)
        inputs = widen(product(x.flatten(0, 1), of_input, biases[0], offsets)).unflatten(0, x.shape[:2])
        outs, state = [], state.to(of_state.dtype)
        for of_place in inputs.unbind(1):
            r, z, n = of_place.chunk(3, 1)
            hr, hz, hn = widen(product(state, of_state, biases[1], None)).chunk(3, 1)
            r, z = differentiable_sigmoid(r + hr), differentiable_sigmoid(z + hz)
            n = torch.tanh(n + r * hn)
            state = (n + z * (state - n)).to(of_state.dtype)
            outs.append(state)
        return (torch.stack(outs, 1) if outs else state.new_zeros(*x.shape[:2], self.hidden_size)), state

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, dropout={self.dropout}"
