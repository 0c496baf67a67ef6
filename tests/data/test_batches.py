"""Every kind of batch keeps each row with its sample when cut, joined and moved; bad fields are named."""

from dataclasses import replace

import pytest
import torch
from batch_kinds import KINDS, clicks, impressions, next_item, offsets_of, own, plain, tensor, tensors
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data import KeyedJaggedTensor

SAMPLES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=6)
THREE = [(2, 1), (0, 2), (1, 0)]
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@kinds
@given(samples=SAMPLES, salt=st.integers(0, 3), data=st.data())
def test_selected_samples_keep_everything(make, samples, salt, data):
    batch = make(samples, salt)
    indices = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=8)) if samples else []
    chosen, whole = batch.select(tensor(indices)), plain(batch)
    assert plain(chosen) == [whole[index] for index in indices]
    assert type(chosen) is type(batch) and chosen.step == batch.step
    assert chosen.lookups().keys() == batch.lookups().keys()


@kinds
@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [[3, 0], [], [2], [1]], [[], [2]]])
def test_parts_are_what_is_selected(make, cut):
    batch = make([(2, 1), (0, 3), (1, 0), (3, 2)])
    cut = [tensor(each) for each in cut]
    parts, selected = batch.parts(cut), [batch.select(each) for each in cut]
    assert [type(part) for part in parts] == [type(one) for one in selected]
    for part, one in zip(parts, selected, strict=True):
        part.validate()
        ours, theirs = tensors(part), tensors(one)
        for name in ours.keys() | theirs.keys():
            assert torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype, name


@kinds
@given(parts=st.lists(SAMPLES, min_size=1, max_size=4))
def test_joined_batches_keep_every_sample_in_order(make, parts):
    batches = [make(part, salt) for salt, part in enumerate(parts)]
    joined = type(batches[0]).concat(batches)
    assert plain(joined) == [sample for batch in batches for sample in plain(batch)]
    assert joined.step == 2


@pytest.mark.smoke
@kinds
def test_parts_of_a_batch_joined_again_are_the_batch(make):
    batch = make(THREE)
    joined = type(batch).concat([batch.select(tensor(part)) for part in ([0], [], [1, 2])])
    expected, found = tensors(batch), tensors(joined)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name


@kinds
@pytest.mark.parametrize(
    "samples",
    [[], [(0, 0)], [(0, 3)], [(4, 0)], [(1, 1)], [(0, 0), (0, 0)]],
    ids=["empty", "nothing", "no_first", "no_second", "one_each", "two_of_nothing"],
)
def test_small_batches_are_legal(make, samples):
    batch = make(samples).validate()
    assert batch.num_samples == len(samples)
    assert plain(batch.select(torch.arange(len(samples)))) == plain(batch)
    nothing = batch.select(tensor([])).validate()
    assert nothing.num_samples == 0 and nothing.loss_terms == 0
    assert nothing.lookups().keys() == batch.lookups().keys()
    offsets, keys = batch.sample_keys()
    assert len(offsets) == len(samples) + 1 and int(offsets[-1]) == len(keys)


@kinds
@pytest.mark.parametrize("how", ["to", "pin_memory"])
def test_a_move_takes_every_tensor_and_reads_none_afterwards(make, how, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.to("meta"))
    batch = make(THREE)
    moved = batch.to("meta", non_blocking=True) if how == "to" else batch.pin_memory()
    assert tensors(moved).keys() == tensors(batch).keys()
    assert {name for name, value in tensors(moved).items() if value.device.type != "meta"} == set()
    # Reading a value of a meta tensor is an error; sizes are known.
    found, expected = moved.lookups(), batch.lookups()
    assert {n: x.ids.shape for n, x in found.items()} == {n: x.ids.shape for n, x in expected.items()}
    assert (moved.step, moved.num_samples, moved.loss_terms) == (2, 3, batch.loss_terms)
    assert [f for f in vars(moved) if f not in tensors(moved)] == [
        f for f in vars(batch) if f not in tensors(batch)
    ]


@kinds
@pytest.mark.parametrize("indices", [[3], [-1], [0, 5]])
def test_an_index_outside_is_an_error(make, indices):
    with pytest.raises(IndexError, match=rf"select: indices must be in \[0, 3\), got values .*{indices[-1]}"):
        make(THREE).select(tensor(indices))


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1, 1], [1, 2, 0, 1, 0, 2]], ids=["one_each", "ragged"])
def test_equal_ids_share_a_key_within_a_feature_only(lengths):
    values, samples = tensor([5, 5, 9, 5, 9, 5]), torch.arange(3).repeat(2).repeat_interleave(tensor(lengths))
    features = KeyedJaggedTensor(("a", "b"), values, offsets_of(lengths))
    offsets, keys = replace(clicks(THREE), features=features).sample_keys()
    order = samples.argsort(stable=True)
    assert torch.equal(offsets, offsets_of(samples.bincount(minlength=3).tolist()))
    named = [(int(place >= 3), int(values[place])) for place in order]  # feature and id
    assert len(set(named)) == 4 == len(set(zip(named, keys.tolist(), strict=True))) == len(set(keys.tolist()))


def changed(batch, **changes):
    """Fields of the batch, or of its features, exchanged."""
    inner = {name: changes.pop(name) for name in ("keys", "values", "offsets") if name in changes}
    return replace(batch, **({"features": replace(batch.features, **inner)} | changes))


BASES = {"next_item": [(2, 0), (0, 0), (3, 0)], "impressions": THREE, "clicks": THREE, "own": THREE}
OFFSETS = [0, 2, 2, 3, 4, 6, 6, 7, 8, 9, 10, 11, 12]  # of the impressions: history, exposed, user_id, age
EXTREME = [0, -(2**63), 2**63 - 1, 5]
BAD = [
    ("next_item", dict(offsets=tensor([0, 3, 2, 5])),
     r"features.offsets must not decrease: features.offsets\[2\] = 2 comes after features.offsets\[1\] = 3 "
     r"\(key 'item', sample 1\)"),
    ("next_item", dict(offsets=tensor([0, -2, 2, 5])), r"offsets\[1\] = -2 comes after"),
    ("next_item", dict(offsets=tensor(EXTREME)), r"offsets\[1\] = -9223372036854775808 comes after"),
    ("next_item", dict(offsets=tensor([1, 2, 2, 5])), r"offsets must start at 0: features.offsets\[0\] = 1"),
    ("next_item", dict(offsets=tensor([0, 2, 2, 4])), r"number of features.values: .*\[3\] = 4, .* 5"),
    ("next_item", dict(offsets=tensor([0, 2, 2, 6])), r"features.offsets\[3\] = 6, but there are 5"),
    ("next_item", dict(offsets=tensor([])), r"offsets must have one entry more .* empty tensor"),
    ("next_item", dict(sample_ids=tensor([1, 2])), r"sample_ids has 2 entries.* describes 3 samples"),
    ("next_item", dict(timestamps=tensor([1] * 4)), r"timestamps has 4 rows, but there are 5 item ids"),
    ("next_item", dict(labels=tensor([1] * 6)), r"labels has 6 rows, but there are 5 item ids"),
    ("next_item", dict(negatives=tensor([[1, 2]])), r"negatives has 1 rows, but there are 5 item ids"),
    ("next_item", dict(negatives=tensor([1] * 5)), r"negatives must have 2 dimension.*\(5,\)"),
    ("next_item", dict(values=tensor([[1] * 5])), r"features.values must have 1 dimension.*\(1, 5\)"),
    ("next_item", dict(keys=("items",)), r"the keys \('item',\) to be consecutive, got \('items',\)"),
    ("next_item", dict(keys=()), r"features must have one or more different keys, got \(\)"),
    ("next_item", dict(keys=("item", "user"), offsets=tensor([0, 2, 2, 5, 5, 5, 5])),
     r"features must have the one key 'item', got \('item', 'user'\)"),
    ("next_item", dict(features={"item": 1}),
     r"features must be a tritonrec.data.KeyedJaggedTensor, got builtins.dict; .*from_torchrec"),
    ("impressions", dict(keys=("history", "age", "user_id", "age")), r"different keys, got \('history'"),
    ("impressions", dict(keys=("history", "user_id", "exposed", "age")),
     r"expected the keys \('history', 'exposed'\) to be consecutive, got \('history', 'user_id'"),
    ("impressions", dict(offsets=tensor([0, 2, 1, *OFFSETS[3:]])), r"= 2 \(key 'history', sample 1\)"),
    ("impressions", dict(offsets=tensor([*OFFSETS[:5], 3, *OFFSETS[6:]])), r"\(key 'exposed', sample 1\)"),
    ("impressions", dict(offsets=tensor([*OFFSETS[:8], 7, *OFFSETS[9:]])),
     r"feature 'user_id' must have one id for each sample: sample 1 has 0"),
    ("impressions", dict(offsets=tensor(OFFSETS[:-1])), r"F \* B \+ 1 entries for the F = 4 keys .*got 12"),
    ("impressions", dict(keys=("history", "exposed", "user_id", "genre")),
     r"context cannot have a feature called 'genre'"),
    ("impressions", dict(history_actions=tensor([1, 2])), r"history_actions has 2 rows, .* 3 history ids"),
    ("impressions", dict(timestamps=tensor([1] * 3)), r"timestamps has 3 rows, .* 6 history and exposed ids"),
    ("impressions", dict(labels=tensor([[1, 0]])), r"labels has 1 rows, but there are 3 exposed ids"),
    ("impressions", dict(labels=tensor([[1], [0], [1]])), r"labels has 1 columns, but there are 2 tasks"),
    ("impressions", dict(labels=tensor([[1, 0], [0, -1], [1, 1]])),
     r"labels must be 0 or 1: labels\[1, 1\] = -1 \(task 'conversion'\)"),
    ("impressions", dict(tasks=("click", "click")), r"tasks must have different names"),
    ("impressions", dict(genres=KeyedJaggedTensor(("genre",), tensor([1]), tensor([0, 1]))),
     r"genres has 1 rows, but there are 6 history and exposed ids"),
    ("impressions", dict(genres=KeyedJaggedTensor(("genre",), tensor([1, 2]), tensor([0, 0, 0, 1, 1, 1, 1]))),
     r"number of genres.values: genres.offsets\[6\] = 1, but there are 2"),
    ("impressions", dict(genres=KeyedJaggedTensor(("tag",), tensor([]), tensor([0] * 7))),
     r"genres must have the one key 'genre', got \('tag',\)"),
    ("impressions", dict(genres=tensor([1] * 6)), r"genres must be a KeyedJaggedTensor, got Tensor"),
    ("clicks", dict(offsets=tensor([0, 1, 2, 3, 4, 6, 6, 7, 8, 9])),
     r"feature 'device' must have one id for each sample: sample 1 has 2"),
    ("clicks", dict(labels=tensor([1, 0, 2])), r"labels must be 0 or 1: labels\[2\] = 2"),
    ("clicks", dict(labels=tensor([1, 0])), r"labels has 2 rows, but there are 3 samples"),
    ("clicks", dict(dense=torch.zeros(3, 2).double()), r"dense must be a tensor of torch.float32, got"),
    ("clicks", dict(dense=torch.zeros(3)), r"dense must have 2 dimension\(s\), got shape \(3,\)"),
    ("clicks", dict(dense=torch.tensor([[0, 1], [2, float("nan")], [3, 4]])), r"finite: dense\[1, 1\] = nan"),
    ("own", dict(prices=torch.zeros(2, dtype=torch.float64)), r"prices has 2 rows, .* 3 bought ids"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), BAD)
def test_a_wrong_field_is_named_with_its_values(kind, changes, message):
    batch = KINDS[kind](BASES[kind]).validate()
    with pytest.raises(ValueError, match=message):
        changed(batch, **changes).validate()


@kinds
def test_a_wrong_type_dtype_or_device_of_any_tensor_is_named(make):
    batch = make(THREE)
    for name in ("sample_ids", "values", "offsets", *(n for n in vars(batch) if n in FIELDS)):
        field = f"features.{name}" if name in ("values", "offsets") else name
        value = getattr(batch.features if field != name else batch, name)
        for wrong, got in ((value.int(), "torch.int32"), ([1], "list"), (None, "NoneType")):
            with pytest.raises(ValueError, match=rf"{field} must be a tensor of torch.\w+, got {got}"):
                changed(batch, **{name: wrong}).validate()
        with pytest.raises(ValueError, match=r" is on (meta|cpu), but the batch is on (cpu|meta)"):
            changed(batch, **{name: value.to("meta")}).validate()


FIELDS = ("timestamps", "labels", "negatives", "history_actions", "dense", "prices", "weights")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([next_item(THREE), next_item(THREE, step=7)], "different step: 2 and 7"),
        ([next_item(THREE), next_item(THREE, negatives=3)], r"rows of negatives: .*\[2\].* and .*\[3\]"),
        ([impressions(THREE), replace(impressions(THREE), tasks=("a", "b"))], "tasks: .*click.* and .*'a'"),
        ([impressions(THREE), changed(impressions(THREE), keys=("history", "exposed", "a", "b"))],
         r"features: \('history', 'exposed', 'user_id', 'age'\) and \('history', 'exposed', 'a', 'b'\)"),
        ([impressions(THREE), impressions(THREE, genres=False)], r"rows of genres: \('genre',\) and None"),
        ([impressions(THREE, genres=False), impressions(THREE)], r"rows of genres: None and \('genre',\)"),
        ([clicks(THREE), replace(clicks(THREE), dense=torch.zeros(3, 1))], "rows of dense"),
        ([own(THREE), replace(own(THREE), shop="mall")], "different shop: corner and mall"),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit_are_not_joined(batches, message):
    with pytest.raises(ValueError, match=f"concat: the batches have different.*{message}|{message}"):
        type(batches[0]).concat(batches)
    with pytest.raises(ValueError, match="concat: needs at least one batch"):
        type(batches[0]).concat([])
