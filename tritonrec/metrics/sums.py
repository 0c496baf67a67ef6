"""Sums whose bits do not depend on the order of their terms."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed import Communicator

BITS = 60
"""Fraction bits of a sum; a term must be below 2**20."""


def exact_sums(terms: Tensor, sizes: Sequence[int]) -> list[list[int]]:
    """Sums of float64 terms (T, n) over consecutive parts of the n, `sizes` long: (parts, T), times 2**60.

    Each term is rounded once, so a sum does not depend on the order of its terms, nor on how they are cut.
    Raises ValueError for a term that is not finite or not below 2**20.
    """
    if not bool((terms.abs() < 2.0**20).all()):
        raise ValueError("predictions, labels and weights of metrics must be finite, and below 2**20")
    high = (terms * 2.0**20).round()
    low = ((terms - high / 2.0**20) * 2.0**BITS).round()
    until = torch.nn.functional.pad(torch.stack([high, low]).long().cumsum(2), (1, 0))
    ends = torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0)
    of_parts = until[:, :, ends.to(terms.device)].diff(dim=2).permute(0, 2, 1)
    return [
        [(h << 40) + l for h, l in zip(*both, strict=True)] for both in zip(*of_parts.tolist(), strict=True)
    ]


def merged(control: Communicator, updates: str, sums: Sequence[Sequence[int]]) -> list[list[int]]:
    """`sums` added up over the ranks. Collective; RuntimeError where ranks differ in their `updates`."""
    found = [json.loads(text) for text in control.all_gather_texts(json.dumps([updates, *sums]))]
    if len({each[0] for each in found}) > 1:
        raise RuntimeError(f"ranks have updated their metrics {', '.join(each[0] for each in found)}")
    return [[sum(row) for row in zip(*rows, strict=True)] for rows in list(zip(*found, strict=True))[1:]]
