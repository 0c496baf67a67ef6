"""Promise: what is logged can be read back, goes on after a restart, and takes nobody's file."""

import copy
import csv
import json
import math
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from trainer_parts import batches, parts, trainer

from tritonrec import Communicators, optional
from tritonrec.checkpoint import Saver
from tritonrec.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger

pytestmark = pytest.mark.smoke
FILES = {"csv": CSVLogger, "jsonl": JSONLinesLogger}


def logged(kind, path, steps, purge_step=None):
    logger = FILES[kind](path, purge_step)
    for step in steps:
        logger.log(step, {"loss": 1 / step})
        if step % 2 == 0:
            logger.log(step, {"HR@10": step / 100})
    logger.close()


def rows(kind, path):
    """(step, names and numbers) of each row."""
    if kind == "jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with path.open(newline="") as file:
            found = [
                {name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)
            ]
    return [(row.pop("step"), row) for row in found]


def expected(steps):
    return [
        each
        for step in steps
        for each in [(step, {"loss": 1 / step}), *([] if step % 2 else [(step, {"HR@10": step / 100})])]
    ]


@pytest.mark.parametrize("kind", FILES)
def test_every_row_is_there_with_all_digits_also_when_a_name_is_new(tmp_path, kind):
    logged(kind, tmp_path / "new" / "log", range(1, 6))
    assert rows(kind, tmp_path / "new" / "log") == expected(range(1, 6))


@pytest.mark.parametrize("kind", FILES)
def test_a_row_can_be_read_before_the_end(tmp_path, kind):
    logger = FILES[kind](tmp_path / "log")
    logger.log(3, {"loss": 0.1})
    assert rows(kind, tmp_path / "log") == [(3, {"loss": 0.1})]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("torn", ["", "7,0.", '{"step": 9, "lo'])
def test_a_run_that_goes_on_replaces_the_later_rows(tmp_path, kind, torn):
    logged(kind, tmp_path / "log", range(1, 8))
    with (tmp_path / "log").open("a") as file:
        file.write(torn)
    logged(kind, tmp_path / "log", range(5, 9), purge_step=5)
    assert rows(kind, tmp_path / "log") == expected(range(1, 9))


@pytest.mark.parametrize("kind", FILES)
def test_a_run_that_goes_on_may_have_no_log_yet(tmp_path, kind):
    logged(kind, tmp_path / "log", [5], purge_step=5)
    assert rows(kind, tmp_path / "log") == expected([5])


@pytest.mark.parametrize("kind", FILES)
def test_a_log_stays_where_it_is_when_the_program_changes_its_folder(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = FILES[kind]("log")
    made.log(1, {"loss": 0.5})
    monkeypatch.chdir(tmp_path.parent)
    made.log(2, {"loss": 0.25, "new": 3.0})
    made.close()
    assert rows(kind, tmp_path / "log") == [(1, {"loss": 0.5}), (2, {"loss": 0.25, "new": 3.0})]


@pytest.mark.parametrize("kind", FILES)
def test_the_log_of_another_run_is_kept(tmp_path, kind):
    (tmp_path / "log").write_text("theirs")
    with pytest.raises(FileExistsError, match=f"{tmp_path / 'log'} is there already"):
        FILES[kind](tmp_path / "log")
    assert (tmp_path / "log").read_text() == "theirs"


def test_a_table_that_is_no_log_is_kept(tmp_path):
    (tmp_path / "log").write_text("user,item\n1,2\n")
    with pytest.raises(ValueError, match="its first column is not 'step'"):
        CSVLogger(tmp_path / "log", purge_step=1)
    assert (tmp_path / "log").read_text() == "user,item\n1,2\n"


@pytest.mark.parametrize(
    "theirs",
    [
        "notes\n",
        '{"name": "ann"}\n',
        '{"step": 1}\n[2]\n',
        "x\n" * 3,
        '{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n',  # torn, and not at the end
        '{"step": "1"}\n',
        "\xff\n",
        "[" * 9999,
    ],
)
def test_lines_that_are_no_log_are_kept(tmp_path, theirs):
    (tmp_path / "log").write_bytes(theirs.encode("latin-1"))
    with pytest.raises(ValueError, match=r"log:\d is no line of a log"):
        JSONLinesLogger(tmp_path / "log", purge_step=5)
    assert (tmp_path / "log").read_bytes() == theirs.encode("latin-1")


@pytest.mark.parametrize("kind", FILES)
def test_a_full_disk_is_named_by_its_file(tmp_path, kind, limited_files):
    logger = FILES[kind](tmp_path / "log")
    with limited_files(100):
        for fails in (lambda: [logger.log(step, {"loss": 1 / 3}) for step in range(1, 9)], logger.close):
            with pytest.raises(OSError, match="File too large") as full:
                fails()
            assert full.value.filename == str(tmp_path / "log")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_has_files_threads_or_groups_of_a_process_has_no_copy(tmp_path, copied):
    made = parts()
    with trainer(made, "reference") as training, training.saver(tmp_path / "run") as saver:
        loggers = CSVLogger(tmp_path / "log.csv"), JSONLinesLogger(tmp_path / "log.jsonl")
        for each in (*loggers, saver, Saver(tmp_path / "own"), Communicators.local()):
            with pytest.raises(TypeError, match=f"a {type(each).__name__} has no copy and no pickle: "):
                copied(each)


def test_json_has_no_nan(capsys):
    logger = JSONLinesLogger("-")
    logger.log(1, {"loss": 0.5, "grad_norm": math.inf})
    logger.close()
    assert capsys.readouterr().out == '{"step": 1, "loss": 0.5, "grad_norm": null}\n'


def test_tensorboard_gets_every_number(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, *scalar):
            calls.append(scalar)

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    logger = TensorBoardLogger(tmp_path, purge_step=3)
    logger.log(3, {"loss": 0.5, "lr": 0.1})
    logger.close()
    assert calls == [(str(tmp_path), 3), ("loss", 0.5, 3), ("lr", 0.1, 3), "closed"]


def test_tensorboard_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install tensorboard, or pip install 'tritonrec\[log"):
        TensorBoardLogger(tmp_path)


@pytest.mark.slow
def test_tensorboard_itself_reads_it(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    for steps, purge in ((range(1, 6), None), (range(4, 8), 4)):
        logger = TensorBoardLogger(tmp_path, purge)
        for step in steps:
            logger.log(step, {"loss": step / 8})
        logger.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(step, step / 8) for step in range(1, 8)]


@pytest.mark.parametrize("whose", ["a stand-in", "Lightning"])
def test_a_data_module_and_a_logger_of_lightning_fit(tmp_path, whose):
    logged, base = [], object
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((step, metrics["loss"])))
    if whose == "Lightning":
        lightning = pytest.importorskip("pytorch_lightning", reason="pip install 'tritonrec[heavy]'")
        from pytorch_lightning.loggers import CSVLogger as LightningLogger

        logger, base = LightningLogger(tmp_path, name="", version=""), lightning.LightningDataModule

    class Log(base):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(range(6), batch_size=None, collate_fn=of_steps)

    of_steps = batches(6).__getitem__
    with trainer(parts()) as plain:
        expected = [(result.step + 1, result.loss) for result in plain.run(batches(6))]
    with trainer(parts()) as trained:
        for result in trained.run(Log().train_dataloader()):
            logger.log_metrics(result.values(), step=result.step + 1)
    if whose == "Lightning":
        logger.finalize("success")
        with open(tmp_path / "metrics.csv", newline="") as file:
            logged = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert logged == expected
