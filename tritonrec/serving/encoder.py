"""User vectors from new tokens alone, over keys and values of the tokens before them.

A layer that has a method ``over`` declares what it reads of past tokens: their keys and values
(`nn.hstu_layer.hstu_layer_over` describes it). Every op of such a layer is one of rows, but causal attention;
and a row of attention is a sum over keys in their order, in chains that begin at multiples of 64 whatever
rows are computed. So the rows of new tokens have the bits that they have when all are computed, and so have
their keys and values in the next layer. `check_equal` compares that with the export's program. An HSTU or a
SASRec in float32 has its layers in one call (`whole`), with the same bits.

Dimensions: B users, L tokens, M new ones of them, d model dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..data.jagged import offsets_of
from ..kernels.autocast import Precision, autocast, widen
from ..kernels.checksums import same_bits
from ..nn import DLRM, NextItemModel
from .programs import ClickScorer, InPrecision, NextItemEncoder, Program, scorer_of


@dataclass(frozen=True)
class Step:
    """What is computed for B users, who have a new token each.

    Args:
        lengths: (B,) int64, of the histories. known: (B,) int64, tokens whose keys and values are stored.
        timestamps: (L,) int64. places: (L,) int64, the tokens' rows of the store.
    """

    lengths: Tensor
    known: Tensor
    timestamps: Tensor
    places: Tensor

    @property
    def offsets(self) -> Tensor:
        """(B + 1,), of the tokens."""
        return offsets_of(self.lengths)

    def to(self, device: torch.device) -> Step:
        """The same on a device."""
        return Step(*(each.to(device) for each in (self.lengths, self.known, self.timestamps, self.places)))

    @property
    def pairs(self) -> int:
        """Of new tokens and tokens of the same user."""
        return int(((self.lengths - self.known) * self.lengths).sum())

    @property
    def sample_ids(self) -> Tensor:
        """(B,), for dropout, which is off."""
        return torch.zeros_like(self.lengths)

    @property
    def new(self) -> Tensor:
        """(M,) int64: numbers of the new tokens among all."""
        starts = torch.repeat_interleave(self.offsets[:-1] + self.known, self.lengths)
        return (torch.arange(len(starts), device="cpu") >= starts).nonzero().squeeze(1)


Encoder = Callable[[Tensor, Step, Tensor], Tensor]
"""Vectors (B, d) from rows (M, d), a step and the store: see `encode_new`."""


def encode_new(model: NextItemModel, precision: Precision, rows: Tensor, step: Step, store: Tensor) -> Tensor:
    """Vectors (B, d) float32 of the users; writes the new tokens' keys and values to the store.

    Args:
        model: in evaluation mode. rows: (M, d) float32, embeddings of the new tokens.
        store: (layers, rows, heads * (qk_dim + v_dim)), on the model's device. All else may be the host's.

    Raises ValueError for keys or values that are not finite: with them rows of attention depend on the rows
    that are computed beside them.
    """
    to, new, fresh = store.device, step.new, offsets_of(step.lengths - step.known)
    step, rows, new, fresh = step.to(to), rows.to(to), new.to(to), fresh.to(to)
    tokens = model.place(step)  # type: ignore[arg-type]
    with torch.no_grad(), autocast(precision, to):
        x = rows * model.config.dim**0.5 + model.positions(tokens.positions[new])
        for number, layer in enumerate(model.layers):
            keep = partial(_keep, store[number], step, new)
            wanted = fresh[1:] - 1 if number == len(model.layers) - 1 else None
            x = layer.over(x, tokens, fresh, keep, wanted)  # type: ignore[operator]
        return widen(model.norm(x))


def _keep(store: Tensor, step: Step, new: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Store the keys and values (M, H, D) of the new tokens; those of all tokens (L, H, D)."""
    written = torch.cat([keys.flatten(1), values.flatten(1)], 1)
    if not bool(written.isfinite().all()):
        raise ValueError("a key or value is not finite: no cache can be exact with it")
    store[step.places[new]] = written
    if len(new) < len(step.places):
        width = keys.shape[1] * keys.shape[2]
        of_all = store.index_select(0, step.places)
        keys = of_all[:, :width].unflatten(1, keys.shape[1:])
        values = of_all[:, width:].unflatten(1, values.shape[1:])
    return keys, values


def give_weights(model: NextItemModel | DLRM, program: Program) -> None:
    """Give `model` the weights of its scorer's program; ValueError where their shapes differ."""
    scorer = ClickScorer(model) if isinstance(model, DLRM) else NextItemEncoder(model)
    holder = InPrecision(scorer, "float32")
    theirs, own = program.state_dict(), holder.state_dict()  # type: ignore[attr-defined]
    for name in sorted({*theirs, *own}):
        shapes = [tuple(each[name].shape) if name in each else "missing" for each in (theirs, own)]
        if shapes[0] != shapes[1]:
            short = name.removeprefix("module.model.")
            raise ValueError(f"{short} is {shapes[0]} in the export and {shapes[1]} in the model")
    copies = {name: each.clone() for name, each in theirs.items()}
    holder.load_state_dict(copies, assign=True)  # a model on the meta device too


def check_equal(model: NextItemModel, encode: Encoder, program: Program, store: Tensor, timed: bool) -> None:
    """Raise ValueError unless the model has the bits of the export's program, with half of a history cached.

    Numbers of a configuration that no shape shows, as that of heads, are found in this way, and layers whose
    tokens see later ones. `timed`: a token asks at the time of the next one.
    """
    for rows, offsets, times in scorer_of(model, model.config.dim).examples:
        if len(rows) > min(1024, store.shape[1]):
            continue
        lengths, places = offsets.diff(), torch.arange(len(rows), device="cpu")
        half = (lengths + 1) // 2
        early = places < torch.repeat_interleave(offsets[:-1] + half, lengths)
        before = Step(half, torch.zeros_like(half), times[early], places[early])
        encode(rows[early], before, store)
        step = Step(lengths, torch.minimum(half - int(timed), lengths - 1).clamp(min=0), times, places)
        got = encode(rows[step.new], step, store)
        with torch.no_grad():
            want = program(rows, offsets, times)
        if not same_bits(got, want):
            raise ValueError(
                f"the {type(model).__name__} has other bits than the export's program: it was built from "
                f"another configuration than the trained one (heads?), {model.config}, or its tokens see "
                "later ones"
            )
