"""The training of sasrec.py by TorchRec: model, batches, AdamW, warm-up and cosine, clipping, averaged
weights, evaluation, early stopping, log and checkpoints; a row-wise sharded EmbeddingCollection over gloo.

    python docs/examples/torchrec_sasrec.py out/torchrec_sasrec
    torchrun --nproc-per-node 2 docs/examples/torchrec_sasrec.py out/torchrec_sasrec

Batches and ranking are tritonrec.data's, so that both see the same samples in the same order. FBGEMM's fused
tables have no Adam on a CPU and no clipping by the norm of all gradients; the "dense" ones here have both.
"""

import argparse
import csv
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sasrec import DIM, LENGTH, LR, WARMUP, SASRec
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tritonrec.data import NextItemLoader, Split, evaluate, load_interactions


def a_row_for_each_id(self, features):
    """FBGEMM's "dense" table adds up the rows of a sample on a CPU, so every id is a sample."""
    ids = features.values()
    return self.emb_module(ids, torch.arange(len(ids) + 1))


BatchedDenseEmbedding.forward = a_row_for_each_id
torch.backends.mha.set_fastpath_enabled(False)  # it makes NaN of queries without keys: the left padding


def pad(rows, lengths):
    """Jagged rows as (B, T, D) with the padding on the left, and (B, T), True there."""
    hidden = torch.arange(LENGTH) < LENGTH - lengths[:, None]
    x = rows.new_zeros(len(lengths), LENGTH, DIM)
    x[~hidden] = rows
    return x, hidden


class NextItem(torch.nn.Module):
    """Sampled softmax of the next item; without a batch's negatives the hidden states of its tokens."""

    def __init__(self):
        super().__init__()
        self.encoder = SASRec()

    def encode(self, rows, lengths):
        x, hidden = pad(rows, lengths)
        return self.encoder(x, hidden)[~hidden]

    def forward(self, batch, rows):
        tokens, count = batch.negatives.shape
        items, labels, sampled = rows.split([tokens, tokens, tokens * count])
        states = self.encode(items, batch.lengths)
        candidates = torch.cat([labels[:, None], sampled.unflatten(0, (tokens, count))], 1)
        logits = (candidates * states[:, None]).sum(2)
        logits[:, 1:].masked_fill_(batch.negatives == batch.labels[:, None], -torch.inf)
        first = torch.zeros(tokens, dtype=torch.int64)
        return torch.nn.functional.cross_entropy(logits, first, reduction="sum")


class Whole(torch.nn.Module):
    """The sharded table and the model behind it."""

    def __init__(self, items):
        super().__init__()
        table = EmbeddingConfig(
            name="item_table", embedding_dim=DIM, num_embeddings=items, feature_names=["item"],
            weight_init_min=-(DIM**-0.5), weight_init_max=DIM**-0.5,
        )  # fmt: skip
        self.embeddings, self.model = EmbeddingCollection([table]), NextItem()

    def rows(self, ids):
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([len(ids)]))
        return self.embeddings(features)["item"].values()

    def forward(self, batch):
        return self.model(batch, self.rows(batch.lookups()["item"].ids))


def sharded(whole, world_size):
    """The model with its table dealt to all ranks by rows; "dense" leaves gradients to be clipped."""
    sharder = EmbeddingCollectionSharder()
    rows = construct_module_sharding_plan(
        whole.embeddings, {"item_table": row_wise(compute_kernel="dense")}, sharder, local_size=world_size,
        world_size=world_size, device_type="cpu",
    )  # fmt: skip
    plan = ShardingPlan({"embeddings": rows})
    return DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def metrics(model, whole, loader, part):
    """Full ranking of each user's held-out item of a part; all ranks look up together."""
    items = whole.rows(loader.catalogue)

    def scores(history):
        states = model.encode(whole.rows(history.ids), history.lengths)
        return states[history.offsets[1:] - 1] @ items.t()  # each user's last token

    with torch.no_grad():
        return evaluate(scores, loader, ks=(10,), part=part)


def write(folder, step, values):
    """A line of the log for each value."""
    with open(folder / "log.csv", "a", newline="") as file:
        csv.writer(file).writerows([step, name, value] for name, value in values.items())


def main(folder, data, epochs, patience, seed=0):
    torch.manual_seed(seed)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    log = load_interactions(data)
    split, part = Split.leave_one_out(patience > 0), "validation" if patience else "test"
    loader = NextItemLoader(log, 128, LENGTH, 32, seed, rank, world_size, split=split)
    steps = epochs * loader.steps_per_epoch
    whole = Whole(1 + int(log.item.max()))
    model = sharded(whole, world_size)
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    adamw = torch.optim.AdamW(parameters.values(), lr=LR, weight_decay=0.01)
    keyed = KeyedOptimizerWrapper(parameters, lambda _: adamw)
    tables = {weight: [dist.group.WORLD] for name, weight in parameters.items() if "embeddings" in name}
    optimizer = GradientClippingOptimizer(keyed, GradientClipping.NORM, 1.0, 2.0, True, tables)
    warmup, cosine = LinearLR(adamw, 0.1, total_iters=WARMUP), CosineAnnealingLR(adamw, steps)
    scheduler = SequentialLR(adamw, [warmup, cosine], [WARMUP])
    average = AveragedModel(whole.model, multi_avg_fn=get_ema_multi_avg_fn(0.98)).eval()
    parts = {"optimizer": adamw, "scheduler": scheduler, "average": average}
    progress = {"step": 0, "best": -1.0, "waited": 0}
    saved = sorted(folder.glob(f"step-*-{rank}-of-{world_size}.pt"))
    if saved:  # go on with the same number of ranks; the states of a "dense" table are of one rank
        found = torch.load(saved[-1])
        for weight, value in zip(model.parameters(), found["weights"], strict=True):
            weight.data.copy_(value)
        for name, each in parts.items():
            each.load_state_dict(found[name])
        progress = found["progress"]
    while progress["step"] < steps and progress["waited"] < (patience or epochs):
        for step in range(progress["step"], progress["step"] + loader.steps_per_epoch):
            batch = loader.batch(step)
            total = torch.tensor([batch.loss_terms, 0.0], dtype=torch.float64)
            optimizer.zero_grad()
            dist.all_reduce(total)
            loss = model(batch)
            (loss * (world_size / float(total[0]))).backward()  # DDP takes the mean over ranks
            optimizer.step()
            scheduler.step()
            average.update_parameters(whole.model)
            total[1] = float(loss.detach())
            dist.all_reduce(total[1:])
            numbers = {"loss": float(total[1] / total[0]), "norm": float(optimizer.last_total_grad_norm)}
            if rank == 0:
                write(folder, step + 1, numbers)
        found = metrics(average.module, whole, loader, part)
        better = found["NDCG@10"] > progress["best"]
        progress = {
            "step": step + 1, "best": max(found["NDCG@10"], progress["best"]),
            "waited": 0 if better else progress["waited"] + 1,
        }  # fmt: skip
        kept = {name: each.state_dict() for name, each in parts.items()}
        kept |= {"weights": [weight.data for weight in model.parameters()], "progress": progress}
        torch.save(kept, folder / f"step-{step + 1:08d}-{rank}-of-{world_size}.pt")
        if rank == 0:
            write(folder, step + 1, found)
            last = {name: round(value, 6) for name, value in (numbers | found).items()}
            print(f"step {step + 1}: {last}", flush=True)
    if patience and (found := metrics(average.module, whole, loader, "test")) and rank == 0:
        print(f"test: {found}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SASRec on a log of interactions, by TorchRec.")
    parser.add_argument("folder", type=Path, help="for the log and checkpoints")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
