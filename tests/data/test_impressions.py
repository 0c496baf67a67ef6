"""A batch of impressions keeps history, exposed items, bags and labels together; bad layouts are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.data.batch import JaggedBatch, Lookup
from tritonrec.data.impressions import ImpressionBatch

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def tensor(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])


def drawn() -> ImpressionBatch:
    """The batch of the module's docstring."""
    return ImpressionBatch(
        step=6,
        sample_ids=tensor([70, 71, 72]),
        context={"gender": tensor([1, 2, 1]), "user_id": tensor([4, 9, 5])},
        history_offsets=tensor([0, 2, 2, 3]),
        history_items=tensor([10, 11, 12]),
        history_actions=tensor([3, 5, 1]),
        history_timestamps=tensor([5, 9, 4]),
        exposed_offsets=tensor([0, 1, 3, 3]),
        exposed_items=tensor([20, 21, 22]),
        exposed_timestamps=tensor([12, 6, 7]),
        genres=Lookup(tensor([1, 4, 2, 2, 1, 4, 3]), tensor([0, 2, 3, 3, 4, 6, 7])),
        labels=tensor([[1, 0], [0, 0], [1, 1]]),
        tasks=("click", "conversion"),
    )


def made(samples: list[tuple[int, int]], genres: bool = True, step: int = 2) -> ImpressionBatch:
    """Samples of (history, exposed) lengths; every value tells its sample and place, bags have 0 to 2 ids."""
    history = [(sample, at) for sample, (length, _) in enumerate(samples) for at in range(length)]
    exposed = [(sample, 50 + at) for sample, (_, length) in enumerate(samples) for at in range(length)]
    items = [1000 * sample + at for sample, at in history + exposed]
    bags = [[10 * item + n for n in range(item % 3)] for item in items]
    flat = [value for bag in bags for value in bag]
    past, shown = tensor(items[: len(history)]), tensor(items[len(history) :])
    return ImpressionBatch(
        step=step,
        sample_ids=tensor([7 * sample - 3 for sample in range(len(samples))]),
        context={"age": tensor([sample % 3 for sample in range(len(samples))]),
                 "user_id": tensor([INT64_MAX - sample for sample in range(len(samples))])},
        history_offsets=offsets_of([length for length, _ in samples]),
        history_items=past,
        history_actions=past + 1,
        history_timestamps=past + 2,
        exposed_offsets=offsets_of([length for _, length in samples]),
        exposed_items=shown,
        exposed_timestamps=shown - 1,
        genres=Lookup(tensor(flat), offsets_of([len(bag) for bag in bags])) if genres else None,
        labels=torch.stack([shown % 2, (shown % 7 == 0).long()], 1).reshape(-1, 2),
        tasks=("click", "conversion"),
    )  # fmt: skip


def plain(batch: ImpressionBatch) -> list[dict]:
    """Sample by sample as lists, so that equality needs no offsets."""
    batch.validate()
    bags = None
    if batch.genres is not None:
        bags = [ids.tolist() for ids in batch.genres.ids.tensor_split(batch.genres.offsets[1:-1])]
        bags = bags if len(batch.genres.offsets) > 1 else []
    samples = []
    for sample in range(batch.num_samples):
        past = range(int(batch.history_offsets[sample]), int(batch.history_offsets[sample + 1]))
        shown = range(int(batch.exposed_offsets[sample]), int(batch.exposed_offsets[sample + 1]))
        after = len(batch.history_items)
        samples.append(
            {
                "id": int(batch.sample_ids[sample]),
                "context": {name: int(ids[sample]) for name, ids in batch.context.items()},
                "history": [(int(batch.history_items[at]), int(batch.history_actions[at]),
                             int(batch.history_timestamps[at])) for at in past],
                "exposed": [(int(batch.exposed_items[at]), int(batch.exposed_timestamps[at]),
                             batch.labels[at].tolist()) for at in shown],
                "bags": bags and [bags[at] for at in past] + [bags[after + at] for at in shown],
            }
        )  # fmt: skip
    return samples


def test_layout_of_the_docstring():
    batch = drawn().validate()
    assert (batch.num_samples, batch.loss_terms, batch.num_tokens) == (3, 3, 12)
    assert batch.history_lengths.tolist() == [2, 0, 1] and batch.exposed_lengths.tolist() == [1, 2, 0]
    assert batch.lengths.tolist() == [5, 4, 3]
    assert batch.exposed_context("user_id").tolist() == [4, 9, 9]


def test_what_each_feature_looks_up():
    found = drawn().lookups()
    assert {name: lookup.ids.tolist() for name, lookup in found.items()} == {
        "item": [10, 11, 12, 20, 21, 22],
        "action": [3, 5, 1],
        "genre": [1, 4, 2, 2, 1, 4, 3],
        "gender": [1, 2, 1],
        "user_id": [4, 9, 5],
    }
    assert {name for name, lookup in found.items() if lookup.offsets is not None} == {"genre"}
    assert "genre" not in replace(drawn(), genres=None).validate().lookups()


def test_sample_keys_are_the_items_of_each_sample():
    offsets, keys = drawn().sample_keys()
    assert offsets.tolist() == [0, 3, 5, 6] and keys.tolist() == [10, 11, 20, 21, 22, 12]


SAMPLES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=6)


@settings(deadline=None)
@given(samples=SAMPLES, genres=st.booleans(), data=st.data())
def test_selected_samples_keep_everything(samples, genres, data):
    batch = made(samples, genres)
    indices = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=8)) if samples else []
    whole = plain(batch)
    assert plain(batch.select(tensor(indices))) == [whole[index] for index in indices]


@settings(deadline=None)
@given(parts=st.lists(SAMPLES, min_size=1, max_size=4), genres=st.booleans())
def test_joined_batches_keep_every_sample_in_order(parts, genres):
    batches = [made(part, genres) for part in parts]
    joined = ImpressionBatch.concat(batches)
    assert plain(joined) == [sample for batch in batches for sample in plain(batch)]
    assert joined.step == 2


def test_parts_of_a_batch_joined_again_are_the_batch():
    batch = drawn()
    parts = [batch.select(tensor(indices)) for indices in ([0], [], [1, 2])]
    joined = ImpressionBatch.concat(parts)
    for name, expected in batch._tensors().items():
        assert torch.equal(joined._tensors()[name], expected), name


@pytest.mark.parametrize(
    "samples",
    [[], [(0, 0)], [(0, 3)], [(4, 0)], [(0, 0), (0, 0)]],
    ids=["empty", "nothing", "no_history", "nothing_exposed", "two_of_nothing"],
)
def test_small_batches_are_legal(samples):
    for genres in (True, False):
        batch = made(samples, genres).validate()
        assert batch.loss_terms == sum(shown for _, shown in samples)
        assert len(batch.lookups()["item"].ids) == sum(past + shown for past, shown in samples)
        assert plain(batch.select(torch.arange(len(samples)))) == plain(batch)
        assert batch.select(tensor([])).validate().lookups().keys() == batch.lookups().keys()


def test_a_move_takes_every_tensor():
    moved = drawn().to("meta")
    assert {name: t.device.type for name, t in moved._tensors().items() if t.device.type != "meta"} == {}
    assert moved.tasks == drawn().tasks and moved.step == 6 and list(moved.context) == ["gender", "user_id"]
    assert replace(drawn(), genres=None).to("cpu").genres is None


@pytest.mark.parametrize("indices", [[3], [-1], [0, 5]])
def test_an_index_outside_is_an_error(indices):
    with pytest.raises(IndexError, match=r"select: indices must be in \[0, 3\), got values from"):
        drawn().select(tensor(indices))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(history_items=torch.zeros(3)), r"history_items must be an int64 tensor, got torch.float32"),
        (dict(sample_ids=[1, 2, 3]), r"sample_ids must be an int64 tensor, got list"),
        (dict(labels=tensor([1, 0, 1])), r"labels must have 2 dimension\(s\), got shape \(3,\)"),
        (dict(exposed_items=tensor([[1], [2], [3]])), r"exposed_items must have 1 dimension"),
        (dict(exposed_timestamps=torch.zeros(3, dtype=torch.int64, device="meta")),
         r"exposed_timestamps is on meta, but sample_ids is on cpu"),
        (dict(history_offsets=tensor([0, 2, 1, 3])),
         r"history_offsets\[2\] = 1 comes after history_offsets\[1\] = 2"),
        (dict(history_offsets=tensor([0, 2, 2, 4])), r"history_offsets\[3\] = 4, but history_items has 3"),
        (dict(exposed_offsets=tensor([1, 1, 3, 3])), r"exposed_offsets must start at 0"),
        (dict(exposed_offsets=tensor([0, 1, 3, 2])), r"exposed_offsets must not decrease"),
        (dict(exposed_offsets=tensor([])), r"exposed_offsets must have one entry more"),
        (dict(history_offsets=tensor([0, 3])), r"history_offsets describes 1 samples, .* describe 3"),
        (dict(sample_ids=tensor([70, 71])), r"sample_ids describes 2 samples"),
        (dict(context={"user_id": tensor([1, 2])}), r"context\['user_id'\] describes 2 samples"),
        (dict(context={"user_id": tensor([1, 2, 3]), "age": tensor([1, 2, 3])}),
         r"context must be in the order of its names, got \['user_id', 'age'\]"),
        (dict(context={"item": tensor([1, 2, 3])}), r"context cannot have a feature called 'item'"),
        (dict(history_actions=tensor([1, 2])), r"history_actions has 2 rows, but history_items has 3"),
        (dict(exposed_timestamps=tensor([1])), r"exposed_timestamps has 1 rows, but exposed_items has 3"),
        (dict(labels=tensor([[1, 0]])), r"labels has 1 rows, but exposed_items has 3"),
        (dict(labels=tensor([[1], [0], [1]])), r"labels has 1 columns, but there are 2 tasks"),
        (dict(labels=tensor([[1, 0], [0, -1], [1, 1]])), r"labels\[1, 1\] = -1 \(task 'conversion'\)"),
        (dict(tasks=("click", "click")), r"tasks must have different names"),
        (dict(genres=Lookup(tensor([1]))), r"genres.offsets must be an int64 tensor, got NoneType"),
        (dict(genres=Lookup(tensor([1, 2]), tensor([0, 0, 0, 1, 1, 1, 1]))),
         r"genres.offsets\[6\] = 1, but genres.ids has 2"),
        (dict(genres=Lookup(tensor([1]), tensor([0, 1]))), r"genres has 1 bags, but there are 6 items"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(drawn(), **changes).validate()


@pytest.mark.parametrize(
    "other, message",
    [
        (replace(drawn(), step=7), r"different steps: \[6, 7\]"),
        (replace(drawn(), tasks=("like", "conversion")), r"different tasks: .*click.* and .*like"),
        (replace(drawn(), context={}), r"different context features: \('gender', 'user_id'\) and \(\)"),
        (replace(drawn(), genres=None), r"different genres: True and False"),
    ],
)
def test_batches_that_do_not_fit_are_not_joined(other, message):
    with pytest.raises(ValueError, match=message):
        ImpressionBatch.concat([drawn(), other])
    with pytest.raises(ValueError, match="needs at least one batch"):
        ImpressionBatch.concat([])


def jagged(lengths: list[int], first: int = 0, step: int = 1, negatives: int = 2) -> JaggedBatch:
    ids = torch.arange(sum(lengths)) * 3 + first
    samples = torch.arange(len(lengths)) - first
    return JaggedBatch(
        step, samples, offsets_of(lengths), ids, ids * 2, ids + 1, ids[:, None].expand(-1, negatives) - 5
    )


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4))
def test_joined_jagged_batches_select_their_parts(parts):
    batches = [jagged(lengths, first=100 * at) for at, lengths in enumerate(parts)]
    joined = JaggedBatch.concat(batches).validate()
    first = 0
    for batch in batches:
        part = joined.select(torch.arange(first, first + batch.num_samples))
        for name in ("sample_ids", "offsets", "ids", "timestamps", "labels", "negatives"):
            assert torch.equal(getattr(part, name), getattr(batch, name)), name
        first += batch.num_samples
    assert first == joined.num_samples


def test_jagged_batches_that_do_not_fit_are_not_joined():
    with pytest.raises(ValueError, match=r"different steps: \[1, 4\]"):
        JaggedBatch.concat([jagged([1]), jagged([1], step=4)])
    with pytest.raises(ValueError, match=r"different numbers of negatives: \[2, 3\]"):
        JaggedBatch.concat([jagged([1]), jagged([1], negatives=3)])
    with pytest.raises(ValueError, match="needs at least one batch"):
        JaggedBatch.concat([])


def test_extreme_ids_pass():
    batch = replace(drawn(), history_items=tensor([INT64_MIN, -1, INT64_MAX])).validate()
    assert batch.select(tensor([2, 0])).history_items.tolist() == [INT64_MAX, INT64_MIN, -1]
