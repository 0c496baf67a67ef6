"""Each block against a loop: hot rows, snapshots, stale rows, dropped inputs, what is left of epochs."""

import math

import pytest
import torch
from slip_kit import CONFIG, LOG, expected_changes, follow, hot_of, loader

from tritonrec.data import ClickLoader
from tritonrec.embedding import Eviction, PrecisionTiers, TablePolicy
from tritonrec.pipeline import ExchangeConfig, WindowConfig
from tritonrec.slipstream import Judgement, RemainingLoader, Slipstream, SlipstreamConfig, hot_rows
from tritonrec.slipstream.classify import classify


def test_rows_with_their_share_of_accesses_are_hot():
    first = torch.tensor([5] * 6 + [7] * 3 + [-9])
    second = torch.tensor([2**63 - 1] * 5 + [7] * 5)
    hot = hot_rows(torch.stack([first, second], 1), ["b", "a"], 0.3)
    assert hot.tables == ("a", "b") and hot.table_of == (1, 0)
    assert [ids.tolist() for ids in hot.ids] == [[7, 2**63 - 1], [5, 7]]  # -9 has a tenth
    assert [n.tolist() for n in hot.accesses] == [[5, 5], [6, 3]]
    assert hot.places(torch.tensor([[7, 7], [5, -1], [-9, 2**63 - 1]])).tolist() == [[3, 0], [2, -1], [-1, 1]]
    shared = hot_rows(torch.stack([first, second], 1), ["t", "t"], 0.35)
    assert shared.ids[0].tolist() == [7] and shared.accesses[0].tolist() == [8]  # 8 of 20, both features
    assert len(hot_rows(torch.stack([first, second], 1), ["b", "a"], 0.0)) == 5
    with pytest.raises(ValueError, match="must be in"):
        hot_rows(first[:, None], ["a"], 1.1)


def test_the_bound_on_memory_leaves_out_the_rows_accessed_least():
    categories = torch.stack([torch.tensor([1] * 4 + [2] * 3 + [3] * 2), torch.tensor([1] * 3 + [4] * 6)], 1)
    every = hot_rows(categories, ["a", "b"], 0.0)
    some = hot_rows(categories, ["a", "b"], 0.0, max_rows=3)
    assert len(every) == 5 and every.left_out == 0
    assert [ids.tolist() for ids in some.ids] == [[1, 2], [4]] and some.left_out == 2  # of equals the first


def test_hot_rows_of_a_run_are_those_of_the_warm_up():
    watch, _ = follow()
    hot = [(name, int(i)) for name, ids in zip(watch.hot.tables, watch.hot.ids, strict=True) for i in ids]
    assert hot == hot_of() and 40 < len(hot) < 400


MODES = {
    "nestpipe": {},
    "sequential": {"mode": "sequential"},
    "skip_fetch": {"window": WindowConfig(3, clustering=True, exchange=ExchangeConfig(skip_fetch=True))},
    "first_use": {
        "window": WindowConfig(4, exchange=ExchangeConfig(first_use=True, taper=0.5)),
        "mode": "fwp",
    },
    "unmerged": {"merge": False, "mode": "dbp", "window": WindowConfig(1)},
    "no_dedup": {"window": WindowConfig(2, exchange=ExchangeConfig(dedup="none"))},
}


def check_changes(judgement, weights):
    expected = expected_changes(weights)
    assert 20 < sum(map(math.isfinite, expected)) < len(expected)
    assert judgement.changes.tolist() == pytest.approx(expected, rel=1e-4)
    assert judgement.judged == sum(map(math.isfinite, expected))


@pytest.mark.parametrize("how", MODES.values(), ids=MODES)
def test_changes_are_distances_between_the_last_two_snapshots(how):
    watch, weights = follow(**how)
    if "skip_fetch" not in str(how):  # whose rows are not all at home after a step
        check_changes(watch.judge(), weights)
    plain, _ = follow()
    assert torch.equal(watch.judge().changes, plain.judge().changes)  # in every bit, however it was trained
    assert len(watch.history()) == CONFIG.snapshots - 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", [
    TablePolicy(Eviction("lru", capacity=10)), TablePolicy(admission=2),
    TablePolicy(precision=PrecisionTiers(3, every=2)),
    TablePolicy(Eviction("ttl", ttl=2), 2, PrecisionTiers(2, every=3)),
])  # fmt: skip
def test_policies_of_the_tables_do_not_make_it_depend_on_the_mode(policy):
    one, other = follow(policy=policy), follow(policy=policy, mode="sequential", window=WindowConfig(1))
    assert torch.equal(one[0].judge().changes, other[0].judge().changes)
    assert one[0].judge().judged > 10
    assert one[0].judge().judged <= follow()[0].judge().judged


def test_rows_that_were_not_admitted_were_not_trained():
    watch, _ = follow(policy=TablePolicy(admission=11))  # one step more than there are
    assert watch.judge().judged == 0 < follow(policy=TablePolicy(admission=10))[0].history()[0].numel()


def naive_drops(judgement, categories, alpha, threshold):
    """Which inputs are dropped, one by one."""
    change = {}
    starts = judgement.hot.starts
    for table, ids in enumerate(judgement.hot.ids):
        for at, i in enumerate(ids.tolist()):
            change[table, i] = float(judgement.changes[starts[table] + at])
    drops = []
    for row in categories.tolist():
        rows = [change.get((table, i)) for table, i in zip(judgement.hot.table_of, row, strict=True)]
        is_hot = None not in rows
        drops.append(is_hot and sum(each < threshold for each in rows) >= alpha)
    return drops


def made_judgement(seed=0):
    generator = torch.Generator().manual_seed(seed)
    categories = torch.randint(0, 6, (400, 3), generator=generator)
    hot = hot_rows(categories[categories[:, 1] != 5], ["a", "b", "c"], 0.0)
    changes = torch.rand(len(hot), generator=generator)
    changes[::7] = math.inf
    return Judgement(hot, changes), categories


SETTINGS = dict(drop=0.5, sample=1.0, confidence=0.999, seed=3)


def check_dropped(alpha, value):
    judgement, categories = made_judgement()
    found = classify(judgement, categories, threshold=value, alpha=alpha, **SETTINGS)
    drops = naive_drops(judgement, categories, alpha, value)
    assert (~found.kept).tolist() == drops and found.dropped == sum(drops)
    assert found.hot_inputs == int((categories[:, 1] != 5).sum())
    assert found.stale_rows == sum(change < value for change in judgement.changes.double().tolist())
    return found


@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_inputs_with_enough_stale_rows_are_dropped(alpha):
    for value in (0.0, 0.2, 0.5, 0.8, 100.0):
        check_dropped(alpha, value)
    assert check_dropped(alpha, 0.0).dropped == 0 < check_dropped(alpha, 100.0).dropped
    exactly = float(made_judgement()[0].changes[1].double())
    check_dropped(alpha, exactly)  # a change of T itself is not below it


def test_the_sample_decides_and_the_estimate_holds():
    judgement, categories = made_judgement()
    categories = categories.repeat(20, 1)  # 8000 inputs, of which 1000 are sampled
    found = classify(judgement, categories, threshold=None, alpha=2, **{**SETTINGS, "sample": 0.0})
    assert found.sampled == 1000 and found.hot_inputs > 5000
    assert found.threshold.interval.low <= found.dropped_share <= found.threshold.interval.high <= 0.5
    assert found.dropped_share > 0.3
    other = classify(judgement, categories, threshold=None, alpha=2, **{**SETTINGS, "sample": 0.0, "seed": 4})
    assert other.threshold.interval != found.threshold.interval
    whole = classify(judgement, categories, threshold=None, alpha=2, **SETTINGS)
    assert whole.sampled == whole.hot_inputs and whole.threshold.interval.share == whole.dropped_share


def test_without_hot_inputs_nothing_is_dropped():
    judgement, categories = made_judgement()
    for inputs in (categories + 100, categories[:0]):
        found = classify(judgement, inputs, threshold=None, alpha=1, **SETTINGS)
        assert found.hot_inputs == found.sampled == found.dropped == 0 and bool(found.kept.all())
    empty = Judgement(hot_rows(categories[:0], ["a", "b", "c"], 0.5), torch.empty(0))
    assert classify(empty, categories, threshold=9.0, alpha=1, **SETTINGS).dropped == 0
    with pytest.raises(ValueError, match=r"alpha must be in \[1, 3\]"):
        judgement.changes_of(categories, 4)


def left(kept, start, stop, first_step=None, **changes):
    return RemainingLoader(loader(**changes), kept, start, stop, first_step)


def test_with_all_samples_kept_batches_are_the_loader_s_own():
    whole = loader()
    assert whole.steps_per_epoch == 19  # of 450 samples; the last batch of an epoch has 18
    kept = torch.ones(450, dtype=torch.bool)
    mine = left(kept, 5, 50)
    assert mine.num_steps == 45 and mine.num_inputs == sum(
        whole.batch(step).num_samples for step in range(5, 50)
    )
    for step in range(5, 50):
        assert torch.equal(mine.batch(step).sample_ids, whole.batch(step).sample_ids)
        assert mine.batch(step).step == step
    for step in (4, 50):
        with pytest.raises(IndexError, match=r"step must be in \[5, 50\)"):
            mine.batch(step)


def test_what_is_left_is_every_kept_sample_in_its_order():
    whole = loader()
    kept = torch.arange(450) % 3 != 0
    mine = left(kept, 5, 45, first_step=100)
    got = [int(i) for step in range(100, 100 + mine.num_steps) for i in mine.batch(step).sample_ids]
    rows = [int(i) for step in range(5, 45) for i in whole.batch(step).sample_ids]
    assert got == [row for row in rows if row % 3] and mine.num_inputs == len(got)
    sizes = [mine.batch(step).num_samples for step in range(100, 100 + mine.num_steps)]
    assert set(sizes[:-1]) - {24} and sizes.count(24) >= len(sizes) - 3  # one short batch at most an epoch
    parts = [left(kept, 5, 45, rank=rank, world_size=3).batch(9).sample_ids for rank in range(3)]
    assert torch.equal(torch.stack([part[0] for part in parts]), left(kept, 5, 45).batch(9).sample_ids[:3])
    assert left(~torch.ones(450, dtype=torch.bool), 5, 45).num_steps == 0
    assert left(kept, 7, 7).num_steps == 0
    with pytest.raises(ValueError, match="kept must be bool of shape"):
        left(kept[1:], 5, 45)
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        left(kept, 5, 4)


def test_memory_is_bounded_and_reported():
    watch, _ = follow()
    small = follow(SlipstreamConfig(**{**vars(CONFIG), "snapshot_mb": 0.001}))[0]
    assert small.nbytes <= 1000 < watch.nbytes
    assert small.hot.left_out + len(small.hot) == len(watch.hot)
    assert len(small.hot) == 1000 // (2 * 4 * 6 + 4 * 2 + 2 * 8 + 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": 0}, r"warmup must be in \[1, 2147483647\], got 0"),
        ({"snapshots": 1}, "snapshots must be in"),
        ({"every": 0}, "every must be in"),
        ({"hot_share": 2.0}, r"hot_share must be in \[0, 1\], got 2.0"),
        ({"drop": -0.1}, "drop must be in"),
        ({"threshold": -1.0}, r"threshold must be in \[0, inf\]"),
        ({"threshold": math.nan}, "threshold must be in"),
        ({"confidence": 1.0}, "confidence must be in"),
        ({"snapshot_mb": 0.0}, "snapshot_mb must be positive"),
        ({"alpha": -1}, "alpha must be in"),
    ],
)
def test_settings_out_of_range_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SlipstreamConfig(**changes)


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="alpha must be at most 26, the features, got 27"):
        follow(SlipstreamConfig(alpha=27))
    with pytest.raises(ValueError, match="mode 'reference' has none"):
        follow(mode="reference", window=WindowConfig(1))
    with pytest.raises(ValueError, match="after step 10 would fall into an update of 3 batches"):
        follow(window=WindowConfig(2, accumulate=3))
    tables = follow()[0].tables
    from tritonrec.distributed import Communicators

    early = Slipstream(CONFIG, ClickLoader(LOG, 24, 0), tables, Communicators.local())
    with pytest.raises(RuntimeError, match="0 of 3 snapshots were taken: train up to step 10 first"):
        early.judge()
