"""NDCG@10 of GRU4Rec, SASRec and HSTU on MovieLens-100K beside RecBole's: one split, one ranking, five seeds.

    pip install --no-deps recbole==1.2.1 colorlog colorama texttable scikit-learn scipy joblib threadpoolctl \
        cloudpickle tqdm thop tabulate
    python ci/benchmarks/quality.py --json ci/baselines/quality.json      # 45 minutes of CPU time
    python ci/benchmarks/quality.py --table ci/baselines/quality.json     # the table of docs/models.md
    python ci/benchmarks/quality.py --evaluation      # time of an evaluation beside RecBole's

Each user's last film is the test, the one before it the validation, the rest trains. Ranked is the whole
catalogue without the films that the user has seen (`tritonrec.data.evaluate`), by RecBole's scores too. All
systems get the same batches in the same order: the last 51 training films of each user, every position a
target. RecBole's own loader makes a sequence of 50 films of every target and takes a hundred times as long,
so model, initial values and loss (cross entropy over the whole catalogue) are RecBole's, the batches are
not. Ours have a softmax over sampled negatives. Sizes and optimizer (Adam) are the same, feed-forward
widths are each one's default. HSTU has its relative bias and dropout of its input, as published. Each
system's learning rate and dropout are the best of `TUNED` by the validation's NDCG@10, on a seed that is
none of the five. The test is read at the epoch that the validation likes best.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame import by_turns, example, options_of, over
from torch import Tensor

import tritonrec
from tritonrec import nn, ops
from tritonrec.data import Interactions, JaggedBatch, Lookup, NextItemLoader, evaluate, load_interactions

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = {
    "recbole": "RecBole's SASRec", "recbole-gru4rec": "RecBole's GRU4Rec", "sasrec": "SASRec",
    "gru4rec": "GRU4Rec", "hstu": "HSTU",
}  # fmt: skip
DIM, LENGTH, LAYERS, HEADS, BATCH, NEGATIVES = 64, 50, 2, 2, 64, 64
EPOCHS, EVERY = 18, 3
TUNED = ((3e-3, 0.2), (3e-3, 0.5))
TUNING_SEED, SEEDS = 100, (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Split:
    """The log without its tests, from which all training comes, and the whole one, on which is tested."""

    training: Interactions
    whole: Interactions

    @classmethod
    def of(cls, data: str) -> Split:
        log = load_interactions(data)
        sequences = log.sequences
        rows = np.sort(np.delete(sequences.rows, sequences.offsets[1:] - 1))
        return cls(Interactions(log.user[rows], log.item[rows], log.timestamp[rows]), log)


@dataclass(frozen=True)
class Setting:
    """Of one training."""

    system: str
    lr: float
    dropout: float
    seed: int


Score = Callable[..., Tensor]
"""(histories, catalogue=the ids to score (I,)) -> (B, I)."""


def ours(setting: Setting, loader: NextItemLoader) -> Iterator[Score]:
    """A score function after each epoch."""
    torch.manual_seed(setting.seed)
    if setting.system == "sasrec":
        model = nn.PaddedNextItem(example().SASRec(setting.dropout), LENGTH)
        nn.convert(model)
    elif setting.system == "gru4rec":
        model = example("gru4rec").model_of(setting.dropout)
    else:
        width = DIM // HEADS
        drops = {"dropout": setting.dropout, "input_dropout": setting.dropout}
        sizes = nn.HSTUConfig(DIM, LAYERS, HEADS, width, width, LENGTH, **drops, relative_bias=True)
        model = nn.HSTU(sizes)
    rule = tritonrec.RowOptimizer("adam", setting.lr)
    tables = tritonrec.HashTableCollection([tritonrec.FeatureConfig("item", DIM)], rule, seed=setting.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.lr)
    window = tritonrec.WindowConfig(1, seed=setting.seed)

    def score(history: JaggedBatch, catalogue: Tensor) -> Tensor:
        rows = tables.peek({"item": Lookup(torch.cat([history.ids, catalogue]))})["item"]
        rows, items = rows.split([len(history.ids), len(catalogue)])
        with torch.no_grad():
            hidden = model.encode(history, rows)
        return ops.linear(hidden[history.offsets[1:] - 1], items, None)

    ranks = tritonrec.Communicators.local()
    with tritonrec.Trainer(model, tables, optimizer, ranks, "sequential", window) as trainer:
        for epoch in range(EPOCHS):
            first = epoch * loader.steps_per_epoch
            model.train()
            for _ in trainer.run(loader.batch(first + i) for i in range(loader.steps_per_epoch)):
                pass
            model.eval()
            yield score


def bring_back_names() -> None:
    """Numpy 2 has lost some that RecBole wants."""
    gone = {"float_": np.float64, "complex_": np.complex128, "object_": np.object_, "unicode_": np.str_}
    for name, kind in gone.items():
        setattr(np, name, kind)


def recbole(setting: Setting, loader: NextItemLoader, items: Tensor) -> Iterator[Score]:
    """The same of RecBole's models; `items` are all ids, ascending."""
    bring_back_names()
    from recbole.config import Config
    from recbole.model import sequential_recommender

    name = "GRU4Rec" if setting.system == "recbole-gru4rec" else "SASRec"

    class EveryPosition(getattr(sequential_recommender, name)):  # type: ignore[misc]
        """Hidden states (B, T, D) of all positions in place of the last one's."""

        def gather_indexes(self, output: Tensor, index: Tensor) -> Tensor:
            return output

    class Catalogue:
        def num(self, field: str) -> int:
            return len(items) + 1  # 0 is the padding

    chosen = {
        "hidden_dropout_prob": setting.dropout, "attn_dropout_prob": setting.dropout,
        "dropout_prob": setting.dropout, "hidden_size": DIM if name == "SASRec" else example("gru4rec").WIDTH,
        "n_layers": LAYERS, "n_heads": HEADS, "MAX_ITEM_LIST_LENGTH": LENGTH, "use_gpu": False,
        "train_neg_sample_args": None, "device": "cpu",
    }  # fmt: skip
    config = Config(model=name, dataset="ml-100k", config_dict=chosen)
    torch.manual_seed(setting.seed)
    model = EveryPosition(config, Catalogue())
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.lr)

    def padded(values: Tensor, offsets: Tensor) -> Tensor:
        places = torch.searchsorted(items, values) + 1
        return torch.nn.utils.rnn.pad_sequence(places.split(offsets.diff().tolist()), batch_first=True)

    def hidden(batch: JaggedBatch) -> Tensor:
        ids = torch.nn.functional.pad(padded(batch.ids, batch.offsets), (0, LENGTH))[:, :LENGTH]
        return model(ids, batch.offsets.diff())

    def score(history: JaggedBatch, catalogue: Tensor) -> Tensor:
        with torch.no_grad():
            last = hidden(history)[torch.arange(history.num_samples), history.offsets.diff() - 1]
            return last @ model.item_embedding.weight[torch.searchsorted(items, catalogue) + 1].t()

    for epoch in range(EPOCHS):
        model.train()
        for i in range(loader.steps_per_epoch):
            batch = loader.batch(epoch * loader.steps_per_epoch + i)
            labels = torch.nn.functional.pad(padded(batch.labels, batch.offsets), (0, LENGTH))[:, :LENGTH]
            logits = hidden(batch)[labels > 0] @ model.item_embedding.weight.t()
            optimizer.zero_grad()
            model.loss_fct(logits, labels[labels > 0]).backward()
            optimizer.step()
        model.eval()
        yield score


def train(setting: Setting, split: Split) -> dict[str, Any]:
    """One training: the best epoch by validation, with its test."""
    loader = NextItemLoader(split.training, BATCH, LENGTH, NEGATIVES, setting.seed)
    tested = NextItemLoader(split.whole, BATCH, LENGTH, 0, setting.seed)
    items = torch.from_numpy(np.unique(split.whole.item))
    epochs = (
        recbole(setting, loader, items) if setting.system.startswith("recbole") else ours(setting, loader)
    )
    started, curve = time.process_time(), []
    for epoch, score in enumerate(epochs, 1):
        if epoch % EVERY == 0:
            valid, test = (
                evaluate(partial(score, catalogue=each.catalogue), each, (10,)) for each in (loader, tested)
            )
            curve.append({
                "epoch": epoch, "valid": round(valid["NDCG@10"], 5), "test": round(test["NDCG@10"], 5),
                "HR@10": round(test["HR@10"], 5),
            })  # fmt: skip
    row = {
        **asdict(setting),
        **max(curve, key=lambda each: each["valid"]),
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    print(row, flush=True)
    return {**row, "curve": curve}


def evaluation(rounds: int = 5) -> None:
    """CPU time of RecBole's evaluation of its SASRec on MovieLens-100K over that of ours, on one thread."""
    bring_back_names()
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer

    parts = {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"}
    chosen = {
        "train_neg_sample_args": None, "MAX_ITEM_LIST_LENGTH": LENGTH, "hidden_size": DIM, "n_layers": LAYERS,
        "n_heads": HEADS, "eval_args": parts, "metrics": ["Hit", "NDCG"], "topk": [10], "use_gpu": False,
        "valid_metric": "NDCG@10", "eval_batch_size": 4096, "show_progress": False, "state": "ERROR",
    }  # fmt: skip
    config = Config(model="SASRec", dataset="ml-100k", config_dict=chosen)
    training, _, tests = data_preparation(config, create_dataset(config))
    theirs = get_trainer(config["MODEL_TYPE"], "SASRec")(
        config, get_model("SASRec")(config, training.dataset)
    )
    loader = NextItemLoader(load_interactions("ml-100k"), BATCH, LENGTH, NEGATIVES, 0)
    score = next(ours(Setting("sasrec", *TUNED[0], 0), loader))
    seconds = by_turns(
        {
            "ours": lambda: evaluate(partial(score, catalogue=loader.catalogue), loader, (10,)),
            "RecBole": lambda: theirs.evaluate(tests, load_best_model=False),
        },
        rounds,
    )
    ratio = over(seconds["RecBole"].cpu, seconds["ours"].cpu)
    print(f"RecBole's takes {statistics.median(seconds['RecBole'].cpu):.2f} s, {ratio:.1f} times ours")


class Rows:
    """Results on disk: an interrupted run goes on where it was."""

    def __init__(self, path: Path):
        self.path = path
        self.all = json.loads(path.read_text())["rows"] if path.exists() else []

    def of(self, setting: Setting, split: Split) -> dict[str, Any]:
        """From the file, or trained now."""
        for row in self.all:
            if asdict(setting).items() <= row.items():
                return row
        self.all.append(train(setting, split))
        environment = {
            "tritonrec": tritonrec.__version__,
            "recbole": "1.2.1",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "epochs": EPOCHS,
            "evaluated_every": EVERY,
            "sizes": {
                "dim": DIM, "layers": LAYERS, "heads": HEADS, "history": LENGTH, "batch": BATCH,
                "negatives": NEGATIVES,
            },
        }  # fmt: skip
        self.path.write_text(json.dumps({"environment": environment, "rows": self.all}, indent=1) + "\n")
        return self.all[-1]


def report(rows: list[dict[str, Any]]) -> None:
    """The table of docs/models.md."""
    print("| system | learning rate, dropout | epoch | NDCG@10 | HR@10 |\n| --- | --: | --: | --: | --: |")
    for system, name in SYSTEMS.items():
        final = [row for row in rows if row["system"] == system and row["seed"] in SEEDS]
        if final:
            spread = {
                metric: f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
                for metric in ("test", "HR@10")
                for values in [[row[metric] for row in final]]
            }
            epochs = sorted(row["epoch"] for row in final)
            print(
                f"| {name} | {final[0]['lr']:g}, {final[0]['dropout']} | {epochs[0]} to {epochs[-1]} "
                f"| {spread['test']} | {spread['HR@10']} |"
            )


def main() -> None:
    args = options_of(
        __doc__, data="ml-100k", only={"default": tuple(SYSTEMS), "help": "systems between commas"},
        json={"type": Path, "help": "write here after every training, and go on with what is there"},
        table={"type": Path, "help": "print the table of this file and end"},
        evaluation={"action": "store_true", "help": "time an evaluation beside RecBole's and end"},
    )  # fmt: skip
    torch.set_num_threads(1)
    if args.evaluation:
        sys.argv[1:] = []  # RecBole reads them
        evaluation()
        return
    if args.table:
        report(json.loads(args.table.read_text())["rows"])
        return
    if args.json is None:
        raise SystemExit("give --json FILE, which is written after every training")
    split, rows = Split.of(args.data), Rows(args.json)
    best = {
        system: max(
            (rows.of(Setting(system, *each, TUNING_SEED), split) for each in TUNED),
            key=lambda row: row["valid"],
        )
        for system in args.only
    }
    for seed, system in product(SEEDS, best):
        rows.of(Setting(system, best[system]["lr"], best[system]["dropout"], seed), split)
    report(rows.all)


if __name__ == "__main__":
    main()
