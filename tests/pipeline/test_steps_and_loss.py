"""Promise: steps rise over all runs; each result has the mean loss of all ranks, in the same bits."""

import copy
import math

import pytest
import torch
from trainer_parts import (
    EVERY,
    EVERY_MODE,
    STAGED_MODES,
    NoParameters,
    Ranker,
    batches,
    parts,
    same,
    state,
    trained,
    trainer,
)

from tritonrec import ops
from tritonrec.data import split
from tritonrec.distributed import Communicator, RanksDisagreeError
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import DenseModel, Trainer, WindowConfig, headers
from tritonrec.pipeline.headers import Header
from tritonrec.pipeline.stages import samples
from tritonrec.trace import Recorder, read


@pytest.mark.smoke
@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("order", [(0, 1, 1), (0, 2, 1), (3, 0)])
def test_steps_that_do_not_rise_are_refused_and_what_was_read_is_trained(mode, order):
    made = parts()
    with trainer(made, mode) as training:
        with pytest.raises(ValueError, match=rf"step {order[-1]} is update {order[-1]}, .*steps must rise"):
            list(training.run(batches(4)[step] for step in order))
        list(training.run([]))
    assert same(state(made), trained(parts(), "reference", "batch", [batches(4)[s] for s in order[:-1]])[0])


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_steps_rise_over_all_runs_and_trainers_of_the_same_tables_or_optimizer(mode, consistency):
    made = parts()
    trained(made, mode, consistency, batches(3))
    fresh = parts()
    for mixed in (made, (made[0], fresh[1], made[2]), (fresh[0], made[1], fresh[2])):
        with pytest.raises(ValueError, match="step 2 is update 2, and update 2 of these tables"):
            trained(mixed, mode, consistency, [batches(3)[2]])
    with trainer(made, mode, consistency) as training:
        list(training.run(batches(5)[3:4]))
        with pytest.raises(ValueError, match="step 3 is update 3"):
            training.step(batches(4)[3])
        assert training.step(batches(6)[5]).step == 5


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_loaded_state_goes_on_at_any_step(mode, consistency):
    made, again = parts(), parts()
    trained(made, mode, consistency, batches(3))
    saved = copy.deepcopy(DenseModel(made[0], made[2]).state_dict())
    for model, tables, optimizer in (again, made):  # fresh objects, and those that have gone further
        tables.load_state(made[1].state())
        DenseModel(model, optimizer).load_state_dict(saved)
        with trainer((model, tables, optimizer), mode, consistency) as training:
            assert training.step(batches(2)[1]).step == 1
    assert same(state(made), state(again))


def test_updates_count_where_several_batches_make_one():
    made = parts()
    trained(made, "nestpipe", "batch", batches(5), accumulate=2)
    with pytest.raises(ValueError, match="step 4 is update 2, and update 2 of"):
        trained(made, "nestpipe", "batch", batches(6)[4:], accumulate=2)
    with pytest.raises(ValueError, match="step 2 is update 2, and update 2 of"):
        trained(made, "nestpipe", "batch", batches(3)[2:])


def expected_loss(results, terms):
    """The mean, from exact sums of the losses on a grid of 2**-24."""
    total = sum(round(float(each) * 2**24) for result in results for each in result.losses)
    return total / 2**24 / terms


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_result_has_the_mean_loss_of_its_update(mode, consistency, accumulate):
    _, results = trained(parts(), mode, consistency, batches(3), accumulate=accumulate)
    for first in range(0, 3, accumulate):
        update = results[first : first + accumulate]
        terms = sum(batch.loss_terms for batch in batches(3)[first : first + accumulate])
        for result in update:
            assert isinstance(result.loss, float) and result.loss_terms == terms
            assert result.loss == pytest.approx(expected_loss(update, terms), rel=2e-7)


@pytest.mark.parametrize("micro_batches", [1, 2, 9])
@pytest.mark.parametrize("mode", STAGED_MODES)
def test_the_mean_loss_has_the_bits_of_synchronous_training(mode, micro_batches, monkeypatch):
    swaps = []
    monkeypatch.setattr(samples, "split", lambda *given: swaps.append(given[4]) or split(*given))
    expected = [result.loss for result in trained(parts(), "reference", "batch", batches(3))[1]]
    clustered = {"clustering": True, "clustering_swaps": micro_batches == 2}
    got = trained(parts(), mode, "batch", batches(3), micro_batches=micro_batches, **clustered)[1]
    assert [result.loss for result in got] == expected
    assert swaps[-3:] == [micro_batches == 2] * 3
    assert torch.tensor(expected, dtype=torch.float32).tolist() == expected  # float32 numbers


def test_large_losses_are_shown_and_do_not_stop_training():
    class Large(NoParameters):
        def forward(self, batch, rows, seed):
            return super().forward(batch, rows, seed) * 2.0**-20 + 2.0**33

    _, results = trained(parts(Large), "reference", "batch", batches(1))
    assert results[0].loss == pytest.approx(7 * 2.0**33 / batches(1)[0].num_tokens)


def test_a_loss_that_is_no_number_is_named():
    class Bad(NoParameters):
        def forward(self, batch, rows, seed):
            return super().forward(batch, rows, seed) + math.inf

    with pytest.raises(ops.ExactSumError, match="losses of the samples"):
        trained(parts(Bad), "reference", "batch", batches(1))


def losses_here(communicators, mode, micro_batches, consistency, model):
    made = parts(model)
    read = batches(3, rank=communicators.rank, world_size=communicators.world_size)
    if communicators.rank == 1:
        read[1] = read[1].select(torch.arange(0))
    with trainer(made, mode, consistency, communicators, micro_batches=micro_batches) as training:
        results = list(training.run(read))
    return [(result.loss, len(result.losses)) for result in results]


@pytest.mark.multi_rank
@pytest.mark.parametrize(("mode", "micro_batches"), [("sequential", 1), ("nestpipe", 4)])
def test_every_rank_has_the_mean_loss_of_all_ranks_also_where_one_has_no_samples(pool, mode, micro_batches):
    for world, model in ((2, Ranker), (3, NoParameters)):
        whole = [
            [batches(3, rank=rank, world_size=world)[step] for rank in range(world)] for step in range(3)
        ]
        whole[1][1] = whole[1][1].select(torch.arange(0))
        together = [type(each[0]).concat(each) for each in whole]
        expected = [result.loss for result in trained(parts(model), "reference", "batch", together)[1]]
        said = pool.run(losses_here, world, mode, micro_batches, "batch", model)
        assert all([loss for loss, _ in each] == expected for each in said)
        assert said[1][1][1] == 0 < said[0][1][1]
        assert sum(each[0][1] for each in said) == 7
    near = pool.run(losses_here, world, mode, micro_batches, "window", model)
    assert all([loss for loss, _ in each] == pytest.approx(expected, rel=1e-4) for each in near)
    assert len({tuple(loss for loss, _ in each) for each in near}) == 1


def test_slices_of_exchanges_have_the_bytes_that_left_the_rank(tmp_path):
    made = parts(), parts()  # by one thread, since torch has one seed

    def rank(communicators):
        recorder, config = Recorder(communicators.rank, 2), WindowConfig(micro_batches=3, seed=4)
        with Trainer(*made[communicators.rank], communicators, "nestpipe", config, recorder) as training:
            list(training.run(batches(3, 7, communicators.rank, 2)))
        recorder.save(file := tmp_path / str(communicators.rank))
        return [span for span in read(file).spans if "bytes" in span.args], training.counts.row_bytes

    for spans, total in run_ranks(2, rank):
        assert {span.name for span in spans} == {"exchange", "gradient_exchange"}
        assert sum(span.args["bytes"] for span in spans) == total > 0


def test_a_rank_that_has_ended_beside_one_that_goes_on_is_named_with_its_batches():
    rows = [Header(0, 5, False, loss_terms=1), Header(1, 5, False, ended=3, loss_terms=1)]
    ahead = torch.tensor([list(rows[0]), [1, 6, *rows[0][2:]]])
    same = torch.tensor([list(rows[0]), list(rows[0]._replace(rank=1))])
    headers._validate_same_step(same)
    with pytest.raises(
        RanksDisagreeError, match="rank 1 ended after 3 batches and rank 0 goes on with step 5"
    ):
        headers._validate_same_step(torch.tensor([list(each) for each in rows]))
    with pytest.raises(RanksDisagreeError, match="rank 1 is at step 6 and rank 0 at step 5"):
        headers._validate_same_step(ahead)


def test_terms_of_the_loss_are_added_up_over_the_ranks():
    mine = Header(0, 5, False, loss_terms=7)
    counts, found = headers.exchange(Communicator(), Communicator(), torch.tensor([[3, 4]]), mine)
    assert counts.tolist() == [[3, 4]] and found == headers.Headers(False, 7, 7)
