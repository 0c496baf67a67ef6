"""Promise: an output that cannot be written is refused before any work, by option; nothing is left behind."""

import os
from pathlib import Path

import commands
import pytest

from tritonrec import files

INPUTS = {
    ("bench", "--compare"), ("plan", "--costs"), ("plan", "--trace"),
    ("report", "--folder"), ("serve-bench", "--checkpoint"), ("train", "--config"), ("train", "--plan"),
    ("score", "--model"), ("serve", "--cached"), ("serve", "--token-file"), ("warmup", "--config"),
}  # fmt: skip
FOLDERS = {
    ("fuzz", "--database"), ("lab", "--trace"), ("profile", "--out"), ("reproduce", "--folder"),
    ("serve-bench", "--trace"), ("train", "--checkpoint"), ("train", "--log-dir"), ("verify", "--trace"),
}  # fmt: skip
OUTPUTS = sorted({*commands.options(Path)} - INPUTS)


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Whoever gets as far as looking for data has worked."""

    def load(*args):
        raise AssertionError("it has begun to work")

    for module in ("verify", "job", "lab"):
        monkeypatch.setattr(f"tritonrec.harness.cli.{module}.load_job", load)
    monkeypatch.setattr("tritonrec.harness.cli.report.build", load)
    monkeypatch.setattr("tritonrec.harness.simulator.run.simulate", load)
    monkeypatch.setattr("tritonrec.harness.network.require_tools", load)
    monkeypatch.setattr("tritonrec.harness.bench.bench", load)
    monkeypatch.setattr("tritonrec.harness.fuzz.run.search", load)
    monkeypatch.setattr("tritonrec.harness.papers.reproduce.reproduce", load)
    monkeypatch.setattr("tritonrec.harness.serve.rounds.run_bench", load)


def test_every_command_that_writes_is_seen():
    assert len(OUTPUTS) >= 18 and {*OUTPUTS} > FOLDERS and {*commands.options(Path)} > INPUTS


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
@pytest.mark.parametrize("where", ["nobody can write", "below a file", "the wrong kind", "too long a name"])
def test_it_is_refused_before_any_work(command, option, where, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    (tmp_path / "folder").mkdir()
    path = {
        "nobody can write": Path("/proc/nowhere/out"),
        "below a file": file / "out",
        "the wrong kind": file if (command, option) in FOLDERS else tmp_path / "folder",
        "too long a name": tmp_path / ("x" * 300),
    }[where]
    code, output, error = commands.invoke(command, option, path)
    assert code == 2 and isinstance(error, SystemExit), output
    assert f"error: {option}: cannot write {path}: " in output
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"] and file.read_text() == "kept"


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_one_that_can_be_written_is_not_touched_before_the_end(command, option, tmp_path):
    path = tmp_path / "new" / "out"
    commands.invoke(command, option, path)
    assert os.listdir(tmp_path) == []


def test_two_outputs_are_not_one_file(tmp_path):
    (tmp_path / "folder").symlink_to(tmp_path)
    for other in (tmp_path / "out", tmp_path / "folder" / "out"):
        code, output, _ = commands.invoke("train", "--json", tmp_path / "out", "--trace", other)
        assert code == 2 and "--json and --trace are both" in output


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", ["--data", "csv:{}?user=user&item=item&timestamp=at", "--json"]),
        ("train", ["--data", "{}", "--trace"]),
        ("verify", ["--data", "csv:{}", "--json"]),
        ("plan", ["{}", "--json"]),
        ("plan", ["--costs", "{}", "--save-costs"]),
        ("simulate", ["--measured", "elsewhere", "--measured", "{}", "--png"]),
        ("trace", ["{}", "--json"]),
        ("bisect", ["elsewhere", "{}", "--json"]),
        ("score", ["{}", "--model", "nowhere"]),
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_no_output_replaces_what_the_command_reads(monkeypatch, tmp_path, command, options, link):
    monkeypatch.setattr(commands, "NEEDED", {})
    read, out = tmp_path / "read.csv", tmp_path / "out"
    read.write_text("kept")
    if link:
        out.symlink_to(read)
    code, output, _ = commands.invoke(
        command, *(each.replace("{}", str(read)) for each in options), out if link else read
    )
    assert code == 2 and "would replace" in output, output
    assert read.read_text() == "kept"


def test_pipes_devices_and_what_is_there_may_be_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "pipe", tmp_path / "file", tmp_path / "link", "/dev/null"):
        files.check_writable(path)
    files.check_writable(tmp_path, folder=True)
    assert (tmp_path / "file").read_text() == "kept" and len(os.listdir(tmp_path)) == 3


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    """Permissions do not bind root, so the system's answer is made up."""

    def refuse(**place):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(PermissionError) as refused:
        files.check_writable(tmp_path / "out")
    assert refused.value.strerror == f"cannot write {tmp_path / 'out'}: Permission denied"
