"""What streaming metrics cost of a training step of DLRM, beside TorchRec's RecMetrics on the same samples.

    python ci/benchmarks/measure_metrics.py [--batch-size 512 4096] [--steps 200]

One rank, 26 features, four micro-batches. Metrics are updated in every step, and computed every 100 steps of
as many steps; the share is their processor time over that of the whole loop. `RecMetrics` are NE, calibration
and AUC of ``torchrec.metrics``, where TorchRec is installed, of the same samples as often.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from frame import options_of

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer, WindowConfig
from tritonrec.harness.job import Job
from tritonrec.metrics import ClickMetrics
from tritonrec.nn import DLRM, DLRMConfig, sigmoid

EVERY = 100


def peers(batch_size: int) -> Callable[[torch.Tensor, torch.Tensor, bool], object] | None:
    """Updates RecMetrics, and computes them where that is due."""
    try:
        from torchrec.metrics.auc import AUCMetricComputation
        from torchrec.metrics.calibration import CalibrationMetricComputation
        from torchrec.metrics.ne import NEMetricComputation
    except ImportError:
        return None
    settings = {"my_rank": 0, "batch_size": batch_size, "n_tasks": 1, "window_size": EVERY * batch_size}
    ne = NEMetricComputation(**settings, include_logloss=True)
    made = [ne, CalibrationMetricComputation(**settings), AUCMetricComputation(**settings)]

    def update(logits: torch.Tensor, labels: torch.Tensor, due: bool) -> object:
        p, y = sigmoid(logits).double()[None], labels.double()[None]
        for each in made:
            each.update(predictions=p, labels=y, weights=torch.ones_like(y))
        return [each._compute() for each in made] if due else None  # newer torchmetrics refuse `compute`

    return update


def measure(batch_size: int, steps: int) -> None:
    job = Job(f"criteo:samples={batch_size * 40}", model="dlrm", batch_size=batch_size)
    loader = job.loader(0, 1)
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(loader.features, loader.num_dense, 16))
    features = [FeatureConfig(name, 16) for name in loader.features]
    tables = HashTableCollection(features, RowOptimizer("adam", lr=1e-3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    metrics, theirs = ClickMetrics(EVERY, logits=True), peers(batch_size)
    spent, beside, values = 0.0, 0.0, dict[str, float]()
    with Trainer(model, tables, optimizer, Communicators.local(), "nestpipe", WindowConfig(4)) as trainer:
        for _ in trainer.run(loader.batch(step) for step in range(10)):
            pass
        began = time.process_time()
        for result in trainer.run(loader.batch(step) for step in range(10, 10 + steps)):
            outputs, due, clock = result.outputs, (result.step + 1) % EVERY == 0, time.thread_time()
            metrics.update(outputs["logits"], outputs["labels"])
            values = metrics.compute() if due else values
            spent += time.thread_time() - clock
            if theirs is not None:
                clock = time.thread_time()
                theirs(outputs["logits"], outputs["labels"], due)
                beside += time.thread_time() - clock
        whole = time.process_time() - began - beside
    print(f"batch {batch_size}: {spent / whole:.2%} of a step of {whole / steps * 1e3:.1f} ms", end="")
    print(f"; RecMetrics {beside / (whole - spent + beside):.2%}" if theirs else "")
    print(f"  {', '.join(f'{name} {value:.4f}' for name, value in values.items())}" if values else "")


def main() -> None:
    options = options_of(__doc__, batch_size=[512, 4096], steps=200)
    torch.set_num_threads(1)
    for size in options.batch_size:
        measure(size, options.steps)


if __name__ == "__main__":
    main()
