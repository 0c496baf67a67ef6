"""Dense gradients that backward completes first are reduced beside the rest of it, in the same bits."""

import threading
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from trainer_parts import DIM, JOB, NoParameters, Ranker, batches, parts, same, state, trainer

from tritonrec import nn
from tritonrec.distributed import Communicators
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.kernels.accumulator import GradientAccumulator
from tritonrec.kernels.hstu_layer import cpu_hstu_layer
from tritonrec.pipeline import (
    NESTPIPE,
    DenseModel,
    ScheduleError,
    StageFailedError,
    Trainer,
    WindowConfig,
    check,
)
from tritonrec.pipeline import early as early_dense
from tritonrec.pipeline.early import EarlyDense
from tritonrec.pipeline.schedule import Access, Edge, Schedule, Stage, with_early_dense


class Deep(Ranker):
    """Three layers, of which backward completes the last two first."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.mix = torch.nn.Identity()  # no parameters in front of the layers but the norm's

    def hidden(self, batch, rows):
        hidden = self.norm(rows)
        for number, layer in enumerate(self.layers):
            hidden = self.through(number, layer, hidden, batch)
        return hidden

    def through(self, number, layer, hidden, batch):
        return torch.sin(layer(hidden, batch.offsets))


class Choosing(Deep):
    """Leaves the last layer out where a micro-batch has few tokens."""

    def through(self, number, layer, hidden, batch):
        return (
            super().through(number, layer, hidden, batch) if number < 2 or batch.num_tokens > 20 else hidden
        )


class Again(Deep):
    """Uses the second layer twice, in backward passes of their own."""

    def through(self, number, layer, hidden, batch):
        for _ in range(1 + (number == 1)):
            hidden = checkpoint(super().through, number, layer, hidden, batch, use_reentrant=True)
        return hidden


class AgainAtLast(Deep):
    """Goes through the layers a second time in some micro-batches, in a backward pass inside of backward."""

    def hidden(self, batch, rows):
        if batch.sample_ids[-1] % 7 < 6:
            return super().hidden(batch, rows)
        first = checkpoint(super().hidden, batch, rows, use_reentrant=True)
        return super().hidden(batch, rows) + first


def trained(communicators, model=Deep, mode="nestpipe", steps=5, size=7, ahead=lambda made: None, **how):
    made = parts(model)
    with trainer(made, mode, communicators=communicators, trust_model=True, **how) as training:
        ahead(training)
        rank, world_size = communicators.rank, communicators.world_size
        list(training.run(batches(steps, size, rank=rank, world_size=world_size)))
    return state(made)


def of_ranks(count=2, replicas=1, nodes=1, **how):
    return run_ranks(count, lambda ranks: trained(ranks, **how), replicas, nodes)


TOLD_APART = [
    (Deep, ["norm", "layers.0"]),
    (lambda: nn.HSTU(nn.HSTUConfig(dim=16, layers=3, heads=2, qk_dim=8, v_dim=8, max_seq_len=9)),
     ["positions", "layers.0"]),
    (lambda: nn.DLRM(nn.DLRMConfig(("a", "b"), 3, 4, (8, 4), (8, 1))), ["bottom"]),
    (lambda: torch.nn.Sequential(torch.nn.Linear(9, 1), torch.nn.Linear(1, 9)), ["0"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "first"), TOLD_APART, ids=["deep", "hstu", "dlrm", "sequential"])
def test_the_first_layers_are_those_whose_gradients_come_last(model, first):
    model = model()
    early = EarlyDense(DenseModel(model, torch.optim.SGD(model.parameters(), 0.1)), 1)
    names = [name for name, _ in model.named_parameters()]
    assert early.others + early.buckets[0] == names and early.buckets[0]
    assert {name for name in names if name.startswith(tuple(f"{each}." for each in first))} == set(
        early.others
    )
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    assert early.shares[0] == sum(sizes[name] for name in early.others) / sum(sizes.values()) >= 1 / 4


def layered(*sizes):
    """Layers of so many thousand values."""
    return torch.nn.Sequential(*(torch.nn.Linear(1000, each, bias=False) for each in sizes))


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ((8, 8, 8, 8), [[3], [2], [1], [0]]),
        ((2, 8, 8, 8), [[3], [2], [0, 1]]),  # of the first one alone too few
        ((1, 1, 1), [[1, 2], [0]]),  # all small: two
        ((2, 2, 2, 2), [[2, 3], [0, 1]]),
        ((8,) * 12, [[9, 10, 11], [6, 7, 8], [3, 4, 5], [0, 1, 2]]),
        ((1, 30), []),
        ((8,), []),
    ],
    ids=str,
)
def test_a_model_is_cut_by_its_values(sizes, messages):
    model = layered(*sizes)
    dense = DenseModel(model, torch.optim.SGD(model.parameters(), 0.1))
    ranks = SimpleNamespace(world_size=2, copies_messages=lambda device: False)
    buckets = early_dense.early_buckets(dense, ranks, WindowConfig(), torch.device("cpu"))
    assert buckets == max(len(messages) - 1, 0)
    if buckets:
        early = EarlyDense(dense, buckets)
        assert [*early.buckets, early.others] == [[f"{n}.weight" for n in each] for each in messages]
        before = [sum(sizes[: each[0]]) / sum(sizes) for each in messages[:-1]]
        assert early.shares == pytest.approx(before)


EARLY = with_early_dense(NESTPIPE, 2)


def without(stage, edge, instead):
    return EARLY.without_edge(stage, edge).with_edges(stage, instead)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (without("early_dense_reduce", Edge("early_gradients", "same"), Edge("route")),
         r"early_dense_reduce\(0, 0\) writes early_gradient 0 while compute\(0, 0\)"),
        # a bucket that leaves with the one before it
        (without("early_dense_reduce", Edge("early_gradients", "same"), Edge("early_gradients", "previous"))
         .with_edges("early_dense_reduce", Edge("route")), r"early_gradient 0 while compute\(0, 0\)"),
        (without("dense_reduce", Edge("compute", "all"), Edge("early_gradients", "all")), "losses"),
        (EARLY.with_edges("early_gradients", Edge("retrieve")), "a part of compute, which must come next"),
        (EARLY._with("early_gradients", lane="reduce"), "a part of compute, which must come next"),
        (EARLY._with("early_gradients", per_bucket=False), "a part of compute, which must come next"),
        (EARLY.with_edges("early_dense_reduce", Edge("compute", "same")),
         "waits for 'same' of compute, which runs once per micro-batch"),
        # what travels beside backward must be left alone by the rest of it
        (EARLY._with("compute", touches=(*EARLY["compute"].touches, EARLY["early_gradients"].touches[-1])),
         "early_gradient "),
    ],
    ids=["no_wait", "previous", "dense_no_wait", "waits_for_more", "other_lane", "no_buckets", "other_index",
         "shared"],
)  # fmt: skip
def test_a_wrong_schedule_is_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        check(schedule, 3)


class Waits(torch.autograd.Function):
    """Backward calls what it was given."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.call()
        return dy, None


def test_earlier_micro_batches_do_what_the_parts_of_the_last_one_do():
    """Here it is the last micro-batch alone that waits for the reduction of the batch before."""
    sums = (Access("update", "sums", "bucket"),)
    gate = Stage("gate", "gate", (Edge("reduced", "previous", batch=1),), (), per_micro_batch=True)
    whole = Stage("whole", "whole", (Edge("gate", "same"),), (), per_micro_batch=True)
    part = Stage("part", "whole", (Edge("gate", "all"),), sums, within="whole", per_bucket=True)
    reduce = Stage("reduce", "reduce", (Edge("part", "same"),), sums, per_bucket=True)
    reduced = Stage("reduced", "other", (Edge("reduce", "all"),), (), per_micro_batch=True)
    schedule = Schedule("late", (gate, part, whole, reduce, reduced), 4, buckets=3)
    with pytest.raises(ScheduleError, match=r"whole\(1, 0\) writes sums 0 while reduce\(0, 0\)"):
        check(schedule, 2)
    check(schedule.with_edges("gate", Edge("reduced", "all", batch=1)), 2)


@pytest.fixture
def small(monkeypatch):
    """Messages as short as the layers of these models."""
    monkeypatch.setattr(early_dense, "LEAST", 1)


@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize("mode", ["nestpipe", "fwp"])
def test_the_reduction_begins_before_the_backward_ends(small, mode, consistency):
    """The last backward goes on to a layer once the gradients of the one behind are on their way."""
    waited = []

    def ahead(training):
        begun = [threading.Event() for _ in range(training.program.schedule.buckets)]
        model, count = training.dense.model, training.config.window_micro_batches
        through, calls = model.through, []

        def begins(bucket: int):
            begun[bucket].set()

        training.program.before("early_dense_reduce", begins)

        def waiting(number, layer, hidden, batch):
            calls.append(number)
            if calls.count(number) % count == 0 and number:  # behind layers 1 and 0
                bucket = 2 - number
                begun[bucket].clear()  # by the reduction of the window before
                hidden = Waits.apply(hidden, lambda: waited.append((bucket, begun[bucket].wait(60))))
            return through(number, layer, hidden, batch)

        model.through = waiting

    of_ranks(mode=mode, consistency=consistency, steps=4, ahead=ahead, exchanges="each")
    assert sorted(waited) == [(0, True)] * 8 + [(1, True)] * 8


@pytest.mark.parametrize("consistency", ["batch", "window"])
def test_an_op_of_all_layers_tells_of_each(small, monkeypatch, consistency):
    """A call of HSTU by one op has exact gradients of a layer after the other; autograd gets float32 ones."""
    job, done = replace(JOB, sizes=replace(JOB.sizes, layers=3)), defaultdict(list)
    name = {"batch": "backward_exact", "window": "backward"}[consistency]
    of_layer = getattr(cpu_hstu_layer.Bound, name)

    def note(what):
        done[threading.current_thread()].append(what)

    def backward(bound, *given):
        found = of_layer(bound, *given)
        note("layer")
        return found

    def rank(communicators):
        made, loader = job.build("adam"), job.loader(communicators.rank, 2)
        how = {"consistency": consistency, "exchanges": "each", "trust_model": True}
        with trainer(made, communicators=communicators, **how) as training:
            early = training._pending.flight.early
            completed = early.completed
            early.completed = lambda: (note("complete"), completed())
            list(training.run(loader.batch(step) for step in range(2)))

    monkeypatch.setattr(cpu_hstu_layer.Bound, name, backward)
    run_ranks(2, rank)
    window = ["layer"] * 9  # of three micro-batches
    for at in (8, 7) if consistency == "batch" else (9, 9):
        window.insert(at, "complete")
    assert list(done.values()) == [window * 2] * 2


def test_calls_that_leave_no_trace_do_not_count():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    early = EarlyDense(DenseModel(model, torch.optim.SGD(model.parameters(), 0.1)), 1)
    own, other, seen = GradientAccumulator(model, None), GradientAccumulator(model, None), []
    early.completed = lambda: seen.append("complete")
    early.watch(model, own)
    early.begin(last=True)
    with other.active():
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert not seen
    with own.active():
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert seen == ["complete"]
    early.end()
    early.begin(last=True)
    with own.active():
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert seen == ["complete"]


@pytest.mark.parametrize("graphs", [None, SimpleNamespace(takes=lambda *given: False, release=lambda: None)])
def test_where_graphs_run_the_model_nobody_is_told(graphs):
    """Hooks of a graph run when it is recorded, and never again."""
    made, seen = parts(Deep), []
    config = WindowConfig(3, seed=4)
    with Trainer(*made, Communicators.local(), "nestpipe", config, schedule=EARLY) as training:
        flight = training._pending.flight
        flight._graphs, completed = graphs, flight.early.completed
        flight.early.completed = lambda: (seen.append(1), completed())
        list(training.run(batches(2)))
    assert len(seen) == (4 if graphs is None else 0)  # two buckets


def test_a_model_of_one_part_and_sharded_parameters_have_none_to_reduce_early():
    model = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="needs a model of as many parts and one"):
        EarlyDense(DenseModel(model, torch.optim.SGD(model.parameters(), 0.1)), 1)
    dense = DenseModel(model := Deep(), torch.optim.SGD(model.parameters(), 0.1))
    EarlyDense(dense, 1)
    dense.shards = object()
    with pytest.raises(ValueError, match="of which none is sharded"):
        EarlyDense(dense, 1)


def test_what_kernels_keep_of_a_window_outlives_its_early_gradients():
    accumulator = GradientAccumulator(model := Deep())
    accumulator.begin_window()
    accumulator.take_flat(list(dict(model.named_parameters()))[:2], over=False)
    assert accumulator.of_window is not None
    accumulator.take_flat()
    assert accumulator.of_window is None


def test_one_rank_may_run_the_schedule_too():
    """Its lanes have threads of their own: one that waits for a part of a task cannot run that task."""
    made, done = [parts(Deep), parts(Deep)], []

    def run():
        for each, schedule in zip(made, (EARLY, NESTPIPE), strict=True):
            config = WindowConfig(3, seed=4)
            with Trainer(*each, Communicators.local(), "nestpipe", config, schedule=schedule) as training:
                list(training.run(batches(4)))
            done.append(state(each))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert len(done) == 2 and same(*done)


def leaves_too_early(training):
    """The second bucket leaves with the first."""
    early, taken = training._pending.flight.early, threading.Event()

    def took(bucket: int):
        taken.set() if bucket else taken.clear()

    def completed():
        training._executor.end_part()
        training._executor.end_part()
        assert taken.wait(60)

    training.program.after("early_dense_reduce", took)
    early.completed = completed


def other_order(training):
    """One rank sends the second bucket first."""
    if training.communicators.rank:
        training._pending.flight.early.buckets.reverse()


@pytest.mark.parametrize("spoil", [leaves_too_early, other_order])
def test_a_bucket_that_leaves_at_another_time_has_other_bits(small, spoil):
    early, other = of_ranks(exchanges="each", ahead=spoil), of_ranks(exchanges="once")
    assert not any(same(*each) for each in zip(early, other, strict=True))


def test_the_run_says_what_is_in_which_message(small):
    said = []
    of_ranks(exchanges="each", steps=1, ahead=lambda training: said.append(training.program.exchanges))
    found = said[0].split("; ")[-1]
    assert said[0] == said[1] and found == (
        "dense gradients in 3 messages, layers.2.weight to layers.2.bias, layers.1.weight to layers.1.bias, "
        "norm.weight to layers.0.bias"
    )


@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize("model", [Deep, Choosing, Again])
def test_it_has_the_bits_of_one_reduction(small, model, consistency):
    how = {"model": model, "consistency": consistency}
    for early, once in zip(of_ranks(exchanges="each", **how), of_ranks(exchanges="once", **how), strict=True):
        assert same(early, once)


WITH = {
    "fwp": {"mode": "fwp"},
    "joined": {"exchanges": "joined"},
    "accumulated": {"accumulate": 2, "micro_batches": 1},
    "kept": {"skip_fetch": True},
    "clipped": {"max_grad_norm": 0.05},
    "replicas": {"count": 4, "replicas": 2, "size": 24},
    "averaged": {"count": 4, "replicas": 2, "average_every": 2, "size": 24},
    "nodes": {"count": 4, "nodes": 2, "size": 24},
    "fp16": {"precision": "fp16"},
    "two": {"micro_batches": 2},
}


@pytest.mark.parametrize("how", WITH.values(), ids=WITH)
def test_it_goes_with_the_other_switches(how):
    seen = []

    def ahead(training):
        seen.append(training.program.schedule.reduces_early)

    early = of_ranks(ahead=ahead, **{"exchanges": "each", **how})
    assert seen and all(seen)
    for each, other in zip(early, of_ranks(**{**how, "exchanges": "once"}), strict=True):
        assert same(each, other)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(1, {"exchanges": "each"}), (2, {"exchanges": "once"}), (2, {"exchanges": "each", "mode": "dbp"}),
     (2, {"exchanges": "each", "micro_batches": 1}), (2, {"exchanges": "each", "model": NoParameters})],
    ids=["alone", "once", "dbp", "one_micro_batch", "no_parameters"],
)  # fmt: skip
def test_where_nothing_travels_beside_a_backward_all_is_reduced_after_it(ranks, how):
    seen = []
    of_ranks(ranks, ahead=lambda training: seen.append(training.program.schedule.reduces_early), **how)
    assert seen == [False] * ranks


def test_parameters_frozen_and_thawed_between_runs(small):
    def rank(communicators, exchanges):
        made = parts(Deep)
        with trainer(made, communicators=communicators, exchanges=exchanges) as training:
            given = iter(batches(9, rank=communicators.rank, world_size=2))
            for frozen in (True, False, True):
                made[0].layers[2].requires_grad_(not frozen)
                made[0].layers[0].requires_grad_(frozen)
                list(training.run([next(given) for _ in range(3)]))
        return state(made)

    early, once = (run_ranks(2, lambda ranks, each=each: rank(ranks, each)) for each in ("each", "once"))
    assert all(same(*pair) for pair in zip(early, once, strict=True))


def test_a_gradient_that_comes_after_all_is_refused():
    with pytest.raises(StageFailedError, match=r"backward has come to parameter layers\.\d\.\w+ again"):
        of_ranks(model=AgainAtLast, exchanges="each")


def test_autograd_makes_the_nodes_watched_on_the_lane_that_computes(monkeypatch):
    """It runs a node on the stream on which that was made: no event of the lane stands for another one."""
    made_on = defaultdict(list)

    def noted(parameter):
        made_on[threading.current_thread().name].append(edge := get_gradient_edge(parameter))
        return edge

    watching = []
    monkeypatch.setattr(early_dense, "get_gradient_edge", noted)
    of_ranks(exchanges="each", ahead=lambda training: watching.append(training._pending.flight.early))
    assert set(made_on) == {"lane compute"} and len(made_on["lane compute"]) == 2 * 4  # once a flight
    assert [each._nodes for each in watching] == [[], []]  # the next trainer's streams are others
