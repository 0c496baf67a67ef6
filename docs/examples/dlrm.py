"""DLRM on clicks in Criteo's layout: early stopping by the validation, then AUC and calibration of the test.

    python docs/examples/dlrm.py                          # a log with a known signal, written here first
    python docs/examples/dlrm.py --data criteo-tsv:day_0  # Criteo's text, or any source of clicks

Of the log that is written here the best possible figures are known: those of the probabilities that drew its
labels.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import tritonrec
from tritonrec import nn
from tritonrec.data import ClickLoader, Split, click_predictions, load_clicks
from tritonrec.metrics import ClickMetrics

DIM, BATCH, LR, NAMES = 16, 256, 3e-3, ("ne", "calibration", "auc")


def write_log(path, rows, seed=0):
    """Criteo's text: label, 13 counts, 26 hexadecimal categories; returns each row's probability of a click.

    A click depends on the first count and on two categories; the rest is noise.
    """
    random = np.random.default_rng(seed)
    counts = random.geometric(0.3, (rows, 13)) - 1
    ids = (random.random((rows, 26)) ** 2 * np.linspace(20, 200, 26)).astype(np.int64)
    logit = -1.6 + 0.9 * np.log1p(counts[:, 0])
    for column, weight in ((0, 1.2), (1, 0.8)):
        logit += weight * random.standard_normal(200)[ids[:, column]]
    probabilities = 1 / (1 + np.exp(-logit))
    labels = random.random(rows) < probabilities
    with open(path, "w") as file:
        for label, dense, row in zip(labels, counts, ids, strict=True):
            fields = [str(int(label)), *map(str, dense), *(f"{value:08x}" for value in row)]
            file.write("\t".join(fields) + "\n")
    return torch.from_numpy(probabilities)


def measured(probabilities, labels):
    """Normalized entropy, calibration (predicted over observed clicks) and AUC, by name."""
    metrics = ClickMetrics(window=0)
    metrics.update(probabilities, labels)
    found = metrics.compute()
    return {name: found[f"window_{name}"] for name in NAMES}


def shown(found):
    return ", ".join(f"{name} {value:.4f}" for name, value in found.items())


def calibration_by_tenths(probabilities, labels):
    """Mean prediction and click rate of ten groups of rows, from the lowest predictions up."""
    for group in probabilities.argsort().chunk(10):
        yield float(probabilities[group].mean()), float(labels[group].double().mean())


def train(log, epochs, patience, folder, mode="nestpipe", micro_batches=4):
    """The test's predictions at the epoch that the validation likes best, and the measures of its epochs."""
    torch.manual_seed(0)
    loader = ClickLoader(log.divided(Split.leave_one_out(True)), BATCH, seed=0)
    model = nn.DLRM(nn.DLRMConfig(log.features, log.dense.shape[1], DIM, bottom=(64, 32), top=(64, 32)))
    features = [tritonrec.FeatureConfig(name, DIM) for name in log.features]
    tables = tritonrec.HashTableCollection(features, tritonrec.RowOptimizer("rowwise_adagrad", 0.02))
    optimizer = torch.optim.Adam(model.parameters(), LR, fused=True)
    stopping, epochs_of_validation = tritonrec.EarlyStopping("ne", patience), []
    ranks = tritonrec.Communicators.local()
    with tritonrec.Trainer(
        model, tables, optimizer, ranks, mode, tritonrec.WindowConfig(micro_batches)
    ) as trainer:

        def predictions(part):
            rows = trainer.rows_of_ranks()
            model.eval()
            with torch.no_grad():
                found = click_predictions(
                    lambda batch: model.predict(batch, rows.peek(batch.lookups())), loader, part, rows.scored
                )
            model.train()
            return found

        while not stopping.should_stop and len(epochs_of_validation) < epochs:
            steps = range(trainer.next_step, trainer.next_step + loader.steps_per_epoch)
            for _ in trainer.run(loader.batch(step) for step in steps):
                pass
            _, probabilities, labels = predictions("validation")
            epochs_of_validation.append(measured(probabilities, labels))
            print(f"epoch {len(epochs_of_validation)}: {shown(epochs_of_validation[-1])}", flush=True)
            stopping.on_evaluation_end(trainer.next_step, epochs_of_validation[-1])
            if stopping.best_step == trainer.next_step:
                trainer.save(folder)
        trainer.load(folder)  # the newest there is the best
        return predictions("test"), epochs_of_validation


def main(data, rows, epochs, patience):
    with TemporaryDirectory() as folder:
        best = None
        if data is None:
            best = write_log(Path(folder, "clicks.tsv"), rows)
            data = f"criteo-tsv:{folder}/clicks.tsv"
        found, _ = train(load_clicks(data), epochs, patience, Path(folder, "checkpoints"))
    print(f"test: {shown(measured(found.probabilities, found.labels))}")
    if best is not None:
        print(f"best possible: {shown(measured(best[found.sample_ids], found.labels))}")
    for predicted, observed in calibration_by_tenths(found.probabilities, found.labels):
        print(f"predicted {predicted:.3f}, clicked {observed:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DLRM on a log of clicks.")
    parser.add_argument("--data", help="a source of clicks; by default one is written")
    parser.add_argument("--rows", type=int, default=30_000, help="of the log that is written")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--patience", type=int, default=1)
    options = parser.parse_args()
    main(options.data, options.rows, options.epochs, options.patience)
