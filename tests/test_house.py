"""Promise: no part of the house grows unseen: CONTRIBUTING.md has the lines of each, and what they buy."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (`[^|]+`) \| ([\d,]+) \| \S.* \|$", re.MULTILINE)


def budgets(text):
    """By folder, or file, the row that it stands in; and by row the lines that it may have."""
    _, _, rows = text.partition("\n## Size\n")
    folders, most = {}, {}
    for names, number in ROW.findall(rows.partition("\n## ")[0]):
        most[names] = int(number.replace(",", ""))
        folders |= dict.fromkeys(re.findall(r"`([^`]+)`", names), names)
    return folders, most


def lines_of(files, folders):
    """By row the lines of its files; a file belongs to the longest name around it."""
    found = {}
    for name, text in files:
        around = [each for each in folders if name == each or name.startswith(f"{each}/")]
        assert around, f"{name} stands in no row of CONTRIBUTING.md's table of sizes"
        row = folders[max(around, key=len)]
        found[row] = found.get(row, 0) + text.count("\n")
    return found


def too_long(found, most):
    return [
        f"{row} has {found[row]:,} lines and its budget is {most[row]:,}: cut, or say what more buys"
        for row in most
        if found.get(row, 0) > most[row]
    ]


def test_no_part_is_larger_than_its_budget():
    folders, most = budgets((ROOT / "CONTRIBUTING.md").read_text())
    paths = [path for top in ("tritonrec", "tests", "ci") for path in sorted((ROOT / top).rglob("*.py"))]
    found = lines_of([(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths], folders)
    assert not (long := too_long(found, most)), "\n".join(long)
    assert not (gone := most.keys() - found.keys()), f"no file: {gone}"


def test_growth_and_a_new_folder_are_seen():
    folders, most = budgets("\n## Size\n| `a`, `b/c` | 1,000 | this |\n| `a/d` | 2 | that |\n\n## More\n")
    assert most == {"`a`, `b/c`": 1000, "`a/d`": 2}
    found = lines_of([("a/x.py", "\n" * 999), ("b/c", "\n"), ("a/d/x.py", "\n" * 3)], folders)
    assert found == {"`a`, `b/c`": 1000, "`a/d`": 3} and "`a/d` has 3 lines" in too_long(found, most)[0]
    assert len(too_long(found, most)) == 1
    with pytest.raises(AssertionError, match=r"b/e\.py stands in no row"):
        lines_of([("b/e.py", "")], folders)
