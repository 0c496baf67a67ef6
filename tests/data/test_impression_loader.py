"""Every training event of a log is exposed once an epoch, behind exactly the events before it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tritonrec.data.impression_loader import ImpressionLoader
from tritonrec.data.impressions import ImpressionBatch
from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures


def rated_log(seed: int = 3, users: int = 25, events: int = 400) -> Interactions:
    """Uneven users, ids of both signs, ties in time, ratings 0 to 5; features that miss some ids."""
    random = np.random.default_rng(seed)
    user = (random.zipf(1.4, events) % users - 4) * 1001
    item = random.integers(-15, 15, events) * 7
    known = np.unique(user)[1:]
    items = np.unique(item)[::2]
    lengths = random.integers(0, 4, len(items))
    return Interactions(
        user,
        item,
        random.integers(0, 90, events),
        random.integers(0, 6, events).astype(np.float64),
        user_features=UserFeatures(
            known, {"zone": np.arange(len(known)) + 1, "age": np.arange(len(known)) % 3 + 1}
        ),
        genres=ItemGenres(
            items, np.append(0, np.cumsum(lengths)), random.integers(1, 6, lengths.sum())
        ),
    )  # fmt: skip


LOG = rated_log()


def loader(log: Interactions = LOG, **changes) -> ImpressionLoader:
    return ImpressionLoader(log, **(dict(batch_size=7, max_history=5, max_exposed=3, seed=11) | changes))


def events_by_user(log: Interactions) -> dict[int, list[int]]:
    """Rows of every user in the order of (timestamp, row), with no help of the code under test."""
    return {
        user: sorted((row for row in range(len(log)) if log.user[row] == user),
                     key=lambda row: (log.timestamp[row], row))
        for user in sorted(set(log.user.tolist()))
    }  # fmt: skip


def plain(batch: ImpressionBatch) -> list[dict]:
    batch.validate()
    samples = []
    for at in range(batch.num_samples):
        one = batch.select(torch.tensor([at]))
        bags = one.genres and [
            bag.tolist() for bag in one.genres.values.tensor_split(one.genres.offsets[1:-1])
        ]
        past, shown = one.timestamps.tensor_split([len(one.history_items)])
        samples.append(
            {
                "context": {name: int(one.features[name].ids) for name in one.context},
                "history": list(zip(one.history_items.tolist(), one.history_actions.tolist(),
                                    past.tolist(), strict=True)),
                "exposed": list(zip(one.exposed_items.tolist(), shown.tolist(),
                                    one.labels.tolist(), strict=True)),
                "bags": bags,
            }
        )  # fmt: skip
    return samples


def expected(log: Interactions, past: list[int], shown: list[int], user: int) -> dict:
    known = log.user_features.user_ids.tolist()
    context = {"user_id": user}
    for name, column in log.user_features.columns.items():
        context[name] = int(column[known.index(user)]) if user in known else 0
    items = log.genres.item_ids.tolist()
    bags = []
    for row in past + shown:
        bag = []
        if log.item[row] in items:
            place = items.index(log.item[row])
            bag = log.genres.genres[log.genres.offsets[place] : log.genres.offsets[place + 1]].tolist()
        bags.append(bag)
    return {
        "context": context,
        "history": [(int(log.item[row]), int(log.rating[row]), int(log.timestamp[row])) for row in past],
        "exposed": [
            (
                int(log.item[row]),
                int(log.timestamp[row]),
                [int(log.rating[row] >= 4), int(log.rating[row] == 5)],
            )
            for row in shown
        ],
        "bags": bags,
    }


def windows(log: Interactions, history: int, exposed: int) -> tuple[list[dict], list[dict]]:
    """Training samples and evaluation samples, made one by one."""
    training, evaluation = [], []
    for user, rows in events_by_user(log).items():
        cut = max(len(rows) - exposed, 0)
        end = cut
        while end > 0:
            begin = max(end - exposed, 0)
            training.append(expected(log, rows[max(begin - history, 0) : begin], rows[begin:end], user))
            end = begin
        evaluation.append(expected(log, rows[max(cut - history, 0) : cut], rows[cut:], user))
    return training, evaluation


def ordered(samples: list[dict]) -> list[dict]:
    return sorted(samples, key=lambda sample: json.dumps(sample, sort_keys=True))


def epoch(loads, number: int = 0) -> list[ImpressionBatch]:
    return [loads.global_batch(step) for step in
            range(number * loads.steps_per_epoch, (number + 1) * loads.steps_per_epoch)]  # fmt: skip


@pytest.mark.parametrize("history, exposed", [(5, 3), (0, 1), (1, 2), (1000, 4), (3, 40)])
def test_an_epoch_is_every_window_and_evaluation_the_rest(history, exposed):
    loads = loader(max_history=history, max_exposed=exposed)
    training, evaluation = windows(LOG, history, exposed)
    found = [sample for batch in epoch(loads, 1) for sample in plain(batch)]
    assert loads.num_samples == len(training)
    assert ordered(found) == ordered(training)
    evaluated = list(loads.evaluation_batches(4))
    assert [sample for batch in evaluated for sample in plain(batch)] == evaluation
    assert {batch.step for batch in evaluated} == {0}


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
def test_the_shards_make_the_global_batch(world_size, balance):
    step = loader().steps_per_epoch + 1
    shards = [
        loader(rank=rank, world_size=world_size, balance=balance).batch(step) for rank in range(world_size)
    ]
    whole = loader(world_size=world_size, balance=balance).global_batch(step)
    assert plain(whole) == plain(loader().global_batch(step))
    joined = ImpressionBatch.concat(shards)
    assert ordered(plain(joined)) == ordered(plain(whole))
    order = {int(sample): place for place, sample in enumerate(whole.sample_ids)}
    for shard in shards:
        places = [order[int(sample)] for sample in shard.sample_ids]
        assert places == sorted(places)
    tokens = loader(world_size=world_size, balance=balance).tokens_per_rank(step)
    assert tokens.tolist() == [shard.num_tokens for shard in shards]


def test_any_step_can_be_made_first():
    forwards = loader()
    batches = [plain(forwards.batch(step)) for step in range(2 * forwards.steps_per_epoch)]
    for step in (len(batches) - 1, 3, 0):
        assert plain(loader().batch(step)) == batches[step]
    assert plain(loader(seed=12).batch(0)) != batches[0]


def test_feedback_columns_are_the_tasks_and_their_bits_the_action():
    bits = np.arange(400) % 4
    log = replace(
        LOG, feedback={"is_click": (bits & 1).astype(np.int64), "long_view": (bits >> 1).astype(np.int64)}
    )
    for batch in epoch(loader(log)):
        assert batch.tasks == ("is_click", "long_view")
    row = {(log.user[row], log.item[row], log.timestamp[row]): bits[row] for row in range(400)}
    once = [key for key in row if sum(key == (log.user[n], log.item[n], log.timestamp[n])
                                      for n in range(400)) == 1]  # fmt: skip
    seen = set()
    for batch in epoch(loader(log)):
        users = batch.exposed_context("user_id").tolist()
        for user, item, time, label in zip(
            users,
            batch.exposed_items.tolist(),
            batch.timestamps[len(batch.history_items) :].tolist(),
            batch.labels.tolist(),
            strict=True,
        ):
            if (user, item, time) in once:
                seen.add((user, item, time))
                assert label == [row[user, item, time] & 1, row[user, item, time] >> 1]
        users = torch.repeat_interleave(batch.features["user_id"].ids, batch.history_offsets.diff()).tolist()
        for user, item, time, action in zip(
            users,
            batch.history_items.tolist(),
            batch.timestamps[: len(batch.history_items)].tolist(),
            batch.history_actions.tolist(),
            strict=True,
        ):
            if (user, item, time) in once:
                assert action == row[user, item, time]
    assert len(seen) > 100


def test_half_stars_round_down_to_an_action():
    log = Interactions(
        np.zeros(4, dtype=np.int64), np.arange(4), np.arange(4), np.array([4.5, 3.5, 5.0, 0.5])
    )
    (batch,) = loader(log, max_exposed=1).evaluation_batches()
    assert batch.history_actions.tolist() == [4, 3, 5]
    trained = loader(log, max_exposed=3).evaluation_batches()
    assert next(iter(trained)).labels.tolist() == [[0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(batch_size=0), r"batch_size must be at least 1, got 0"),
        (dict(max_history=-1), r"max_history must be at least 0, got -1"),
        (dict(max_exposed=0), r"max_exposed must be at least 1, got 0"),
        (dict(rank=2, world_size=2), r"rank must be in \[0, 2\), got 2"),
        (dict(max_exposed=400), r"none of the \d+ users has more than max_exposed = 400 events"),
        (dict(log=replace(LOG, rating=None)), r"neither ratings nor feedback columns"),
        (dict(log=replace(LOG, rating=LOG.rating - 1)), r"must be in \[0, 2\*\*53\): row \d+ has -1.0"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        loader(**changes)
