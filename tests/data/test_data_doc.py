"""The batches and streams of docs/data.md are as the page says."""

import doctest
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.mark.parametrize(
    ("first", "last", "least"), [("Batches", "Parquet", 10), ("Streaming", "Balancing", 14)]
)
def test_the_examples_print_what_the_page_says(first, last, least):
    text = PAGE.read_text()
    section = text[text.index(f"\n## {first}\n") : text.index(f"\n## {last}\n")]
    source = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(source, {"torch": torch}, PAGE.name, str(PAGE), 0)
    failed, attempted = doctest.DocTestRunner().run(examples)
    assert attempted > least and failed == 0
