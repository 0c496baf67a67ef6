"""Promise: a file is written whole, or what was there before stays."""

import json
import os
import threading

import pytest

from tritonrec.files import save_json, whole


def test_a_file_is_replaced_at_the_end_and_nothing_lies_beside_it(tmp_path):
    target = tmp_path / "new" / "report.json"
    save_json({"a": [1]}, target)
    with whole(target) as part:
        part.write_text("{}")
        assert json.loads(target.read_text()) == {"a": [1]}
    assert target.read_text() == "{}" and os.listdir(target.parent) == ["report.json"]


def test_an_error_keeps_what_was_there(tmp_path):
    target = tmp_path / "trace"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole(target) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["trace"]
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_json({"a": object()}, target)
    assert target.read_text() == "before"


def test_what_leads_elsewhere_is_not_replaced(tmp_path):
    """A device or a pipe would be gone for everybody, and a link would no longer lead where it led."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    came = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_text()), daemon=True)
    reader.start()
    save_json([1], pipe)
    reader.join(10)
    assert json.loads(came[0]) == [1] and pipe.is_fifo()
    link.symlink_to(target)
    save_json([2], link)
    assert link.is_symlink() and json.loads(target.read_text()) == [2]
