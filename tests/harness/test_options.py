"""Promise: words on the command line become the policy they say, or one clear error."""

import pytest

from tritonrec.embedding import Eviction, PrecisionTiers, TablePolicy
from tritonrec.harness.cli.policy import policy

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("", 1, ""), TablePolicy()),
        (("lru:500", 3, ""), TablePolicy(Eviction("lru", capacity=500), 3)),
        (("lfu:500:20", 1, ""), TablePolicy(Eviction("lfu", capacity=500, every=20))),
        (
            ("ttl:7:2", 1, "4:100"),
            TablePolicy(Eviction("ttl", ttl=7, every=2), precision=PrecisionTiers(4, 100)),
        ),
    ],
)
def test_words_become_policies(words, expected):
    assert policy(*words) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("lru", 1, ""), r"--evict takes lru:ROWS, .* got 'lru'"),
        (("fifo:3", 1, ""), "--evict takes"),
        (("lru:many", 1, ""), "--evict takes whole numbers, got 'lru:many'"),
        (("lru:0", 1, ""), "needs capacity of at least 1, got 0"),
        (("", 1, "3"), "--precision-tiers takes THRESHOLD:EVERY, got '3'"),
        (("", 1, "300:2"), "threshold must be 1 to 255, got 300"),
    ],
)
def test_other_words_are_refused(words, named):
    with pytest.raises(ValueError, match=named):
        policy(*words)
