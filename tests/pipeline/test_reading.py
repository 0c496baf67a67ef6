"""Promise: any iterable of batches is read on the prefetch lane, and its errors are the caller's own."""

import threading
import types
import warnings

import pytest
import torch
from speeds import slow_except
from torch.utils.data import DataLoader
from trainer_parts import EVERY_MODE, batches, parts, same, state, trained, trainer

from tritonrec import ops
from tritonrec.data.slices import work
from tritonrec.kernels.dispatch import default_impl
from tritonrec.pipeline import StageFailedError, Trainer
from tritonrec.serving import infer
from tritonrec.serving.live import Publisher
from tritonrec.trace import Recorder

PIPELINED = slow_except(["nestpipe"], ["dbp", "fwp", "nestpipe"])


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_batches_are_read_on_the_prefetch_lane(mode):
    names = []

    def source():
        for batch in batches(4):
            names.append(threading.current_thread().name)
            yield batch

    expected, _ = trained(parts(), "reference", "batch", batches(4))
    made = parts()
    trained(made, mode, "batch", source())
    lanes = mode not in ("reference", "sequential")
    assert set(names) == {"lane prefetch" if lanes else threading.current_thread().name}
    assert same(state(made), expected)


@pytest.mark.parametrize("mode", PIPELINED)
def test_what_a_source_does_is_in_the_trace_of_the_lane(mode):
    def source():
        for batch in batches(3):
            with work("decode"), work("inner"):
                pass
            yield batch

    made = parts()
    training = trainer(made, mode)
    training.recorder = training._pending._recorder = recorder = Recorder(0, 1)
    with training:
        list(training.run(source()))
    spans = [span for span in recorder._spans if span[1] in ("load", "decode", "inner")]
    assert {span[0] for span in spans} == {"prefetch"}
    by_batch = {(name, args["batch"]): (start, end) for _lane, name, start, end, args in spans}
    assert len(by_batch) == 9
    for step in range(3):
        (a, b), (c, d), (e, f) = (by_batch[name, step] for name in ("load", "decode", "inner"))
        assert a <= c <= e <= f <= d <= b


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.made = batches(count)

    def __len__(self):
        return len(self.made)

    def __getitem__(self, at):
        return self.made[at]


@pytest.mark.parametrize("workers", slow_except([0], [0, 2]))
def test_a_data_loader_of_torch_is_an_iterable_of_batches(workers):
    expected, _ = trained(parts(), "reference", "batch", batches(5))
    made = parts()
    loader = DataLoader(Numbers(5), batch_size=1, collate_fn=lambda one: one[0], num_workers=workers)
    trained(made, "nestpipe", "batch", loader)
    assert same(state(made), expected)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_an_error_of_the_source_comes_out_as_it_is(mode):
    class BadShardError(LookupError):
        pass

    def source():
        yield from batches(2)
        raise BadShardError("shard 7 is gone")

    with pytest.raises(BadShardError, match=r"^shard 7 is gone\nwhile the batch after step 1 was read$"):  # noqa: SIM117
        with trainer(parts(), mode) as training:
            list(training.run(source()))


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_anything_but_a_batch_is_refused_by_name(mode):
    with pytest.raises(TypeError, match=r"got dict: a DataLoader makes them in its collate_fn"):  # noqa: SIM117
        with trainer(parts(), mode) as training:
            list(training.run([{"item": 3}]))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (batches(1)[0], r"run takes batches one after the other, and got one: run\(\[batch\]\)"),
        (None, "run takes an iterable of batches, as a list, .* got NoneType"),
        (batches, "got function: call it first"), (7, "got int"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_what_is_no_iterable_of_batches_is_refused_with_what_to_do(mode, given, says):
    with trainer(parts(), mode) as training:
        with pytest.raises(TypeError, match=says):
            list(training.run(given))
        with pytest.raises(TypeError, match=r"progress takes an iterator.*got .*: iter\(batches\)"):
            training.progress([given])
        with pytest.raises(TypeError, match=r"must be of type .*, got (a JaggedBatch|None|<function .*|7)$"):
            training.evaluate(given)
        assert len(list(training.run(batches(1)))) == 1
    if given is not None and not callable(given):
        with pytest.raises(TypeError, match=says.replace("run", "infer")):
            list(infer(None, given, None))


def test_a_loader_in_the_place_of_its_batches_is_told_how_to_give_them():
    loader = types.SimpleNamespace(batch=batches)
    with trainer(parts(), "nestpipe") as training, pytest.raises(TypeError, match="for step in"):
        list(training.run(loader))


@pytest.mark.if_changed
def test_a_stage_that_fails_does_not_wait_for_a_source_that_never_comes():
    never = threading.Event()

    def source():
        yield batches(1)[0]
        never.wait(250)

    made = parts()
    made[0].forward = None  # the first batch fails
    with pytest.raises(StageFailedError, match="compute"):  # noqa: SIM117
        with trainer(made) as training:
            list(training.run(source()))
    never.set()


@pytest.mark.parametrize("mode", PIPELINED)
def test_a_source_runs_under_the_settings_of_the_callers_thread(mode):
    seen = []

    def source():
        for batch in batches(2):
            seen.append((torch.is_autocast_enabled("cpu"), default_impl()))
            yield batch

    with torch.autocast("cpu", torch.bfloat16), ops.use_impl("cpu"), trainer(parts(), mode) as training:
        list(training.run(source()))
    assert seen == [(True, "cpu")] * 2


def test_a_source_must_leave_the_model_alone_while_windows_are_in_flight():
    made = parts()
    first = batches(1)[0]
    rows = torch.randn(3 * first.num_tokens, 6, generator=torch.Generator().manual_seed(1))

    def source():
        for batch in batches(3):
            made[0](first, {"item": rows}, 0)
            yield batch

    with pytest.raises(RuntimeError, match="a call of Ranker is refused"), trainer(made) as training:
        list(training.run(source()))


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_results_that_nobody_takes_are_named(mode):
    with trainer(parts(), mode) as training:
        with pytest.warns(
            RuntimeWarning, match=r"trainer\.run works while its results are taken, and nobody"
        ):
            training.run(batches(3))
        assert training.next_step == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(training.run(batches(3)))) == 3 and training.next_step == 3
            for _ in training.run(batches(6)[3:]):
                break
            list(training.run([]))


def test_calls_that_give_results_one_by_one_all_name_them():
    with pytest.warns(RuntimeWarning, match="infer works while its results are taken"):
        infer(None, [], None)
    assert Publisher.run.__wrapped__ and Trainer.run.__wrapped__


class Anew:
    """An iterator that begins anew after its end, as DALI's and many of one's own do."""

    def __init__(self, epochs):
        self.epochs, self.place = epochs, 0

    def __iter__(self):
        return self

    def __next__(self):
        if not self.epochs[0]:
            del self.epochs[0]
            raise StopIteration
        return self.epochs[0].pop(0)


@pytest.mark.parametrize("mode", PIPELINED)
def test_an_iterator_that_begins_anew_ends_the_run_as_it_ends_a_loop(mode):
    made, every = parts(), batches(6)
    with trainer(made, mode) as training:
        source = Anew([every[:4], every[4:]])
        assert [result.step for result in training.run(source)] == [0, 1, 2, 3]
        assert [result.step for result in training.run(source)] == [4, 5]
        assert same(state(made), trained(parts(), "reference", "batch", every)[0])
