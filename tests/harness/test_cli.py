"""Promise: the commands do what their help says, and bad input is one clear line and exit status 2."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tritonrec.distributed.signals import STOP_SIGNALS
from tritonrec.harness import cli
from tritonrec.harness.cli import app, declared

ROOT = Path(__file__).resolve().parents[2]
SMALL = "zipf:users=60,items=80,seed=3"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help_fills_the_lines_of_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in invoke("verify", "--help").stdout.splitlines()]
    assert "reference, and compares losses, dense parameters, keys, rows and optimizer" in lines


@pytest.mark.smoke
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_examples_of_a_command_are_in_its_help_and_have_options_that_it_has(name):
    text = invoke(name, "--help").stdout
    command = cli.load(name)
    known = {spelled for option in command.params for spelled in option.opts}
    assert cli.EXAMPLES[name]
    for example in cli.EXAMPLES[name]:
        assert f"tritonrec {example}" in text
        own, *words = example.partition(" -- ")[0].split()
        assert own == name and {word.partition("=")[0] for word in words if word[0] == "-"} <= known


def test_options_are_declared_as_the_commands_have_them():
    command = [sys.executable, "-c", "import declared; print(declared.text(), end='')"]
    written = subprocess.run(command, cwd=ROOT / "ci", capture_output=True, text=True, check=True).stdout
    assert written == declared.FILE.read_text(), "an option has changed: python ci/declared.py"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_is_the_same_as_declared_and_as_loaded(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    told = invoke(name, "--help").stdout
    monkeypatch.setattr(
        cli.Commands, "resolve_command", lambda self, ctx, args: (name, cli.load(name), args[1:])
    )
    assert told == invoke(name, "--help").stdout


def test_help_that_is_not_asked_for_is_not_told(tmp_path):
    """Of the script behind two dashes, or the value of an option."""
    (tmp_path / "script.py").write_text("import sys; print('given', sys.argv[1:])")
    script = invoke("emulate", "--", "python", tmp_path / "script.py", "--help")
    assert "Usage" not in script.stdout and "given ['--help']" in script.stdout
    result = invoke("train", "--data", "--help", "--steps", "1")
    assert result.exit_code == 2 and "Usage" not in result.stdout and "--data --help" in result.output


@pytest.mark.parametrize(
    ("words", "resume"),
    [([], False), (["--resume"], True), (["--resume=auto"], "auto"), (["--resume", "--steps", "3"], True)],
)
def test_resume_may_stand_alone(words, resume, monkeypatch):
    from tritonrec.harness.cli import train

    seen = []
    monkeypatch.setattr(train, "ready", lambda run: seen.append(run.resume) or sys.exit(0))
    invoke("train", "--data", SMALL, "--checkpoint", "/tmp/nowhere", *words)
    assert seen == [resume]


def test_what_stands_behind_two_dashes_is_no_option(monkeypatch):
    from tritonrec.harness.cli import emulate

    seen = []
    monkeypatch.setattr(emulate, "run", lambda command, _: seen.append(command) or 0)
    invoke("emulate", "--", "python", "train.py", "--resume")
    assert seen == [["python", "train.py", "--resume"]]


def test_resume_takes_no_other_word():
    result = invoke("train", "--data", SMALL, "--checkpoint", "/tmp/nowhere", "--resume=perhaps")
    assert result.exit_code == 2 and "--resume takes yes, no or auto, got 'perhaps'" in result.output


def test_help_begins_with_what_most_runs_need():
    from tritonrec.harness.cli.train import FIRST

    lines = invoke("train", "--help").stdout.splitlines()
    options = [line.split()[1] for line in lines if line.startswith("│ --")]
    assert options[: len(FIRST)] == [f"--{name.replace('_', '-')}" for name in FIRST]


@pytest.mark.slow
def test_commands_run_without_docstrings():
    """Under ``python -OO`` there are none."""
    code = "from tritonrec.harness.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-OO", "-c", code, "fetch", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Download a public log" in done.stdout, done.stderr


def test_an_interrupt_among_the_first_imports_has_no_traceback():
    interrupting = (
        "import runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["tritonrec"].split(":")
    for start in (
        "runpy.run_module('tritonrec', run_name='__main__')",
        f"from {module} import {function} as main; main()",
    ):
        done = subprocess.run([sys.executable, "-c", interrupting + start], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (130, ""), start


@pytest.mark.slow
def test_verify_writes_its_report(tmp_path):
    file = tmp_path / "report.json"
    result = invoke(
        "verify", "--data", SMALL, "--quick", "--modes", "nestpipe", "--world-size", 1,
        "--micro-batches", 2, "--steps", 2, "--json", file,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    cases = json.loads(file.read_text())["cases"]
    assert cases and all(case["identical"] for case in cases)
    assert {case["mode"] for case in cases if case["variant"] != "hash-embedding"} == {"nestpipe"}


def test_train_reports_and_saves(tmp_path):
    summary, trace = tmp_path / "summary.json", tmp_path / "run.pftrace"
    arguments = [
        "train", "--data", SMALL, "--batch-size", 16, "--max-seq-len", 10, "--negatives", 4, "--dim", 8,
        "--checkpoint", tmp_path / "checkpoint", "--json", summary,
    ]  # fmt: skip
    result = invoke(*arguments, "--steps", 3, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert "popularity" in result.stdout
    assert json.loads(summary.read_text())["step"] == 3
    assert invoke("trace", trace).exit_code in (0, 1)
    resumed = invoke(*arguments, "--steps", 5, "--resume", "--mode", "reference")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads(summary.read_text())["step"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "csv:/nowhere.csv"], "/nowhere.csv"),
        (["train", "--data", "movies"], "unknown data 'movies'"),
        (["train", "--data", SMALL, "--steps", "2", "--resume"], "directory of a checkpoint"),
        (["train", "--data", SMALL, "--lr", "0"], "learning rate must be positive"),
        (
            ["train", "--data", SMALL, "--lr", "0", "--lr-schedule", "cosine"],
            "learning rate must be positive",
        ),
        (
            ["train", "--data", SMALL, "--mode", "reference", "--consistency", "window"],
            "reference of 'batch'",
        ),
        (["train", "--data", SMALL, "--mode", "sequential", "--depth", "3"], "depth is for dbp and nestpipe"),
        (["verify", "--world-size", "none"], "whole numbers from 1"),
        (["verify", "--modes", "fast"], "takes some of dbp, fwp, nestpipe"),
        (["verify", "--quick", "--full"], "exclude each other"),
        (["trace", "/nowhere.pftrace"], "/nowhere.pftrace"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_current_folder_that_is_gone_is_said(tmp_path):
    """Libraries that torch loads end the process there."""
    (tmp_path / "gone").mkdir()
    code = "import os; os.rmdir(os.getcwd()); from tritonrec.harness.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "--data", "zipf"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path / "gone", env=paths, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "the current folder is not there any more" in done.stderr, done.stderr


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_as_an_error_does(monkeypatch, number, status):
    """So that what it has built is taken down; SIGHUP stays ignored where `nohup` says so."""
    ended = []

    def command():
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            ended.append(number)

    monkeypatch.setattr(cli, "app", command)
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    try:
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == status and ended == [number]
        signal.signal(number, signal.SIG_IGN)
        monkeypatch.setattr(cli, "app", lambda: os.kill(os.getpid(), number))
        cli.main()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupt_that_becomes_an_error_is_one_line(interrupted, monkeypatch, capsys):
    """Modules in C make an ImportError of it."""

    def command():
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        raise ImportError("half imported")

    monkeypatch.setattr(cli, "app", command)
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(SystemExit if interrupted else ImportError) as ended:
            cli.main()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if interrupted:
        assert ended.value.code == 130
        assert capsys.readouterr().err == "interrupted: ImportError: half imported\n"
