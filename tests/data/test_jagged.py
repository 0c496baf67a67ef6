"""A keyed jagged tensor keeps ids with their key and sample, and is TorchRec's without a copy."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from batch_kinds import INT64_MAX, INT64_MIN, offsets_of, tensor
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data import ClickBatch, KeyedJaggedTensor, Lookup, WeightedLookup
from tritonrec.embedding import FeatureConfig, HashEmbeddingCollection

IDS = st.integers(INT64_MIN, INT64_MAX) | st.sampled_from([INT64_MIN, -1, 0, INT64_MAX])
BAGS = st.lists(IDS, max_size=3)


@st.composite
def bags(draw, features=None, samples=None) -> list[list[list[int]]]:
    """Ids by feature and sample."""
    features = draw(st.integers(1, 4)) if features is None else features
    samples = draw(st.integers(0, 5)) if samples is None else samples
    ids = st.lists(IDS, min_size=1, max_size=1) if draw(st.booleans()) else BAGS
    each = st.lists(ids, min_size=samples, max_size=samples)
    return draw(st.lists(each, min_size=features, max_size=features))


def made(features: list[list[list[int]]]) -> KeyedJaggedTensor:
    flat = [ids for feature in features for ids in feature]
    keys = tuple(f"f{at}" for at in range(len(features)))
    values = tensor([value for ids in flat for value in ids])
    return KeyedJaggedTensor(keys, values, offsets_of([len(ids) for ids in flat])).validate()


def plain(features: KeyedJaggedTensor) -> list[list[list[int]]]:
    offsets, samples = features.offsets.tolist(), (len(features.offsets) - 1) // len(features.keys)
    ids = [features.values[a:b].tolist() for a, b in pairwise(offsets)]
    return [ids[at * samples : (at + 1) * samples] for at in range(len(features.keys))]


DRAWN = [[[10, 11], [], [20, 21, 22]], [[4], [7, 9], []]]


@given(bags())
def test_a_key_has_the_ids_and_offsets_of_its_samples(expected):
    features = made(expected)
    by_key = features.to_dict()
    assert list(by_key) == list(features.keys)
    for key, samples in zip(features.keys, expected, strict=True):
        for ids, offsets in (features[key], by_key[key]):
            assert ids.tolist() == [value for bag in samples for value in bag]
            assert torch.equal(offsets, offsets_of([len(bag) for bag in samples]))
    assert plain(KeyedJaggedTensor.from_dict(by_key)) == expected


def test_a_key_is_read_without_the_others(monkeypatch):
    features = made(DRAWN)
    features = replace(features, weights=torch.arange(len(features.values), dtype=torch.float32))
    expected = features.to_dict()
    monkeypatch.setattr(KeyedJaggedTensor, "to_dict", lambda self: pytest.fail("all keys were made"))
    for key in features.keys:
        assert all(map(torch.equal, features[key], expected[key]))


@given(bags(), st.data())
def test_by_sample_keeps_the_order_of_keys_and_ids(expected, data):
    features = made(expected)
    keys = data.draw(st.lists(st.sampled_from(features.keys), min_size=1, unique=True))
    offsets, ids = features.by_sample(*keys)
    at = [features.keys.index(key) for key in keys]
    samples = [[value for f in at for value in expected[f][b]] for b in range(features.num_samples)]
    assert ids.tolist() == [value for sample in samples for value in sample]
    assert torch.equal(offsets, offsets_of([len(sample) for sample in samples])) and offsets.is_contiguous()


def test_a_matrix_is_one_id_for_each_key_and_sample():
    features = KeyedJaggedTensor.from_matrix(["a", "b"], tensor([[1, 2], [3, 4], [5, 6]])).validate()
    assert plain(features) == [[[1], [3], [5]], [[2], [4], [6]]]
    assert plain(KeyedJaggedTensor.from_dict({"a": Lookup(tensor([1, 3, 5])), "b": features["b"]})) == plain(
        features
    )
    assert plain(KeyedJaggedTensor.from_matrix(["a"], tensor([]).view(0, 1))) == [[]]


@pytest.fixture(params=["stand-in", "torchrec"])
def torchrec(request, monkeypatch):
    """TorchRec where it is installed, and always what its documentation says of it."""
    if request.param == "torchrec":
        return pytest.importorskip(
            "torchrec", reason="not installed: bash ci/benchmarks/torchrec.sh installs it"
        )
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    import jagged_standin

    monkeypatch.setitem(sys.modules, "torchrec", jagged_standin)
    return jagged_standin


@pytest.mark.parametrize("expected", [DRAWN, [[], []], [[[]]], [[[INT64_MIN], [INT64_MAX, -1]]]])
def test_there_and_back_keeps_every_id_and_the_memory(torchrec, expected):
    features = made(expected)
    theirs = features.to_torchrec()
    assert isinstance(theirs, torchrec.KeyedJaggedTensor) and theirs.keys() == list(features.keys)
    assert theirs.offsets().tolist() == features.offsets.tolist()
    assert theirs.lengths().tolist() == features.lengths.flatten().tolist()
    for key, part in (
        theirs.to_dict().items() if features.num_samples else ()
    ):  # TorchRec has none of no sample
        assert part.values().tolist() == features[key].ids.tolist()
        assert part.lengths().tolist() == features[key].offsets.diff().tolist()
    back = KeyedJaggedTensor.from_torchrec(theirs).validate()
    assert back.keys == features.keys and plain(back) == expected
    assert back.values.data_ptr() == theirs.values().data_ptr() == features.values.data_ptr()


WEIGHTS = torch.arange(8.0) / 8


def weighted(features: list[list[list[int]]]) -> KeyedJaggedTensor:
    plainly = made(features)
    return KeyedJaggedTensor(plainly.keys, plainly.values, plainly.offsets, WEIGHTS).validate()


def test_weights_stay_with_their_ids(torchrec):
    features = weighted(DRAWN)
    weight_of = dict(zip(features.values.tolist(), WEIGHTS.tolist(), strict=True))
    halves = [features.select(tensor(part)) for part in ([1, 0], [2], [])]
    back = KeyedJaggedTensor.from_torchrec(features.to_torchrec())
    for other in (
        *halves,
        KeyedJaggedTensor.concat(halves),
        KeyedJaggedTensor.from_dict(features.to_dict()),
        back,
    ):
        assert other.validate().weights.tolist() == [weight_of[id_] for id_ in other.values.tolist()]
        for ids, _offsets, weights in other.to_dict().values():
            assert weights.tolist() == [weight_of[id_] for id_ in ids.tolist()]
    assert torch.equal(back.weights, WEIGHTS)


def test_wrong_weights_are_named():
    ids, lengths = tensor([1, 2, 3]), tensor([1, 2])
    for weights, said in (
        (torch.ones(2), "features.weights must have one entry for each of the 3 ids, got 2"),
        (
            torch.ones(3, dtype=torch.float64),
            "features.weights must be a tensor of torch.float32, got torch.float64",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            KeyedJaggedTensor.from_lengths_sync(["a"], ids, lengths, weights)
    with pytest.raises(ValueError, match="all batches need weights of their features, or none"):
        KeyedJaggedTensor.concat([made(DRAWN), weighted(DRAWN)])
    with pytest.raises(ValueError, match=r"all of \['a', 'b'\] need weights, or none"):
        KeyedJaggedTensor.from_dict({"a": made(DRAWN)["f0"], "b": weighted(DRAWN)["f0"]})
    one = KeyedJaggedTensor.from_lengths_sync(["a"], tensor([1]), tensor([1]), torch.ones(1))
    with pytest.raises(ValueError, match=r"\['a'\] have weights, which this kind of batch does not use"):
        ClickBatch(0, tensor([1]), one, torch.zeros(1, 3), tensor([0])).validate()


def test_what_no_table_can_look_up_is_refused(torchrec, monkeypatch):
    kind, lengths = torchrec.KeyedJaggedTensor, tensor([1, 2])
    with pytest.raises(ValueError, match=r"values of features \['a'\] must be integers, got torch.float32"):
        KeyedJaggedTensor.from_torchrec(kind(keys=["a"], values=torch.ones(3), lengths=lengths))
    variable = kind(keys=["a"], values=tensor([1, 2, 3]), lengths=lengths)
    monkeypatch.setattr(kind, "variable_stride_per_key", lambda self: True)
    with pytest.raises(ValueError, match=r"features \['a'\] have different batch sizes, \[2\]"):
        KeyedJaggedTensor.from_torchrec(variable)


def test_without_torchrec_the_import_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(ImportError, match="torchrec"):
        made(DRAWN).to_torchrec()


def test_every_feature_has_the_same_samples_whatever_the_total():
    user, city = tensor([1, 2, 3]), tensor([9])
    with pytest.raises(ValueError, match="same samples, got 'user' with 3, 'city' with 1"):
        KeyedJaggedTensor.from_dict({"user": Lookup(user), "city": Lookup(city)})
    with pytest.raises(ValueError, match="'user' with 1, 'city' with 3"):
        bags = {"user": Lookup(user, tensor([0, 3])), "city": Lookup(city, tensor([0, 0, 1, 1]))}
        KeyedJaggedTensor.from_dict(bags)
    with pytest.raises(ValueError, match="same samples, got none"):
        KeyedJaggedTensor.from_dict({})


def test_features_with_and_without_bags_stand_together_in_their_order():
    bags = {
        "a": Lookup(tensor([5, 6])),
        "b": Lookup(tensor([7, 8, 9]), tensor([0, 0, 3])),
        "c": Lookup(tensor([4, -1])),
        "d": Lookup(tensor([3]), tensor([0, 1, 1])),
    }
    expected = [[[5], [6]], [[], [7, 8, 9]], [[4], [-1]], [[3], []]]
    assert plain(KeyedJaggedTensor.from_dict(bags)) == expected
    none = tensor([])
    empty = KeyedJaggedTensor.from_dict({"a": Lookup(none), "b": Lookup(none, tensor([0]))})
    assert empty.keys == ("a", "b") and empty.offsets.tolist() == [0]


def test_each_features_bags_and_weights_fit_its_ids_whatever_the_total():
    one, two = tensor([1]), tensor([2, 3])
    with pytest.raises(ValueError, match="offsets of 'a' must end at the number of ids"):
        KeyedJaggedTensor.from_dict({"a": Lookup(one, tensor([0, 2])), "b": Lookup(two, tensor([0, 1]))})
    for wrong, message in (
        ([], "'b' must have one entry more"),
        ([1, 1, 2], "'b' must start at 0"),
        ([0, 3, 2], "'b' must not decrease"),
        ([0, 1, 1], "'b' must end at"),
        ([0, INT64_MAX, 2], "'b' must not decrease"),
    ):
        bags = {"a": Lookup(one, tensor([0, 0, 1])), "c": Lookup(two), "b": Lookup(two, tensor(wrong))}
        with pytest.raises(ValueError, match=f"offsets of {message}"):
            KeyedJaggedTensor.from_dict(bags)
    with pytest.raises(ValueError, match="offsets of 'a' must have one entry more"):
        KeyedJaggedTensor.from_dict({"a": Lookup(one, tensor([]))})
    offsets, weights = (tensor([0, 1]), tensor([0, 2])), (torch.ones(2), torch.ones(1))
    with pytest.raises(ValueError, match=r"weights of feature 'a' must be \(1,\).* got \(2,\)"):
        KeyedJaggedTensor.from_dict(
            {
                "a": WeightedLookup(one, offsets[0], weights[0]),
                "b": WeightedLookup(two, offsets[1], weights[1]),
            }
        )


def test_offsets_that_give_keys_different_samples_are_refused_wherever_they_are_read():
    wrong = KeyedJaggedTensor(("user", "city"), tensor([1, 2, 3]), tensor([0, 1, 2, 3]))
    for read in (wrong.to_dict, wrong.validate, lambda: wrong.num_samples, lambda: wrong["user"]):
        with pytest.raises(ValueError, match=r"must have F \* B \+ 1 entries for the F = 2 keys"):
            read()
    tables = HashEmbeddingCollection([FeatureConfig("user", 2), FeatureConfig("city", 2)])
    with pytest.raises(ValueError, match="F = 2 keys"):
        tables(wrong)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_integers_of_any_width_are_taken_as_torchrec_takes_them(dtype):
    values, lengths = tensor([4, 5, 6]).to(dtype), tensor([2, 0, 1, 0]).to(dtype)
    found = KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths, torch.ones(3))
    assert plain(found) == [[[4, 5], []], [[6], []]]
    by_offsets = KeyedJaggedTensor.from_offsets_sync(["a", "b"], values, found.offsets.to(dtype))
    assert plain(by_offsets) == plain(found) and by_offsets.values.dtype == torch.int64


def test_lengths_that_are_none_are_refused():
    ids = tensor([1, 2, 3])
    for lengths, said in (
        (torch.tensor([1.5, 1.5]), "lengths must be integers, got torch.float32"),
        (tensor([4, -1]), r"lengths\[1\] = -1"),
        (tensor([1, 1, 1]), r"lengths must be \(F \* B,\)"),
        (tensor([[3], [0]]), r"lengths must be \(F \* B,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids, lengths)
    with pytest.raises(ValueError, match=r"values must be integers, got torch.float32"):
        KeyedJaggedTensor.from_lengths_sync(["a"], torch.ones(1), tensor([1]))
