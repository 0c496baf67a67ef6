"""The batches of docs/data.md are as the page says."""

import doctest
import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_examples_of_batches_print_what_the_page_says():
    section = PAGE.read_text().split("## Batches")[1].split("\n## ")[0]
    source = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(source, {"torch": torch}, PAGE.name, str(PAGE), 0)
    failed, attempted = doctest.DocTestRunner().run(examples)
    assert attempted > 10 and failed == 0
