"""Promise: a field of JSON lines is found though the first object has none, or null."""

import json

import pytest

from tritonrec.data import load_interactions, text_tables


def written(path, objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return f"json:{path}"


EVENTS = [
    {"user": 1, "item": 5, "timestamp": 10, "rating": 4.0},
    {"user": 1, "item": 6, "timestamp": 11, "rating": 2.5},
    {"user": 2, "item": 5, "timestamp": 12, "rating": 1.0},
    {"user": 2, "item": 7, "timestamp": 13, "rating": 5.0},
]


@pytest.mark.parametrize("at", range(4))
def test_the_order_of_fields_and_objects_does_not_matter(tmp_path, at):
    whole = load_interactions(written(tmp_path / "a.json", EVENTS))
    turned = [dict(reversed(each.items())) for each in EVENTS[at:] + EVENTS[:at]]
    found = load_interactions(written(tmp_path / "b.json", turned))
    assert sorted(found.rating.tolist()) == sorted(whole.rating.tolist()) == [1.0, 2.5, 4.0, 5.0]


@pytest.mark.parametrize("missing", ["left out", "null"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_rating_that_one_object_lacks_is_named_alike_wherever_it_is(tmp_path, missing, at):
    objects = [dict(each) for each in EVENTS]
    if missing == "null":
        objects[at]["rating"] = None
    else:
        del objects[at]["rating"]
    with pytest.raises(ValueError, match=rf"line {at + 1}.*rating"):
        load_interactions(written(tmp_path / "log.json", objects))


def test_fields_are_looked_for_in_some_lines_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(text_tables, "FIRST_LINES", 2)
    late = [{name: each[name] for name in ("user", "item", "timestamp")} for each in EVENTS[:2]] + EVENTS[2:]
    assert load_interactions(written(tmp_path / "log.json", late)).rating is None


def test_a_field_twice_inside_a_value_is_shown_as_such(tmp_path):
    path = tmp_path / "log.json"
    source, lines = written(path, EVENTS), path.read_text().splitlines()
    lines[2] = (
        lines[2].replace("{", '{"user": {"x": 1, "x": 2}, "was": ', 1).replace('"was": "user": ', '"was": ')
    )
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"log.json, line 3: column user has {\"x\": \"a field twice\"}"):
        load_interactions(source)


@pytest.mark.parametrize("at", [1, 4])
def test_a_field_that_an_object_has_twice_is_named_where_it_is_read(tmp_path, at):
    path = tmp_path / "log.json"
    source, lines = written(path, EVENTS), path.read_text().splitlines()
    for field, is_read in (("rating", True), ("other", False)):
        twice = [line.replace("}", f', "{field}": 1.0, "{field}": 2.0}}') if n == at else line
                 for n, line in enumerate(lines, 1)]  # fmt: skip
        path.write_text("\n".join(twice))
        if is_read:
            with pytest.raises(ValueError, match=f"log.json, line {at}: the object has 'rating' twice"):
                load_interactions(source)
        else:
            assert len(load_interactions(source)) == 4
