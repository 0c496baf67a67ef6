"""A batch of every kind, made from (first, second) lengths of each sample; every value tells where it was."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tritonrec.data import (
    Batch,
    ClickBatch,
    ImpressionBatch,
    JaggedBatch,
    KeyedJaggedTensor,
    Lookup,
    per_sample,
    per_token,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def offsets_of(lengths: list[int]) -> Tensor:
    return tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])


@dataclass(frozen=True)
class OwnBatch(Batch):
    """What a user might add: prices and tags of what was bought, a weight of each sample, a name."""

    prices: Tensor = field(metadata=per_token("bought", dtype=torch.float64))
    tags: KeyedJaggedTensor | None = field(metadata=per_token("bought", dtype=None))
    weights: Tensor = field(metadata=per_sample(torch.float32, dim=2))
    shop: str = "corner"


def bags(rows: int, salt: int) -> tuple[Tensor, Tensor]:
    """Ids and offsets of bags of 0 to 2 ids."""
    lengths = [(row + salt) % 3 for row in range(rows)]
    return torch.arange(sum(lengths)) * 11 - salt, offsets_of(lengths)


def next_item(samples, salt=0, step=2, negatives=2) -> JaggedBatch:
    lengths = [first for first, _ in samples]
    ids = torch.arange(sum(lengths)) * 1000 - salt
    drawn = ids[:, None] * 10 + torch.arange(negatives)
    return JaggedBatch.from_sequences(
        step, torch.arange(len(samples)) * 7 - salt, offsets_of(lengths), ids, ids + 1, ids + 2, drawn
    )


def impressions(samples, salt=0, step=2, genres=True) -> ImpressionBatch:
    past, shown = sum(first for first, _ in samples), sum(second for _, second in samples)
    ids = torch.arange(past + shown) * 1000 - salt
    count = torch.arange(len(samples))
    features = {
        "history": Lookup(ids[:past], offsets_of([first for first, _ in samples])),
        "exposed": Lookup(ids[past:], offsets_of([second for _, second in samples])),
        "user_id": Lookup(INT64_MAX - count - salt),
        "age": Lookup(count % 3),
    }
    return ImpressionBatch(
        step=step,
        sample_ids=count * 7 - salt,
        features=KeyedJaggedTensor.from_dict(features),
        history_actions=ids[:past] + 1,
        timestamps=ids + 2,
        labels=torch.stack([ids[past:] // 1000 % 2, (ids[past:] // 1000 % 7 == 0).long()], 1),
        genres=KeyedJaggedTensor(("genre",), *bags(past + shown, salt)) if genres else None,
        tasks=("click", "conversion"),
    )


def without_genres(samples, salt=0, step=2) -> ImpressionBatch:
    return impressions(samples, salt, step, genres=False)


def clicks(samples, salt=0, step=2) -> ClickBatch:
    count = torch.arange(len(samples))
    features = KeyedJaggedTensor.from_matrix(
        ("site", "device", "app"), count[:, None] * 1000 + torch.arange(3) - salt
    )
    dense = count[:, None] * 0.25 + torch.arange(2)
    return ClickBatch(step, count * 7 - salt, features, dense, (count + salt) % 2)


def own(samples, salt=0, step=2) -> OwnBatch:
    first, second = sum(a for a, _ in samples), sum(b for _, b in samples)
    ids = torch.arange(first + second) * 1000 - salt
    features = KeyedJaggedTensor.from_dict(
        {
            "seen": Lookup(ids[:first], offsets_of([a for a, _ in samples])),
            "bought": Lookup(ids[first:], offsets_of([b for _, b in samples])),
        }
    )
    return OwnBatch(
        step, torch.arange(len(samples)) - salt, features, ids[first:].double() / 7,
        KeyedJaggedTensor(("tag",), *bags(second, salt)), torch.arange(3.0 * len(samples)).view(-1, 3),
    )  # fmt: skip


KINDS = {make.__name__: make for make in (next_item, impressions, without_genres, clicks, own)}
COLUMNS = {  # the keys whose ids a column has rows for; none: the samples
    JaggedBatch: {"timestamps": ["item"], "labels": ["item"], "negatives": ["item"]},
    ImpressionBatch: {
        "history_actions": ["history"], "timestamps": ["history", "exposed"], "labels": ["exposed"],
        "genres": ["history", "exposed"],
    },
    ClickBatch: {"dense": [], "labels": []},
    OwnBatch: {"prices": ["bought"], "tags": ["bought"], "weights": []},
}  # fmt: skip


def plain(batch: Batch) -> list[dict]:
    """Sample by sample as lists, read with loops."""
    batch.validate()
    keys, values, offsets = (
        batch.features.keys,
        batch.features.values.tolist(),
        batch.features.offsets.tolist(),
    )
    ranges = {}
    for at, key in enumerate(keys):
        for sample in range(batch.num_samples):
            place = at * batch.num_samples + sample
            ranges[key, sample] = range(offsets[place], offsets[place + 1])
    samples = []
    for sample in range(batch.num_samples):
        found = {"id": int(batch.sample_ids[sample])}
        for key in keys:
            found[key] = [values[place] for place in ranges[key, sample]]
        for name, owners in COLUMNS[type(batch)].items():
            start = ranges[owners[0], 0].start if owners else 0
            rows = [place - start for key in owners for place in ranges[key, sample]] if owners else [sample]
            found[name] = [row_of(getattr(batch, name), row) for row in rows]
        samples.append(found)
    return samples


def row_of(column, row):
    if isinstance(column, KeyedJaggedTensor):
        return column.values[int(column.offsets[row]) : int(column.offsets[row + 1])].tolist()
    return None if column is None else column[row].tolist()


def tensors(value, name="batch") -> dict[str, Tensor]:
    """Every tensor of a batch by its path."""
    if isinstance(value, Tensor):
        return {name: value}
    found = {}
    for part, inner in vars(value).items() if hasattr(value, "__dict__") else ():
        found |= tensors(inner, f"{name}.{part}")
    return found
