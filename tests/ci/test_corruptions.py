"""The attack by damaged checkpoints finds nothing in the reader, and finds the reader without its checks."""

from collections import Counter
from types import SimpleNamespace

import corruptions
import pytest
from damage import DAMAGES
from speeds import slow_except

from tritonrec.checkpoint import manifest, reader


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return corruptions.originals(tmp_path_factory.mktemp("originals"))


@pytest.mark.slow
def test_damaged_checkpoints_are_refused_or_equal(made, tmp_path):
    cases = [corruptions.run_case(number, 3, made, tmp_path) for number in range(100)]
    assert [case for case in cases if case["defect"]] == []
    assert {case["kind"] for case in cases} == {each.__name__.removeprefix("damage_") for each in DAMAGES}
    assert {case["original"] for case in cases} == {each.name for each in made}
    ends = Counter(end.partition(":")[0] for case in cases for end in case["ends"].values())
    assert ends["refused"] > 100 and ends["equal"] > 50


class Fitting(str):
    """A checksum that fits all others."""

    def __ne__(self, other):
        return False


def without_content(monkeypatch):
    monkeypatch.setattr(manifest, "_check", lambda body: None)


def without_columns(monkeypatch):
    monkeypatch.setattr(reader._Reader, "_check", lambda *arguments: None)


def without_checksums_of_files(monkeypatch):
    sha256 = SimpleNamespace(sha256=lambda content: SimpleNamespace(hexdigest=Fitting))
    monkeypatch.setattr(reader, "hashlib", sha256)


def without_checksums_of_manifests(monkeypatch):
    monkeypatch.setattr(manifest, "_sha256_of", lambda body: Fitting())


@pytest.mark.if_changed
@pytest.mark.parametrize(
    "weaken",
    slow_except(
        [without_content],
        [without_content, without_columns, without_checksums_of_files, without_checksums_of_manifests],
    ),
)
def test_a_reader_without_a_check_is_found(made, tmp_path, monkeypatch, weaken):
    weaken(monkeypatch)
    cases = (corruptions.run_case(number, 4, made, tmp_path) for number in range(400))
    assert any(case["defect"] for case in cases)
