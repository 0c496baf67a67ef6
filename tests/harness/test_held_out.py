"""Promise: a part of the split without events is found before a run is spent on it."""

from types import SimpleNamespace

import pytest

from tritonrec.data import Split
from tritonrec.harness.train.evaluate import check_held_out

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize("rule", ["leave-one-out", "leave-one-out:validation"])
@pytest.mark.parametrize("empty", [None, "test", "validation"])
def test_every_part_of_the_split_has_events(rule, empty):
    loader = SimpleNamespace(evaluation_batches=lambda part: iter([] if part == empty else ["a batch"]))
    if empty is None or (empty == "validation" and rule == "leave-one-out"):
        return check_held_out(loader, Split.parse(rule))
    with pytest.raises(ValueError, match=rf"no event is held out for {empty}: .*\(--split {rule}\)"):
        check_held_out(loader, Split.parse(rule))
