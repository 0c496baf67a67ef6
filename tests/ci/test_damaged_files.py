"""The attack by damaged files finds nothing in the readers, and finds a reader without its check."""

import random

import files
import pytest
from formats import FORMATS
from speeds import slow_except

from tritonrec.serving import exported_table


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = {}
    for name, each in FORMATS.items():
        found[name] = tmp_path_factory.mktemp("originals") / name
        found[name].mkdir()
        each.write(found[name], random.Random(7))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_what_was_written_twice_alike(made, name):
    assert files._end(FORMATS[name], made[name], made[name], changes_allowed=False) == "equal"


@pytest.mark.parametrize(
    ("name", "count"), slow_except([("csv", 20)], [("csv", 20), *((n, 150) for n in FORMATS)])
)
def test_damaged_files_are_refused_equal_or_legible(made, tmp_path, name, count):
    cases = [files.run_case(FORMATS[name], number, 11, made, tmp_path) for number in range(count)]
    assert [case for case in cases if case["defect"]] == []
    ends = {case["end"].partition(":")[0] for case in cases}
    assert "refused" in ends <= {"refused", "equal", "other"}
    assert len(ends) > 1 or name == "csv-gz"  # whose checksum leaves a few bytes of its head alone


FOUND = [("export-parquet", 1229, 0), ("export-parquet", 1758, 0), ("window-shards", 200, 11)]


@pytest.mark.parametrize(("name", "number", "seed"), FOUND)
def test_damages_that_once_ended_in_a_librarys_error_or_the_process(made, tmp_path, name, number, seed):
    case = files.run_case(FORMATS[name], number, seed, made, tmp_path)
    assert not case["defect"] and case["end"].startswith("refused"), case


def test_a_reader_that_skips_the_checksums_is_found(made, tmp_path, monkeypatch):
    monkeypatch.setattr(exported_table, "checked_file", lambda folder, entry: folder / entry["file"])
    format = FORMATS["export-safetensors"]
    cases = (files.run_case(format, number, 11, made, tmp_path) for number in range(300))
    assert any(case["end"] == "accepted: another content" for case in cases)
