"""Promise: a field of JSON lines is found though the first object has none, or null."""

import json

import pytest

from tritonrec.data import json_tables, load_interactions


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
    monkeypatch.setattr(json_tables, "FIRST_LINES", 2)
    late = [{name: each[name] for name in ("user", "item", "timestamp")} for each in EVENTS[:2]] + EVENTS[2:]
    assert load_interactions(written(tmp_path / "log.json", late)).rating is None
