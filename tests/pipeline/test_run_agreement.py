"""Promise: what one rank alone changes between runs and in one is named on every rank, with the step."""

import re
from datetime import timedelta
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from speeds import slow_except
from test_agreement import change_values, dense_rule, freeze, freeze_rows
from trainer_parts import JOB

from tritonrec.data import JaggedBatch
from tritonrec.distributed import Communicators, RankPool, RanksDisagreeError
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.pipeline import PIPELINED, DenseModel, StageFailedError, Trainer, WindowConfig, run_agreement
from tritonrec.pipeline.model_call import CallerSettings
from tritonrec.pipeline.run_agreement import RunAgreement
from tritonrec.pipeline.words import LOWEST, Words, may_differ, words_of

pytestmark = pytest.mark.multi_rank


def change_buffer(trainer):
    trainer.dense.model.shift[1] += 1e-6


def replace_buffer_values(trainer):
    trainer.dense.model.shift = trainer.dense.model.shift.flip(0)


def change_parameter(trainer):
    with torch.no_grad():
        trainer.dense.model.layers[0].output.weight[1, 2] += 1e-6


def permute_data(trainer):
    weight = trainer.dense.model.layers[0].output.weight.data
    weight.copy_(weight.flip(1).clone())


def load_state(trainer):
    own = trainer.dense.optimizers[0].state_dict()
    own["state"][0]["exp_avg"] = own["state"][0]["exp_avg"] * 2
    trainer.dense.optimizers[0].load_state_dict(own)


def change_rate(trainer):
    trainer.dense.optimizers[0].param_groups[0]["lr"] = 0.04


def one_module_evaluates(trainer):
    trainer.dense.model.layers[0].eval()


def other_threads(trainer):
    torch.set_num_threads(torch.get_num_threads() + 1)


def other_default(trainer):
    torch.set_default_dtype(torch.float64)


def deterministic(trainer):
    torch.use_deterministic_algorithms(True)


def flush_denormals(trainer):
    torch.set_flush_denormal(True)


def change_epsilon(trainer):
    trainer.dense.model.norm.eps = 0.5


def change_dropout(trainer):
    trainer.dense.model.layers[0].gate.dropout = 0.75


def replace_forward(trainer):
    norm = trainer.dense.model.norm
    norm.forward = norm.extra_repr


def of_parts(change, trainer):
    change(trainer.dense.model, trainer.tables, trainer.dense.optimizers[0])


WEIGHT = "rank 1 has parameter layers.0.output.weight=number "
# What the last rank does between two runs, and how the error of each rank names it.
LATER = {
    "buffer": (change_buffer, "rank 1 has buffer shift=float32 (4,) with SHA-256 "),
    "values of a buffer": (replace_buffer_values, "rank 1 has buffer shift=float32 (4,)"),
    "parameter": (change_parameter, WEIGHT),
    "parameter's data": (
        partial(of_parts, change_values),
        WEIGHT,
    ),
    "places of values": (permute_data, WEIGHT),
    "optimizer state": (load_state, "rank 1 has optimizer state "),
    "learning rate": (change_rate, "rank 1 has group 0 of optimizer="),
    "betas": (partial(of_parts, dense_rule), "rank 1 has group 0 of optimizer="),
    "a module's mode": (one_module_evaluates, "training=False"),
    "a frozen parameter": (partial(of_parts, freeze), "frozen"),
    "frozen rows": (partial(of_parts, freeze_rows), "rank 1 has rows of table item=frozen and rank 0 has "),
    "a module's setting": (change_epsilon, "rank 1 has module norm=LayerNorm((6,), eps=0.5"),
    "a module's attribute": (change_dropout, "gate=GatedNorm(dropout=0.75"),
    "a module's forward": (replace_forward, "forward=LayerNorm.extra_repr"),
    "threads": (other_threads, "rank 1 has torch.get_num_threads()="),
    "default dtype": (other_default, "rank 1 has torch.get_default_dtype()=torch.float64 and rank 0 has "),
    "deterministic": (deterministic, "rank 1 has torch.are_deterministic_algorithms_enabled()=True"),
    "denormals": (flush_denormals, "rank 1 has torch.set_flush_denormal()=True"),
}


QUICK_CHANGES = [
    "buffer",
    "parameter's data",
    "learning rate",
    "frozen rows",
    "threads",
    "denormals",
    "a module's setting",
]


def message_between_runs(
    communicators, change, mode="nestpipe", single=False, before=2, consistency="batch", everyone=False
):
    """The error of a second run, before which the last rank does `change`; results there were."""
    model, tables, optimizer = JOB.build("adam")
    model.register_buffer("shift", torch.arange(4, dtype=torch.float32))
    loader = JOB.loader(communicators.rank, communicators.world_size)
    threads, done = torch.get_num_threads(), []
    window = WindowConfig(2, consistency=consistency)
    try:
        with Trainer(model, tables, optimizer, communicators, mode, window) as trainer:

            def run(steps):
                if single:
                    done.extend(trainer.step(loader.batch(step)).step for step in steps)
                else:
                    done.extend(result.step for result in trainer.run(map(loader.batch, steps)))

            run(range(before))
            if change is not None and (everyone or communicators.rank == communicators.world_size - 1):
                change(trainer)
            run(range(before, before + 3))
    except (RanksDisagreeError, StageFailedError) as error:
        return done, str(error)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
    return done, ""


def next_epoch(trainer):
    trainer.dense.schedulers[0].last_epoch += 1


def test_the_digest_of_a_rank_tells_every_change():
    """What the slow cases below show between ranks, of one rank alone."""
    model, tables, optimizer = JOB.build("adam")
    model.register_buffer("shift", torch.arange(4, dtype=torch.float32))
    changes = {name: change for name, (change, _) in LATER.items()}
    changes |= {"a scheduler's epoch": next_epoch}
    scheduler, threads = torch.optim.lr_scheduler.StepLR(optimizer, 99), torch.get_num_threads()
    found = {}
    try:
        with Trainer(
            model, tables, optimizer, Communicators.local(), "nestpipe", WindowConfig(2), scheduler=scheduler
        ) as trainer:
            trainer.step(JOB.loader().batch(0))
            agreement = RunAgreement(Communicators.local(), tables, trainer.dense, dict)
            assert agreement.begin(False) == agreement.begin(False)
            found[agreement.begin(False)] = "nothing"
            for name in sorted(changes, key="default dtype".__eq__):
                changes[name](trainer)
                assert found.setdefault(agreement.begin(False), name) == name
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", slow_except(QUICK_CHANGES, LATER))
def test_what_a_rank_changes_between_runs_is_named_on_every_rank(pool, name):
    change, words = LATER[name]
    (done, first), *rest = pool.run(message_between_runs, 2, change)
    assert rest == [(done, first)] and done == [0, 1]
    assert words in first and "give every rank the same" in first


@pytest.mark.parametrize(
    "mode, single",
    slow_except([("sequential", True)], [("sequential", True), *product(PIPELINED, (True, False))]),
)
def test_every_mode_and_single_steps_compare_too(pool, mode, single):
    for change, words in (LATER["parameter"], LATER["learning rate"]):
        outcomes = pool.run(message_between_runs, 2, change, mode, single)
        assert all(done == [0, 1] and words in message for done, message in outcomes)


def test_replicas_compare_too_and_name_the_rank_among_all(pool):
    outcomes = pool.run(message_between_runs, 4, change_buffer, replicas=2)
    assert all("rank 3 has buffer shift=" in message and "rank 0 has" in message for _, message in outcomes)


def load_rows(trainer):
    ids, rows = trainer.tables.export()["item"]
    trainer.tables.load("item", ids[2:4], rows[2:4] * 0.5)


def load_all_rows(trainer):
    _ids, rows = trainer.tables.export()["item"]
    state = trainer.tables.state()
    state["item"]["rows"] = rows * 0.5
    trainer.tables.load_state(state)


def erase_rows(trainer):
    (group,) = trainer.tables.groups
    group.table.erase(group.table.keys()[3:5])


def update_rows(trainer):
    (group,) = trainer.tables.groups
    keys = group.table.keys()[:1]
    group.table.update(group.table.find(keys), torch.ones(1, group.table.row_width))


def load_the_same_rows(trainer):
    ids, rows = trainer.tables.export()["item"]
    trainer.tables.load("item", ids[:5], rows[:5])


ROWS = {"load": load_rows, "load_state": load_all_rows, "erase": erase_rows, "update": update_rows}


@pytest.mark.parametrize("name", slow_except(["load", "update"], ROWS))
@pytest.mark.parametrize("single", [True, False])
def test_rows_that_one_replica_s_caller_writes_are_named(pool, name, single):
    outcomes = pool.run(message_between_runs, 4, ROWS[name], "nestpipe", single, replicas=2)
    for done, message in outcomes:
        assert done == [0, 1], message
        assert re.search(
            r"step 2: rank 3 has row of id \d+ of table item=values with sum \w{16} and rank 2", message
        )


def test_rows_that_all_write_alike_or_that_stay_as_they_are_pass(pool):
    for change, everyone in ((load_rows, True), (update_rows, True), (load_the_same_rows, False)):
        outcomes = pool.run(
            message_between_runs, 4, change, "nestpipe", False, 2, "batch", everyone, replicas=2
        )
        assert outcomes == [([0, 1, 2, 3, 4], "")] * 4


def other_rows_at_first(communicators):
    model, tables, optimizer = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    tables.load("item", torch.tensor([7]), torch.full((1, tables.groups[0].table.row_width), 1.0))
    if communicators.rank == 1:
        load_rows_of(tables)
    try:
        with Trainer(model, tables, optimizer, communicators, "fwp", WindowConfig(2)) as trainer:
            list(trainer.run(map(loader.batch, range(2))))
    except (RanksDisagreeError, StageFailedError) as error:
        return str(error)


def load_rows_of(tables):
    tables.load("item", torch.tensor([7]), torch.full((1, tables.groups[0].table.row_width), 2.0))


def test_rows_that_differ_from_the_start_are_named(pool):
    for message in pool.run(other_rows_at_first, 2, replicas=2):
        assert "rank 1 has row of id 7 of table item=values with sum" in message


def test_ranks_that_change_nothing_or_the_same_go_on(pool):
    for single in (False, True):
        assert pool.run(message_between_runs, 2, None, "nestpipe", single) == [([0, 1, 2, 3, 4], "")] * 2


def message_of_rates(communicators, mode, of_rows, update):
    """The error of a run in which the last rank has another rate in an update, that no probe sees."""
    differs = communicators.rank == communicators.world_size - 1

    def rate(number):
        return 0.025 if differs and number == update else 0.05

    model, tables, optimizer = JOB.build("adam")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate(done + 1) / 0.05)
    if of_rows:
        scheduler = None
        tables = HashTableCollection(JOB.features(), RowOptimizer("adam", rate), seed=JOB.seed)
    loader, done = JOB.loader(communicators.rank, communicators.world_size), []
    try:
        with Trainer(
            model, tables, optimizer, communicators, mode, WindowConfig(2), scheduler=scheduler
        ) as trainer:
            done.extend(result.step for result in trainer.run(map(loader.batch, range(6))))
    except (RanksDisagreeError, StageFailedError) as error:
        return done, str(error)
    return done, ""


@pytest.mark.if_changed
@pytest.mark.parametrize("mode", ["nestpipe", "fwp"])
@pytest.mark.parametrize(
    "of_rows, update", slow_except([(False, 3), (True, 3)], [*product((False, True), (3, 6))])
)
def test_a_rate_of_one_rank_in_the_middle_of_a_run_is_named(pool, mode, of_rows, update):
    if mode == "fwp":
        outcomes = pool.run(message_of_rates, 2, mode, of_rows, update)
    else:  # the groups of a pool are of no use after windows that ranks have left half done
        with RankPool([(2, 1)], timedelta(seconds=20)) as own:
            outcomes = own.run(message_of_rates, 2, mode, of_rows, update)
    named = (
        "the learning rate of table item"
        if of_rows
        else "the learning rate of group 0"
        if mode == "nestpipe"
        else "group 0 of optimizer="
    )
    for _done, message in outcomes:
        assert f"rank 1 has {named}" in message and "give every rank the same" in message


def other_rate_in_flight(communicators):
    model, tables, optimizer = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    try:
        with Trainer(model, tables, optimizer, communicators, "nestpipe", WindowConfig(2)) as trainer:
            for result in trainer.run(map(loader.batch, range(6))):
                if result.step == 1 and communicators.rank == 1:
                    optimizer.param_groups[0]["lr"] = 0.04
    except (RuntimeError, StageFailedError) as error:
        return str(error)


@pytest.mark.if_changed
def test_a_rate_that_one_rank_changes_in_flight_is_named_on_the_others():
    with RankPool([(2, 1)], timedelta(seconds=6)) as pool:
        refused = "lr of group 0 of Adam was changed from 0.05 to 0.04 while steps"
        others, own = pool.run(other_rate_in_flight, 2)
    assert own.startswith(refused) and f"rank 1 has failed: RuntimeError: {refused}" in others


def autocast_of_one(communicators):
    model, tables, optimizer = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    on = communicators.rank == 1
    try:
        with (
            Trainer(model, tables, optimizer, communicators, "nestpipe", WindowConfig(2)) as trainer,
            torch.autocast("cpu", torch.bfloat16, enabled=on),
        ):
            list(trainer.run(map(loader.batch, range(2))))
    except (RanksDisagreeError, StageFailedError) as error:
        return str(error)


def test_autocast_of_one_rank_is_named(pool):
    for message in pool.run(autocast_of_one, 2):
        assert "rank 1 has autocast=(('cpu', torch.bfloat16),) and rank 0 has autocast=()" in message


def default_device_of_one(communicators):
    model, tables, optimizer = JOB.build("adam")
    agreement = RunAgreement(communicators, tables, DenseModel(model, optimizer), dict)
    there = torch.device("meta") if communicators.rank else None
    with pytest.raises(RanksDisagreeError) as raised:
        agreement.settle(Words(), CallerSettings(device=there), 3, torch.arange(2))
    return str(raised.value)


def test_a_default_device_of_one_rank_is_named(pool):
    for message in pool.run(default_device_of_one, 2):
        assert "rank 1 has default device=meta and rank 0 has default device=None" in message


def test_a_row_of_one_table_is_not_that_of_another():
    """The same id and values, written by one rank's caller into this table and by another's into that."""
    features = [FeatureConfig(name, 4) for name in ("user", "item")]
    found = set()
    for name in ("user", "item"):
        tables = HashTableCollection(features, RowOptimizer("sgd"), merge=False)
        agreement = RunAgreement(Communicators.local(), tables, SimpleNamespace(), dict, compares_rows=True)
        tables.load(name, torch.tensor([7]), torch.tensor([[0.5, -1.0, 2.0, 0.25]]))
        found.add(agreement.written_rows()[0])
    assert len(found) == 2 and 0 not in found


def samples_of(communicators, kind, steps=3):
    """Train; the last rank has the samples of `kind`."""
    model, tables, optimizer = JOB.build("adam")
    world, last = communicators.world_size, communicators.rank == communicators.world_size - 1
    loader = JOB.loader(0, 1) if kind == "whole" else JOB.loader(communicators.rank, world)
    other = JOB.loader(0, world)

    def batch(step):
        if last and kind == "part":
            return JaggedBatch.concat([loader.batch(step), other.batch(step).select(torch.tensor([1]))])
        if last and kind == "later" and step == 2:
            return other.batch(step)
        return loader.batch(step)

    # the groups of a pool are of no use after windows that ranks have left half done
    mode = "sequential" if kind == "later" else "nestpipe"
    try:
        with Trainer(model, tables, optimizer, communicators, mode, WindowConfig(2)) as trainer:
            return "", [result.step for result in trainer.run(map(batch, range(steps)))]
    except (RanksDisagreeError, StageFailedError) as error:
        return str(error), []


@pytest.mark.parametrize("kind, step", [("whole", 0), ("part", 0), ("later", 2)])
def test_samples_that_two_ranks_share_are_named(pool, kind, step):
    for message, _ in pool.run(samples_of, 2, kind):
        assert (
            f"step {step}: ranks 0 and 1 both train sample " in message
            and "give each rank its part" in message
        )
        assert "rank= and world_size=" in message


def some(*ids, step=0):
    return SimpleNamespace(sample_ids=torch.tensor(ids, dtype=torch.int64), step=step)


def differ(*ranks):
    return may_differ([each.row for each in ranks])


def test_words_of_samples_tell_those_that_are_shared():
    plain, other = CallerSettings(), CallerSettings((("cpu", torch.bfloat16),))
    first = words_of(plain, 7, [some(1, 2), some(-5)], {})
    assert first == words_of(plain, 7, [some(-5, 1), some(2)], {}) and differ(first, first)
    assert differ(first, words_of(plain, 7, [some(9, 2, 4)], {}))  # a part, in a run's first window
    assert not differ(first, words_of(plain, 7, [some(9, 3, 4)], {}))
    assert differ(first, words_of(plain, 8, [some(9, 3, 4)], {}))  # another state
    assert differ(first, words_of(other, 7, [some(9, 3, 4)], {}))
    assert not differ(first, words_of(plain, 0, [some(9, 3, 4)], {}))  # elsewhere no run begins
    later = words_of(plain, 0, [some(1, 2, 3)], {})
    assert not differ(
        later, words_of(plain, 0, [some(3, 4, 5)], {})
    )  # as the end of an epoch may be filled up
    assert differ(later, words_of(plain, 0, [some(3, 2, 1)], {}))
    assert differ(later, words_of(plain, 0, [some(4, 3, 2)], {}))  # most of them
    two = words_of(plain, 7, [some(1, 2), some(3, 4, step=1)], {})  # steps of two epochs
    assert not differ(two, words_of(plain, 7, [some(3, 4), some(1, 2, step=1)], {}))
    golden = 0x9E3779B97F4A7C15 - 2**64
    for spread in (1, golden, 2**32 + 1):  # ids that were made by a product
        ids = (torch.arange(40) * spread).tolist()
        even = words_of(plain, 7, [some(*ids[::2]), some(*ids[::2], step=1)], {})
        assert not differ(even, words_of(plain, 7, [some(*ids[1::2]), some(*ids[1::2], step=1)], {}))
    empty = words_of(plain, 7, [some()], {})
    assert empty.samples == 0 and not differ(empty, empty, first)  # ranks without samples
    assert not differ(Words(), Words(), first)
    many = words_of(plain, 7, [some(*range(1000))], {})
    assert len(many.lowest) == LOWEST and all(many.lowest)
    assert differ(many, words_of(plain, 7, [some(*range(500))], {}))
    assert differ(
        words_of(plain, 0, [some(*range(1000))], {}), words_of(plain, 0, [some(*range(9, 1000))], {})
    )
    # A stream without borders of epochs, of which two ranks have the same few of 32 smallest hashes.
    lowest = sorted(range(1000), key=lambda each: words_of(plain, 7, [some(each)], {}).lowest[0])
    others = list(range(1000, 2000))
    assert not differ(many, words_of(plain, 7, [some(*lowest[:2], *others)], {}))
    assert differ(many, words_of(plain, 7, [some(*lowest[:12], *others)], {}))


class Running(torch.nn.Module):
    """A model with a buffer that its forward changes by its samples, and another one."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros((), dtype=torch.float32))
        self.register_buffer("shift", torch.arange(4, dtype=torch.float32))

    def forward(self, batch, rows, seed):
        with torch.no_grad():
            self.seen += batch.sample_ids.sum()
        return self.model(batch, rows, seed)


def running_buffers(communicators, change):
    model, tables, _ = JOB.build("adam")
    model = Running(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = JOB.loader(communicators.rank, communicators.world_size)
    window = WindowConfig(2, consistency="window")
    try:
        for start in (0, 4):  # a second trainer of the model, too
            with Trainer(model, tables, optimizer, communicators, "nestpipe", window) as trainer:
                for first in (start, start + 2):
                    list(trainer.run(map(loader.batch, range(first, first + 2))))
            if change and communicators.rank == 1:
                model.shift += 1
    except (RanksDisagreeError, StageFailedError) as error:
        return str(error)
    return "", float(model.seen)


def test_buffers_that_a_forward_changes_may_differ_and_others_may_not(pool):
    (_, one), (_, other) = pool.run(running_buffers, 2, False)
    assert one != other
    assert all("rank 1 has buffer shift=" in message for message in pool.run(running_buffers, 2, True))


def test_steps_one_by_one_compare_all_state_at_first_and_now_and_then(monkeypatch):
    monkeypatch.setattr(run_agreement, "ALWAYS", 2)
    monkeypatch.setattr(run_agreement, "SELDOM", 5)
    model, tables, optimizer = JOB.build("adam")
    found, seen = RunAgreement(Communicators.local(), tables, DenseModel(model, optimizer), dict), []
    monkeypatch.setattr(found, "_sums", lambda thorough: seen.append(thorough) or [])
    for single in [True] * 11 + [False]:
        found.begin(single)
    assert [at for at, thorough in enumerate(seen, 1) if thorough] == [1, 2, 5, 10, 12]


@pytest.mark.parametrize("moved", [False, True])
def test_a_swap_of_two_values_and_a_bit_change_the_state(moved):
    model, tables, optimizer = JOB.build("adam")
    found = RunAgreement(Communicators.local(), tables, DenseModel(model, optimizer), dict)
    before = found.begin(single=False)
    assert found.begin(single=False) == before and before > 0
    weight = model.layers[0].output.weight.data
    if moved:
        weight[0, 0], weight[-1, -1] = weight[-1, -1].item(), weight[0, 0].item()
    else:
        weight.view(-1).view(torch.int32)[3] ^= 1
    assert found.begin(single=False) != before
