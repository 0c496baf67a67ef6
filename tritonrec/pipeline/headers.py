"""What ranks say of themselves with the key counts of a window, so that all are at the same step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..distributed import Communicators, RanksDisagreeError

GOES_ON = -1


class Header(NamedTuple):
    """One rank's.

    Args:
        rank: among all. step: of the window's last batch; at the end of a run, the last one's.
        ended: batches of the run on a rank whose batches have ended; `GOES_ON` with every window.
        stop: 1 where the rank was asked to stop.
        terms: of the loss, in this window.
    """

    rank: int
    step: int
    ended: int
    stop: int
    terms: int


class Headers(NamedTuple):
    """Of all ranks: whether one was asked to stop, and terms of this sharding group and of all ranks."""

    stop: bool
    shard_terms: int
    terms: int


def exchange(
    communicators: Communicators, counts: torch.Tensor, step: int, terms: int = 0, ended: int = GOES_ON
) -> tuple[torch.Tensor, Headers]:
    """Send row r of `counts` (L, n) int64 and a header to rank r of this sharding group. Collective.

    With replicas of the tables each rank sees the headers of all ranks, not only of its sharding group.

    Returns:
        The counts (L, n) received, and what the headers say together.

    Raises:
        RanksDisagreeError: ranks are at different steps, or the batches of one have ended. On every rank.
    """
    header = Header(communicators.rank, step, ended, communicators.stop.is_set(), terms)
    mine = torch.tensor([header], dtype=torch.int64).expand(len(counts), -1)
    answers = communicators.routing.all_to_all_equal(torch.cat([counts, mine], 1))
    counts, headers = answers.split([counts.shape[1], len(header)], 1)
    shard_terms = int(headers[:, -1].sum())
    if communicators.replicas > 1:
        rows = headers.reshape(1, -1).expand(communicators.replicas, -1)
        headers = communicators.replica_routing.all_to_all_equal(rows).view(-1, len(header))
    _demand_together(headers)
    _rank, _step, _ended, stop, all_terms = headers.unbind(1)
    return counts, Headers(bool(stop.any()), shard_terms, int(all_terms.sum()))


def _demand_together(headers: torch.Tensor) -> None:
    """Raise RanksDisagreeError unless all ranks are at one step, or have all ended."""
    _rank, step, ended, _stop, _terms = headers.unbind(1)
    goes_on = ended == GOES_ON
    if bool((step == step[0]).all()) and bool((goes_on == goes_on[0]).all()):
        return
    everyone = sorted(Header(*row) for row in headers.tolist())
    going = [each for each in everyone if each.ended == GOES_ON]
    done = [each for each in everyone if each.ended != GOES_ON]
    if going and done:
        raise RanksDisagreeError(
            f"rank {done[0].rank} ended after {done[0].ended} batches and rank {going[0].rank} goes on with "
            f"step {going[0].step}: give every rank the same number (drop_last=True, or pad with empty "
            "batches)"
        )
    first = everyone[0]
    other = next(each for each in everyone if each.step != first.step)
    raise RanksDisagreeError(
        f"rank {other.rank} is at step {other.step} and rank {first.rank} at step {first.step}: give every "
        "rank its part of the same batches"
    )
