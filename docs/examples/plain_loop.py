"""Dynamic tables in an ordinary PyTorch loop: a two-tower model, AdamW for its layers, Adam for its rows.

``python plain_loop.py ml-100k`` fetches MovieLens-100K once; without an argument the data is synthetic.
"""

import sys

import torch
from torch import nn

from tritonrec import HashEmbedding, HashOptimizer, RowOptimizer
from tritonrec.data import load

DATA = "zipf:users=100,items=400,communities=8,affinity=1.0,extreme_ids=true,seed=1"  # ids all over int64


class TwoTower(nn.Module):
    """Scores (B, B) of each user with each item of a batch."""

    def __init__(self, dim: int):
        super().__init__()
        rule = RowOptimizer("adam", lr=0.05)
        self.users, self.items = HashEmbedding(dim, rule), HashEmbedding(dim, rule)  # no number of rows
        self.user_tower, self.item_tower = (
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.user_tower(self.users(users)) @ self.item_tower(self.items(items)).t()


def main(source: str = DATA, steps: int = 60) -> None:
    torch.manual_seed(0)
    log = load(source)
    users, items = torch.from_numpy(log.user), torch.from_numpy(log.item)
    model = TwoTower(dim=16)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01), HashOptimizer(model)]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, steps) for each in optimizers]
    for step in range(steps):
        batch = torch.randint(len(users), (128,))
        loss = nn.functional.cross_entropy(model(users[batch], items[batch]), torch.arange(128))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        optimizers[1].clip_grad_norm_(model.parameters(), 1.0)  # of layers and rows together
        for each in (*optimizers, *schedulers):
            each.step()
        if step % 20 == 19:
            print(f"loss {float(loss.detach()):.4f}")
    model.eval()  # an id that was never seen reads as its initial row, and gets none
    with torch.no_grad():
        print(f"scores of a new user: {tuple(model(torch.tensor([2**62 + 1]), items[:5]).shape)}")
    print(f"rows: {len(model.users.tables.weights()['embedding'][0])} users")


if __name__ == "__main__":
    main(*sys.argv[1:])
