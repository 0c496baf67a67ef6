"""Checks of an exchange: arguments that do not fit together, and ranks that disagree."""

from __future__ import annotations

import operator
from contextlib import suppress

import torch

from .messages import UNKNOWN, Header, Layout
from .transport import Disagreement, Exchange


def checked_counts(name: str, counts: list[int], world_size: int) -> list[int]:
    """`counts` as ints; ValueError unless there is one of at least 0 for each rank."""
    with suppress(TypeError):
        whole = [operator.index(count) for count in counts]
        if len(whole) == world_size and min(whole) >= 0:
            return whole
    raise ValueError(f"{name} needs {world_size} counts of at least 0, one for each rank, got {counts}")


def check_values(values: torch.Tensor, send: list[int]) -> None:
    """Raise ValueError unless `values` are sum(send) dense rows with memory."""
    if values.dim() < 1 or len(values) != sum(send):
        raise ValueError(f"values must have sum(send) = {sum(send)} rows, got {tuple(values.shape)}")
    if values.layout is not torch.strided or values.is_quantized or values.device.type == "meta":
        raise ValueError(
            "values must be a dense tensor with memory, got "
            f"{values.dtype} {values.layout} on {values.device}"
        )


def check_out(out: torch.Tensor, values: torch.Tensor, receive: list[int] | None) -> None:
    """Raise ValueError unless the received rows fit into `out`."""
    fits = out.dim() > 0 and Layout.of(out) == Layout.of(values) and out.device == values.device
    if not fits or not out.is_contiguous() or (receive is not None and len(out) != sum(receive)):
        rows = "the received rows" if receive is None else f"sum(receive) = {sum(receive)} rows"
        raise ValueError(
            f"out must hold {rows} of {Layout.of(values)} on {values.device}, contiguous; got "
            f"{tuple(out.shape)} {str(out.dtype).removeprefix('torch.')} on {out.device}"
            f"{'' if out.is_contiguous() else ', not contiguous'}"
        )


def check_header(header: Header, exchange: Exchange, peer: int, rank: int, capacity: int, most: int) -> None:
    """Raise Disagreement where a message from `peer` to `rank` is none that its receiver expects.

    Args:
        exchange: of the receiver. capacity: of `BoundedLagAllToAll`. most: bytes of rows whose receiver
            expects any number.
    """
    number, layout, sent = exchange.number, exchange.layout, exchange.send[peer]
    expected = UNKNOWN if exchange.receive is None else exchange.receive[peer]
    if header.number != number:
        raise Disagreement(
            f"rank {peer} sent all-to-all {header.number} and rank {rank} expects {number}: all ranks have "
            "to run the same exchanges"
        )
    if not header.matches(layout) or expected not in (UNKNOWN, header.rows):
        rows = "any number" if expected == UNKNOWN else expected
        raise Disagreement(
            f"rank {peer} sent {header.rows} rows of {header.layout}, and rank {rank} expects {rows} of "
            f"{layout} in all-to-all {number}: give all ranks one dtype and row shape, and each rank the "
            "counts that are sent to it"
        )
    if header.expects not in (UNKNOWN, sent):
        raise Disagreement(
            f"rank {rank} sent {sent} rows of {layout}, and rank {peer} expects {header.expects} of "
            f"{header.layout} in all-to-all {number}: give each rank the counts that are sent to it"
        )
    # Both directions: both ranks find the same message too large.
    for source, to, rows, known in ((peer, rank, header.rows, expected), (rank, peer, sent, header.expects)):
        size = exchange.size(rows)
        if known == UNKNOWN and source != to and size > most:
            raise Disagreement(
                f"rank {source} sent {size} bytes, and rank {to} has a capacity of {capacity} in "
                f"all-to-all {number}: give BoundedLagAllToAll a larger one, on all ranks"
            )
