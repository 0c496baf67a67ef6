"""Promise: training, validation and test share no event, and a stream has the parts of the log in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tritonrec.data import (
    ClickLoader,
    ClickLog,
    ImpressionLoader,
    ImpressionStream,
    Interactions,
    NextItemLoader,
    NextItemStream,
    Split,
    auc,
    click_predictions,
    clicks_from_ratings,
    evaluate,
    evaluate_clicks,
    evaluate_impressions,
    popularity_scores,
)
from tritonrec.data.convert_sequences import write_sequences
from tritonrec.data.convert_windows import write_windows

RULES = [
    "leave-one-out",
    "leave-one-out:validation",
    "ratio:0.6,0.2,0.2",
    "ratio:0.7,0,0.3",
    "time:700",
    "time:500,700",
    "time:0.6,0.2,0.2",
]


def some_log(seed: int = 3, users: int = 40) -> Interactions:
    """Users with 1 to 20 events at distinct times of their own; every event has an item of its own."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 21, users)
    user = rng.permutation(np.repeat(np.arange(users) * 7, lengths))
    rows = len(user)
    times = rng.choice(1000, rows, replace=False).astype(np.int64)
    return Interactions(user, 10_000 + np.arange(rows), times, rng.integers(1, 6, rows).astype(np.float64))


LOG = some_log()


def parts_by_hand(log: Interactions, rule: str) -> dict[str, set[int]]:
    """The items of each part, user by user."""
    kind, _, rest = rule.partition(":")
    numbers = rest.split(",")
    ordered = np.sort(log.timestamp)
    parts: dict[str, set[int]] = {"train": set(), "validation": set(), "test": set()}
    for user in np.unique(log.user):
        rows = np.flatnonzero(log.user == user)
        rows = rows[np.argsort(log.timestamp[rows])]
        n = len(rows)
        if kind == "leave-one-out":
            test = int(n >= 2)
            validation = int(n >= 3 and rest == "validation")
        elif kind == "ratio":
            validation, test = (int(n * float(share) + 1e-9) for share in numbers[1:])
        else:
            if len(numbers) == 3:
                held = [int(len(ordered) * float(share) + 1e-9) for share in numbers[1:]]
                borders = [ordered[len(ordered) - sum(held)], ordered[len(ordered) - held[1]]]
            else:
                borders = [int(numbers[0]), int(numbers[-1])]
            times = log.timestamp[rows]
            test = int((times >= borders[1]).sum())
            validation = int(((times >= borders[0]) & (times < borders[1])).sum())
        items = log.item[rows].tolist()
        cut = n - test - validation
        parts["train"].update(items[:cut])
        parts["validation"].update(items[cut : n - test])
        parts["test"].update(items[n - test :])
    return parts


def trained_items(loader) -> set[int]:
    batches = [loader.global_batch(step) for step in range(loader.steps_per_epoch)]
    return {int(item) for batch in batches for item in torch.cat([batch.ids, batch.labels])}


@pytest.mark.parametrize("rule", RULES)
def test_training_sees_its_own_part_only(rule):
    loader = NextItemLoader(LOG, 8, 50, 2, seed=1, split=Split.parse(rule))
    parts = parts_by_hand(LOG, rule)
    assert set(loader.catalogue.tolist()) == parts["train"]
    assert trained_items(loader) <= parts["train"]
    assert (
        set(torch.cat([loader.global_batch(s).negatives.flatten() for s in range(3)]).tolist())
        <= parts["train"]
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("part", ["test", "validation"])
def test_an_evaluation_has_each_event_of_its_part_and_the_events_before(rule, part):
    # Items are unique, so with all of them in the catalogue a target names its event.
    split = Split.parse(rule)
    loader = NextItemLoader(LOG, 8, 5, 2, seed=1, split=split)
    loader.catalogue = torch.from_numpy(np.sort(LOG.item))
    wanted = parts_by_hand(LOG, rule)[part]
    if part == "validation" and not split.has_validation:
        with pytest.raises(ValueError, match="no event is held out for validation"):
            next(loader.evaluation_batches(part=part))
        return
    found = set()
    sequences = LOG.sequences
    for batch in loader.evaluation_batches(7, part):
        batch.history.validate()
        for at, user in enumerate(batch.history.sample_ids.tolist()):
            place = int(np.flatnonzero(sequences.user_ids == user)[0])
            events = sequences.items[sequences.offsets[place] : sequences.offsets[place + 1]].tolist()
            target = int(loader.catalogue[batch.targets[at]])
            before = events[: events.index(target)]
            found.add(target)
            history = batch.history.ids[batch.history.offsets[at] : batch.history.offsets[at + 1]].tolist()
            assert history == before[-5:] and before
            seen = loader.catalogue[batch.seen_items[batch.seen_users == at]].tolist()
            assert seen == before
    firsts = {int(sequences.items[first]) for first in sequences.offsets[:-1]}  # they have no history
    assert found == wanted - firsts


@pytest.mark.if_changed
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "time:0.6,0.2,0.2"])
def test_a_stream_has_the_parts_of_the_loader(rule, tmp_path):
    write_sequences([LOG], tmp_path, rows_per_file=13, rows_per_group=4)
    split = Split.parse(rule)
    loader = NextItemLoader(LOG, 8, 6, 2, seed=1, split=split)
    stream = NextItemStream(tmp_path, 8, 6, 2, seed=1, split=split)
    assert torch.equal(stream.catalogue, loader.catalogue)
    assert torch.equal(stream.popularity, loader.popularity)
    assert trained_items(stream) == trained_items(loader)
    for part in ["test", *(["validation"] if split.has_validation else [])]:
        both = [list(each.evaluation_batches(9, part)) for each in (loader, stream)]
        targets = [torch.cat([batch.targets for batch in each]).tolist() for each in both]
        assert targets[0] == targets[1]
        scores = popularity_scores(loader)
        assert evaluate(scores, loader, (3,), part=part) == evaluate(scores, stream, (3,), part=part)
    if not split.has_validation:
        with pytest.raises(ValueError, match="no event is held out for validation"):
            list(stream.evaluation_batches(part="validation"))


def test_shares_of_all_events_that_begin_at_one_time_leave_no_validation():
    times = np.array([1, 2, 3, 4, 5, 6, 9, 9, 9, 9])
    assert Split.parse("time:0.6,0.2,0.2").resolved(times) == Split.time(9)
    times[7] = 10
    assert Split.parse("time:0.6,0.2,0.2").resolved(times) == Split.time(9)
    assert Split.parse("time:0.6,0.2,0.2").resolved(np.arange(10)) == Split.time(8, 6)


def test_shares_of_all_events_need_the_whole_log(tmp_path):
    write_sequences([LOG], tmp_path, rows_per_file=13, rows_per_group=4)
    split, refusal = Split.parse("time:0.6,0.2,0.2"), r"goes by all events of the log, .*--no-stream"
    with pytest.raises(ValueError, match=refusal):
        NextItemStream(tmp_path, 8, 6, 2, seed=1, split=split)
    with pytest.raises(ValueError, match=refusal):
        NextItemStream(tmp_path, 8, 6, 2, seed=1, split=split, catalogue=torch.arange(9))
    for buckets in (1, 4):  # each has times of its own
        with pytest.raises(ValueError, match=refusal):
            write_windows([LOG], tmp_path, 4, 3, rows_per_group=5, split=split, buckets=buckets)


def some_score(batch):
    return (batch.exposed_items * 0.618 % 1)[:, None].expand(batch.labels.shape)


@pytest.mark.parametrize("rule", RULES)
def test_windows_of_each_part_have_its_events_once(rule, tmp_path):
    split, parts = Split.parse(rule), parts_by_hand(LOG, rule)
    loader = ImpressionLoader(LOG, 5, 4, 3, seed=2, split=split)
    if rule.startswith("leave-one-out"):  # of impressions that is a window
        held = {name: set() for name in parts}
        for user in np.unique(LOG.user):
            rows = np.flatnonzero(LOG.user == user)
            items = LOG.item[rows[np.argsort(LOG.timestamp[rows])]].tolist()
            test = max(len(items) - 3, 0)
            validation = max(test - 3, 0) if split.has_validation else test
            held["train"].update(items[:validation])
            held["validation"].update(items[validation:test])
            held["test"].update(items[test:])
        parts = held
    shown = torch.cat([loader.global_batch(step).exposed_items for step in range(loader.steps_per_epoch)])
    assert sorted(shown.tolist()) == sorted(parts["train"])
    for part in ("test", "validation"):
        if not parts[part]:
            with pytest.raises(ValueError, match="no event is held out"):
                next(loader.evaluation_batches(part=part))
            continue
        batches = [batch.validate() for batch in loader.evaluation_batches(4, part)]
        assert sorted(torch.cat([each.exposed_items for each in batches]).tolist()) == sorted(parts[part])
        order = {int(item): int(time) for item, time in zip(LOG.item, LOG.timestamp, strict=True)}
        for batch in batches:
            for at in range(batch.num_samples):
                past = batch.history_items[batch.history_offsets[at] : batch.history_offsets[at + 1]]
                own = batch.exposed_items[batch.exposed_offsets[at] : batch.exposed_offsets[at + 1]]
                assert all(order[int(old)] < order[int(own[0])] for old in past)
    if split.shares:
        return
    write_windows([LOG], tmp_path, 4, 3, rows_per_group=5, split=split)
    stream = ImpressionStream(tmp_path, 5, seed=2)
    for part in ("test", "validation"):
        if parts[part]:
            both = [evaluate_impressions(some_score, each, part=part) for each in (stream, loader)]
            assert both[0] == both[1]


@pytest.mark.parametrize("rule", RULES)
def test_clicks_of_ratings_are_divided_by_user_or_time(rule):
    split = Split.parse(rule)
    log = clicks_from_ratings(LOG, split=split)
    by_user = {
        "leave-one-out": "ratio:0.9,0,0.1",
        "leave-one-out:validation": "ratio:0.8,0.1,0.1",
    }.get(rule, rule)
    parts = parts_by_hand(LOG, by_user)
    items = log.categories[:, log.features.index("item")]
    assert set(items[: log.trained].tolist()) == parts["train"]
    assert set(items[log.trained : log.trained + log.validated].tolist()) == parts["validation"]
    loader = ClickLoader(log, 16, 0)
    for part, held in (("test", loader.num_held_out), ("validation", loader.num_validation)):
        batches = list(loader.evaluation_batches(5, part))
        rows = torch.cat([torch.empty(0), *(batch.features["item"].ids for batch in batches)])
        assert set(rows.long().tolist()) == parts[part] and held == len(parts[part])
        if not held:
            with pytest.raises(ValueError, match=f"no rows held out for {part}"):
                evaluate_clicks(lambda batch: batch.dense[:, 0], loader, part)


def test_predictions_of_a_part_are_there_with_their_rows_and_labels():
    log = plain_clicks().divided(Split.leave_one_out(True))
    loader = ClickLoader(log, 16, 0)
    found = click_predictions(lambda batch: batch.dense[:, 0], loader, "validation")
    assert found.sample_ids.tolist() == list(range(82, 92))
    assert found.labels.tolist() == log.labels[82:92].tolist()
    assert found.probabilities.tolist() == log.dense[82:92, 0].tolist()
    metrics = evaluate_clicks(lambda batch: batch.dense[:, 0], loader, "validation")
    assert metrics["AUC"] == auc(found.probabilities, found.labels)


def plain_clicks(rows: int = 103) -> ClickLog:
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 2, rows)
    dense = rng.random((rows, 1), dtype=np.float32)
    return ClickLog(dense, np.arange(rows)[:, None], labels, ("item",), rows - 11)


def test_rows_of_a_log_of_clicks_are_divided_in_their_order():
    log = plain_clicks()
    assert log.divided(Split()) is log
    with_validation = log.divided(Split.leave_one_out(True))
    assert (with_validation.trained, with_validation.validated) == (82, 10)
    shares = log.divided(Split.ratio(0.5, 0.3, 0.2))
    assert (shares.trained, shares.validated) == (103 - 30 - 20, 30)
    shares = plain_clicks(100).divided(Split.ratio(0.42, 0.29, 0.29))  # 0.29 * 100 is a little below 29
    assert (shares.trained, shares.validated) == (42, 29)
    with pytest.raises(ValueError, match="a log of clicks has no times"):
        log.divided(Split.time(5))


@pytest.mark.parametrize("rule", [*RULES, "ratio:0.6,0.2,0.2", "time:-5"])
def test_a_rule_is_its_words(rule):
    split = Split.parse(rule)
    assert Split.parse(str(split)) == split
    assert split.has_validation == (rule in (RULES[1], RULES[2], RULES[5], RULES[6]))


@pytest.mark.parametrize(
    "text",
    [
        "", "last", "leave-one-out:2", "ratio", "ratio:0.8,0.2", "ratio:0.8,0.1,0.2", "ratio:0,0.5,0.5",
        "ratio:0.9,0.1,0", "ratio:1.2,-0.1,-0.1", "time", "time:a", "time:5,4", "time:5,5", "time:1,2,3",
        "ratio:nan,0.1,0.1", "ratio:0.8,0.1,0.05",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(ValueError, match=r"split|must"):
        Split.parse(text)


def test_a_part_that_is_none_and_a_split_without_training_are_named():
    with pytest.raises(ValueError, match="part must be 'test' or 'validation', got 'train'"):
        next(NextItemLoader(LOG, 8, 5, 2, seed=1).evaluation_batches(part="train"))
    with pytest.raises(
        ValueError, match="has the two training items that make one token, beside those that time:-1"
    ):
        NextItemLoader(LOG, 8, 5, 2, seed=1, split=Split.time(-1))
