"""Promise: every block of README.md and docs runs as pasted: Python a page at a time from top to bottom,
commands as far as their arguments, and those of `TINY` on small data; what cannot run here is in `NOT_RUN`.

A page's blocks share their names, as a reader's session does, and have nothing else. A plain block right
behind a Python block is what that prints.
"""

import csv
import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from speeds import slow_except

from tritonrec.harness.cli import COMMANDS, load
from tritonrec.harness.cli.train import RUN
from tritonrec.harness.train.config import read_config
from tritonrec.harness.train.run import StoppingRule
from tritonrec.harness.verify import faults
from tritonrec.harness.verify.corpus import bug

ROOT = Path(__file__).parents[2]
PAGES = {path.stem if path.parent.name == "docs" else path.name: path
         for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}  # fmt: skip
NOT_RUN = {
    "emulator 1": "an excerpt of a kernel",
    "scale 1": "eight ranks; tests/pipeline/test_replicas.py has four",
    "serving 8": "it uploads; tests/serving/test_hub.py does so to a fake",
}
"""Python blocks that are only looked at."""
SLOW = {
    "README.md", "data", "dlrm", "emulator", "models", "server", "serving", "slipstream", "training",
    "tutorial", "verifying",
}  # fmt: skip
"""Pages of more than a second or two; `make test` compiles their blocks."""
OWN_PROCESS = {"emulator"}
"""Pages that need Triton as it is; the test process has it interpret."""
LEFT = {
    "README.md": "result.step == 19 and ranks.world_size == 1",
    "checkpoints": "len(rows) == 5 and found.step == 3 and found.tables['items']['rows'].shape == (5, 8)",
    "embedding": "ids.tolist() == [-3, 7, 8, 9, 2**63 - 1] and weights.shape == (5, 8)",
    "faults": "result.step == 2 and __import__('pathlib').Path('checkpoints').is_dir() and last_step == 20",
    "migrate": "ebc.fused_optimizer.updates == table.fused_optimizer.updates == 1 and len(pooled) == 2",
    "ops": "inserted.tolist() == [True] * 3 and own_sums.tolist() == [[3, -300], [0, 0], [2**40, -(2**62)]]",
    "server": "answer['step'] == 1 and len(items) == 2",
    "serving": "probabilities.shape == (8,) and rows.shape == (5, 4)",
    "slipstream": "left.num_steps > 0 and found.kept is not None",
    "traces": "__import__('pathlib').Path('run.pftrace').stat().st_size > 1000 and stages.count('step') == 3",
    "tutorial": "result.step == 9 and 'NDCG@10' in metrics and trainer.next_step == 10",
    "verifying": "report.passed and len(report.cases) > 2 and callable(test_my_model)",
}
"""By page what holds of its names at the end."""
TINY = {
    "train": "--steps 2 --batch-size 8 --dim 8 --max-seq-len 10",
    "trace": "",
    "simulate": "",
}
"""What is added to a command of the pages to run it in seconds; others take minutes, root or a GPU."""
LONG = {
    "--user-column", "--warm-start", "--config", "--resume", "--slipstream", "--workers", "--measured",
    "--plan", "--device",
}  # fmt: skip
"""Options of commands that take files of earlier ones, minutes or a GPU."""
FILES = ("lab.json", "nestpipe.pftrace", "run.toml", "clicks.csv", "checkpoints")
"""That commands of the pages read."""
PROGRAMS = "tritonrec|python|printf|torchrun|pytest|bash|make|pip|sbatch|docker|kubectl"
COMMAND = re.compile(rf"(\$ |(sudo )?(\S*/)?({PROGRAMS}) )")
"""How a block of commands begins."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is its first one's number, `number` counts the page's Python blocks."""

    page: str
    language: str
    text: str
    line: int
    number: int
    printed: str = ""

    @property
    def name(self) -> str:
        return f"{self.page} {self.number}"


def blocks_of(page: str) -> list[Block]:
    text = PAGES[page].read_text()
    found, number, end = [], 0, 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, body = match[1], match[2]
        if (
            found
            and found[-1].language == "python"
            and not language
            and not text[end : match.start()].strip()
        ):
            found[-1] = replace(found[-1], printed=body)
        found.append(Block(page, language, body, text[: match.start()].count("\n") + 2, number))
        number += language == "python"
        end = match.end()
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def lines_of(block: Block) -> str:
    """With the line numbers of the page, for tracebacks."""
    return "\n" * (block.line - 1) + block.text


def run(page: str, capture=lambda: "") -> dict[str, object]:
    """The names that a page's blocks leave behind."""
    names = {"__name__": "__main__"}
    examples = doctest.DocTestParser()
    for block in PYTHON:
        if block.page != page or block.name in NOT_RUN:
            continue
        if block.text.startswith(">>> "):
            test = examples.get_doctest(block.text, names, block.name, str(PAGES[page]), block.line - 1)
            runner = doctest.DocTestRunner()
            report: list[str] = []
            assert runner.run(test, out=report.append, clear_globs=False).failed == 0, "".join(report)
            names |= test.globs
            continue
        capture()
        exec(compile(lines_of(block), str(PAGES[page]), "exec"), names)
        if block.printed:
            shown = block.printed.splitlines()
            shown = shown[:-1] if shown[-1] == "..." else shown
            assert capture().splitlines()[: len(shown)] == shown
    return names


def type_in(block: Block) -> None:
    """Run the commands behind ``$``; each prints what stands below it."""
    for part in block.text.split("$ ")[1:]:
        command, _, printed = part.partition("\n")
        run_by = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
        done = subprocess.run(
            run_by, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        )  # fmt: skip
        assert done.stdout.split() == printed.split(), command  # a bar that is done leaves an empty line


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder for what a page writes; torchrun's variables, process groups and bugs are as before."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that one that is not there is taken away again
        monkeypatch.delenv(name)
    monkeypatch.setattr(bug, "CORPUS", [*bug.CORPUS])
    monkeypatch.setattr(faults, "SOURCES", {**faults.SOURCES})
    state = torch.random.get_rng_state()
    yield tmp_path
    torch.random.set_rng_state(state)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_python_block_compiles():
    for block in PYTHON:
        if block.name not in NOT_RUN and not block.text.startswith(">>> "):
            compile(lines_of(block), str(PAGES[block.page]), "exec")


def test_the_lists_name_what_is_there():
    names = {block.name for block in PYTHON} | set(PAGES)
    assert set(NOT_RUN) <= names and set(PAGES) >= SLOW


WITH_PYTHON = sorted({block.page for block in PYTHON} - OWN_PROCESS)


@pytest.mark.every_case
@pytest.mark.parametrize("page", slow_except([page for page in WITH_PYTHON if page not in SLOW], WITH_PYTHON))
def test_a_page_runs_as_pasted(page, elsewhere, trackers, capsys):
    if page == "data":  # its Python reads what its commands have made
        type_in(next(block for block in BLOCKS if block.page == page and "small-parquet" in block.text))
    names = run(page, lambda: capsys.readouterr().out)
    if page == "training":
        rows = csv.DictReader(Path("metrics.csv").read_text().splitlines())
        assert [row["step"] for row in rows] == [str(step) for step in range(1, 9)]
        assert trackers == [(names["values"], 8)] * 3 and "tokens_per_second" in names["values"]
        saved: list[object] = []
        names["trainer"].load("checkpoints", saved.append)
        assert saved == [{"early_stopping": names["stopping"].state_dict()}]
        assert names["stopping"].step == names["steps"].stop == names["trainer"].next_step
    if page in LEFT:
        assert eval(LEFT[page], names), LEFT[page]


@pytest.fixture
def trackers(monkeypatch):
    """What trackers are sent; none of them is installed here."""
    sent: list[tuple[dict[str, float], int]] = []
    run = SimpleNamespace(log=lambda values, step: sent.append((values, step)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: run))
    mlflow = SimpleNamespace(start_run=lambda: None, end_run=lambda: None, log_metrics=run.log)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    comet = SimpleNamespace(log_metrics=run.log, end=run.finish)
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=lambda project_name, online: comet))
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(OWN_PROCESS))
def test_a_page_runs_in_a_process_of_its_own(page, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parent, ROOT / "tests", ROOT)))
    program = f"import test_docs; test_docs.run({page!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_config_file_of_the_training_page(tmp_path):
    (block,) = (block for block in BLOCKS if block.language == "toml")
    (tmp_path / "run.toml").write_text(block.text)
    found = read_config(tmp_path / "run.toml", RUN)
    assert found.early_stopping == StoppingRule("NDCG@10", 3) and found.job.policy.eviction.capacity == 1000


def test_the_costs_of_the_simulator_page():
    (block,) = (block for block in BLOCKS if block.language == "json")
    costs = json.loads(block.text)
    assert costs["world_size"] == 4 and costs["measured"][0]["stages"].keys() == {"compute", "exchange"}


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command: of blocks that begin with one, and of `tritonrec ...` in the text."""
    for block in BLOCKS:
        if not block.language and COMMAND.match(block.text):
            lines = block.text.replace("\\\n", " ").splitlines()
            if lines[0].startswith("$ "):
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            yield from ((block.page, shlex.split(line, comments=True)) for line in lines)
    for page, path in PAGES.items():
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for match in re.finditer(r"`(tritonrec [^`]*)`", text):
            words = shlex.split(match[1], comments=True)
            if words[1] in COMMANDS and len(words) > 2:
                yield page, words


ALL_COMMANDS = list(commands())


def plain(words: list[str]) -> list[str]:
    """`tritonrec ...` without what stands around it: sudo, torchrun, a folder, a redirection."""
    words = words[words[0] == "sudo" :]
    if words[0] == "torchrun":
        words = ["python", *words[words.index("--nproc-per-node") + 2 :]]
    if words[:3] == ["python", "-m", "tritonrec"]:
        words = words[2:]
    words = [Path(words[0]).name, *words[1:]]
    return words[: words.index(">")] if ">" in words else words


def check(words: list[str]) -> None:
    """Fails where the program, an option of it, or the value of one is unknown."""
    name, *arguments = plain(words)
    if name == "tritonrec":
        load(arguments[0]).make_context(*arguments[:1], arguments[1:])
    elif name == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif name in ("python", "bash"):
        module = arguments[:1] == ["-m"]
        path = f"{arguments[1].replace('.', '/')}.py" if module else arguments[0]
        source = (ROOT / path).read_text()
        if path.endswith(".sh"):
            source += (ROOT / "ci/benchmarks/bench_torchrec.py").read_text()
        if "options_of(" in source:  # of `ci/benchmarks/frame.py`, which gives it to all
            source += '"--json"'
        for option in (each for each in arguments if each.startswith("--")):
            assert f'"{option}"' in source or f"{option[2:].replace('-', '_')}:" in source, option
    elif name == "pytest":
        assert all((ROOT / each).exists() for each in arguments if each.startswith("tests/"))
    elif name in ("sbatch", "docker", "kubectl"):
        assert all((ROOT / each).is_file() for each in arguments if each.startswith("docs/"))
    else:
        assert name in ("pip", "ls", "printf"), name


@pytest.mark.parametrize("page", sorted({page for page, _ in ALL_COMMANDS}))
@pytest.mark.every_case
def test_the_commands_of_a_page_exist_with_their_options(page, elsewhere):
    for name in FILES:
        Path(name).touch()
    for where, words in ALL_COMMANDS:
        if where == page:
            try:
                check(words)
            except (Exception, SystemExit) as error:
                pytest.fail(f"{' '.join(words)}: {error}")


SMALL = [
    plain(words)
    for _, words in ALL_COMMANDS
    if words[0] != "torchrun"
    and plain(words)[0] == "tritonrec"
    and plain(words)[1] in TINY
    and not LONG & set(words)
]


@pytest.mark.slow
@pytest.mark.parametrize("words", SMALL, ids=" ".join)
def test_a_command_runs_on_small_data(words, elsewhere):
    if "nestpipe.pftrace" in words:
        shutil.copy(ROOT / "traces/nestpipe.pftrace", elsewhere)
    if "DIR" in words:
        Path("DIR").mkdir()
    command = [*words, *shlex.split(TINY[words[1]])]
    if words[1] == "train":
        data = "criteo:samples=200,scale=0.0001" if "dlrm" in words else "zipf:users=40,items=60,ratings=1"
        command += ["--data", data]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] or done.stdout[-2000:]
