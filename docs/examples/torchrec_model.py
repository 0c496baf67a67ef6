"""`tritonrec.ops` in a TorchRec model: a KeyedJaggedTensor comes in, a KeyedJaggedTensor goes out.

TorchRec's jagged layout is ours: values end to end with offsets, so nothing is copied or padded in between.
"""

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from tritonrec import ops


class SequenceModel(torch.nn.Module):
    """EmbeddingCollection -> attention over each feature's sequences -> scores of the last item."""

    def __init__(self, features: dict[str, int], dim: int, heads: int, max_seq_len: int):
        super().__init__()
        self.heads, self.max_seq_len = heads, max_seq_len
        self.embeddings = EmbeddingCollection([
            EmbeddingConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=rows, feature_names=[name])
            for name, rows in features.items()
        ])  # fmt: skip
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Weights of the result are the norms of what each item's token has attended to."""
        norms = []
        for rows in self.embeddings(features).values():
            q, k, v = self.qkv(rows.values()).unflatten(1, (3, self.heads, -1)).unbind(1)
            attended = ops.hstu_attention(
                q, k, v, rows.offsets().long(), self.max_seq_len,
                alpha=q.shape[2] ** -0.5, scaling_seqlen=self.max_seq_len,
            )  # fmt: skip
            norms.append((rows.values() + attended.flatten(1)).norm(dim=1))
        return KeyedJaggedTensor(
            features.keys(), features.values(), torch.cat(norms), features.lengths(), features.offsets()
        )


def main() -> None:
    torch.manual_seed(0)
    model = SequenceModel({"clicked": 50, "bought": 30}, dim=8, heads=2, max_seq_len=6)
    features = KeyedJaggedTensor(
        keys=["clicked", "bought"],
        values=torch.tensor([7, 3, 7, 49, 1, 2, 29]),
        lengths=torch.tensor([3, 0, 1, 1, 2, 0]),  # three samples of "clicked", then of "bought"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        result = model(features)
        loss = result.weights().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {float(loss.detach()):.6f}")
    print({name: part.lengths().tolist() for name, part in result.to_dict().items()})


if __name__ == "__main__":
    main()
