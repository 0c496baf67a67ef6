"""Promise: micro-batches share exchanges, nothing is late for it, no bit changes, and no more rows travel."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import trainer_parts as parts
from speeds import slow_except

from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import ExchangeConfig, Trainer, WindowConfig
from tritonrec.pipeline.exchange_groups import each_alone, joined_groups
from tritonrec.trace import Recorder

M, STEPS = 5, 3


def test_the_drawing_of_the_docstring():
    groups = joined_groups(8, overlap=True, ordered=False)
    assert groups.rows_with == (0, 1, 2, 2, 4, 4, 4, 4)
    assert groups.gradients_with == (3, 3, 3, 3, 5, 5, 6, 7)
    assert groups.joined and not groups.same and groups.sharing == [1, 1, 2, 2, 1, 1]


def test_without_overlap_rows_come_first_and_gradients_leave_last():
    groups = joined_groups(4, overlap=False, ordered=False)
    assert groups.rows_with == (0, 0, 0, 0) and groups.gradients_with == (3, 3, 3, 3) and groups.same
    assert groups.sharing == [4] and each_alone(3).sharing == [1, 1, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_sums_with_an_order_leave_one_by_one(overlap):
    groups = joined_groups(6, overlap, ordered=True)
    assert groups.gradients_with == tuple(range(6)) and groups.rows_with[-1] < 5
    assert groups.sharing == [1] * 6


@pytest.mark.parametrize("count", range(1, 20))
@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_early_and_gradients_late_in_groups_of_neighbours(count, overlap):
    groups = joined_groups(count, overlap, ordered=False)
    for i in range(count):
        rows, gradients = groups.rows_with[i], groups.gradients_with[i]
        assert rows <= i <= gradients
        assert groups.rows_with[rows] == rows and groups.gradients_with[gradients] == gradients
    assert list(groups.rows_with) == sorted(groups.rows_with)
    assert list(groups.gradients_with) == sorted(groups.gradients_with)
    assert each_alone(count).joined is False and groups.joined is (count > 3 or (count > 1 and not overlap))


@pytest.mark.parametrize("count", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("rows", [0.1, 0.3, 0.5])
def test_rows_that_can_be_hidden_are_not_late(count, rows):
    """One second of computation and `rows` of exchange: the last micro-batch ends as if none was joined."""

    def end(groups):
        sent, arrived, computed = 0.0, {}, 0.0
        for first in sorted(set(groups.rows_with)):
            sent += groups.rows_with.count(first) * rows / count
            arrived[first] = sent
        for i in range(count):
            computed = max(computed, arrived[groups.rows_with[i]]) + 1 / count
        return computed

    assert end(joined_groups(count, True, False)) == pytest.approx(end(each_alone(count)))


def trained(mode, consistency="batch", machines=2, **window):
    """State, exchanged parts and counts of each of two ranks."""
    made = [parts.parts() for _ in range(2)]

    def rank(communicators):
        communicators = replace(communicators, machines=machines)
        own, over, sent = made[communicators.rank], communicators.communication, []
        exchange = over.exchange

        def noted(values, send, receive, out=None):
            sent.append(sum(send))
            return exchange(values, send, receive, out)

        over.exchange = noted
        with parts.trainer(own, mode, consistency, communicators, micro_batches=M, **window) as trainer:
            list(trainer.run(parts.batches(STEPS, 13, communicators.rank, 2)))
            return parts.state(own), len(sent), trainer.counts

    return run_ranks(2, rank)


CASES = list(product(("sequential", "dbp", "fwp", "nestpipe"), ("batch", "window"), (False, True)))
FEW = [("sequential", "batch", False), ("nestpipe", "batch", False), ("nestpipe", "window", True)]


@pytest.mark.parametrize(("mode", "consistency", "first_use"), slow_except(FEW, CASES))
def test_joined_exchanges_have_the_bits_of_single_ones_and_no_more_rows(mode, consistency, first_use):
    each, joined = (
        trained(mode, consistency, first_use=first_use, exchanges=exchanges)
        for exchanges in ("each", "joined")
    )
    for (state, messages, counts), (other, fewer, same) in zip(each, joined, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))
        overlaps = mode in ("fwp", "nestpipe")
        if consistency == "batch" and not (overlaps or first_use):  # all share both exchanges
            for name in ("exchanged", "received", "rows", "key_bytes", "row_bytes", "embedding_bytes"):
                assert getattr(same, name) < getattr(counts, name)
                setattr(same, name, getattr(counts, name))
        if consistency == "batch":
            same.row_bytes = counts.row_bytes  # a packed row's bytes follow from its value
        assert counts == same
        rows = 4 if overlaps else 1
        gradients = M if consistency == "window" else rows * 2  # packed sums and their lengths
        assert messages == STEPS * M * (2 if consistency == "window" else 3)
        assert fewer == STEPS * (rows + gradients)


@pytest.mark.parametrize("consistency", ["batch", "window"])
def test_ranks_of_one_machine_exchange_a_windows_rows_once(consistency):
    alone, *runs = (
        trained("nestpipe", consistency, **how)
        for how in (
            {"exchanges": "each", "machines": 1},
            {"exchanges": "once"}, {"machines": 1},
            {"exchanges": "joined", "machines": 1}, {},
        )
    )  # fmt: skip
    # packed sums and their lengths are two messages; on one machine sums are sent whole
    gradients = (M, M, M, M) if consistency == "window" else (2, 1, 4, 2 * M)
    for ranks, rows, sums in zip(runs, (1, 1, 4, M), gradients, strict=True):
        for (state, _, whole), (other, messages, counts) in zip(alone, ranks, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))
            assert messages == STEPS * (rows + sums)
            assert (counts.rows < whole.rows) is (consistency == "batch" and rows == 1)


@pytest.mark.parametrize(
    ("mode", "exchanges", "machines", "said"),
    [
        ("nestpipe", "auto", 1, "1 of rows and 1 of gradients a window of 8 micro-batches: the ranks' own"),
        (
            "nestpipe",
            "auto",
            2,
            "8 of rows and 8 of gradients a window of 8 micro-batches: they travel",
        ),
        ("nestpipe", "joined", 2, "4 of rows and 4 of gradients a window of 8 micro-batches: exchanges is"),
        ("nestpipe", "each", 1, "8 of rows and 8 of gradients a window of 8 micro-batches: exchanges is 'e"),
        ("nestpipe", "once", 2, "1 of rows and 1 of gradients a window of 8 micro-batches: exchanges is 'o"),
        ("dbp", "auto", 2, "1 of rows and 1 of gradients a window of 8 micro-batches: dbp overlaps none"),
    ],
)
def test_a_trace_says_which_exchanges_run_and_why(mode, exchanges, machines, said):
    made = [parts.parts() for _ in range(2)]

    def rank(communicators):
        communicators = replace(communicators, machines=machines)
        recorder, config = (
            Recorder(communicators.rank, 2),
            WindowConfig(8, exchange=ExchangeConfig(sharing=exchanges)),
        )
        with Trainer(*made[communicators.rank], communicators, mode, config, recorder):
            return recorder.metadata["exchanges"], recorder.metadata["taper"]

    beside = mode == "nestpipe" and exchanges != "once" and (exchanges, machines) != ("auto", 1)
    for words, taper in run_ranks(2, rank):
        assert words.startswith(said) and taper == (0.9 if beside else 1.0)
        assert ("; micro-batches have 0.9 of the samples of their inner neighbours" in words) is beside


def test_a_trace_says_where_a_machine_could_get_a_row_once():
    def rank(communicators):
        communicators = replace(communicators, machines=2)
        with parts.trainer(parts.parts(), communicators=communicators) as training:
            return training.program.exchanges

    said = "nodes=2 would send a row once to a machine, and not to each rank"
    assert all(each.endswith(said) for each in run_ranks(4, rank))
    for world, options in ((4, {"nodes": 2}), (2, {}), (3, {}), (4, {"replicas": 2})):
        assert not any(said in each for each in run_ranks(world, rank, **options))
