"""Promise: `make test` leaves out cases of a test with many, and no test."""

from pathlib import Path
from types import SimpleNamespace

from speeds import LONGEST, longest_first, of_whole_files, thinned


def case(number, test="test_a", op=None, marks=(), file="tests/a.py"):
    params = {"number": number} | ({} if op is None else {"op": op})
    return SimpleNamespace(
        nodeid=f"{file}::{test}[{number}-{op}]",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda name: name if name in marks else None,
    )


def numbers(items, **of):
    return sorted(item.callspec.params["number"] for item in thinned(map(hashable, items), **of))


def hashable(item):
    return type("Item", (), {**vars(item), "get_closest_marker": staticmethod(item.get_closest_marker)})()


def test_few_cases_stay_and_of_many_some_of_all_parts():
    assert numbers([case(n) for n in range(6)], most=6) == [*range(6)]
    many = numbers([case(n) for n in range(166)], most=6)
    assert len(many) == 6 + 160 // 16 and {n // 42 for n in many} == {0, 1, 2, 3}
    assert numbers([case(n) for n in reversed(range(166))], most=6) == many  # in whatever order they come
    assert many != numbers([case(n) for n in range(166)], most=6, draw="b")


def test_every_test_and_every_op_has_its_own():
    alone = hashable(SimpleNamespace(nodeid="tests/a.py::test_alone", get_closest_marker=lambda name: None))
    items = [*map(hashable, (case(n, test, op) for test in "ab" for op in "cd" for n in range(9))), alone]
    kept = thinned(items, 2)
    assert alone in kept and len(kept) == 4 * 2 + 1
    assert len({(item.nodeid[:14], item.callspec.params["op"]) for item in kept - {alone}}) == 4


def test_a_test_of_which_every_case_counts_stays_whole():
    judge = [case(n, "test_judge", marks=["every_case"]) for n in range(30)]
    assert numbers([*judge, *(case(100 + n) for n in range(10))], most=2)[:30] == [*range(30)]
    assert len(numbers([*judge, *(case(100 + n) for n in range(18))], most=2)) == 30 + 3


def test_files_whose_cases_are_quick_stay_whole():
    root = Path(__file__).parents[1]
    assert all((root / name).exists() for name in of_whole_files())
    for name in of_whole_files():
        quick = [case(n, file=name) for n in range(30)]
        assert numbers([*quick, *(case(100 + n) for n in range(18))], most=2)[:30] == [*range(30)]


def test_the_longest_files_come_first_and_the_others_stay_in_order():
    tests = Path(__file__).parent
    assert all((tests / f"{name}.py").exists() for name in LONGEST)
    names = ["a", LONGEST[1], "c", LONGEST[0], "b", LONGEST[1]]
    items = [SimpleNamespace(path=tests / f"{name}.py", number=place) for place, name in enumerate(names)]
    longest_first(items, tests)
    assert [item.number for item in items] == [3, 1, 5, 0, 2, 4]
