"""Promise: a load that is refused has changed nothing: no tensor, no number, no position, on no rank."""

import copy
import errno
import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_state_loads import KEPT, equal, places
from trainer_parts import DIM, Ranker, batches, parts, trainer

from tritonrec import dcp
from tritonrec.checkpoint.manifest import add_checksum
from tritonrec.data import NumberedLoader
from tritonrec.distributed import Communicators, RanksDisagreeError
from tritonrec.embedding import RowOptimizer
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.resilience import PeerCopies


def everything(training, loader=None):
    dense = training.dense.state_dict()
    position = None if loader is None else loader.state_dict()
    return copy.deepcopy([dense, training.tables.state(), training.next_step, position, training.tables.seed])


class Wide(Ranker):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(DIM, 1)


class Position:
    """A loader of another kind than the one that was saved."""

    def __init__(self, fails):
        self.at, self.fails = 5, fails

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state.get("at", 0)
        if self.fails and "at" not in state:
            raise KeyError("at")


REFUSED = {
    "another table": (dict(names=["item", "shop"]), {}, "table 'shop' is not there|'shop'"),
    "another policy": (dict(policy=KEPT), {}, "policy"),
    "another optimizer": (dict(optimizer="sgd"), {}, "rule of table item|optimizer"),
    "another dense rate": (dict(lr=0.01), {}, r"lr of table item is 0\.05 in .* and 0\.01 here"),
    "another seed": (dict(seed=3), {}, r"seed of table item is 2 .* and 3 here.*changed=\{\"seed\"\}"),
    "another rule": (dict(rule=RowOptimizer("adam", lr=0.05, beta2=0.9)), {}, "rule of table item"),
    "another model": (dict(model=Wide), {}, "more.weight is missing"),
    "another consistency": ({}, dict(consistency="window"), "consistency is batch .* and window here"),
    "accumulation": ({}, dict(accumulate=2), "accumulate is 1 .* and 2 here"),
    "clipping": ({}, dict(max_grad_norm=1.0), "clipping of max_grad_norm is 0.0 .* and 1.0 here"),
    "precision": ({}, dict(precision="bf16"), "precision of model is float32 .* and bf16 here"),
    "a loader that fails": ({}, {"loader": True}, "at"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    made, loader = parts(), NumberedLoader(batches(9))
    with trainer(made, "sequential") as training:  # kernels are imported on one thread
        list(training.run(next(loader) for _ in range(3)))
        training.save(folder, loader=loader)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_a_trainer_that_refuses_a_checkpoint_is_as_it_was(saved, name):
    options, window, message = REFUSED[name]
    window = dict(window)
    loader = Position(True) if window.pop("loader", False) else NumberedLoader(batches(9))
    with trainer(parts(**options), **window) as training:
        count = 2 * window.get("accumulate", 1)
        if not isinstance(loader, Position) and "names" not in options:
            list(training.run(next(loader) for _ in range(count)))
        before = everything(training, loader)
        with pytest.raises((ValueError, KeyError), match=message):
            training.load(saved, loader=loader)
        assert equal(everything(training, loader), before)


def test_a_dense_model_that_fails_in_the_end_puts_the_loader_back(saved, monkeypatch):
    made, loader = parts(), NumberedLoader(batches(9))
    with trainer(made) as training:
        before = everything(training, loader)
        monkeypatch.setattr(training.dense, "load_state_dict", lambda state: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            training.load(saved, loader=loader)
        assert equal(everything(training, loader), before)


def test_a_position_that_cannot_be_read_changes_nothing(saved, tmp_path):
    made, loader = parts(), NumberedLoader(batches(9))
    with trainer(made) as training:
        training.save(tmp_path)  # without a position
        list(training.run(next(loader) for _ in range(1)))
        before = everything(training, loader)
        with pytest.raises(ValueError, match=r"no position of a loader.* it was saved without loader="):
            training.load(tmp_path, loader=loader)
        assert equal(everything(training, loader), before)


@pytest.mark.parametrize(
    ("changed", "options", "window"),
    [
        ({"seed"}, dict(seed=3), {}),
        ({"lr"}, dict(lr=0.01), {}),
        ({"rule"}, dict(rule=RowOptimizer("adam", lr=0.05, beta2=0.9)), {}),
        ({"consistency"}, {}, dict(consistency="window")),
        ({"clipping"}, {}, dict(max_grad_norm=1.0)),
    ],
)
def test_a_setting_that_is_given_as_changed_holds_from_the_load_on(saved, changed, options, window):
    with trainer(parts(**options), **window) as training:
        assert training.load(saved, changed=changed) == 3
        if "lr" in changed:
            assert training.dense.optimizers[0].param_groups[0]["lr"] == 0.01
            assert training.tables.groups[0].optimizer.lr == 0.01
        assert training.tables.seed == options.get("seed", 2)
        list(training.run(batches(5)[3:]))


def ftrl_like(decay=0.9, eps=1e-8, until=1000, sign=1.0):
    """A rule with constants in a closure, which no name shows."""

    def rule(weight, state, gradient, step, lr):
        state = (decay if step < until else 0.5) * state + gradient * gradient
        return weight - sign * lr * gradient / (state.sqrt() + eps), state

    return RowOptimizer.custom(rule, lambda dim: dim, lr=0.05)


CONSTANTS = {"decay": 0.91, "eps": 1e-7, "until": 5000, "sign": -1.0}


def test_a_rule_of_ones_own_is_compared_by_what_it_computes(tmp_path):
    with trainer(parts(rule=ftrl_like())) as training:
        training.save(tmp_path)
    with trainer(parts(rule=ftrl_like())) as training:
        assert training.load(tmp_path) == 0
    for name, value in CONSTANTS.items():
        other = ftrl_like(**{name: value})
        assert repr(other) != repr(ftrl_like()), name  # by which ranks are compared
        with trainer(parts(rule=other)) as training:
            with pytest.raises(ValueError, match=r"table item, its function's results.*changed=\{\"rule"):
                training.load(tmp_path)
            training.load(tmp_path, changed={"rule"})


def test_the_dropout_seed_is_compared(saved):
    made = parts()
    config = WindowConfig(micro_batches=3, seed=5)
    with Trainer(*made, Communicators.local(), "nestpipe", config) as training:
        with pytest.raises(ValueError, match=r"dropout_seed is 4 in .* and 5 here"):
            training.load(saved)
        assert training.load(saved, changed={"dropout_seed"}) == 3
        with pytest.raises(ValueError, match="changed= has 'sed', and takes seed, scale"):
            training.load(saved, changed={"sed"})
        with pytest.raises(
            TypeError, match=r"Trainer.load: changed must be several names.*: write \['seed'\]"
        ):
            training.load(saved, changed="seed")


def test_rates_that_follow_a_scheduler_are_not_changed(saved, tmp_path):
    def training_of(lr):
        model, tables, optimizer = parts(lr=lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return Trainer(
            model, tables, optimizer, Communicators.local(), "sequential", WindowConfig(), scheduler=schedule
        )

    with training_of(0.05) as training:
        list(training.run(batches(2)))
        training.save(tmp_path)
    with training_of(0.05) as training:  # the rate after two steps is no other setting
        assert training.load(tmp_path) == 2
    with training_of(0.01) as training:
        with pytest.raises(ValueError, match=r"lr of optimizer 0, group 0 is 0\.05 in .* and 0\.01 here"):
            training.load(tmp_path)
        with pytest.raises(ValueError, match="the learning rates follow a scheduler"):
            training.load(tmp_path, changed={"lr"})


def test_a_rule_of_parameters_that_was_changed_by_name_holds(saved):
    made = parts()
    made[2].param_groups[0].update(betas=(0.5, 0.6), weight_decay=0.3)
    with trainer(made) as training:
        with pytest.raises(ValueError, match="rule of optimizer 0, group 0 is"):
            training.load(saved)
        training.load(saved, changed={"rule"})
    (group,) = made[2].param_groups
    assert group["betas"] == (0.5, 0.6) and group["weight_decay"] == 0.3


def stepped(optimizer, size):
    return torch.optim.lr_scheduler.StepLR(optimizer, size)


def warmed_up(optimizer, steps):
    """A warm-up and a cosine; the rate is far from the second's minimum where that is far."""
    both = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, both, [1])


def multiplied(optimizer, factor):
    return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda done: factor)


def cyclic(optimizer, base):
    scale = torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, scale_fn=lambda x: base**x, cycle_momentum=False
    )
    return torch.optim.lr_scheduler.ChainedScheduler([scale])


AVERAGES = {
    "EMA": lambda decay: {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(decay)},
    "EMA of each": lambda decay: {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(decay)},
    "own": lambda decay: {"avg_fn": lambda old, new, done: decay * old + (1 - decay) * new},
    "buffers": lambda decay: {"use_buffers": decay > 0.6},
    "mean": lambda decay: {} if decay > 0.6 else {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(decay)},
}
"""Of the model's weights, as its arguments for a decay."""


def training_with(kind, value, communicators=None):
    made = parts()
    given = {}
    if kind in AVERAGES:
        given["average"] = torch.optim.swa_utils.AveragedModel(made[0], **AVERAGES[kind](value))
    else:
        given["scheduler"] = kind(made[2], value)
    return Trainer(*made, communicators or Communicators.local(), "sequential", WindowConfig(), **given)


# Torch's own load takes the saved ones in silence; values of functions are in closures, which no state has.
SETTINGS = [
    (stepped, 1, 9, "scheduler", "scheduler 0, step_size is 1 in .* and 9 here"),
    (warmed_up, 1, 9, "scheduler", "scheduler 0, part 1, T_max is 1 in .* and 9 here"),
    *(
        (functions, 0.75, 0.5, "scheduler", "scheduler.* is .* in .* here.*changed=")
        for functions in (
            lambda optimizer, factor: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: factor**done),
            multiplied, cyclic,
        )
    ),
    *((name, 0.75, 0.5, "average", "average.* is .* in .* here.*changed=") for name in AVERAGES),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "saved", "here", "changed", "said"), SETTINGS)
def test_settings_of_schedulers_and_averages_are_those_that_were_saved_or_given_by_name(
    tmp_path, kind, saved, here, changed, said
):
    with training_with(kind, saved) as training:
        list(training.run(batches(1)))
        training.save(tmp_path)
    with training_with(kind, here) as training:
        before = everything(training)
        with pytest.raises(ValueError, match=said):
            training.load(tmp_path)
        assert equal(everything(training), before)
        training.load(tmp_path, changed={changed})
        if here == 9:
            (state,) = (each.state_dict() for each in training.dense.schedulers)
            assert state["last_epoch"] == 1 and "9" in str(state)
        training.save(tmp_path / "again")
    for value, folder in ((saved, tmp_path), (here, tmp_path / "again")):
        with training_with(kind, value) as training:
            assert training.load(folder) == 1


@pytest.mark.parametrize(("kind", "named"), [(SETTINGS[2][0], "scheduler"), ("EMA", "average")])
def test_ranks_whose_functions_differ_are_named(kind, named):
    def of_rank(communicators):
        training_with(kind, 0.5 if communicators.rank else 0.75, communicators)

    with pytest.raises(RanksDisagreeError, match=named):
        run_ranks(2, of_rank)


def test_a_load_into_a_used_trainer_gives_the_bits_of_a_fresh_one(saved):
    def ended(first):
        made = parts()
        with trainer(made) as training:
            list(training.run(batches(6)[:first]))
            training.load(saved)
            list(training.run(batches(9)[3:]))
            return everything(training)[:2]

    assert equal(ended(0), ended(6))  # which has rows of steps 3 to 5


def test_no_rank_loads_where_one_cannot(tmp_path):
    def rank(communicators):
        made = parts()
        with trainer(made, communicators=communicators, mode="sequential") as training:
            list(training.run(batches(3, rank=communicators.rank, world_size=2)))
            training.save(tmp_path)
            before = everything(training)
            list(training.run(batches(5, rank=communicators.rank, world_size=2)[3:]))
            after = everything(training)
            communicators.control.all_gather_texts("saved")
            if communicators.rank == 1:  # its part of the table
                (file,) = tmp_path.glob("step-*/item.8000-ffff.*")
                content = file.read_bytes()
                file.write_bytes(content[:-1] + b"x")
            communicators.control.all_gather_texts("damaged")
            with pytest.raises((ValueError, RuntimeError)) as error:
                training.load(tmp_path)
            return equal(everything(training), after) and not equal(before, after), str(error.value)

    (same, message), (also, own) = run_ranks(2, rank)
    assert same and also
    assert "nothing is loaded, because rank 1 cannot" in message and "was altered" in own


@pytest.mark.parametrize("how", [Trainer.load, Trainer.warm_start])
def test_ranks_that_read_different_checkpoints_load_nothing(saved, tmp_path, how):
    with trainer(parts()) as training:
        training.load(saved)
        training.save(tmp_path, {"another": 1})

    def rank(communicators):
        with trainer(parts(), communicators=communicators, mode="sequential") as training:
            before = everything(training)
            with pytest.raises(RanksDisagreeError, match="rank 1 has digest of the checkpoint"):
                how(training, (saved, tmp_path)[communicators.rank])
            return equal(everything(training), before)

    assert run_ranks(2, rank) == [True, True]


@pytest.mark.parametrize("how", [Trainer.load, dcp.load, Trainer.warm_start], ids=lambda how: how.__module__)
def test_a_read_that_fails_anywhere_changes_nothing(tmp_path, monkeypatch, how):
    loader, opened, opens = NumberedLoader(batches(9)), Path.open, []
    with trainer(parts(policy=KEPT), "sequential") as training:
        list(training.run(next(loader) for _ in range(3)))
        (dcp.save if how is dcp.load else Trainer.save)(training, tmp_path / "run", loader=loader)

    def torn(path, *given, **options):
        if path.is_relative_to(tmp_path):
            opens.append(path)
            if len(opens) == at:
                raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *given, **options)

    with trainer(parts(policy=KEPT), "sequential") as training:
        list(training.run(next(loader) for _ in range(2)))
        before = everything(training, loader)
        monkeypatch.setattr(Path, "open", torn)
        at = 0
        while True:
            at += 1
            opens.clear()
            try:
                how(training, tmp_path / "run", **({} if how is Trainer.warm_start else {"loader": loader}))
                break
            except (OSError, ValueError, RuntimeError):
                assert equal(everything(training, loader), before), opens
        assert at > 3 and not equal(everything(training, loader), before)


def test_peer_copies_of_another_training_change_nothing():
    copies = PeerCopies()
    with trainer(parts(), mode="sequential") as training:
        list(training.run(batches(3)))
        copies.keep(training)
    for options in (dict(seed=3), dict(model=Wide), dict(names=["item", "shop"]), dict(policy=KEPT)):
        with trainer(parts(**options), mode="sequential") as training:
            before = everything(training)
            with pytest.raises(ValueError):
                copies.restore(training)
            assert equal(everything(training), before)


def test_a_checkpoint_of_a_version_without_settings_is_loaded_and_says_so(saved, tmp_path):
    import shutil

    shutil.copytree(saved, tmp_path / "old")
    (path,) = (tmp_path / "old").glob("step-*.json")
    body = json.loads(path.read_text())
    del body["manifest_sha256"], body["meta"]["recipe"]
    path.write_text(json.dumps(add_checksum(body)))
    with (
        trainer(parts(seed=3)) as training,
        pytest.warns(UserWarning, match="does not say with which seed, "),
    ):
        assert training.load(tmp_path / "old") == 3


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "item", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dict", "tensor", "tuple", "float", "item"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_metadata_of_any_content_is_taken_or_refused_and_then_nothing_changes(saved, data):
    (path,) = saved.glob("step-*.json")
    original = path.read_text()
    body = json.loads(original)
    del body["manifest_sha256"]
    place = data.draw(st.sampled_from([*places(body["meta"])]))
    inner = body["meta"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(JSON)
    path.write_text(json.dumps(add_checksum(body)))
    try:
        with trainer(parts(), mode="sequential") as training:
            loader = NumberedLoader(batches(9))
            before = everything(training, loader)
            try:
                training.load(saved, loader=loader)
            except (ValueError, RuntimeError, KeyError, TypeError) as error:
                # a loader of a user's own may raise what it likes
                assert isinstance(error, (ValueError, RuntimeError)) or "loader" in place, error
                assert equal(everything(training, loader), before)
            with suppress(ValueError, RuntimeError):
                training.warm_start(saved)
    finally:
        path.write_text(original)
