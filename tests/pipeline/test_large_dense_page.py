"""Promise: the examples of docs/training.md on large dense parts run as pasted, on several ranks."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
SETUP = re.search(r"```python\n(.*?)\nwith Trainer", PAGE, re.DOTALL)[1]
SECTION = PAGE[PAGE.index("\n## Large dense parts\n") : PAGE.index("\n## Clipping\n")]
BLOCKS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def run(communicators, folder):
    """The losses, the whole weights, and how many values of the parameters are here."""
    names = {"here": communicators}
    first, second = BLOCKS
    exec(SETUP.replace("Communicators.local()", "here"), names)
    exec(first.replace('"sharded"', repr(folder)), names)
    names["__name__"] = __name__
    exec(second, names)
    here = sum(parameter.to_local().numel() for parameter in names["sharded"].parameters())
    assert [type(layer).__name__ for layer in names["deep"].layers] == ["Checkpointed"] * 4
    return names["losses"], names["weights"], here


@pytest.mark.slow
@pytest.mark.multi_rank
def test_the_sharded_model(pool, tmp_path):
    found = pool.run(run, 4, str(tmp_path))
    losses, weights, _ = found[0]
    assert len(losses) == 3 and all(each[0] == losses for each in found)
    assert all(torch.equal(each[1][name], weights[name]) for each in found for name in weights)
    assert sum(here for *_, here in found) == sum(each.numel() for each in weights.values())
    assert max(here for *_, here in found) < 0.4 * sum(each.numel() for each in weights.values())
