"""A `StoredTable` without a key index, chunks or tiers: dictionaries, and handles in no order."""

from __future__ import annotations

import random

import torch

from tritonrec.embedding.lookup import Moves
from tritonrec.kernels import chunked_rows


class DictTable:
    """Stands where `StoredTable` stands, to show what the rest of a table takes from one.

    Handles are drawn at random from those that are free, so that nobody can tell anything from a number.
    """

    device, padded = torch.device("cpu"), False

    def __init__(self, placement, dim, row_width, initial_rows, slots, chunk_rows, tiers):
        self.dim, self.row_width, self.initial_rows = dim, row_width, initial_rows
        self.handle_of: dict[int, int] = {}
        self.rows: dict[int, torch.Tensor] = {}  # by handle; reserved ones too
        self.low: set[int] = set()
        self.end, self.free, self.moves = 0, [], Moves()
        self.random = random.Random(slots)

    def __len__(self):
        return len(self.handle_of)

    def find(self, keys, count=None):
        return torch.tensor([self.handle_of.get(key, -1) for key in keys.tolist()], dtype=torch.int64)

    def find_or_insert(self, keys, count=None, initial=True):
        inserted = self.find(keys) < 0
        for key, row in zip(keys[inserted].tolist(), self.initial_rows(keys[inserted]), strict=True):
            if not self.free:
                self.grow(5)
            self.handle_of[key] = self.free.pop()
            self.rows[self.handle_of[key]] = row.clone()
        return self.find(keys), inserted

    def prefetch(self, handles):
        pass

    def gather(self, handles, out=None):
        none = torch.full((self.row_width,), torch.nan)
        rows = [self.rows.get(handle, none) for handle in handles.tolist()]
        out = torch.empty(len(rows), self.row_width) if out is None else out
        return out.copy_(torch.stack(rows)) if rows else out

    def update(self, handles, values, low_precision=None):
        fit = chunked_rows.fits(values.contiguous(), self.dim)
        low = torch.zeros_like(fit) if low_precision is None else fit & low_precision
        for handle, row, is_low in zip(handles.tolist(), values, low.tolist(), strict=True):
            if handle in self.rows:
                self.rows[handle] = row.clone()
                was_low = handle in self.low
                up, down = self.moves[:2]
                self.moves = Moves(up + (was_low > is_low), down + (was_low < is_low))
                (self.low.add if is_low else self.low.discard)(handle)

    def erase(self, keys, count=None):
        handles = self.find(keys)
        for key, handle in zip(keys.tolist(), handles.tolist(), strict=True):
            self.handle_of.pop(key, None)
            self.rows.pop(handle, None)
            self.low.discard(handle)
        return handles

    def release(self, handles, count=None):
        assert not set(handles.tolist()) & set(self.free)
        self.free += handles.tolist()
        self.random.shuffle(self.free)

    def items(self, dtype=torch.int64):
        keys = list(self.handle_of)
        self.random.shuffle(keys)
        return torch.tensor(keys, dtype=torch.int64), self.find(torch.tensor(keys, dtype=torch.int64)).to(
            dtype
        )

    def grow(self, rows):
        self.free += range(self.end, self.end + rows)
        self.end += rows
        self.random.shuffle(self.free)

    def in_low_precision(self, handles):
        return torch.tensor([handle in self.low for handle in handles.tolist()], dtype=torch.bool)

    def memory(self):
        saved = 2 * self.row_width * len(self.low)
        none = dict.fromkeys(("key_structure", "metadata", "fp32_values", "fp16_values", "disk"), 0)
        return {**none, "saved_by_fp16": saved}
