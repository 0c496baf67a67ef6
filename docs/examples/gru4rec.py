"""GRU4Rec of torch's modules: a GRU over each user's items, sampled softmax, validation and early stopping.

python docs/examples/gru4rec.py
torchrun --nproc-per-node 2 docs/examples/gru4rec.py       # the same digits
"""

import argparse

import torch

import tritonrec
from tritonrec import nn
from tritonrec.data import NextItemLoader, Split, load_interactions

DIM, WIDTH, LENGTH, LR = 64, 128, 50, 3e-3


class GRU4Rec(torch.nn.Module):
    """Hidasi et al. 2016, as RecBole has it: x (B, T, D) embedding rows, hidden (B, T) True for no token."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.drop = torch.nn.Dropout(dropout)
        self.gru = torch.nn.GRU(DIM, WIDTH, bias=False, batch_first=True)
        self.out = torch.nn.Linear(WIDTH, DIM)

    def forward(self, x, hidden):
        return self.out(self.gru(self.drop(x))[0])


def model_of(dropout=0.2):
    """Padded on the right, so that a state begins at the first item."""
    model = nn.PaddedNextItem(GRU4Rec(dropout), LENGTH, side="right")
    nn.convert(model)  # torch's modules become ours of the same names
    return model


def main(data, epochs, patience, mode="nestpipe", micro_batches=4, seed=0, make=model_of):
    torch.manual_seed(seed)
    model = make()
    with tritonrec.from_environment() as ranks:
        shard = {"rank": ranks.rank, "world_size": ranks.world_size}
        split = Split.leave_one_out(True)  # a user's last item is for test, the one before for validation
        loader = NextItemLoader(load_interactions(data), 64, LENGTH, 64, seed, split=split, **shard)
        rows = tritonrec.RowOptimizer("adam", LR)
        tables = tritonrec.HashTableCollection([tritonrec.FeatureConfig("item", DIM)], rows, seed=seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
        window = tritonrec.WindowConfig(micro_batches, seed=seed)
        stopping = tritonrec.EarlyStopping("NDCG@10", patience, communicators=ranks)
        with tritonrec.Trainer(model, tables, optimizer, ranks, mode, window) as trainer:
            for epoch in range(epochs):
                first, steps = epoch * loader.steps_per_epoch, loader.steps_per_epoch
                for result in trainer.run(loader.batch(first + step) for step in range(steps)):
                    loss = result.loss
                found = trainer.evaluate(loader, part="validation")
                if ranks.rank == 0:
                    print(f"epoch {epoch + 1}: loss {loss:.4f}, NDCG@10 {found['NDCG@10']:.4f}", flush=True)
                if stopping.on_evaluation_end(trainer.next_step, found):
                    break
            found = trainer.evaluate(loader)
            if ranks.rank == 0:
                print(f"test: NDCG@10 {found['NDCG@10']:.4f}, HR@10 {found['HR@10']:.4f}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRU4Rec on a log of interactions.")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--patience", type=int, default=8)  # it stands still at first
    options = parser.parse_args()
    main(options.data, options.epochs, options.patience)
