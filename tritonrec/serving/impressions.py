"""Batches for the clicks and conversions of items shown to users, of an exported GRM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..data import ImpressionBatch, KeyedJaggedTensor, Lookup, Vocabulary
from ..data.jagged import offsets_of
from .histories import array_of


def impressions_of(
    samples: Sequence[Any], facts: Mapping[str, Any], words: Mapping[str, Vocabulary]
) -> ImpressionBatch:
    """The batch of these samples; its labels are zeros.

    Args:
        samples: with the fields of `server.bodies.Sample`.
        facts: of the dense model, in the export's manifest. words: vocabularies by feature.

    Raises ValueError naming a sample of other features or of more tokens than the model takes, and an
    unknown word.
    """
    names, longest = facts["context"], facts["max_seq_len"]
    for at, sample in enumerate(samples):
        if sample.context.keys() != set(names):
            wanted, got = ", ".join(names) or "nothing", ", ".join(sample.context) or "nothing"
            raise ValueError(f"context of sample {at} must be {wanted}, got {got}")
        if not facts["genres"] and any(event.genres for event in [*sample.history, *sample.exposed]):
            raise ValueError(f"sample {at} has genres, and the model takes none")
        tokens = len(names) + len(sample.history) + len(sample.exposed)
        if tokens > longest:
            raise ValueError(f"sample {at} has {tokens} tokens, the model takes {longest}")
    history = [event for sample in samples for event in sample.history]
    exposed = [event for sample in samples for event in sample.exposed]
    events = [*history, *exposed]
    ids = array_of([event.item for event in events], "list of items", words.get("item"))[0]
    features = {
        "history": Lookup(ids[: len(history)], _offsets([len(each.history) for each in samples])),
        "exposed": Lookup(ids[len(history) :], _offsets([len(each.exposed) for each in samples])),
    }
    for name in names:
        of_name = [sample.context[name] for sample in samples]
        features[name] = Lookup(array_of(of_name, f"feature {name!r}", words.get(name))[0])
    genres = None
    if facts["genres"]:
        values = array_of([genre for event in events for genre in event.genres], "list of genres", None)[0]
        bags = Lookup(values, _offsets([len(event.genres) for event in events]))
        genres = KeyedJaggedTensor.from_dict({"genre": bags})
    return ImpressionBatch(
        0, torch.arange(len(samples), device="cpu"), KeyedJaggedTensor.from_dict(features),
        array_of([event.action for event in history], "list of actions", None)[0],
        array_of([event.timestamp for event in events], "list of timestamps", None)[0],
        torch.zeros(len(exposed), len(facts["tasks"]), dtype=torch.int64, device="cpu"), genres,
        tuple(facts["tasks"]),
    )  # fmt: skip


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return offsets_of(torch.tensor(lengths, dtype=torch.int64, device="cpu"))
