"""The interval covers what it should; the threshold is the largest that drops no more than was asked for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.slipstream.threshold import find_threshold, interval, t_quantile

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("confidence", "freedom", "published"),
    [
        (0.999, 1, 636.619), (0.999, 2, 31.599), (0.999, 10, 4.587), (0.999, 100, 3.390), (0.999, 200, 3.340),
        (0.95, 1, 12.706), (0.95, 5, 2.571), (0.95, 120, 1.980), (0.95, 10**6, 1.960), (0.5, 3, 0.765),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_published_tables(confidence, freedom, published):
    assert t_quantile(confidence, freedom) == pytest.approx(published, abs=6e-4)  # 3.340 is the paper's


def test_the_interval_by_hand():
    # 30 of 100 sampled from 400: sd^2 = 0.3 * 0.7 * 100 / 99, correction 0.75, t(99) = 3.391529
    half = 3.391529 * math.sqrt(0.75 * 0.21 * 100 / 99 / 100)
    assert interval(30, 100, 400, 0.999) == pytest.approx((0.3 - half, 0.3, 0.3 + half), rel=1e-5)
    assert interval(7, 7, 7, 0.999) == (1, 1, 1) and interval(3, 10, 10, 0.9) == (0.3, 0.3, 0.3)
    assert interval(0, 50, 90, 0.999) == (0, 0, 0) and interval(1, 1, 9, 0.99) == (0, 1, 1)
    low, _, high = interval(1, 4, 1000, 0.999)
    assert (low, high) == (0, 1)  # nothing outside of shares
    for wrong in ((2, 1, 9), (0, 0, 9), (0, 10, 9), (-1, 3, 9)):
        with pytest.raises(ValueError, match="needs 0 <= dropped <= sampled <= population"):
            interval(*wrong, 0.9)
    with pytest.raises(ValueError, match="confidence in"):
        t_quantile(1.0, 4)


def misses(half_width_of, trials=400):
    """How often the interval misses the share of a population, and the mean half width over the scatter."""
    generator = torch.Generator().manual_seed(7)
    population = torch.zeros(300, dtype=torch.int64)
    population[:120] = 1
    counts = [int(population[torch.randperm(300, generator=generator)[:240]].sum()) for _ in range(trials)]
    found = [half_width_of(count) for count in counts]
    missed = sum(not f.low <= 0.4 <= f.high for f in found) / trials
    scatter = torch.tensor(counts).double().div(240).std()
    width = sum((f.high - f.low) / 2 for f in found) / trials
    return missed, float(width / scatter)


def test_samples_without_replacement_are_covered_as_often_as_promised():
    """At 90 % about a tenth is missed, and the half width is 1.65 deviations of the samples' own scatter."""
    missed, width = misses(lambda count: interval(count, 240, 300, 0.9))
    assert 0.05 < missed < 0.16 and 1.5 < width < 1.85


def dropped(changes, value):
    return sum(change < value for change in changes)


def plain_threshold(changes, population, most, confidence):
    """The largest T, tried one after another."""
    finite = sorted({change for change in changes if math.isfinite(change)})
    tried = [0.0, *finite, *(math.nextafter(last, math.inf) for last in finite[-1:])]
    fine = [
        t for t in tried if interval(dropped(changes, t), len(changes), population, confidence).high <= most
    ]
    return fine[-1] if fine else 0.0


CHANGES = st.lists(
    st.sampled_from([math.inf, 0.5, 0.25, 0.125, 2.0]) | st.floats(0.0009765625, 1024, width=32),
    min_size=1,
    max_size=60,
)


@given(
    CHANGES, st.integers(0, 500), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.sampled_from([0.9, 0.999])
)
def test_the_search_finds_what_trying_all_finds(changes, more, most, confidence):
    population = len(changes) + more
    found = find_threshold(torch.tensor(changes, dtype=torch.float64), population, most, confidence)
    assert found.value == plain_threshold(changes, population, most, confidence)
    assert found.interval == interval(dropped(changes, found.value), len(changes), population, confidence)
    assert found.interval.high <= most or found.value == 0
    assert len(found.probes) <= math.log2(len(changes) + 2) + 1


def test_the_search_drops_as_much_as_it_may():
    changes = torch.rand(2000, generator=torch.Generator().manual_seed(1)).double()
    found = find_threshold(changes, 2000, 0.25, 0.999)  # all are sampled: no margin
    assert int((changes < found.value).sum()) == 500
    assert find_threshold(changes, 10**6, 0.25, 0.999).value < found.value
    assert find_threshold(changes, 10**6, 1.0, 0.999).value > float(changes.max())
    assert find_threshold(changes[:0], 0, 0.5, 0.999).value == 0.0
    with pytest.raises(ValueError, match="the share to drop must be in"):
        find_threshold(changes, 2000, 1.5, 0.999)
