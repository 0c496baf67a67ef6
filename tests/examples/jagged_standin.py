"""The parts of TorchRec that its example and `from_torchrec` use, in the layout of its documentation."""

import torch


class KeyedJaggedTensor:
    """Values of feature 0's samples, then of feature 1's; lengths (F * B,) in the same order."""

    def __init__(self, keys, values, weights=None, lengths=None, offsets=None):
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths
        lengths = self._lengths = offsets.diff() if lengths is None else lengths
        total = torch.zeros(len(lengths) + 1, dtype=lengths.dtype)
        total[1:] = lengths.cumsum(0)
        assert offsets is None or torch.equal(offsets.long(), total.long())
        self._offsets = total

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def weights(self):
        assert self._weights is not None and len(self._weights) == len(self._values)
        return self._weights

    def weights_or_none(self):
        return self._weights

    def stride_per_key(self):
        return [len(self._lengths) // len(self._keys)] * len(self._keys)

    def variable_stride_per_key(self):
        return False

    def lengths(self):
        return self._lengths

    def offsets(self):
        return self._offsets

    def to_dict(self):
        batch = len(self._lengths) // len(self._keys)
        found = {}
        for place, key in enumerate(self._keys):
            start, end = self._offsets[place * batch], self._offsets[(place + 1) * batch]
            lengths = self._lengths[place * batch : (place + 1) * batch]
            found[key] = KeyedJaggedTensor([key], self._values[start:end], lengths=lengths)
        return found


class EmbeddingConfig:
    def __init__(self, name, embedding_dim, num_embeddings, feature_names):
        self.name, self.dim, self.rows, self.features = name, embedding_dim, num_embeddings, feature_names


class EmbeddingCollection(torch.nn.Module):
    """A row for every id, feature by feature, as jagged tensors of rows."""

    def __init__(self, tables):
        super().__init__()
        self.table_of = {feature: table.name for table in tables for feature in table.features}
        self.tables = torch.nn.ModuleDict(
            {table.name: torch.nn.Embedding(table.rows, table.dim) for table in tables}
        )

    def forward(self, features):
        parts = features.to_dict()
        return {
            key: KeyedJaggedTensor(
                [key], self.tables[self.table_of[key]](part.values()), lengths=part.lengths()
            )
            for key, part in parts.items()
        }
