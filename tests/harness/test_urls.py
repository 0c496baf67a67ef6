"""Promise: commands take URLs for checkpoints, exports, logs, traces and config, or refuse them by name."""

import json
import os
from pathlib import Path

import pytest
from commands import COMMANDS, invoke
from typer.testing import CliRunner

from tritonrec import checkpoint
from tritonrec.files.places import place_of, read_document
from tritonrec.harness.cli import app
from tritonrec.harness.job import Job
from tritonrec.harness.train.config import read_config
from tritonrec.harness.train.run import Run
from tritonrec.serving import Predictor

pytestmark = pytest.mark.filterwarnings("ignore:.*its file system has no locks.*:RuntimeWarning")
SIZES = ("--dim", 8, "--heads", 1, "--layers", 1, "--batch-size", 16, "--max-seq-len", 8)


@pytest.fixture(autouse=True)
def nothing_here(tmp_path, monkeypatch):
    """No command makes a folder ``memory:``."""
    monkeypatch.chdir(tmp_path)
    yield
    assert os.listdir(tmp_path) == []


def test_a_run_whose_files_are_all_at_urls():
    here = "memory://commands"
    outputs = ("--json", f"{here}/summary.json", "--json-lines", f"{here}/log.jsonl")
    run = ("train", *SIZES, "--checkpoint", f"{here}/run")
    code, output, _ = invoke(*run, "--steps", 2, *outputs, "--trace", f"{here}/run.pftrace")
    assert code == 0, output
    assert json.loads(read_document(f"{here}/summary.json"))["step"] == 2
    assert len((place_of(here) / "log.jsonl").read_text().splitlines()) >= 2
    code, output, _ = invoke(*run, "--steps", 3, "--resume", "--json-lines", f"{here}/log.jsonl")
    assert code == 0, output
    assert checkpoint.steps(f"{here}/run") == [2, 3]
    config = ("train", "--config", f"{here}/run", "--steps", 1, "--checkpoint", f"{here}/warm")
    code, output, _ = invoke(*config, "--warm-start", f"{here}/run", "--json-lines", f"{here}/other.jsonl")
    assert code == 0 and "table item: " in output and "dense: " in output, output
    code, output, _ = invoke("export", "--tables-only")  # of nowhere
    assert code == 2 and "nowhere holds no checkpoint" in output
    code, output, _ = invoke(*run[:-1], "nowhere", "--steps", 2, "--resume")  # and leaves no folder
    assert code == 2 and "nowhere holds no checkpoint to resume" in output


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_a_store_that_cannot_be_reached_is_named_before_any_work(option, monkeypatch):
    def fails(self, path, **rest):
        raise ConnectionError("no route to the store")

    monkeypatch.setattr(type(place_of("memory://x")._fs), "info", fails)
    code, output, _ = invoke("train", *SIZES, "--steps", 1, option, "memory://away/out")
    assert code == 2 and option in output and "no route to the store" in output, output
    assert "step" not in output  # no line of training


def test_tables_at_a_url_are_exported_there():
    here = "memory://exported"
    assert invoke("train", *SIZES, "--steps", 1, "--checkpoint", f"{here}/run")[0] == 0
    result = CliRunner().invoke(app, ["export", f"{here}/run", f"{here}/out", "--tables-only"])
    assert result.exit_code == 0 and "memory://exported/out" in result.output.replace("\n", "")
    assert len(Predictor.load(f"{here}/out").tables["item"].ids) > 10
    result = CliRunner().invoke(app, ["bisect", f"{here}/run", f"{here}/run"])
    assert result.exit_code == 0, result.output


def paths():
    """(command, words) with ``{}`` for each path that a command takes; a command may lack other arguments."""
    for name, command in COMMANDS.items():
        for each in command.params:
            if "Path" in str(each.type_descriptor.annotation):
                given = [] if each.param_type_name == "argument" else each.opts[:1]
                before = [
                    "local" for other in command.params[: command.params.index(each)]
                    if not given and other.param_type_name == "argument"
                ]  # fmt: skip
                yield pytest.param(name, [*before, *given, "{}"], id=f"{name} {each.opts[0]}")


@pytest.mark.if_changed
@pytest.mark.parametrize(("command", "words"), list(paths()))
def test_no_path_of_a_command_loses_the_host_or_a_part_of_a_url(command, words):
    """pathlib makes one slash of two: ``file://nas/x`` would be ``/nas/x``, and ``a//b`` another object."""
    for url, says in (
        ("file://nas/x", "is on the host nas: a file here is file:///nas/x"),
        ("s3://b/a//k", "s3://b/a//k: a URL here has no empty part"),
        ("s3:b/k", "no URL for want of slashes"),
    ):  # fmt: skip
        result = CliRunner(env={"COLUMNS": "400"}).invoke(
            app, [command, *(word.format(url) for word in words)]
        )
        assert result.exit_code == 2 and says in " ".join(result.output.split()), result.output


def test_a_path_of_a_config_file_is_read_as_one_of_a_command(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "run.toml"
    for url, says in (("file://nas/x", "is on the host nas"), ("s3://b//k", "has no empty part")):
        file.write_text(f'checkpoint = "{url}"')
        code, output, _ = invoke("train", "--config", file)
        assert code == 2 and f"checkpoint: {url}" in output and says in output, output
    file.write_text('checkpoint = "file:///a%20b"\n')
    assert read_config(file, Run(Job())).checkpoint == Path("/a b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--token-file", "memory://a/b"), "memory://a/b: a token cannot be at a URL"),
        (
            ("train", "--storage", "disk", "--disk-path", "memory://a/b"),
            "memory://a/b: the directory of tables",
        ),
        (("profile", "--out", "s3://b/p"), "s3://b/p: the folder of --out cannot be at a URL"),
        (("verify", "--trace", "s3://b/p"), "s3://b/p: the folder of --trace cannot be at a URL"),
        (("train", "--checkpoint", "nosuch://b/p"), "nothing is written at nosuch://"),
        (("train", "--json", "http://127.0.0.1:9/x"), "nothing is written at http://"),
        (("train", "--config", "nosuch://b/p"), "nosuch://b/p cannot be opened"),
        (("train", "--plan", "nosuch://b/p.json"), "nosuch://b/p.json cannot be opened"),
        (("train", "--config", "missing.toml"), "missing.toml"),
    ],
)
def test_what_cannot_be_there_is_refused_by_name(words, message):
    code, output, _ = invoke(*words)
    assert code == 2 and message in output, output
