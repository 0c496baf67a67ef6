"""Promise: merging, dedup, accumulation and policies give the bits of plain synchronous training."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from speeds import slow_except
from trainer_parts import batches, parts, same, state

from tritonrec.data import JaggedBatch
from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, PrecisionTiers, TablePolicy
from tritonrec.embedding.key_index import KeyIndex
from tritonrec.pipeline import PIPELINED, StageFailedError, Trainer, WindowConfig
from tritonrec.settings import with_values

DIM = 6


def run(mode, run_batches, made=None, **window):
    made = made or parts()
    config = with_values(WindowConfig(seed=4), window)
    with Trainer(*made, Communicators.local(), mode, config) as training:
        results = list(training.run(run_batches))
        counts = training.counts
    return state(made), results, counts


@pytest.mark.parametrize("mode", slow_except(["reference", "nestpipe"], ["reference", *PIPELINED]))
def test_accumulating_two_batches_is_training_on_both_at_once(mode):
    # without dropout, whose mask goes by the batch's step, and with the optimizers' step counted in updates
    four = batches(4)
    pairs = [[replace(batch, step=step) for batch in four[2 * step : 2 * step + 2]] for step in (0, 1)]
    whole = [JaggedBatch.concat(pair) for pair in pairs]
    expected, _, _ = run("reference", whole, parts())
    split = {} if mode == "reference" else {"micro_batches": 3}
    got, results, _ = run(mode, four, parts(), accumulate=2, **split)
    assert same(got, expected)
    assert [result.step for result in results] == [0, 1, 2, 3]
    assert [result.loss_terms for result in results] == [whole[0].num_tokens] * 2 + [whole[1].num_tokens] * 2


def test_step_takes_the_batches_of_one_update():
    expected, _, _ = run("reference", batches(4), accumulate=2)
    made, four = parts(), batches(4)
    with Trainer(*made, Communicators.local(), "nestpipe", WindowConfig(2, accumulate=2, seed=4)) as training:
        assert training.step(*four[:2]).step == 1
        assert training.step(*four[2:]).step == 3
        with pytest.raises(ValueError, match="one update takes 1 to 2 batches, got 3"):
            training.step(*four[:3])
    assert same(state(made), expected)


@pytest.mark.parametrize("steps", [[1, 2], [0, 2], [0, 0]])
def test_an_update_of_other_batches_is_refused(steps):
    run_batches = [replace(batch, step=step) for batch, step in zip(batches(2), steps, strict=True)]
    with pytest.raises(ValueError, match="2 consecutive batches from a multiple of 2, got steps"):
        run("nestpipe", run_batches, accumulate=2)


def test_dedup_drops_keys_where_it_says_and_no_bit():
    expected, _, _ = run("reference", batches(4))
    counts = {}
    for dedup in ("none", "exchange", "lookup", "both"):
        got, _, counts[dedup] = run("nestpipe", batches(4), micro_batches=2, dedup=dedup)
        assert same(got, expected), dedup
    occurrences = sum(len(batch.lookups()["item"].ids) for batch in batches(4))
    per_batch = sum(len(batch.lookups()["item"].ids.unique()) for batch in batches(4))
    for dedup, found in counts.items():
        assert found.occurrences == occurrences and found.lookups == 4
        assert (found.exchanged == occurrences) == (dedup in ("none", "lookup"))
        assert found.received == found.exchanged
        assert (found.read == per_batch) == (dedup in ("lookup", "both"))
        assert found.read in (per_batch, found.received)
        assert found.key_bytes == found.row_bytes == 0  # one rank sends nothing
    assert per_batch == counts["both"].exchanged < counts["exchange"].exchanged < occurrences


POLICIES = {
    "lru": TablePolicy(Eviction("lru", capacity=30)),
    "lfu": TablePolicy(Eviction("lfu", capacity=30, every=3)),
    "ttl": TablePolicy(Eviction("ttl", ttl=1)),
    "admission": TablePolicy(admission=3),
    "precision": TablePolicy(precision=PrecisionTiers(2, every=2)),
    "size": TablePolicy(precision=PrecisionTiers("4KiB", every=2)),
    "all": TablePolicy(
        Eviction("lru", capacity=30, every=2), admission=2, precision=PrecisionTiers(3, every=4)
    ),
}


QUICK = [*((name, "nestpipe") for name in POLICIES), *(("all", mode) for mode in PIPELINED)]


@pytest.mark.parametrize(("name", "mode"), slow_except(QUICK, product(POLICIES, PIPELINED)))
def test_policies_go_by_steps_and_keys_whatever_the_mode(mode, name):
    made = [parts(policy=POLICIES[name]) for _ in range(2)]
    expected, losses, _ = run("reference", batches(9), made[0])
    got, results, _ = run(mode, batches(9), made[1], micro_batches=3)
    plain, counters = [each[1].groups[0].table.counters for each in made]
    did = {"admission": "rejected", "precision": "demoted", "size": "demoted"}.get(name, "evicted")
    assert getattr(counters, did) > 0
    assert same(got, expected) and counters == plain
    for a, b in zip(losses, results, strict=True):
        assert torch.equal(a.losses[a.sample_ids.argsort()], b.losses[b.sample_ids.argsort()])


@pytest.mark.parametrize(
    "mode, skip_fetch",
    [("dbp", False), ("dbp", True), ("fwp", False), ("nestpipe", False), ("nestpipe", True)],
)
def test_a_key_is_hashed_once_a_window(monkeypatch, mode, skip_fetch):
    """The handles of the lookup are carried to the write-back."""
    calls = Counter()

    def counted(method):
        def call(index, *arguments):
            calls[method.__name__] += 1
            return method(index, *arguments)

        return call

    for method in (KeyIndex.find, KeyIndex.find_or_insert, KeyIndex.erase):
        monkeypatch.setattr(KeyIndex, method.__name__, counted(method))
    _, _, counts = run(mode, batches(5), micro_batches=2, skip_fetch=skip_fetch)
    assert calls == {"find_or_insert": counts.lookups} == {"find_or_insert": 5}


@pytest.mark.parametrize("mode", slow_except(["dbp", "nestpipe"], PIPELINED))
def test_a_low_precision_weight_beyond_float16_is_an_error_that_names_it(mode):
    made = parts(policy=TablePolicy(precision=PrecisionTiers(5, every=2)), optimizer="sgd")
    ids = batches(1)[0].lookups()["item"].ids.unique()
    made[1].load("item", ids, made[1].initial_rows("item", ids) * 2e5)
    with pytest.raises(StageFailedError, match=r"table item.* does not fit 16 bits"):
        run(mode, batches(1), made)
