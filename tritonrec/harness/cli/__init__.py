"""The `tritonrec` command. The module of a command is imported when it is called: most of them load torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import OptionInfo

from ...host_memory import keep_freed_memory
from ...version import __version__
from .declared import FILE, check_numbers, command_of

COMMANDS = {
    "verify": "Prove that the pipelined modes equal synchronous training in every bit.",
    "fuzz": "Try random configurations against synchronous training, and print the smallest that fails.",
    "train": "Train a model in any mode; print loss and metrics beside those of a ranking without training.",
    "export": "Write a checkpoint's tables and dense model for serving and other tools.",
    "serve": "Serve an exported model over HTTP, with the bits of its Predictor.",
    "score": "Score the rows of a Parquet file into another one; a killed run goes on.",
    "bisect": "Find the first difference of two runs: step, tensor or table, key, column, both values.",
    "trace": "Time per lane, exposed communication, hidden lookup; check that every dependency was honoured.",
    "bench": "Time the kernels beside their peers; print ratios, losses as plainly as wins.",
    "report": "Recorded figures on one page: contract, faults, benchmarks over commits, kernels, traces.",
    "profile": "Show where a training step goes: a trace with lanes and operators, and a flame graph.",
    "lab": "Run every mode over rate-limited links; print exposed, hidden and sent parts.",
    "simulate": "Model the cluster of the NestPipe paper; print paper, model and error side by side.",
    "reproduce": "Make figures of the five papers again; print paper, record and this machine side by side.",
    "plan": "Tell what a run will need of memory and time, or which switches suit measured costs.",
    "serve-bench": "Serve a DLRM whose lookups have a bounded lag; print latency and throughput by bound.",
    "emulate": "Run tests or a script with Triton's kernels compiled for a GPU and executed on the CPU.",
    "warmup": "Compile the kernels of training and serving, so that the first run does not.",
    "fetch": "Download a public log into the cache, once, and check it.",
    "doctor": "Describe this machine, and test whether batch invariance holds on it.",
}
"""By name the first sentence of its help; the function of that name is in the module of that name."""

EXAMPLES = {
    "verify": ["verify --quick", "verify --data ml-100k --inject-faults --json report.json"],
    "fuzz": ["fuzz --minutes 1", "fuzz --configurations 500 --seed 7 --json fuzz.json"],
    "train": [
        "train --data zipf --steps 50",
        "train --data ml-100k --checkpoint run --resume=auto",
        "train --data ml-100k --world-size 2 --trace run.pftrace",
        "train --model dlrm --data criteo --optimizer rowwise_adagrad",
    ],
    "export": ["export run exported", "export run exported --format safetensors --metadata"],
    "serve": ["serve exported", "serve exported --cached run --port 8080"],
    "score": ["score users.parquet best.parquet --model exported --k 100"],
    "bisect": ["bisect run-a run-b"],
    "trace": ["trace run.pftrace --png run.png"],
    "bench": ["bench --only unique", "bench --repeat 3 --json before.json", "bench --compare before.json"],
    "report": ["report --html report.html"],
    "profile": ["profile --data ml-100k --steps 20 --out profile"],
    "lab": ["lab --data zipf --world-size 2 --rate 200"],
    "simulate": ["simulate --png tables.png"],
    "reproduce": ["reproduce list", "reproduce simulate", 'reproduce "Fig. 9" --folder figures'],
    "plan": ["plan run.toml --world-size 2", "plan --trace run.pftrace --world-size 8"],
    "serve-bench": ["serve-bench --scenarios none"],
    "emulate": ["emulate -- python my_kernel.py"],
    "warmup": ["warmup --models hstu,dlrm --optimizers adam"],
    "fetch": ["fetch ml-100k"],
    "doctor": ["doctor"],
}
"""Calls that its help shows, by name of the command."""

ALONE = {"--resume": "yes"}
"""Options with a value that they have where none is given; a value is joined to them by ``=``."""


def load(name: str) -> Any:
    """The command `name` of `COMMANDS`, with all its options."""
    return _made(name, function_of(name))


def told(name: str, words: list[str]) -> Any:
    """The command `name` as it is declared, for its help and wrong options; with right ones it is called."""
    declarations = json.loads(FILE.read_text())
    command = _made(name, command_of(declarations[name]))

    def invoke(ctx: Any) -> Any:
        check_numbers(ctx.params, declarations["train"])
        loaded = load(name)
        _begun.append(name)
        return loaded.invoke(loaded.make_context(name, list(words), parent=ctx.parent))

    command.invoke = invoke
    return command


def function_of(name: str) -> Any:
    """The function that is the command `name`."""
    module = name.replace("-", "_")
    return getattr(import_module(f".{module}", __name__), module)


def _made(name: str, function: Any) -> Any:
    paragraphs = cleandoc(function.__doc__ or COMMANDS[name]).split("\n\n")  # python -OO drops docstrings
    alone = typer.Typer(add_completion=False)
    # typer keeps the line ends of the source, and a terminal of 80 columns would add its own
    text = [" ".join(each.split()) for each in paragraphs]
    examples = "\n".join(f"  tritonrec {each}" for each in EXAMPLES[name])
    _read_paths(function)
    shown = "\n\n".join([*text, f"\b\nExamples:\n{examples}"])
    alone.command(name, cls=Command, help=shown)(function)
    return get_command(alone)


def _read_paths(function: Any) -> None:
    """Every path of a command goes through `given_path`, before typer makes one slash of a URL's two."""
    from ...files.places import given_path

    def read(text: Any) -> Path:
        try:
            return given_path(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    function.__annotations__ = get_type_hints(function, include_extras=True)
    for hint in function.__annotations__.values():
        kind, *infos = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if Path in (kind, *get_args(kind), *(inner for each in get_args(kind) for inner in get_args(each))):
            for info in infos:
                info.parser = read
                if isinstance(info, OptionInfo):  # the metavar of an argument is its name
                    info.metavar = "<path>"


class Command(TyperCommand):
    """An option of `ALONE` may stand without a value: ``--resume`` is ``--resume=yes``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of its base."""
        ended = args.index("--") if "--" in args else len(args)
        options = [f"{each}={ALONE[each]}" if each in ALONE else each for each in args[:ended]]
        return super().parse_args(ctx, options + args[ended:])


class Commands(TyperGroup):
    """Lists the commands, and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As of its base."""
        if args and args[0] in COMMANDS:
            from ...files.places import require_current_folder

            try:
                require_current_folder()
            except FileNotFoundError as error:
                raise typer.BadParameter(str(error)) from None
            name, *words = args
            self.commands[name] = told(name, words)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="tritonrec",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"tritonrec {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, and end.")
    ] = False,
) -> None:
    """Train large recommendation models with nested pipelining, and prove it bit for bit."""


_begun: list[str] = []
"""The command that runs; before it does there is nothing to close."""
AGAIN_SECONDS = 0.1


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported in a frame of `main`."""
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    """End as after an exception: ranks, network namespaces and temporary folders go.

    A module that is imported is imported first: torch, say, swallows an exception in its import of numpy,
    and goes on with half of it.
    """
    if _imports(frame):
        if not _begun:
            os._exit(128 + number)
        again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    elif number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    else:
        raise SystemExit(128 + number)


def main() -> None:
    """Entry point of the console script."""
    interrupts = list[int]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        _leave(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _leave)
    keep_freed_memory()
    try:
        app()
    except Exception as error:
        # Modules in C make an ImportError of a Ctrl-C while they are imported, and closing may fail after it.
        if not interrupts:
            raise
        print(f"interrupted: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from error
