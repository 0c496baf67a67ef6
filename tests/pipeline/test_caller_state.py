"""Promise: what a caller changes between results has the same bits in every mode, or is refused by name."""

import signal
import threading
import time
from typing import ClassVar

import pytest
import torch
from speeds import slow_except
from torch.optim.lr_scheduler import LambdaLR
from trainer_parts import DIM, NoParameters, Ranker, batches, parts, same, state, trainer

from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.pipeline import Executor, StageFailedError, Trainer, WindowConfig
from tritonrec.pipeline.attributes import noted
from tritonrec.pipeline.caller_state import first_change
from tritonrec.pipeline.pending import PendingWindows

MODES = slow_except(["nestpipe"], ["reference", "sequential", "dbp", "fwp", "nestpipe"])
HOOKS = []
RATE = [0.05]  # of rows, by a function that reads it


class Scaled(Ranker):
    """With a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.heat, self.settings, self.calls = 1.0, {"heat": 1.0}, 0

    def hidden(self, batch, rows):
        self.calls += 1
        return super().hidden(batch, rows) * self.scale * self.heat * self.settings["heat"]


def made(built=Scaled):
    torch.manual_seed(9)
    model = built()
    tables = HashTableCollection(
        [FeatureConfig("item", DIM)], RowOptimizer(lr=lambda update: RATE[0]), seed=2, slots=8
    )
    return model, tables, torch.optim.AdamW(model.parameters(), lr=0.05)


def in_group(name, value):
    return lambda model, tables, optimizer: optimizer.param_groups[0].update({name: value})


def edited(model, tables, optimizer):
    with torch.no_grad():
        model.mix.weight.mul_(0.9)


def edited_data(model, tables, optimizer):
    model.mix.weight.data.mul_(0.9)


def buffer_edited(model, tables, optimizer):
    model.scale.mul_(0.9)


def buffer_replaced(model, tables, optimizer):
    model.scale = torch.tensor(0.8)


def module_replaced(model, tables, optimizer):
    model.norm = torch.nn.Identity()


def hooked(model, tables, optimizer):
    model.norm.register_forward_hook(lambda module, args, output: output * 2)


def frozen(model, tables, optimizer):
    model.mix.weight.requires_grad_(False)


def state_edited(model, tables, optimizer):
    optimizer.state[model.mix.weight]["exp_avg"].zero_()


def hooked_everywhere(model, tables, optimizer):
    HOOKS.append(
        torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output * 2 if module is model.norm else None
        )
    )


def row_rate(model, tables, optimizer):
    RATE[0] = 0.01


def seeded(model, tables, optimizer):
    tables.set_seed(8)


def precision(model, tables, optimizer):
    torch.set_default_dtype(torch.float64)


CHANGES = {
    "lr": (in_group("lr", 0.01), "lr of group 0 of AdamW was changed from 0.05 to 0.01"),
    "weight decay": (in_group("weight_decay", 0.5), "weight_decay of group 0"),
    "betas": (in_group("betas", (0.5, 0.9)), "betas of group 0"),
    "a group's parameters": (
        lambda model, tables, optimizer: optimizer.param_groups[0]["params"].reverse(),
        "the parameters of group 0 of AdamW was changed",
    ),
    "a parameter": (edited, "parameter mix.weight was changed while"),
    "a parameter's data": (edited_data, "parameter mix.weight was changed while"),
    "a buffer": (buffer_edited, "buffer scale was changed"),
    "a buffer replaced": (buffer_replaced, "a module, a buffer or a hook"),
    "a buffer's data": (lambda model, *rest: model.scale.data.mul_(0.9), "buffer scale was changed"),
    "another buffer's data": (
        lambda model, *rest: setattr(model.scale, "data", torch.tensor(0.9)), "buffer scale was changed",
    ),
    "an attribute": (
        lambda model, *rest: setattr(model, "heat", 0.5), "attribute heat of Scaled was changed from 1.0"
    ),
    "an entry": (lambda model, *rest: model.settings.update(heat=0.5), "attribute settings of Scaled was"),
    "a method": (
        lambda model, *rest: setattr(model, "hidden", lambda batch, rows: rows * model.mix.weight[0, 0]),
        "attribute hidden of Scaled was",
    ),
    "a setting of a layer": (lambda model, *rest: setattr(model.norm, "eps", 0.1), "attribute eps of norm"),
    "a class": (lambda model, *rest: setattr(model, "__class__", Ranker), "the class of Scaled was changed"),
    "a state of the optimizer": (state_edited, "state exp_avg of parameter mix.weight was changed"),
    "the optimizer's states": (lambda model, tables, optimizer: optimizer.state.clear(), "state .* changed"),
    "a hook of all modules": (hooked_everywhere, "a hook of all modules was changed from False to True"),
    "a module": (module_replaced, "a module, a buffer or a hook"),
    "a hook": (hooked, "a module, a buffer or a hook"),
    "eval": (lambda model, *rest: model.eval(), r"eval\(\) of module \w+ is refused while"),
    "eval of a layer": (lambda model, *rest: model.norm.eval(), r"eval\(\) of module \w+ is refused while"),
    "freezing": (frozen, r"requires_grad_\(\).* is refused"),
    "the rate of rows": (row_rate, "learning rate of .* was changed from 0.05 to 0.01"),
    "the tables' seed": (seeded, "set_seed"),
    "the default dtype": (precision, "default dtype"),
    "matmul": (lambda *_: torch.set_float32_matmul_precision("high"), "matmul precision was changed"),
    "determinism": (lambda *_: torch.use_deterministic_algorithms(True), "deterministic algorithms was"),
}  # fmt: skip


def run(mode, change, after=2, count=6, depth=0):
    """State after a change that follows the result of a step."""
    RATE[0] = 0.05
    trained = made()
    config = WindowConfig(1 if mode == "reference" else 2, seed=4, depth=depth)
    try:
        with Trainer(*trained, Communicators.local(), mode, config) as training:
            for result in training.run(batches(count)):
                if result.step == after:
                    change(*trained)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        while HOOKS:
            HOOKS.pop().remove()
    return state(trained)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_between_results_is_seen_alike_or_refused(what, mode):
    change, message = CHANGES[what]
    if mode in ("reference", "sequential", "fwp"):  # nothing is in flight between results
        if what not in ("the default dtype", "a module", "a hook", "a method"):
            assert same(run(mode, change), run("reference", change))
        return
    with pytest.raises((RuntimeError, StageFailedError), match=message):
        run(mode, change)


class Weighted(torch.nn.Module):
    """With a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.factor = torch.ones(())


def test_another_tensor_at_the_id_of_one_that_is_gone_is_a_change():
    """As the second of two changes in a row often is."""
    model, others = Weighted(), list[torch.Tensor]()
    before, number = noted(model), id(model.factor)
    assert first_change(before, noted(model)) is None
    del model.factor
    while not others or id(others[-1]) != number:
        others.append(torch.full((), 0.8))
        assert len(others) < 100_000, "no tensor got the id"
    model.factor = others[-1]
    assert first_change(before, noted(model)) == "attribute factor of Weighted was changed"


class Passing(Ranker):
    """A call changes the model in `ways`, and puts it back when it ends, later than the caller looks."""

    ways: ClassVar = {
        "an attribute": lambda model: (setattr(model, "seen", []), lambda: delattr(model, "seen"))[1],
        "a method": lambda model: (
            setattr(model.mix, "forward", model.mix.forward), lambda: delattr(model.mix, "forward")
        )[1],
        "a hook": lambda model: model.norm.register_forward_hook(lambda *given: None).remove,
        "eval": lambda model: (model.norm.eval(), model.norm.train)[1],
    }  # fmt: skip

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, batch, rows, seed):
        put_back = self.ways[self.way](self)
        try:
            time.sleep(0.02)
            return super().forward(batch, rows, seed)
        finally:
            put_back()


@pytest.mark.parametrize("way", Passing.ways)
def test_what_a_call_keeps_until_it_ends_is_no_change_of_the_caller_s(way):
    def run(mode):
        trained = made(lambda: Passing(way))
        with trainer(trained, mode) as training:
            for _ in training.run(batches(5)):
                time.sleep(0.01)
        return state(trained)

    assert same(run("nestpipe"), run("reference"))


@pytest.mark.parametrize("begun", [False, True])
def test_what_the_first_call_changes_is_no_change_of_the_caller_s(begun):
    """The source of batches ends in an error before the first call of the model has begun, or in it."""

    def run(mode):
        trained = made()
        hidden = trained[0].hidden

        def late(batch, rows):
            inside.set()
            if mode != "reference":
                assert failed.wait(60)
            return hidden(batch, rows)

        inside, failed = threading.Event(), threading.Event()
        trained[0].hidden = late

        def source():
            yield batches(1)[0]
            if begun and mode != "reference":
                assert inside.wait(60)
            raise OSError("no more")

        with trainer(trained, mode, trust_model=begun) as training:  # so no comparison calls it
            with pytest.raises(OSError):
                list(training.run(source()))
            failed.set()
            time.sleep(0.2)  # the call counts itself
            list(training.run([]))
        return state(trained)

    assert same(run("nestpipe"), run("reference"))


@pytest.mark.parametrize("after", [3, 4])
@pytest.mark.parametrize("what", ["lr", "a parameter", "a buffer", "the rate of rows"])
def test_so_is_one_when_the_last_windows_are_in_flight(what, after):
    change, message = CHANGES[what]
    with pytest.raises((RuntimeError, StageFailedError), match=message):
        for _ in range(3):  # an edit in the very moment of an update is not seen: rare, on busy machines
            run("nestpipe", change, after)


def test_autocast_that_begins_between_results_is_refused():
    trained = made()
    inside = torch.autocast("cpu", torch.bfloat16)
    with (
        pytest.raises(RuntimeError, match="autocast or the default device was changed"),
        trainer(trained) as training,
    ):
        try:
            for result in training.run(batches()):
                if result.step == 1:
                    inside.__enter__()
        finally:
            inside.__exit__(None, None, None)


def test_a_scheduler_of_the_trainer_may_change_rates_and_the_caller_s_own_may_not():
    def scheduled(mode, by_trainer):
        trained = made()
        scheduler = LambdaLR(trained[2], lambda update: 1 / (1 + update))
        config = WindowConfig(1 if mode == "reference" else 2, seed=4)
        with Trainer(
            *trained, Communicators.local(), mode, config, scheduler=scheduler if by_trainer else None
        ) as training:
            for _ in training.run(batches()):
                if not by_trainer:
                    scheduler.step()
        return state(trained)

    assert same(scheduled("nestpipe", True), scheduled("reference", True))
    with pytest.raises(
        (RuntimeError, StageFailedError), match=r"lr of group 0 .* Trainer\(scheduler=\.\.\.\)"
    ):
        scheduled("nestpipe", False)


def test_changes_after_a_run_are_honoured_by_the_next():
    def both(mode):
        RATE[0] = 0.05
        trained = made()
        with trainer(trained, mode) as training:
            list(training.run(batches(3)))
            for what in ("lr", "weight decay", "a parameter", "a buffer", "the rate of rows"):
                CHANGES[what][0](*trained)
            list(training.run(batches(6)[3:]))
        return state(trained)

    assert same(both("nestpipe"), both("reference"))


class OneThatMovesItsOwnSettings(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["counted"] = self.param_groups[0].get("counted", 0) + 1


def test_an_optimizer_may_keep_values_in_its_groups():
    model, tables, _ = made()
    optimizer = OneThatMovesItsOwnSettings(model.parameters(), lr=0.1)
    with trainer((model, tables, optimizer)) as training:
        list(training.run(batches()))
    assert optimizer.param_groups[0]["counted"] == 6


@pytest.mark.parametrize(
    "mode", slow_except(["reference", "nestpipe"], ["reference", "sequential", "nestpipe"])
)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_whenever_they_come(mode, kind):
    trained = made()
    handle = getattr(trained[0].mix.weight, kind)(lambda given: None)
    with pytest.raises(ValueError, match=r"parameter mix.weight has a hook .*register_step_pre_hook"):
        trainer(trained, mode)
    handle.remove()
    with trainer(trained, mode) as training:
        list(training.run(batches(1)))
        getattr(trained[0].mix.weight, kind)(lambda given: None)
        with pytest.raises(ValueError, match="has a hook"):
            list(training.run(batches(2)[1:]))


def test_a_hook_of_the_optimizer_finds_the_gradients():
    def clipped(mode):
        trained = made()

        def halve(optimizer, args, kwargs):
            for parameter in trained[0].parameters():
                parameter.grad.mul_(0.5)

        trained[2].register_step_pre_hook(halve)
        with trainer(trained, mode) as training:
            list(training.run(batches(3)))
        return state(trained)

    assert same(clipped("nestpipe"), clipped("reference"))


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_in_the_source_of_batches_leaves_the_trainer_usable(mode):
    def source():
        yield from batches(3)
        raise KeyboardInterrupt

    trained = parts()
    with trainer(trained, mode) as training:
        results = []
        with pytest.raises(KeyboardInterrupt):
            for result in training.run(source()):
                results.append(result)
        results += training.run([])
        results += training.run(batches(6)[3:])
    assert [result.step for result in results] == list(range(6))
    expected = parts()
    with trainer(expected, "reference") as training:
        list(training.run(batches(6)))
    assert same(state(trained), state(expected))


@pytest.mark.parametrize("mode", ["reference", "sequential"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_after_an_update_that_was_cut_nothing_is_trained_or_saved(mode, error, tmp_path):
    """By an interrupt, or in the caller's own code, which an update calls: a part of the update is done."""

    def cut(*_):
        raise error

    trained = parts(NoParameters if error is KeyboardInterrupt else Ranker)
    with trainer(trained, mode) as training:
        list(training.run(batches(1)))
        training.save(tmp_path)
        table = trained[1].groups[0].table
        update = table.update
        if error is KeyboardInterrupt:
            table.update = cut
        else:
            hook = trained[2].register_step_post_hook(cut)
        with pytest.raises(error):
            list(training.run(batches(2)[1:]))
        if error is KeyboardInterrupt:
            table.update = update
        else:
            hook.remove()
        for use in (lambda: list(training.run(batches(3)[2:])), lambda: training.save(tmp_path)):
            with pytest.raises(RuntimeError, match=r"step 1 was interrupted, .* load a checkpoint"):
                use()
        assert training.load(tmp_path) == 1
        calls = trained[0].register_forward_hook(cut)  # before an update nothing is lost
        if error is ZeroDivisionError:
            with pytest.raises(error):
                list(training.run(batches(2)[1:]))
        calls.remove()
        training.save(tmp_path)
        assert len(list(training.run(batches(4)[2:]))) == 2


def test_a_trainer_that_abandoned_windows_saves_nothing(tmp_path):
    training = trainer(parts())
    training.progress(iter(batches()))
    training.close()
    with pytest.raises(RuntimeError, match=r"was closed while steps \d to \d were in flight"):
        training.save(tmp_path)


@pytest.mark.parametrize(
    ("where", "method"),
    [
        (Executor, "call"), (Executor, "result"), (PendingWindows, "begin"), (Executor, "submit"),
        (Executor, "wait"), (PendingWindows, "end"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_anywhere_in_a_step_loses_nothing(monkeypatch, where, method, late):
    """Between two states it waits for the second."""
    original, calls = getattr(where, method), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3 and not late:
            signal.raise_signal(signal.SIGINT)
        found = original(*args)
        if len(calls) == 3 and late:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(where, method, interrupted)
    before = signal.getsignal(signal.SIGINT)
    trained, source, steps = parts(), iter(batches(6)), []
    with trainer(trained, skip_fetch=True) as training:
        with pytest.raises(KeyboardInterrupt):
            for result in training.run(source):
                steps.append(result.step)
        steps += [result.step for result in training.run(source)]
    assert steps == list(range(6)) and signal.getsignal(signal.SIGINT) is before
    expected = parts()
    with trainer(expected, "reference") as training:
        list(training.run(batches(6)))
    assert same(state(trained), state(expected))


@pytest.mark.parametrize("mode", MODES)
def test_a_second_thread_is_refused_and_the_first_goes_on(mode):
    trained, waits, goes_on = made(), threading.Event(), threading.Event()

    def source():
        for batch in batches(4):
            if batch.step == 2:
                waits.set()
                assert goes_on.wait(60)
            yield batch

    with trainer(trained, mode) as training:
        first = threading.Thread(target=lambda: list(training.run(source())))
        first.start()
        assert waits.wait(60)
        with pytest.raises(RuntimeError, match="another thread is in a step of this trainer"):
            list(training.run(batches(6)[4:]))
        goes_on.set()
        first.join(60)
        list(training.run(batches(6)[4:]))
    alone = made()
    with trainer(alone, mode) as training:
        list(training.run(batches(6)))
    assert same(state(trained), state(alone))
