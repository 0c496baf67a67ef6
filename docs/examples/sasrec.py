"""SASRec of torch's own modules, trained as people do: AdamW, warm-up and cosine, clipping, averaged weights,
an evaluation every epoch, early stopping, a log, a checkpoint to go on from at any number of ranks.

    python docs/examples/sasrec.py out/sasrec
    torchrun --nproc-per-node 2 docs/examples/sasrec.py out/sasrec     # the same bits
"""

import argparse
from pathlib import Path

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tritonrec
from tritonrec import checkpoint, nn, ops
from tritonrec.data import Lookup, NextItemLoader, evaluate, load_interactions
from tritonrec.embedding import WarmupCosine

DIM, LENGTH, LR, WARMUP = 64, 50, 1e-3, 20


class SASRec(torch.nn.Module):
    """Kang and McAuley 2018: x (B, T, D) embedding rows, hidden (B, T) True where there is no token."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.positions, self.drop = torch.nn.Embedding(LENGTH, DIM), torch.nn.Dropout(dropout)
        torch.nn.init.normal_(self.positions.weight, std=0.02)  # torch's default, 1, drowns the items
        layer = torch.nn.TransformerEncoderLayer(DIM, 2, DIM, dropout, batch_first=True, norm_first=True)
        norm = torch.nn.LayerNorm(DIM)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)

    def forward(self, x, hidden):
        x = self.drop(x * DIM**0.5 + self.positions(torch.arange(LENGTH)[None]))
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.encoder(x, mask=causal, src_key_padding_mask=hidden)


def metrics(model, tables, loader):
    """Full ranking of each user's held-out item."""
    items = tables.peek({"item": Lookup(loader.catalogue)})["item"]

    def scores(history):
        hidden = model.encode(history, tables.peek({"item": Lookup(history.ids)})["item"])
        return ops.linear(hidden[history.offsets[1:] - 1], items, None)  # each user's last token

    with torch.no_grad():
        return evaluate(scores, loader, ks=(10,))


def logger(folder, step, tensorboard):
    """Goes on before `step`, where a run was interrupted later."""
    if tensorboard:
        return tritonrec.TensorBoardLogger(folder / "events", step)
    return tritonrec.CSVLogger(folder / "log.csv", step)


def main(folder, data, epochs, patience, mode, micro_batches, tensorboard=False, seed=0):
    torch.manual_seed(seed)
    model = nn.PaddedNextItem(SASRec(), LENGTH)
    nn.convert(model)  # torch's modules become ours of the same names
    with tritonrec.from_environment() as ranks:
        log = load_interactions(data)
        loader = NextItemLoader(log, 128, LENGTH, 32, seed, ranks.rank, ranks.world_size)
        steps = epochs * loader.steps_per_epoch
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
        warmup, cosine = LinearLR(optimizer, 0.1, total_iters=WARMUP), CosineAnnealingLR(optimizer, steps)
        scheduler = SequentialLR(optimizer, [warmup, cosine], [WARMUP])
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98)).eval()
        rows = tritonrec.RowOptimizer("adamw", WarmupCosine(LR, WARMUP, WARMUP + steps), weight_decay=0.01)
        tables = tritonrec.HashTableCollection([tritonrec.FeatureConfig("item", DIM)], rows, seed=seed)
        window = tritonrec.WindowConfig(micro_batches, max_grad_norm=1.0, seed=seed)
        options = {"scheduler": scheduler, "average": average}
        stopping = tritonrec.EarlyStopping("NDCG@10", patience, communicators=ranks)
        with tritonrec.Trainer(model, tables, optimizer, ranks, mode, window, **options) as trainer:
            if checkpoint.steps(folder):  # go on, whatever number of ranks has saved it
                trainer.load(folder, stopping.load_state_dict)
            lines = logger(folder, trainer.next_step + 1, tensorboard) if ranks.rank == 0 else None
            while trainer.next_step < steps and not stopping.should_stop:
                epoch = range(trainer.next_step, trainer.next_step + loader.steps_per_epoch)
                for result in trainer.run(loader.batch(step) for step in epoch):
                    numbers = {
                        "loss": result.loss,
                        "norm": result.grad_norm,
                        "rate": result.learning_rates[0],
                    }
                    if lines:
                        lines.log(result.step + 1, numbers)
                found = metrics(average.module, trainer.whole_tables(), loader)
                stopping.on_evaluation_end(trainer.next_step, found)
                trainer.save(folder, stopping.state_dict())
                if lines:
                    lines.log(trainer.next_step, found)
                    last = {name: round(value, 6) for name, value in (numbers | found).items()}
                    print(f"step {trainer.next_step}: {last}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SASRec on a log of interactions.")
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--mode", default="nestpipe")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensorboard", action="store_true", help="instead of log.csv")
    main(**vars(parser.parse_args()))
