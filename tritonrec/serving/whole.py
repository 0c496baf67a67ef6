"""A model's layers in one call of the CPU (`numba_layers`): weights as its loops read them.

For new tokens over stored keys and values, and for whole histories in place of an export's program. That is a
hundred nodes, whose checks take ten times as long as the arithmetic of a short history.

Dimensions: B users, L tokens, M new ones of them, d model dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.jagged import offsets_of
from ..kernels.autocast import Precision
from ..kernels.checksums import same_bits
from ..kernels.linear.numba_linear import laid_out
from ..kernels.row_layout import flat
from ..kernels.workers import THREAD_COST, over_ranges
from ..nn import (
    DLRM,
    HSTU,
    DLRMConfig,
    HSTUConfig,
    HSTULayer,
    NextItemModel,
    SASRec,
    SASRecConfig,
    SASRecLayer,
)
from .encoder import Encoder, Step, encode_new, give_weights
from .programs import Program, scorer_of

CACHE_LINE = 16  # of float32
EXAMPLE = 512  # tokens of the examples by which layers are compared with a program
_KINDS: dict[str, tuple[Any, Any]] = {
    "HSTU": (HSTU, HSTUConfig), "SASRec": (SASRec, SASRecConfig), "DLRM": (DLRM, DLRMConfig),
}  # fmt: skip


class Whole:
    """`encode_new` of a float32 HSTU or SASRec, and its `NextItemEncoder`, with their bits."""

    def __init__(self, model: NextItemModel):
        from . import numba_layers

        config, norm = model.config, model.norm
        first: Any = model.layers[0]
        parts = [_parts(each) for each in model.layers]
        self._dim, widths = config.dim, [config.dim, config.heads, config.qk_dim, config.v_dim]
        self._width = config.heads * (config.qk_dim + config.v_dim)
        scales = [config.qk_dim**-0.5, config.dim**0.5]
        if isinstance(model, HSTU):
            self._kernel: Callable[..., bool] = numba_layers.hstu
            eps = [first.norm.eps, first.gate.eps, norm.eps]
            scales[1:1] = [1 / config.max_seq_len]
        else:
            self._kernel = numba_layers.sasrec
            eps = [first.norm.eps, first.ffn_norm.eps, norm.eps]
            widths.append(first.inner.out_features)
        layers, at = _behind_each_other(parts)
        shared, shared_at = _behind_each_other([[model.positions.weight, norm.weight, norm.bias]])
        self._arguments = (
            layers, at, shared[0], shared_at, tuple(map(np.uintp, widths)),
            np.array([*eps, *scales], np.float32),
        )  # fmt: skip
        self._cost = 2.0 * layers.size, 4.0 * len(parts) * self._width

    def encode(self, rows: Tensor, step: Step, store: Tensor) -> Tensor:
        """See `encode_new`."""
        users = offsets_of(step.lengths - step.known), step.known, step.offsets, step.places, step.timestamps
        of_token, of_pair = self._cost
        cost = len(rows) * of_token + float(step.pairs) * of_pair
        found = self._run(rows, tuple(each.numpy() for each in users), store.numpy(), cost)
        if found is None:
            raise ValueError("a key or value is not finite: no cache can be exact with it")
        return found

    def vectors(self, program: Program, rows: Tensor, offsets: Tensor, timestamps: Tensor) -> Tensor:
        """What `program`, that of `NextItemEncoder`, gives; its arguments are checked.

        It is called itself for values that are not finite, and where it is faster: a user is computed by one
        thread here, and by all of them there, in twice the processor's time for long histories and more for
        short ones (docs/serving.md).
        """
        bounds, times = (np.ascontiguousarray(each.numpy()) for each in (offsets, timestamps))
        lengths, count = np.diff(bounds), len(rows)
        costs = lengths * (self._cost[0] + lengths * self._cost[1])
        total, threads = float(costs.sum()), torch.get_num_threads()
        alone = float(costs.max(initial=0)) * min(threads, total // THREAD_COST) > 2 * total
        if alone or rows.shape[1] != self._dim:
            return program(rows, offsets, timestamps)
        known, places = np.zeros(len(lengths), np.int64), np.arange(count)
        # a chunk of users has passed a layer before the next one begins, so all layers store in one place
        store = np.empty((1, count, self._width), np.float32)
        found = self._run(rows.contiguous(), (bounds, known, bounds, places, times), store, total)
        return program(rows, offsets, timestamps) if found is None else found

    def _run(
        self, rows: Tensor, users: tuple[np.ndarray, ...], store: np.ndarray, cost: float
    ) -> Tensor | None:
        """The vectors (B, d); None where a key or value is not finite."""
        count = len(users[1])
        out = torch.empty(count, self._dim, dtype=torch.float32, device="cpu")
        given = rows.numpy().reshape(-1), users, store, out.numpy().reshape(-1)

        def run(start: int, stop: int) -> bool:
            return self._kernel(*self._arguments, *given, start, stop)

        return out if all(over_ranges(run, count, cost)) else None


class WholeClicks:
    """`ClickScorer` of a float32 DLRM, with its bits."""

    def __init__(self, model: DLRM):
        layers: list[Any] = [*(model.bottom or []), *model.top]
        parts = [part for each in layers for part in (laid_out(each.weight.t()), each.bias)]
        weights, at = _behind_each_other([parts])
        widths = np.array([each.weight.shape[::-1] for each in layers], np.uintp)
        self._bottom = len(layers) - len(model.top)
        self._arguments = weights[0], at, widths, self._bottom
        self._cost = 2.0 * weights.size
        self._dense, self._sizes = model.config.dense, (len(model.config.features), model.config.dim)

    def logits(self, program: Program, dense: Tensor, rows: Tensor) -> Tensor:
        """What `program`, that of `ClickScorer`, gives for its arguments."""
        from .numba_clicks import logits

        count = len(dense)
        if dense.shape[1:] != (self._dense,) or rows.shape != (count, *self._sizes):
            return program(dense, rows)
        out = torch.empty(count, 1, dtype=torch.float32, device="cpu")
        given = *(flat(each) for each in (dense, rows)), *map(np.uintp, self._sizes), flat(out)

        def run(start: int, stop: int) -> None:
            logits(*self._arguments, *given, np.uintp(start), np.uintp(stop))

        over_ranges(run, count, self._cost * count, step=4)
        return out


def program_or_whole(dense: Mapping[str, Any], program: Any) -> Program:
    """The program of an export's histories or clicks; in its place `Whole.vectors` or `WholeClicks.logits`.

    That is for layers which the manifest describes, if they have the program's bits on an example.
    """
    layers = dense.get("layers")
    if layers is None or dense["precision"] != "float32" or not isinstance(program, torch.nn.Module):
        return program
    try:
        model = described_model(dense, program)
        whole = partial(
            WholeClicks(model).logits if isinstance(model, DLRM) else Whole(model).vectors, program
        )
        for example in scorer_of(model, model.config.dim).examples:
            if len(example[0]) <= EXAMPLE and not same_bits(whole(*example), program(*example)):
                raise ValueError("the program has other bits")
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        warnings.warn(
            f"the export says that its layers are {str(layers)[:200]}, which is not so ({error}): its "
            "program is run, which is slower for short histories; export again",
            stacklevel=2,
        )
        return program
    return whole


def described_model(dense: Mapping[str, Any], program: Program) -> Any:
    """The HSTU, SASRec or DLRM whose ``layers`` the manifest describes, with the program's weights.

    Raises LookupError, TypeError or ValueError where it describes no model, or another one.
    """
    layers = dense["layers"]
    kind, config = _KINDS[layers["model"]]
    with torch.device("meta"):
        model = kind(config(**layers["config"]))
    give_weights(model, program)
    for name in ("max_seq_len", "dense", "features"):
        told, own = dense.get(name), getattr(model.config, name, None)
        if told != (list(own) if isinstance(own, tuple) else own):
            raise ValueError(f"{name} is {told} beside it")
    return model


def encoder_of(model: NextItemModel, precision: Precision) -> Encoder:
    """`encode_new` of a model, in one call where its layers and precision are those of a kernel."""
    layer = {HSTU: HSTULayer, SASRec: SASRecLayer}.get(type(model))
    if precision == "float32" and layer and {type(each) for each in model.layers} == {layer}:
        return Whole(model).encode
    return partial(encode_new, model, precision)


def _parts(layer: Any) -> list[Any]:
    """Parameters of a layer in the order of its kernel; weights of products (inner, columns), laid out."""
    modules, rest = [layer.norm], []
    if isinstance(layer, HSTULayer):
        modules += [layer.uvqk, layer.gate, layer.output]
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        rest = [layer.tables().get(name, none) for name in ("pos_weights", "ts_weights")]
    else:
        modules += [layer.qkv, layer.output, layer.ffn_norm, layer.inner, layer.outer]
    weights = [each.weight if each.weight.dim() == 1 else laid_out(each.weight.t()) for each in modules]
    return [
        part for weight, each in zip(weights, modules, strict=True) for part in (weight, each.bias)
    ] + rest


def _behind_each_other(parts: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of equal parts: an array (rows, n), and where each part begins (on a cache line) and ends."""
    sizes = [np.size(each) if isinstance(each, np.ndarray) else each.numel() for each in parts[0]]
    starts = np.cumsum([0, *(-(-size // CACHE_LINE) * CACHE_LINE for size in sizes)])
    found = torch.zeros(len(parts), int(starts[-1]), dtype=torch.float32, device="cpu")
    for row, of_row in zip(found, parts, strict=True):
        for part, start, size in zip(of_row, starts, sizes, strict=False):
            row[start : start + size] = (
                torch.as_tensor(part, dtype=torch.float32, device="cpu").detach().flatten()
            )
    return found.numpy(), np.stack([starts[:-1], starts[:-1] + sizes], 1)
