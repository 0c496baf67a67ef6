"""The examples of docs/embedding.md and docs/migrate.md run as pasted."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "embedding": (DOCS / "embedding.md").read_text().split("## In a loop of your own")[1].split("\n## ")[0],
    "migrate": (DOCS / "migrate.md").read_text(),
}
BLOCKS = {
    f"{page} {number}": block
    for page, text in PAGES.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_example_runs(name):
    found = {}
    exec(BLOCKS[name], found)
    if "weights" in found:
        assert found["ids"].tolist() == [-3, 7, 8, 9, 2**63 - 1] and found["weights"].shape == (5, 8)
    elif "ebc" in found:
        assert found["pooled"].values().shape == (2, 192) and found["pooled"]["product"].shape == (2, 64)
        assert found["ebc"].fused_optimizer.updates == 1
    else:
        assert found["pooled"].shape == (2, 64) and found["table"].fused_optimizer.updates == 1


def test_all_examples_are_here():
    assert list(BLOCKS) == ["embedding 0", "migrate 0", "migrate 1"]
