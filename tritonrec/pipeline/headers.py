"""Headers that ranks exchange with the key counts of a window, so that all are at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..distributed import Communicator, RanksDisagreeError
from .words import WIDTH, Words, may_differ

NO_WORDS = Words()
GOES_ON = -1


class Header(NamedTuple):
    """One rank's state.

    Args:
        rank: among all. step: of the window's last batch; at the end of a run, the last one's.
        stop: the rank was asked to stop.
        ended: batches of the run on a rank whose batches have ended; `GOES_ON` with every window.
        loss_terms: in this window.
    """

    rank: int
    step: int
    stop: bool
    ended: int = GOES_ON
    loss_terms: int = 0


class Headers(NamedTuple):
    """Of all ranks: whether one was asked to stop, and loss terms of this sharding group and of all ranks."""

    stop: bool
    shard_loss_terms: int
    loss_terms: int


def exchange(
    routing: Communicator,
    replica_routing: Communicator,
    counts: torch.Tensor,
    header: Header,
    words: Words = NO_WORDS,
    settle: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, Headers]:
    """Send row r of `counts` (L, n) int64 and the header to rank r of this sharding group. Collective.

    With replicas of the tables, or ranks on other nodes, each rank gets the headers of all ranks.

    Args:
        routing, replica_routing: over the ranks that get counts, and over those that are in their places
            elsewhere: all ranks are in one of the first with one of the second.
        words: of this rank (`run_agreement`). settle: called on all ranks where theirs may differ.

    Returns:
        The counts (L, n) received, and what follows from all headers.

    Raises:
        RanksDisagreeError: ranks are at different steps, or the batches of one have ended. On every rank.
    """
    own = [*header, *words.row]
    mine = torch.tensor([own], dtype=torch.int64, device="cpu").expand(len(counts), -1)
    # row r of the message:  | counts for rank r | header | words |
    # Every rank gets every header of its group; where there are replicas a second exchange brings the
    # others'.
    received = routing.all_to_all_equal(torch.cat([counts, mine], 1))
    counts, headers = received.split([counts.shape[1], len(own)], 1)
    # The last field, `loss_terms`, of this sharding group, before the headers of other groups come.
    shard_loss_terms = int(headers[:, len(header) - 1].sum())
    replicas = replica_routing.world_size
    if replicas > 1:
        rows = headers.reshape(1, -1).expand(replicas, -1)
        headers = replica_routing.all_to_all_equal(rows).view(-1, len(own))
    headers, of_words = headers.split([len(header), WIDTH], 1)
    _validate_same_step(headers)
    # All ranks see the same headers, so all of them call `settle` or none does: it is collective.
    if len(headers) > 1 and may_differ(of_words.tolist()):
        settle()
    _rank, _step, stop, _ended, loss_terms = headers.unbind(1)
    return counts, Headers(bool(stop.any()), shard_loss_terms, int(loss_terms.sum()))


def _validate_same_step(headers: torch.Tensor) -> None:
    """Raise RanksDisagreeError unless all ranks are at one step, or have all ended."""
    _rank, step, _stop, ended, _loss_terms = headers.unbind(1)
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
