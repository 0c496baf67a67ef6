"""`tritonrec.ops` in a PyTorch module of one's own: look every key up once, attend over jagged sequences."""

import torch

from tritonrec import ops


class JaggedEncoder(torch.nn.Module):
    """Sequences end to end, no padding: ids (L,), offsets (B + 1,) -> (L, dim)."""

    def __init__(self, rows: int, dim: int, heads: int, max_seq_len: int):
        super().__init__()
        self.heads, self.max_seq_len = heads, max_seq_len
        self.table = torch.nn.Parameter(torch.randn(rows, dim) * dim**-0.5)
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        keys, inverse, _counts = ops.unique(ids)  # each key once, in the order of first occurrence
        x = ops.gather_rows(ops.gather_rows(self.table, keys), inverse)
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)
        attended = ops.hstu_attention(
            q, k, v, offsets, self.max_seq_len, alpha=q.shape[2] ** -0.5, scaling_seqlen=self.max_seq_len
        )
        return x + attended.flatten(1)


def main() -> None:
    torch.manual_seed(0)
    model = JaggedEncoder(rows=100, dim=16, heads=2, max_seq_len=8)
    optimizer = torch.optim.Adam(model.parameters())
    ids, offsets = torch.tensor([7, 3, 7, 9, 9]), torch.tensor([0, 3, 3, 5])  # three sequences, one empty
    for _ in range(3):
        loss = model(ids, offsets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {float(loss.detach()):.6f}")


if __name__ == "__main__":
    main()
