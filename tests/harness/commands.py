"""The commands of `tritonrec` and their options, for tests that walk through all of them."""

from typer.testing import CliRunner

from tritonrec.harness import cli
from tritonrec.harness.cli import app

COMMANDS = {name: cli.load(name) for name in cli.COMMANDS}
SMALL = "zipf:users=60,items=80,seed=3"
NEEDED = {
    "train": ["--data", SMALL], "verify": ["--data", SMALL], "lab": ["--data", SMALL],
    "profile": ["--data", SMALL], "trace": ["nowhere.pftrace"],
    "serve": ["nowhere"], "score": ["nowhere", "nowhere-else", "--model", "nowhere"],
    "reproduce": ["growth"],
    "export": ["nowhere", "nowhere-else"], "bisect": ["nowhere", "nowhere-else"],
}  # fmt: skip


def invoke(command, *arguments):
    """Run `command` with what it needs; the result's ``output`` has single spaces and no frames."""
    words = [command, *NEEDED.get(command, []), *map(str, arguments)]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words)
    return result.exit_code, " ".join(result.output.replace("│", " ").split()), result.exception


def options(kind):
    """(command, option) of every option that takes a `kind`."""
    return [
        (name, option.opts[0])
        for name, command in COMMANDS.items()
        for option in command.params
        if option.param_type_name == "option" and str(kind) in str(option.type_descriptor.annotation)
    ]
