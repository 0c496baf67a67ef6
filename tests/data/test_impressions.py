"""A batch of impressions says what each feature looks up, and whose context an exposed item has."""

from __future__ import annotations

from dataclasses import replace

from batch_kinds import tensor

from tritonrec.data import ImpressionBatch, KeyedJaggedTensor, Lookup


def drawn() -> ImpressionBatch:
    """The batch of the module's docstring."""
    return ImpressionBatch(
        step=6,
        sample_ids=tensor([70, 71, 72]),
        features=KeyedJaggedTensor.from_dict(
            {
                "history": Lookup(tensor([10, 11, 12]), tensor([0, 2, 2, 3])),
                "exposed": Lookup(tensor([20, 21, 22]), tensor([0, 1, 3, 3])),
                "gender": Lookup(tensor([1, 2, 1])),
                "user_id": Lookup(tensor([4, 9, 5])),
            }
        ),
        history_actions=tensor([3, 5, 1]),
        timestamps=tensor([5, 9, 4, 12, 6, 7]),
        labels=tensor([[1, 0], [0, 0], [1, 1]]),
        genres=KeyedJaggedTensor(("genre",), tensor([1, 4, 2, 2, 1, 4, 3]), tensor([0, 2, 3, 3, 4, 6, 7])),
        tasks=("click", "conversion"),
    )


def test_ids_that_each_feature_looks_up():
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
