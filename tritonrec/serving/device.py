"""An exported model that computes on an accelerator, by the ops that its training ran there.

Embedding rows lie on the host, where ids are looked up; layers, scores and the search are the device's. Its
bits are those of the trainer's evaluation on this device, which are not the CPU's: a device has an
exponential and an order of products of its own. Like the CPU's they do not depend on the batch.

Dimensions: B users, L events, I items, d model dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..kernels.checksums import same_bits
from ..kernels.dispatch import usable_device
from .predictor import Predictor
from .programs import NEXT_ITEM, InPrecision, NextItemEncoder, scorer_of
from .retrieval import not_finite, top_k
from .whole import EXAMPLE, described_model

SCORES = 2**26
"""That are in memory at a time."""


class DevicePredictor(Predictor):
    """A `Predictor` of the next item on a device: vectors are there, items and scores come to the host.

    Attributes:
        device: see `torch.device`.
    """

    def __init__(self, exact: Predictor, device: torch.device | str = "cuda"):
        """Put the layers and the items, (I, d) float32, of `exact` on a device.

        Raises ValueError for a device that is not here, a model that is not of the next item, and an export
        that does not describe its layers, as those of an HSTU and a SASRec do; TypeError for an `exact` that
        holds its rows, or searches, in a way of its own.
        """
        if type(exact) not in (Predictor, DevicePredictor):
            raise TypeError(f"a {type(exact).__name__} computes in a way of its own: give a Predictor")
        dense = exact.dense_of(NEXT_ITEM, "a predictor on a device")
        super().__init__(exact.manifest, exact.tables, exact.program, exact.vocabularies)
        self.device = usable_device(device)
        if "layers" not in dense:
            raise ValueError(
                "the export does not say which layers it has, as those of an HSTU or a SASRec do: serve it "
                "on the CPU, or export it again"
            )
        try:
            model = described_model(dense, exact.program)
        except (LookupError, TypeError) as error:
            raise ValueError(f"the export describes no layers of its program: {error!r}") from error
        module = InPrecision(NextItemEncoder(model), dense["precision"]).eval().requires_grad_(False)
        for example in scorer_of(model, model.config.dim).examples:
            if len(example[0]) <= EXAMPLE and not same_bits(module(*example), exact.program(*example)):
                raise ValueError("the layers that the export describes have other bits than its program")
        self._layers, self._whole = module.to(self.device), self._items().whole.to(self.device)

    def recomputed(self, rows: Tensor, offsets: Tensor, timestamps: Tensor) -> Tensor:
        """Vectors (B, d) of whole histories from rows (L, d); see `NextItemEncoder`."""
        with torch.no_grad():
            return self._layers(*(each.to(self.device) for each in (rows, offsets, timestamps)))

    def vectors(self, ids: Tensor, offsets: Tensor, timestamps: Tensor) -> Tensor:
        """As of its base, on the device."""
        return self.recomputed(self.rows("item", ids), offsets, timestamps)

    def scores_of(self, vectors: Tensor, items: Tensor | None = None) -> Tensor:
        """As of its base, from vectors on the device."""
        weights = self._whole if items is None else self.rows("item", items).to(self.device)
        return ops.linear(vectors, weights, None).cpu()

    def best_without(self, vectors: Tensor, k: int, places: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """As of its base; ValueError where a score is not finite."""
        found: list[tuple[Tensor, Tensor]] = []
        size = max(1, SCORES // max(1, len(self._whole)))
        for first in range(0, len(vectors), size):
            own = offsets[first : first + size + 1]
            scores = ops.linear(vectors[first : first + size], self._whole, None)
            if not bool((good := scores.isfinite()).all()):
                user, item = (~good).nonzero()[0].tolist()
                raise not_finite(first + user, item, float(scores[user, item]))
            users = torch.repeat_interleave(torch.arange(len(own) - 1, device="cpu"), own.diff())
            seen = (each.to(self.device) for each in (users, places[own[0] : own[-1]]))
            scores[tuple(seen)] = -torch.inf  # below all others, of which k or more are left
            best, highest = top_k(scores, k)
            found.append((self.item_ids[best.cpu()], highest.cpu()))
        return (
            torch.cat([torch.empty(0, k, dtype=torch.int64, device="cpu"), *(ids for ids, _ in found)]),
            torch.cat([torch.empty(0, k, dtype=torch.float32, device="cpu"), *(each for _, each in found)]),
        )


def on_device(predictor: Predictor, device: torch.device | str) -> Predictor:
    """The predictor itself for the CPU, or a `DevicePredictor` of it."""
    return predictor if usable_device(device).type == "cpu" else DevicePredictor(predictor, device)
