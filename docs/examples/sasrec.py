"""SASRec of torch's modules, trained as people do: AdamW, warm-up and cosine, clipping, bfloat16, averaged
weights, validation every epoch, early stopping, TensorBoard, checkpoints for any number of ranks. Each user's
last item is for the test at the end, the one before for validation, or with --patience 0 for training.

    python docs/examples/sasrec.py out/sasrec
    torchrun --nproc-per-node 2 docs/examples/sasrec.py out/sasrec     # the same bits
"""

import argparse
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tritonrec
from tritonrec import checkpoint, nn
from tritonrec.data import NextItemLoader, Split, load_interactions
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
        return self.encoder(x, mask=causal, src_key_padding_mask=hidden, is_causal=False)


def main(folder, data, epochs, patience, mode, micro_batches, precision="bf16", seed=0):
    torch.manual_seed(seed)
    model = nn.PaddedNextItem(SASRec(), LENGTH)
    nn.convert(model)  # torch's modules become ours of the same names
    with tritonrec.from_environment() as ranks:
        split, part = Split.leave_one_out(patience > 0), "validation" if patience else "test"
        shard = {"rank": ranks.rank, "world_size": ranks.world_size}
        loader = NextItemLoader(load_interactions(data), 128, LENGTH, 32, seed, split=split, **shard)
        steps = epochs * loader.steps_per_epoch
        rate = WarmupCosine(LR, WARMUP, WARMUP + steps)  # of rows and dense parameters
        rows = tritonrec.RowOptimizer("adamw", rate, weight_decay=0.01)
        tables = tritonrec.HashTableCollection([tritonrec.FeatureConfig("item", DIM)], rows, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
        scheduler = LambdaLR(optimizer, lambda done: rate(done + 1) / LR)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        window = tritonrec.WindowConfig(micro_batches, max_grad_norm=1.0, precision=precision, seed=seed)
        options = {"scheduler": scheduler, "average": average}
        stopping = tritonrec.EarlyStopping("NDCG@10", patience or epochs, communicators=ranks)
        with tritonrec.Trainer(model, tables, optimizer, ranks, mode, window, **options) as trainer:
            if checkpoint.steps(folder):  # go on, whatever number of ranks has saved it
                trainer.load(folder, stopping.load_state_dict)
            log = None
            if ranks.rank == 0:  # what a killed run has logged of the steps to come is replaced
                log = tritonrec.TensorBoardLogger(folder / "events", trainer.next_step + 1)
            while trainer.next_step < steps and not stopping.should_stop:
                epoch = range(trainer.next_step, trainer.next_step + loader.steps_per_epoch)
                for result in trainer.run(loader.batch(step) for step in epoch):
                    if log:
                        log.log(result.step + 1, result.values())
                found = trainer.evaluate(loader, part=part)
                stopping.on_evaluation_end(trainer.next_step, found)
                trainer.save(folder, stopping.state_dict())
                if log:
                    log.log(trainer.next_step, found)
                    print(f"step {trainer.next_step}: {result.values() | found}", flush=True)
            if patience and (found := trainer.evaluate(loader)) and ranks.rank == 0:
                print(f"test: {found}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SASRec on a log of interactions.")
    parser.add_argument("folder", type=Path, help="for checkpoints and events")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--mode", default="nestpipe")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
