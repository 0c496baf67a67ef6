"""A batch of next-item training says where its tokens are, and looks up ids, labels and negatives."""

from __future__ import annotations

from batch_kinds import next_item


def test_layout_of_the_docstring():
    batch = next_item([(2, 0), (0, 0), (3, 0)], salt=-70).validate()
    assert batch.num_samples == 3 and batch.num_tokens == 5
    assert batch.offsets.tolist() == [0, 2, 2, 5]
    assert batch.lengths.tolist() == [2, 0, 3] and batch.loss_terms == 5
    assert batch.token_positions().tolist() == [0, 1, 0, 1, 2]
    assert batch.token_sample_ids().tolist() == [70, 70, 84, 84, 84]


def test_ids_looked_up_are_ids_then_labels_then_negatives():
    batch = next_item([(1, 0), (2, 0)])
    expected = [0, 1000, 2000, 2, 1002, 2002, 0, 1, 10000, 10001, 20000, 20001]
    ((name, (ids, offsets)),) = batch.lookups().items()
    assert name == "item" and ids.tolist() == expected and offsets is None


def test_sample_keys_are_ids_labels_and_negatives_token_by_token():
    offsets, keys = next_item([(1, 0), (0, 0), (2, 0)]).sample_keys()
    assert offsets.tolist() == [0, 4, 4, 12]
    assert keys.tolist() == [0, 2, 0, 1, 1000, 1002, 10000, 10001, 2000, 2002, 20000, 20001]
