"""Keys of merged tables: the number of a logical table and an id in one int64 (MTGRBoost, section 4.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from ..kernels.dispatch import on_host

Columns = Mapping[str, torch.Tensor]


class KeyLayout:
    """Encoding of logical table and id in the keys of a merged table (MTGRBoost, equation 8).

    ``key = (member << (63 - k)) | id`` with ``k = ceil(log2(m + 1))`` bits for m tables; the sign bit stays
    0. Three tables::

        bit    63   62 61    60 ........ 0
               0    member   id                 ids from 0 to 2**61 - 1

    The keys of a single table are its ids, all 2**64 of them.

    Rows are as wide as the widest table's. Those of a narrower one have zeros behind their weights, and
    behind each of their states::

        row of dim 3 beside dim 4    w w w 0 | s s s 0

    Args:
        names: of the logical tables, in the order of their member numbers; by default a single table without
            a name.
        dims: weights of a row of each; by default all have as many.
    """

    def __init__(self, names: tuple[str, ...] = ("",), dims: tuple[int, ...] = ()):
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a table needs one or more distinct names, got {list(names)}")
        if dims and len(dims) != len(names):
            raise ValueError(f"tables {list(names)} need a dim each, got {list(dims)}")
        self.names, self.dims = names, dims
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
        prefixes = torch.tensor(members, dtype=torch.int64, device="cpu") << self._shift
        lengths = torch.tensor([each.shape[0] for each in ids], dtype=torch.int64, device="cpu")
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

    def merged(self, member: int, columns: Columns, feature: str) -> dict[str, torch.Tensor]:
        """Columns of a state of logical table `member`, by name, as this table's."""
        found = {**columns, "keys": self.pack(member, columns["keys"], feature)}
        if "rows" in columns:
            found["rows"] = self.widened(member, columns["rows"])
        return found

    def narrowed(self, member: int, rows: torch.Tensor) -> torch.Tensor:
        """The columns (K, w) of logical table `member` in `rows` (K, W) of this table."""
        if not self.dims or self.dims[member] == (widest := max(self.dims)):
            return rows
        return (
            rows.reshape(len(rows), rows.shape[1] // widest, widest)[:, :, : self.dims[member]]
            .flatten(1)
            .contiguous()
        )

    def widened(self, member: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows (K, W) of this table, from the `rows` (K, w) of logical table `member`."""
        if not self.dims or self.dims[member] == (widest := max(self.dims)):
            return rows
        blocks = rows.reshape(len(rows), rows.shape[1] // self.dims[member], self.dims[member])
        return F.pad(blocks, (0, widest - self.dims[member])).flatten(1)

    def by_table(self, parts: Mapping[str, Columns]) -> dict[str, dict[str, torch.Tensor]]:
        """Columns by part of a state, which is of rows or of candidates -> those of each logical table, by
        `part_name`; keys become ids.
        """
        tables = {}
        for part, columns in parts.items():
            members, ids = self.unpack(columns["keys"])
            for member, name in enumerate(self.names):
                own = {**columns, "keys": ids}
                if self.bits:
                    here = members == member
                    own = {column: values[here] for column, values in own.items()}
                    if "rows" in own:
                        own["rows"] = self.narrowed(member, own["rows"])
                tables[part_name(name, part)] = own
        return tables


def part_name(table: str, part: str) -> str:
    """The name of a part of a logical table's state: of its rows, or of its candidates."""
    return table if part == "rows" else f"{table}.{part}"
