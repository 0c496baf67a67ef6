"""Promise: any optimizer of torch trains the dense model with the same bits in every mode and restart."""

import copy
import json
import math
import time
from collections import Counter

import pytest
import torch
from speeds import slow_except
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainer_parts import EVERY, Ranker, batches, parts, same

from tritonrec import checkpoint
from tritonrec.checkpoint import flatten, unflatten
from tritonrec.distributed import Communicators
from tritonrec.embedding.in_flight import as_lane
from tritonrec.pipeline import DenseModel, StageFailedError, Trainer, WindowConfig
from tritonrec.settings import with_values


class OwnRule(torch.optim.Optimizer):
    """A user's own: sign descent with a buffer made from a setting of the instance."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.factor = 0.5

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["mean"] = p.grad.lerp(state["mean"], self.factor) if state else p.grad.clone()
                    p.sub_(state["mean"].sign() * group["lr"])


def grouped(parameters, **options):
    """AdamW that decays matrices alone, with a rate of their own."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def muon_and_adamw(parameters):
    """Muon, which takes matrices alone, and AdamW for the rest."""
    parameters = list(parameters)
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


OPTIMIZERS = {
    "adamw in groups, fused": lambda p: grouped(p, fused=True),
    "adamw, foreach, amsgrad": lambda p: grouped(p, foreach=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "own": lambda p: OwnRule(p, lr=0.01),
    "muon and adamw": lambda p: muon_and_adamw(p),
}
SCHEDULERS = {
    "none": lambda o: None,
    "warm-up, then cosine": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.25, total_iters=2), schedulers.CosineAnnealingLR(o, 4)], [2]
    ),
    "steps": lambda o: schedulers.MultiStepLR(o, [1, 1, 3], 0.5),
}


def made(optimizer="adamw in groups, fused", scheduler="none", average=False):
    model, tables, _ = parts()
    built = OPTIMIZERS[optimizer](model.parameters())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75)) if average else None
    makes = SCHEDULERS[scheduler]
    listed = [makes(each) for each in built] if isinstance(built, list) else makes(built)
    if scheduler == "none":
        listed = None
    options = {"scheduler": listed, "average": averaged}
    return (model, tables, built), options


def trainer(of, mode="nestpipe", consistency="batch", **window):
    (model, tables, optimizer), options = of
    window.setdefault("micro_batches", 1 if mode == "reference" else 3)
    config = with_values(WindowConfig(consistency=consistency, seed=4), window)
    return Trainer(model, tables, optimizer, Communicators.local(), mode, config, **options)


def trained(of, mode, consistency="batch", given=None, **window):
    with trainer(of, mode, consistency, **window) as training:
        list(training.run(batches(4) if given is None else given))
        rows = [part.clone() for pair in training.tables.export().values() for part in pair]
        return [*rows, *(each.clone() for each in training.dense.tensors().values())]


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
@pytest.mark.parametrize("optimizer", slow_except(["adamw in groups, fused", "muon and adamw"], OPTIMIZERS))
def test_any_optimizer_has_the_same_bits_in_every_mode(mode, consistency, optimizer):
    other = "reference" if consistency == "batch" else "sequential"
    of = made(optimizer, "warm-up, then cosine", average=True)
    expected = trained(made(optimizer, "warm-up, then cosine", average=True), other, consistency)
    assert same(trained(of, mode, consistency), expected)
    assert not same(trained(made(optimizer, average=True), mode, consistency), expected)


def test_its_tensors_have_those_of_the_average():
    _, options = of = made("momentum", average=True)
    with trainer(of) as training:
        list(training.run(batches(3)))
        tensors = training.dense.tensors()
        for name, parameter in options["average"].module.named_parameters():
            assert torch.equal(tensors[f"average/{name}"], parameter), name
            assert not torch.equal(tensors[name], parameter), name


def test_it_is_the_update_of_torch():
    of, plain = made("adamw in groups, fused", "steps", average=True), Ranker()
    expected = grouped(plain.parameters(), fused=True)
    scheduler = SCHEDULERS["steps"](expected)
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    random, dense = torch.Generator().manual_seed(3), DenseModel(of[0][0], of[0][2], **of[1])
    for _ in range(5):
        gradients = {n: torch.randn(p.shape, generator=random) for n, p in plain.named_parameters()}
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name].clone()
        expected.step()
        scheduler.step()
        averaged.update_parameters(plain)
        dense.step(gradients)
    assert same(list(of[0][0].parameters()), list(plain.parameters()))
    assert same(list(of[1]["average"].parameters()), list(averaged.parameters()))
    assert scheduler.get_last_lr() == of[1]["scheduler"].get_last_lr() != [0.01, 0.02]
    assert all(parameter.grad is None for parameter in of[0][0].parameters())


@pytest.mark.parametrize(("mode", "consistency"), EVERY)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_result_has_the_rates_of_its_own_update(mode, consistency, accumulate):
    """Not those of now: by then the lanes have stepped the scheduler for later batches."""
    of = made("adamw in groups, fused", "warm-up, then cosine")
    expected, _ = made("adamw in groups, fused", "warm-up, then cosine")
    scheduler, rates = SCHEDULERS["warm-up, then cosine"](expected[2]), []
    for _ in range(6 // accumulate):
        rates += [tuple(group["lr"] for group in expected[2].param_groups)] * accumulate
        expected[2].step()
        scheduler.step()
    with trainer(of, mode, consistency, accumulate=accumulate) as training:
        results = [*training.run(batches(4)), *training.run(batches(6)[4:])]
    assert [result.learning_rates for result in results] == rates and len(set(rates)) > 2


def test_a_rate_that_is_a_tensor_and_one_that_is_missing():
    model, _tables, _ = parts()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False)
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    dense = DenseModel(model, optimizer, scheduler)
    dense.step({})  # nobody would take its rates
    plain = torch.optim.Optimizer(model.parameters(), {})
    plain.step = lambda: None
    with as_lane():
        dense.begin(lambda: "step 0 is", guarded=False)
        dense.step({name: torch.ones_like(p) for name, p in model.named_parameters()})
        dense.step({name: torch.ones_like(p) for name, p in model.named_parameters()})
        dense.schedulers, dense.optimizers = (), (plain,)
        dense.step({})
        dense.end()
    (first,), (second,), (none,) = (tuple(map(float, rates)) for rates in dense.rates)
    assert (first, second) == (0.25, 0.125) and math.isnan(none)


@pytest.mark.parametrize("optimizer", slow_except(["adamw in groups, fused", "muon and adamw"], OPTIMIZERS))
@pytest.mark.parametrize("scheduler", ["warm-up, then cosine", "steps"])
def test_a_trainer_goes_on_from_what_it_saved(tmp_path, optimizer, scheduler):
    expected = trained(made(optimizer, scheduler, True), "reference")
    with trainer(made(optimizer, scheduler, True)) as first:
        list(first.run(batches(2)))
        first.save(tmp_path, {"note": [1, "a"]})
        assert first.next_step == 2
    again, seen = made(optimizer, scheduler, True), []
    with trainer(again, "dbp") as second:
        assert second.load(tmp_path, seen.append) == 2 == second.next_step
    assert seen == [{"note": [1, "a"]}]
    assert same(trained(again, "fwp", given=batches(4)[2:]), expected)


def test_a_save_is_complete_when_it_returns(tmp_path, monkeypatch):
    write = checkpoint.Saver._write

    def late(*args):
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(checkpoint.Saver, "_write", late)
    with trainer(made("momentum"), "dbp") as training:
        list(training.run(batches(2)))
        training.save(tmp_path)
        assert checkpoint.load(tmp_path, rank=0, world_size=1).step == 2


def test_a_state_that_was_loaded_shares_no_memory():
    of = made("momentum")
    trained(of, "nestpipe", given=batches(2))
    saved = DenseModel(*of[0][::2]).state_dict()
    before = copy.deepcopy(saved)
    fresh = made("momentum")
    DenseModel(*fresh[0][::2]).load_state_dict(saved)
    trained(fresh, "nestpipe", given=batches(4)[2:])
    (plain, tensors), (_, same_before) = flatten(saved, "s"), flatten(before, "s")
    assert plain and same(list(tensors.values()), list(same_before.values()))


WRONG_STATES = {
    "other parts": (
        lambda s: {**s, "average": {}},
        "expected the states of model, optimizers, schedulers, got",
    ),
    "more optimizers": (
        lambda s: {**s, "optimizers": [{}] * 3},
        "expected the states of 1 optimizers, got 3",
    ),
    "more schedulers": (
        lambda s: {**s, "schedulers": [{}] * 3},
        "expected the states of 0 schedulers, got 3",
    ),
    "a parameter less": (lambda s: s["model"].pop("mix.bias"), "mix.bias is missing"),
    "a parameter more": (lambda s: s["model"].update(x=torch.ones(1)), "x is not in the model"),
    "another shape": (
        lambda s: s["model"].update({"mix.bias": torch.ones(5)}),
        r"mix.bias: expected shape \(6,\)",
    ),
    "other groups": (
        lambda s: s["optimizers"][0]["param_groups"].pop(),
        "expected an optimizer with the groups",
    ),
    "a rate that is no number": (
        lambda s: s["optimizers"][0]["param_groups"][0].update(lr=float("nan")),
        "lr of group 0 is 'nan', where 0.01 is here",
    ),
    "a setting that is no number": (
        lambda s: s["optimizers"][0]["param_groups"][0].update(betas=("x", 0.999)),
        "betas of group 0 is .*where .* is here",
    ),
    "a setting less": (
        lambda s: s["optimizers"][0]["param_groups"][0].update(betas=(0.9,)),
        "betas of group 0 is .*where .* is here",
    ),
    "a group without one": (
        lambda s: s["optimizers"][0]["param_groups"][0].pop("weight_decay"),
        "group 0 of the optimizer lacks weight_decay",
    ),
    "another optimizer": (
        lambda s: s["optimizers"][0]["state"]["mix.bias"].pop("exp_avg"),
        "mix.bias: the optimizer keeps step, exp_avg",
    ),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_another_state_is_refused_and_nothing_is_loaded(name):
    of = made()
    trained(of, "nestpipe", given=batches(2))
    dense = DenseModel(*of[0][::2])
    before = {name: each.clone() for name, each in dense.tensors().items()}
    change, said = WRONG_STATES[name]
    state = copy.deepcopy(dense.state_dict())
    for tensor in state["model"].values():
        tensor.zero_()
    with pytest.raises(ValueError, match=said):
        changed = change(state)
        dense.load_state_dict(changed if isinstance(changed, dict) and "model" in changed else state)
    assert same(list(dense.tensors().values()), list(before.values()))


class Unsteady(torch.optim.SGD):
    """Rounds otherwise at another place in memory."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1.0 if p.data_ptr() % 64 else 1.0 + 2.0**-20)


def test_an_optimizer_whose_bits_depend_on_memory_is_refused():
    model, tables, _ = parts()
    unsteady = Unsteady(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Unsteady with the settings of its group 0 gives other bits"):
        trainer(((model, tables, unsteady), {}))
    trainer(((model, tables, unsteady), {}), consistency="window").close()


class StateFromTheStart(torch.optim.Adagrad):
    """As torch 2.11 and 2.12 have it: `step` takes the state that the constructor has made."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(each)}

    def step(self, closure=None):
        assert all(self.state[each] for group in self.param_groups for each in group["params"])
        return super().step(closure)


def test_an_optimizer_whose_state_is_there_from_the_start_trains():
    def final(kind):
        model, tables, _ = parts()
        with trainer(((model, tables, kind(model.parameters(), lr=0.1, fused=True)), {})) as built:
            list(built.run(batches(3)))
        return [each.detach().clone() for each in model.parameters()]

    assert same(final(StateFromTheStart), final(torch.optim.Adagrad))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_check_of_an_optimizer_leaves_it_as_it_was(name):
    model = torch.nn.Linear(400, 130)  # long enough to be cut between threads
    built = OPTIMIZERS[name](model.parameters())
    optimizer = built[0] if isinstance(built, list) else built
    scheduler, threads = schedulers.LinearLR(optimizer, 0.5), torch.get_num_threads()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = [each.detach().clone() for each in model.parameters()]
    rates = scheduler.get_last_lr()
    tables = parts()[1]
    trainer(((model, tables, built), {"scheduler": scheduler})).close()
    assert same(list(model.parameters()), before) and not optimizer.state and not calls
    assert scheduler.get_last_lr() == rates and torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", math.nan), ("lr", -0.1), ("lr", torch.tensor(math.inf)), ("lr", "0.1"),
        ("weight_decay", math.nan), ("eps", -1.0), ("betas", (0.9, math.nan)), ("betas", (1.0, 0.9)),
    ],
)  # fmt: skip
def test_a_number_of_a_group_that_makes_nan_is_named_before_anything_moves(setting, value):
    of = made("adamw in groups, fused")
    of[0][2].param_groups[1][setting] = value
    before = [each.clone() for each in of[0][0].parameters()]
    with trainer(of) as training, pytest.raises(ValueError, match=f"^{setting} of group 1 of AdamW is "):
        list(training.run(batches(2)))
    assert same(list(of[0][0].parameters()), before)


@pytest.mark.parametrize(("mode", "error"), [("reference", ValueError), ("nestpipe", StageFailedError)])
@pytest.mark.parametrize("rate", [math.nan, -1.0])
def test_a_rate_of_a_scheduler_that_makes_nan_is_named(mode, error, rate):
    of = made("momentum")
    scheduler = schedulers.LambdaLR(of[0][2], lambda update: rate if update == 1 else 1.0)
    said = r"lr of group 0 of SGD is (nan|-0.05), and must be .* scheduler"
    with trainer((of[0], {"scheduler": scheduler}), mode) as training, pytest.raises(error, match=said):
        list(training.run(batches(3)))


def test_a_rate_that_a_scheduler_of_torch_ends_a_rounding_below_zero_is_taken():
    def of():
        own = made("momentum")
        scheduler = schedulers.LinearLR(own[0][2], 1 / 3, 0.0, 4)
        return own[0], {"scheduler": scheduler}

    first, second = of(), of()
    with trainer(first) as training:
        list(training.run(batches(5)))
        state = training.dense.state_dict()
    assert -1e-12 < first[0][2].param_groups[0]["lr"] < 0
    with trainer(second) as training:
        training.dense.load_state_dict(state)


class NeedsAClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


def of_other():
    return schedulers.LinearLR(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0))


REFUSED = {
    "a closure": (NeedsAClosure, {}, TypeError, "needs a closure"),
    "a plateau": (
        None,
        lambda m, o: {"scheduler": schedulers.ReduceLROnPlateau(o)},
        TypeError,
        "needs a metric",
    ),
    "two for one": (
        lambda p, lr: [torch.optim.SGD(list(p), lr=lr)] * 2,
        {},
        ValueError,
        "mix.weight is given to two optimizers",
    ),
    "no scheduler": (None, lambda m, o: {"scheduler": 0.1}, TypeError, "torch.optim.lr_scheduler, got float"),
    "another's": (None, lambda m, o: {"scheduler": of_other()}, ValueError, "has another optimizer"),
    "no average": (None, lambda m, o: {"average": 0.9}, TypeError, "AveragedModel or None, got 0.9"),
    "another average": (
        None,
        lambda m, o: {"average": AveragedModel(torch.nn.Linear(2, 2))},
        ValueError,
        "saved with another model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_train_with_is_refused(name):
    kind, options, error, said = REFUSED[name]
    model, tables, _ = parts()
    optimizer = (kind or torch.optim.SGD)(model.parameters(), lr=0.1)
    with pytest.raises(error, match=said):
        trainer(((model, tables, optimizer), options(model, optimizer) if options else {}))


@pytest.mark.parametrize("mode", ["reference", "sequential", "nestpipe"])
@pytest.mark.parametrize("consistency", ["batch", "window"])
def test_a_lazy_module_is_called_before_it_trains(mode, consistency):
    for name, lazy in (
        ("mix.weight", torch.nn.LazyLinear(6)),
        ("norm.running_mean", torch.nn.LazyBatchNorm1d()),
    ):
        model, tables, _ = parts()
        if name.startswith("norm"):
            lazy.weight = lazy.bias = None  # buffers alone
        setattr(model, name.partition(".")[0], lazy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=f"{name} has no shape before the first call of its lazy module"):
            trainer(((model, tables, optimizer), {}), mode, "batch" if mode == "reference" else consistency)


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_takes_no_parameter_with_gaps(fused):
    model, tables, _ = parts()
    model.mix.weight = torch.nn.Parameter(torch.zeros(6, 6, 2)[..., 0])
    of = ((model, tables, torch.optim.Adam(model.parameters(), fused=fused)), {})
    if not fused:
        trainer(of).close()
        return
    with pytest.raises(ValueError, match=r"mix\.weight has gaps in memory"):
        trainer(of)


TREES = [
    {"a": [1, 2.5, None, True], "b": {"c": (torch.arange(3), "x")}, 3: {"d": -math.inf}, 2.5: []},
    {"milestones": Counter({1: 2, 7: 1}), "empty": {}, "tuple": (), "nan": math.nan},
]


@pytest.mark.parametrize("tree", TREES, ids=["nested", "counter"])
def test_a_tree_comes_back_as_it_went(tree):
    plain, tensors = flatten(tree, "tree")
    back = unflatten(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert repr(back) == repr(tree) and [type(each) for each in back.values()] == [
        type(each) for each in tree.values()
    ]


@pytest.mark.parametrize("value", [print, object(), {1, 2}, b"x"], ids=["function", "object", "set", "bytes"])
def test_anything_else_has_no_place_in_a_checkpoint(value):
    with pytest.raises(TypeError, match=r"tree/a/1 is a \w+, which a checkpoint cannot hold"):
        flatten({"a": [0, value]}, "tree")


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"tensor": "x"}, "no tensor x"),
        ({"odd": 1}, "kind of value 'odd'"),
        ({}, "one kind"),
        ({"a": 1, "b": 2}, "one"),
    ],
)
def test_values_that_no_tree_gave_are_refused(plain, said):
    with pytest.raises(ValueError, match=said):
        unflatten(plain, {})


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam", "sgd"])
def test_a_fused_optimizer_of_the_harness_is_one_that_torch_has_on_the_device(name):
    """Adagrad's is on CPUs alone: elsewhere torch refuses it."""
    from tritonrec.harness.job import dense_optimizer

    parameters = {device: [torch.nn.Parameter(torch.zeros(3, device=device))] for device in ("cpu", "meta")}
    assert dense_optimizer(parameters["cpu"], name, 0.1).param_groups[0]["fused"]
    if "adagrad" in name:
        assert not dense_optimizer(parameters["meta"], name, 0.1).param_groups[0]["fused"]
