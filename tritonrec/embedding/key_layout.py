"""Keys of merged tables: the number of a logical table and an id in one int64 (MTGRBoost, section 4.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ..kernels import launch
from ..kernels.dispatch import on_host


class KeyLayout:
    """Encoding of logical table and id in the keys of a merged table (MTGRBoost, equation 8).

    ``key = (member << (63 - k)) | id`` with ``k = ceil(log2(m + 1))`` bits for m tables; the sign bit stays
    0. Three tables::

        bit    63   62 61    60 ........ 0
               0    member   id                 ids from 0 to 2**61 - 1

    The keys of a single table are its ids, all 2**64 of them.

    Args:
        names: of the logical tables, in the order of their member numbers; by default a single table without
            a name.
    """

    def __init__(self, names: tuple[str, ...] = ("",)):
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a table needs one or more distinct names, got {list(names)}")
        self.names = names
        # ceil(log2(m + 1)) is the bit length of m.
        self.bits = len(names).bit_length() if len(names) > 1 else 0
        self.table_ids = [
            # By name and not by member number: a table begins with
            # the same rows merged, apart, or merged with others.
            int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") if name else 0
            for name in names
        ]
        self._shift = 63 - self.bits

    def __str__(self) -> str:
        return f"table {', '.join(self.names)}" if self.names != ("",) else "the table"

    def describe(self, key: torch.Tensor) -> str:
        """The id and the logical table of one key, for error messages."""
        member, number = self.unpack(key.view(1))
        name = self.names[int(member)]
        return f"id {int(number)} of table {name}" if name else f"id {int(number)}"

    def pack(self, member: int, ids: torch.Tensor, feature: str) -> torch.Tensor:
        """Keys (K,) int64 of `ids` (K,) of logical table `member`.

        Raises ValueError naming `feature` and the first id that does not fit. Ids on a device are not looked
        at (`validate`).
        """
        if not self.bits:
            return ids
        if on_host(ids):
            self.validate(ids, feature)
        return ids | (member << self._shift)

    def pack_all(
        self, members: Sequence[int], ids: Sequence[torch.Tensor], features: Sequence[str]
    ) -> torch.Tensor:
        """`pack` of several features' ids, one after another; on the host in a few calls for all of them."""
        if len(ids) == 1 or not on_host(ids[0]):
            return torch.cat([self.pack(*each) for each in zip(members, ids, features, strict=True)])
        together = torch.cat(list(ids))
        if not self.bits:
            return together
        if not self._fit(together):
            for name, each in zip(features, ids, strict=True):
                self.validate(each, name)
        prefixes = torch.tensor(members, dtype=torch.int64) << self._shift
        lengths = torch.tensor([each.shape[0] for each in ids], dtype=torch.int64)
        return together | torch.repeat_interleave(prefixes, lengths, output_size=together.shape[0])

    def _fit(self, ids: torch.Tensor) -> bool:
        """Whether all fit into a key; without a sign bit an id that is too small is one too large."""
        # An arithmetic shift: the sign bit of a negative id stays, so both kinds of misfits leave something.
        return not bool((ids >> self._shift).any())

    def validate(self, ids: torch.Tensor, feature: str) -> None:
        """Raise ValueError naming `feature` and the first of `ids` (K,) that does not fit into a key."""
        if self.bits and not self._fit(ids):
            outside = (ids >> self._shift) != 0
            raise ValueError(
                f"feature {feature!r}: id {int(ids[outside][0])} does not fit into a table merged of "
                f"{len(self.names)}, which leaves ids from 0 to {(1 << self._shift) - 1}; keep the table of "
                "this feature apart with merge=False"
            )

    def unpack(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Member numbers (K,) and ids (K,), both int64."""
        if not self.bits:
            return torch.zeros_like(keys), keys
        return keys >> self._shift, keys & ((1 << self._shift) - 1)

    def ids(self, keys: torch.Tensor) -> torch.Tensor:
        """The ids (K,) int64 of `keys` (K,) in their own tables."""
        return self.unpack(keys)[1]

    def count(self, keys: torch.Tensor, which: torch.Tensor | None = None) -> torch.Tensor:
        """Number of `keys` (K,) in each logical table, of those `which` (K,) bool marks: (m,) int64."""
        members = self.unpack(keys)[0]
        ones = torch.ones_like(keys) if which is None else which.to(torch.int64)
        return keys.new_zeros(len(self.names)).scatter_add_(0, torch.where(ones > 0, members, 0), ones)

    def initial_rows(self, seed: int, keys: torch.Tensor, dim: int, scale: float) -> torch.Tensor:
        """Initial weights (K, dim) float32: a function of (seed, table name, id, column), merged or not."""
        if not self.bits:
            return launch.initial_rows(seed, self.table_ids[0], keys, dim, scale)
        members, ids = self.unpack(keys)
        rows = torch.empty(len(keys), dim, dtype=torch.float32, device=keys.device)
        if not on_host(keys):  # nothing waits for the number of keys of a table: each draws all rows
            for member, table_id in enumerate(self.table_ids):
                own = launch.initial_rows(seed, table_id, ids, dim, scale)
                rows = own if member == 0 else torch.where((members == member).unsqueeze(1), own, rows)
            return rows
        for member in torch.unique(members).tolist():
            here = members == member
            rows[here] = launch.initial_rows(seed, self.table_ids[member], ids[here], dim, scale)
        return rows
