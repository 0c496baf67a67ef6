"""Retrieval: train HSTU, export it, load it, and find items by an approximate index beside exact search.

    pip install 'tritonrec[faiss]'
    python docs/examples/retrieval.py out/retrieval

Without faiss the only approximate index is `half`: exact search over items that are rounded to 16 bits.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import tritonrec
from tritonrec import nn, ops
from tritonrec.data import NextItemLoader, load_interactions
from tritonrec.serving import Predictor, export, recall, top_k

try:
    import faiss
except ImportError:
    faiss = None

DIM, LENGTH = 32, 20


def train(folder, data, steps):
    """The exported model, and histories to retrieve for."""
    torch.manual_seed(0)
    loader = NextItemLoader(load_interactions(data), 128, LENGTH, 16, seed=0)
    sizes = nn.HSTUConfig(dim=DIM, layers=1, heads=2, qk_dim=16, v_dim=16, max_seq_len=LENGTH)
    model = nn.HSTU(sizes)
    tables = tritonrec.HashTableCollection(
        [tritonrec.FeatureConfig("item", DIM)], tritonrec.RowOptimizer("adam", lr=3e-3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ranks = tritonrec.Communicators.local()
    with tritonrec.Trainer(model, tables, optimizer, ranks, "nestpipe") as trainer:
        for result in trainer.run(loader.batch(step) for step in range(steps)):
            last = result.loss
        trainer.save(folder / "checkpoints")
    export(folder / "checkpoints", folder / "export", model)
    print(f"loss {last:.4f} after {steps} steps; exported {len(tables.groups[0].table):,} items")
    return folder / "export", next(iter(loader.evaluation_batches(256))).history


def approximate(kind, items):
    """A search (queries, k) -> places (B, k) in `items` (I, d), by the inner product; -1 for none."""
    if kind == "half":
        rounded = items.bfloat16().float()
        return lambda queries, k: top_k(ops.linear(queries, rounded, None), k)[0]
    cells = max(1, int(len(items) ** 0.5))
    names = {"flat": "Flat", "ivf": f"IVF{cells},Flat", "hnsw": "HNSW32"}
    index = faiss.index_factory(items.shape[1], names[kind], faiss.METRIC_INNER_PRODUCT)
    if kind == "ivf":
        index.nprobe = max(1, cells // 8)  # an eighth of the cells is searched
    index.train(items.numpy())
    index.add(items.numpy())
    return lambda queries, k: torch.from_numpy(index.search(queries.numpy(), k)[1])


def main(folder, data, steps, k, kinds):
    path, histories = train(folder, data, steps)
    predictor = Predictor.load(path)
    exact, _scores = predictor.retrieve(histories, k, exclude=None)
    print(f"items for the first user: {exact[0, :5].tolist()}")
    queries, items = predictor.encode(histories), predictor.rows("item", predictor.item_ids)
    for kind in kinds:
        if faiss is None and kind != "half":
            print(f"{kind}: faiss is not installed")
            continue
        places = approximate(kind, items)(queries, k)
        print(f"{kind}: recall@{k} {recall(predictor.item_ids[places], exact):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Approximate retrieval beside exact search.")
    parser.add_argument("folder", type=Path, nargs="?", help="for checkpoint and export; it must be new")
    parser.add_argument("--data", default="zipf:users=3000,items=20000,median_length=20,seed=1")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--indexes", default="half,flat,ivf,hnsw", help="some of half, flat, ivf, hnsw")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        main(folder, options.data, options.steps, options.k, options.indexes.split(","))
