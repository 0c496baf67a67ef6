"""Promise: while windows are in flight model, tables and optimizer are the trainer's, else the caller's."""

import copy
import io
import json
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from trainer_parts import (
    EVERY,
    ONE_IN_FLIGHT,
    READS_AHEAD,
    Ranker,
    batches,
    optimizer_of,
    parts,
    same,
    state,
    trained,
    trainer,
)

from tritonrec.data import Lookup
from tritonrec.embedding.in_flight import as_lane
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.nn.context import takes_indexed_rows
from tritonrec.pipeline import DenseModel
from tritonrec.pipeline.dense_checks import PROBE_ELEMENTS, _capped, validate_invariant
from tritonrec.pipeline.flight import Flight, on_the_callers_thread
from tritonrec.pipeline.pending import PendingWindows
from tritonrec.pipeline.places import Buffer, KeptRows, OwnedRows, WindowPlaces
from tritonrec.resilience import peer_copies
from tritonrec.resilience.peer_copies import PeerCopies

STEPS_1_TO_3 = r"refused while steps 1 to 3 are in flight.*list\(trainer\.run"


def plain_step(model):
    """One step of torch's own optimizer; how far each parameter moved."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    batch = batches(1)[0]
    rows = torch.randn(3 * batch.num_tokens, 6, generator=torch.Generator().manual_seed(1))
    model(batch, {"item": rows}, 0).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    moved = [a - b for a, b in zip(before, model.parameters(), strict=True)]
    return moved, gradients


def assert_trains_by_itself(model):
    moved, gradients = plain_step(model)
    assert all(bool(each.abs().max() > 0) for each in moved)
    for change, gradient in zip(moved, gradients, strict=True):
        torch.testing.assert_close(change, 0.01 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_after_an_error_the_model_is_given_back_with_its_gradients(mode, consistency):
    made = parts()
    for parameter in made[0].parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    forward, made[0].forward = made[0].forward, None

    def failing(batch, rows, seed):
        losses = forward(batch, rows, seed)
        losses.sum().backward()
        if batch.step == 2:
            raise OverflowError("a failure of the model")
        return forward(batch, rows, seed)

    made[0].forward = failing
    with pytest.raises((OverflowError, RuntimeError), match="a failure of the model"):  # noqa: SIM117
        with trainer(made, mode, consistency) as training:
            list(training.run(batches(4)))
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in made[0].parameters())
    del made[0].forward
    assert_trains_by_itself(made[0])


def test_a_run_that_fails_as_ranks_are_compared_leaves_the_model_to_the_caller():
    def begin(single):
        raise MemoryError("of a digest")

    made = parts()
    with trainer(made, "nestpipe") as training:
        training._pending.agreement = SimpleNamespace(begin=begin, end=lambda: None)
        with pytest.raises(MemoryError, match="of a digest"):
            list(training.run(batches(3)))
        assert_trains_by_itself(made[0])


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_between_runs_a_step_of_torch_is_one_of_the_steps(mode, consistency):
    def run(made, kind):
        model = made[0]
        with trainer(made, kind, consistency) as training:
            list(training.run(batches(2)))
            assert not any(vars(parameter) for parameter in model.parameters())
            assert_trains_by_itself(model)
            list(training.run(batches(3)[2:]))
        return state(made)

    assert same(run(parts(), mode), run(parts(), "reference" if consistency == "batch" else "sequential"))


def test_two_trainers_over_one_model_take_turns():
    expected, _ = trained(parts(), "reference", "batch", batches(6))
    made = parts()
    with trainer(made, "nestpipe") as first, trainer(made, "dbp", "window") as other, \
            trainer(made, "reference") as third:  # fmt: skip
        for training, batch in zip([first, third, first, third, first, third], batches(6), strict=True):
            training.step(batch)
    assert same(state(made), expected)
    with other, pytest.raises(RuntimeError, match="was closed"):
        other.step(batches(7)[6])


@pytest.mark.parametrize("shared", ["the model", "table item", "both and the optimizer"])
def test_a_second_trainer_waits_for_the_windows_of_the_first(shared):
    made, (model, tables, dense) = parts(), parts()
    if shared == "the model":
        mixed = made[0], tables, optimizer_of(made[0])
    else:
        mixed = (model, made[1], dense) if shared == "table item" else made
    name = shared if shared == "table item" else "the model"
    with trainer(made) as first, trainer(mixed, "reference") as second:
        next(first.run(batches(6)))
        with pytest.raises(RuntimeError, match=rf"another trainer's use of {name} is {STEPS_1_TO_3}"):
            second.step(batches(8)[7])
        list(first.run([]))
        assert second.step(batches(8)[7]).step == 7


def by_turns(communicators, mode):
    """Two trainers of the same ranks, of which the second steps while the first may have steps in flight."""
    one, two = parts(), parts()
    given = batches(6, 8, communicators.rank, communicators.world_size)
    with (
        trainer(one, mode, "batch", communicators) as first,
        trainer(two, mode, "batch", communicators) as second,
    ):
        results = first.run(given)
        next(results)
        with pytest.raises(RuntimeError) if first.in_flight() else nullcontext() as refused:
            second.step(given[0])
        list(results)
        return str(refused.value) if refused else "", second.step(given[5]).loss


@pytest.mark.parametrize("mode", ["nestpipe", "sequential"])
def test_a_second_trainer_of_the_same_ranks_waits_too(mode):
    words, losses = zip(*run_ranks(2, lambda each: by_turns(each, mode)), strict=True)
    assert losses[0] == losses[1]
    refused = (
        "another trainer's use of the ranks' groups is refused while steps 1 to" if mode == "nestpipe" else ""
    )
    assert all(each.startswith(refused) and bool(each) == bool(refused) for each in words)


def ids_of(table):
    return torch.tensor([3, -7, 11])


NO_ROWS = torch.full((3,), -1)
READERS_AND_WRITERS = {
    "peek": lambda model, tables, dense: tables.peek({"item": Lookup(ids_of(tables))}),
    "export": lambda model, tables, dense: tables.export(),
    "load": lambda model, tables, dense: tables.load("item", ids_of(tables), torch.ones(3, 18)),
    "state": lambda model, tables, dense: tables.state(),
    "load_state": lambda model, tables, dense: tables.groups[0].table.load_state({}),
    "track_changes": lambda model, tables, dense: tables.track_changes(),
    "take_changes": lambda model, tables, dense: tables.take_changes(),
    "snapshot_of_changes": lambda model, tables, dense: tables.snapshot_of_changes(),
    "lookup": lambda model, tables, dense: tables.groups[0].table.lookup(ids_of(tables), 9),
    "find": lambda model, tables, dense: tables.groups[0].table.find(ids_of(tables)),
    "gather": lambda model, tables, dense: tables.groups[0].table.gather(NO_ROWS, ids_of(tables)),
    "update": lambda model, tables, dense: tables.groups[0].table.update(NO_ROWS, torch.ones(3, 18)),
    "erase": lambda model, tables, dense: tables.groups[0].table.erase(ids_of(tables)),
    "table export": lambda model, tables, dense: tables.groups[0].table.export(),
    "table load": lambda model, tables, dense: tables.groups[0].table.load(ids_of(tables), torch.ones(3, 18)),
    "table state": lambda model, tables, dense: tables.groups[0].table.state(),
    "optimizer's state": lambda model, tables, dense: dense.state_dict(),
    "optimizer load": lambda model, tables, dense: dense.load_state_dict({}),
    "optimizer step": lambda model, tables, dense: dense.step(),
    "call": lambda model, tables, dense: model(
        batches(1)[0], {"item": torch.randn(3 * batches(1)[0].num_tokens, 6)}, 0
    ),
    "call of a part": lambda model, tables, dense: model.hidden(
        batches(1)[0], torch.randn(batches(1)[0].num_tokens, 6)
    ),
    "state_dict": lambda model, tables, dense: model.state_dict(),
    "state_dict of a part": lambda model, tables, dense: model.mix.state_dict(),
    "load_state_dict": lambda model, tables, dense: model.load_state_dict(Ranker().state_dict()),
    "deepcopy": lambda model, tables, dense: copy.deepcopy(model),
    "pickle": lambda model, tables, dense: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize(("mode", "consistency"), READS_AHEAD)
def test_whatever_reads_or_writes_state_is_refused_in_flight_and_changes_nothing(mode, consistency):
    made = parts()
    with trainer(made, mode, consistency, depth=4) as training:
        results = training.run(batches(6))
        next(results)
        for use in READERS_AND_WRITERS.values():
            with pytest.raises(RuntimeError, match=STEPS_1_TO_3):
                use(*made)
        assert training.in_flight() == [1, 2, 3]
        list(results)
    assert same(state(made), trained(parts(), mode, consistency, batches(6))[0])


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_after_the_last_window_everything_may_be_read_and_written(mode, consistency):
    made = parts()
    with trainer(made, mode, consistency) as training:
        list(training.run(batches(2)))
        for name, use in READERS_AND_WRITERS.items():
            if name not in ("load_state", "optimizer load"):  # their arguments here are no legal ones
                use(*made)


@pytest.mark.parametrize(("mode", "consistency"), ONE_IN_FLIGHT)
def test_modes_with_one_window_in_flight_show_the_state_of_each_step(mode, consistency):
    made, seen = parts(), []
    with trainer(made, mode, consistency) as training:
        for result in training.run(batches(3)):
            seen.append([each.clone() for each in state(made)])
            assert result.step == len(seen) - 1
    for count in (1, 3):
        assert same(seen[count - 1], trained(parts(), mode, consistency, batches(count))[0])


class Dropping(Ranker):
    """Counts in `modes` whether a step was computed in training mode."""

    def forward(self, batch, rows, seed):
        self.seen.append((batch.step, self.training))
        losses = super().forward(batch, rows, seed)
        return losses if self.training else losses * 0.25


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_a_batch_is_computed_in_the_mode_that_the_model_had_when_it_was_read(mode, consistency):
    def run(kind):
        made = parts(Dropping)
        with trainer(made, kind, consistency) as training:
            list(training.run(batches(2)))
            made[0].eval()
            list(training.run(batches(4)[2:]))
        return state(made)

    assert same(run(mode), run("reference" if consistency == "batch" else "sequential"))


@pytest.mark.parametrize(("mode", "consistency"), ONE_IN_FLIGHT)
def test_a_parameter_changed_between_steps_is_trained_from_its_new_values(mode, consistency):
    def run(kind):
        made = parts()
        with trainer(made, kind, consistency) as training:
            for result in training.run(batches(3)):
                if result.step == 1:
                    made[0].mix.weight.data.zero_()
        return state(made)

    got = run(mode)
    assert same(got, run("reference" if consistency == "batch" else "sequential"))
    assert not same(got, trained(parts(), mode, consistency, batches(3))[0])


@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_a_parameter_that_its_optimizer_does_not_hold_is_refused(mode):
    model, tables, optimizer = parts()
    with trainer((model, tables, optimizer), mode) as training:
        training.step(batches(1)[0])
        model.load_state_dict(Ranker().state_dict(), assign=True)
        with pytest.raises(ValueError, match=r"parameter mix\.weight is not given to the optimizer"):
            training.step(batches(2)[1])
    with pytest.raises(ValueError, match=r"norm\.weight is not given to the optimizer"):
        trainer((model, tables, torch.optim.Adam(model.mix.parameters())), mode)
    with pytest.raises(ValueError, match=r"not in the model, of shapes \(3,\)"):
        trainer((model, tables, torch.optim.Adam([*model.parameters(), torch.ones(3)])), mode)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer.*got Parameter"):
        trainer((model, tables, list(model.parameters())), mode)
    with pytest.raises(TypeError, match=r"parameter mix\.weight is torch\.bfloat16"):
        trainer((model, tables, torch.optim.Adam(model.bfloat16().parameters())), mode)


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
def test_frozen_parameters_stay_and_those_beside_them_are_trained(mode, consistency):
    made = parts()
    model = made[0]
    model.mix.weight.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trained(made, mode, consistency, batches(3))
    moved = {
        name: not torch.equal(parameter, was)
        for (name, parameter), was in zip(model.named_parameters(), before, strict=True)
    }
    assert moved == {"mix.weight": False, "mix.bias": True, "norm.weight": True, "norm.bias": True}


def test_dense_sums_are_exact_where_batches_are_whole():
    """With consistency "window" any model trains, with float32 gradients of its own."""
    for consistency, bits in (("batch", 36), ("window", None)):
        with trainer(parts(), "sequential", consistency) as one:
            assert one._pending.flight._bits == bits


def test_a_lane_may_do_what_is_refused_to_others():
    flight, module = SimpleNamespace(_steps=lambda: "step 3"), torch.nn.Linear(1, 1)
    for refuse in (Flight._refuse_state_dict, Flight._refuse_loading):
        with pytest.raises(RuntimeError, match="of Linear"):
            refuse(flight, module)
        with as_lane():
            refuse(flight, module)


def test_a_run_that_has_ended_has_no_batches_to_agree_about():
    with trainer(parts(), "nestpipe", "batch") as one:
        assert len(list(one.run(batches(3)))) == 3
        assert one._pending.batches == 0


class Counted:
    """A loader whose position is a number."""

    def __init__(self, done):
        self.done = done

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


@pytest.mark.parametrize("step", [0, 2])
def test_a_copy_in_memory_brings_back_the_state_of_its_step_and_the_loader_and_is_kept(step):
    made, copies, meta = parts(), PeerCopies(), {"note": step}
    with trainer(made, "dbp", "batch") as one:
        list(one.run(batches(step)))
        copies.keep(one, meta, Counted(step))
        expected = copy.deepcopy(state(made))
        list(one.run(batches(4)[step:]))
    other, loader, accepted = parts(), Counted(7), []
    with trainer(other, "dbp", "batch") as two:
        assert copies.restore(two, accept=accepted.append, loader=loader) == step
    assert same(state(other), expected) and loader.done == step and accepted == [meta]
    assert [each.step for each in copies._copies] == [step] * 2  # for the next loss


def test_of_a_checkpoint_and_a_copy_of_one_step_the_checkpoint_is_taken(tmp_path):
    made, copies, accepted = parts(), PeerCopies(), []
    with trainer(made, "dbp", "batch") as one:
        list(one.run(batches(2)))
        copies.keep(one, {"from": "memory"})
        one.save(tmp_path, {"from": "disk"})
    with trainer(parts(), "dbp", "batch") as two:
        assert copies.restore(two, tmp_path, accepted.append) == 2
    assert accepted == [{"from": "disk"}]


def test_a_copy_that_another_rank_lacks_is_forgotten(monkeypatch):
    """It would take the place of the one that all ranks have, and be that of steps that are trained again."""
    made, copies = parts(), PeerCopies()
    with trainer(made, "dbp", "batch") as one:
        for first in (0, 2):
            list(one.run(batches(first + 2)[first:]))
            copies.keep(one)
    assert [each.step for each in copies._copies] == [2, 4]
    with trainer(parts(), "dbp", "batch") as two:
        control = two.communicators.control
        other = json.dumps({"saved": -1, "shard": 0, "copies": [(2, 1, [0])]})
        monkeypatch.setattr(control, "all_gather_texts", lambda text: [text, other], raising=False)
        monkeypatch.setattr(peer_copies, "_redistribute", lambda groups, own, shards, empty: own[0])
        assert copies.restore(two) == 2
    assert [each.step for each in copies._copies] == [2, 2]


def test_steps_under_way_are_described_by_the_first_and_the_last():
    for steps, words in (([3], "step 3 is"), ([3, 4], "steps 3 to 4 are"), ([3, 4, 5], "steps 3 to 5 are")):
        assert PendingWindows._described(SimpleNamespace(steps=lambda steps=steps: steps)) == words


def test_parameters_are_checked_in_flight_unless_lanes_put_them_in_and_out():
    checked = []
    for shards in (None, object()):
        dense = SimpleNamespace(shards=shards, check_settings=lambda: None)
        rest = {"check_modes": lambda: None, "_requires_grad": list, "_trained": [], "_structure": None}
        rest["_validate"] = lambda shards=shards: checked.append(shards)
        Flight.check_caller(SimpleNamespace(under_way=True, dense=dense, **rest))
    assert checked == [None]


def test_on_the_callers_thread_tensors_are_made_in_the_hosts_memory():
    with torch.device("meta"), on_the_callers_thread("cpu"):
        assert torch.zeros(1).device.type == "cpu"
    with on_the_callers_thread("cpu"):
        assert torch.zeros(1).device.type == "cpu"


def test_a_window_that_is_over_keeps_what_the_next_one_reads():
    places = object.__new__(WindowPlaces)
    places.previous, places._values = object(), {Buffer: 1, OwnedRows: 2, KeptRows: 3}
    places.retire()
    assert places.previous is None and places._values == {Buffer: 1, OwnedRows: 2}


def test_a_long_parameter_is_probed_with_fewer_rows():
    assert _capped(torch.Size([3, 5])) == (3, 5)
    assert _capped(torch.Size([2 * PROBE_ELEMENTS, 2])) == (PROBE_ELEMENTS // 2, 2)
    assert _capped(torch.Size([3, 2 * PROBE_ELEMENTS])) == (1, 2 * PROBE_ELEMENTS)


@pytest.mark.parametrize("graphs", [None, object()])
@pytest.mark.parametrize("compiles", [False, True])
def test_rows_that_are_not_gathered_are_for_the_model_s_own_call(graphs, compiles):
    class Reads(torch.nn.Module):
        forward = takes_indexed_rows(lambda self, batch, rows, seed: None)

    class ReadsByOneOp(torch.nn.Module):
        forward = takes_indexed_rows(lambda self, batch, rows, seed: None, on_the_cpu=True)

    flight = SimpleNamespace(
        _graphs=graphs,
        _compilation=SimpleNamespace(compiles=compiles),
        dense=SimpleNamespace(shards=None),
        model=Reads(),
    )
    own = graphs is None and not compiles
    assert Flight.reads_indexed_rows(flight, {"triton"}) == own
    assert not Flight.reads_indexed_rows(flight, {"cpu"})
    flight.model = ReadsByOneOp()
    for impls in ({"triton"}, {"cpu"}, {"cpu", "triton"}):
        assert Flight.reads_indexed_rows(flight, impls) == own
    assert not Flight.reads_indexed_rows(flight, {"reference"})
    flight.dense.shards = object()
    assert Flight.reads_indexed_rows(flight, {"triton"}) == own
    assert not Flight.reads_indexed_rows(flight, {"cpu"})


def test_an_optimizer_of_parameters_without_memory_is_not_probed():
    validate_invariant(torch.optim.SGD([torch.nn.Parameter(torch.empty(3, device="meta"))], lr=0.1))


@pytest.mark.parametrize(("values", "changes"), [(32_768, 1), (32_769, 2)])
def test_parameters_that_torch_cuts_between_threads_are_probed_with_another_number(
    values, changes, monkeypatch
):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    validate_invariant(torch.optim.SGD([torch.nn.Parameter(torch.zeros(values))], lr=0.1))
    assert len(counts) == changes and counts[-1] == torch.get_num_threads()


@pytest.mark.parametrize("mode", ["reference", "sequential", "dbp", "nestpipe"])
def test_after_an_error_of_a_step_nothing_is_under_way(mode):
    made = parts()
    made[0].forward = lambda batch, rows, seed: 1 / 0
    with trainer(made, mode, "batch") as one:
        with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
            next(one.run(batches(4)))
        assert one.in_flight() == [] and not one._pending.flight.under_way
        made[0].state_dict(), made[1].export(), made[2].state_dict()  # theirs again, before the trainer ends


def test_every_use_of_the_dense_state_asks_whether_something_is_under_way():
    model, _tables, optimizer = parts()
    dense, asked = DenseModel(model, optimizer), []

    def check(action):
        asked.append(action)
        raise RuntimeError

    dense.in_flight.append(SimpleNamespace(check=check))
    for call in dense.tensors, dense.state_dict, lambda: dense.load_state_dict({}):
        with pytest.raises(RuntimeError):
            call()
    assert asked == ["reading the state", "state_dict", "load_state_dict"]


def test_what_stays_in_a_buffer_is_written_once_the_pipeline_is_empty(monkeypatch):
    finished = []
    with trainer(parts(), "nestpipe", "batch") as one:
        finish = one.program.finish
        one.program.finish = lambda places: finished.append(places.window.number) or finish(places)
        list(one.run(batches(4)))
    assert finished == [3]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_trainer_has_no_copy(copied):
    with pytest.raises(TypeError, match="a Trainer has no copy"):
        copied(trainer(parts(), "reference"))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_optimizer_in_flight_is_refused(copied):
    made = parts()
    with trainer(made, "nestpipe") as training:
        run = training.run(batches(4))
        next(run)
        with pytest.raises(RuntimeError, match="a copy of the optimizer is " + STEPS_1_TO_3):
            copied(made[2])
        list(run)
    again = copied(made[2])
    again = pickle.loads(again) if isinstance(again, bytes) else again
    assert repr(again.state_dict()) == repr(made[2].state_dict())
