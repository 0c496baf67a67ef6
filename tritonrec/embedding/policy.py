"""Where a table is, and its policies for rows that are seldom used: eviction, admission, precision tiers."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from typing import Literal

import torch

from ..files.places import local_path
from ..kernels.dispatch import usable_device
from ..settings import MOST, bytes_of, setting, typed

EvictionPolicy = Literal["lru", "lfu", "ttl"]
Storage = Literal["auto", "host", "device", "cached", "disk"]
MAX_CACHE_ROWS = 1 << 29
DEVICE_SHARE = 0.5
"""Of an accelerator's free memory, for tables that ``"auto"`` puts there; buffers and model need the rest."""
ROW_BYTES = 48
"""Of keys and metadata of a row at most: 12 a slot, of which three eighths are in use at least, and 16."""


@typed
@dataclass(frozen=True)
class Placement:
    """Where a table is. The bits of training are the same everywhere.

    Args:
        storage: ``"host"``: keys, rows and optimizer state in host memory, and lookups on the host.
            ``"device"``: all of it in the memory of `device`, lookups and updates by its kernels.
            ``"cached"``: keys and metadata on `device`, rows in page-locked host memory, and those of recent
            lookups in a cache on `device` (NestPipe, section IV.A: they are known a batch ahead). With a
            `path` the rows are in a file behind both: those that the cache misses come into `memory`.
            ``"disk"``: keys and metadata in host memory, rows in a file, and those of recent lookups in host
            memory.
            ``"auto"``: host where `device` is a CPU; beside an accelerator cached, as in NestPipe. There the
            tables of a collection that an eviction bounds are on the device, as long as `DEVICE_SHARE` of its
            free memory holds them.
        device: of ``"device"`` and ``"cached"`` tables; a lookup's keys are given there.
        cache_rows: rows of a ``"cached"`` table on the device. Two batches' rows should fit.
        path: an existing directory, for the files of ``"disk"`` tables, and of ``"cached"`` ones that are to
            lie there. They have no names there and are gone with the process; what lasts is the last
            checkpoint.
        memory: of the rows of such a table in host memory, one of each merged table and rank, such as
            ``"2GiB"``. Two batches' rows should fit.
        index_memory: of a ``"disk"`` table's key structure in memory, such as ``"4GiB"``; a larger one is
            in a file in `path`, too. By default it is in memory at every size.
    """

    storage: Storage = setting(
        "auto", "Tables in host memory, on the device, cached there, or on disk; auto: cached beside a GPU."
    )
    device: str = "cpu"
    cache_rows: int = setting(1 << 20, "Rows of a cached table on the device.", 1, MAX_CACHE_ROWS)
    path: str = setting(
        "", "Directory for the files of tables on disk, or cached before a disk.", option="disk_path"
    )
    memory: str = setting(
        "1GiB", "Memory for the rows of each table on disk, such as 512MiB.", option="disk_memory"
    )
    index_memory: str = setting(
        "",
        "Put the keys of a table on disk in a file, too, beyond a size such as 4GiB.",
        option="disk_index_memory",
    )

    def __post_init__(self) -> None:
        if self.storage != "cached" and (self.storage == "disk") != bool(self.path):
            raise ValueError(
                "tables on disk need a directory, cached ones may have one, and others take none: got "
                f"storage={self.storage!r} with path={self.path!r}"
            )
        if not self.path and self.memory != Placement.memory:
            raise ValueError(
                f"memory={self.memory!r} (disk_memory) is of tables on disk, and these have "
                f"storage={self.storage!r}"
            )
        if self.index_memory:
            if self.storage != "disk":
                raise ValueError(
                    f"index_memory={self.index_memory!r} (disk_index_memory) is of tables on disk, and "
                    f"these have storage={self.storage!r}"
                )
            bytes_of(self.index_memory, "index_memory of tables on disk (disk_index_memory)")
        if self.path:
            self.folder()
        bytes_of(self.memory, "memory of tables on disk (disk_memory)")

    def folder(self) -> str:
        """`path` as it is from any working directory; ValueError for a URL."""
        return str(local_path(self.path, "the directory of tables on disk (disk_path)").absolute())

    def chosen(self) -> Placement:
        """This, with the storage that ``"auto"`` means."""
        if self.storage != "auto":
            return self
        return replace(self, storage="host" if self.device.partition(":")[0] == "cpu" else "cached")

    def __str__(self) -> str:
        """What runs where."""
        chosen = self.chosen()
        if chosen.storage == "host":
            return "keys and rows in host memory, looked up by the host"
        if chosen.storage == "device":
            return f"keys and rows on {self.device}, looked up there"
        if chosen.storage == "disk":
            keys = "keys in host memory"
            if self.index_memory:
                keys += f" up to {self.index_memory}, beyond it in a file"
            return (
                f"{keys}, looked up by the host; rows in a file in {self.path}, {self.memory} "
                "of recent lookups in host memory"
            )
        home = f"a file in {self.path}, {self.memory} of them in host memory" if self.path else "host memory"
        return (
            f"keys on {self.device}, looked up there; rows in {home}, {self.cache_rows:,} of recent "
            f"lookups on {self.device}"
        )


@typed
@dataclass(frozen=True)
class Eviction:
    """Eviction of rows (MTGRBoost, section 4.1: metadata for eviction).

    Time is the step number. The keys of this step and of the one before are never evicted: their rows are in
    the pipeline's two buffers.

    Args:
        policy: ``"lru"`` and ``"lfu"`` keep each logical table, all ranks together, at `capacity` rows. They
            evict the rows with the oldest last access, or with the fewest steps that used them; of equal
            ones the smaller id first. ``"ttl"`` evicts rows whose last access is more than `ttl` steps ago.
        capacity: rows of a logical table, over all ranks; or a size such as ``"2GiB"``: as many rows as that
            holds, with their optimizer state and `ROW_BYTES` of keys and metadata each. A step's new keys are
            inserted after its eviction pass, so the table may exceed the capacity by their number.
        ttl: steps.
        every: steps between eviction passes, which run at multiples of it.
    """

    policy: EvictionPolicy
    capacity: int | str | None = None
    ttl: int | None = None
    every: int = setting(1, "Steps between eviction passes.", 1)

    def __post_init__(self) -> None:
        required, other = ("ttl", "capacity") if self.policy == "ttl" else ("capacity", "ttl")
        value = getattr(self, required)
        if isinstance(value, str):
            value = bytes_of(value, required)
        if value is None or value < 1:
            raise ValueError(f"eviction by {self.policy} needs {required} of at least 1, got {value}")
        if getattr(self, other) is not None:
            raise ValueError(
                f"eviction by {self.policy} takes {required}: leave out {other}={getattr(self, other)}"
            )

    def rows_of(self, row_width: int) -> int | None:
        """The `capacity` in rows of `row_width` float32 values; ValueError where not one fits."""
        if not isinstance(self.capacity, str):
            return self.capacity
        size = 4 * row_width + ROW_BYTES
        if bytes_of(self.capacity) < size:
            raise ValueError(f"no row of {size} bytes fits into a capacity of {self.capacity}")
        return bytes_of(self.capacity) // size


@typed
@dataclass(frozen=True)
class PrecisionTiers:
    """Rows used often in float32, the others in 16 bits (MTGRBoost, section 5.2: mixed precision).

    Each row counts the steps that use it, up to 255; all counts halve at steps divisible by `every`. A row
    with a count of at least `threshold` is stored in float32. Any other is in low precision: float16 weights
    and bfloat16 optimizer state, whose range is float32's; Adam's second moment would vanish in float16.

    By a size no count decides, but memory does: where a logical table, all ranks together, is larger than it
    in float32, a pass stores its least used rows in 16 bits, as many as bring it there; of equal counts the
    smaller ids first. A row that is used again is in float32 until the next pass, as new rows are.

    Args:
        threshold: 1 to 255; or a size such as ``"2GiB"``, which has rows with their optimizer state and
            `ROW_BYTES` of keys and metadata each. A table whose rows are all in 16 bits outgrows it.
        every: steps between halvings, and passes. A row used in every step settles just below ``2 * every``.
    """

    threshold: int | str = setting(MISSING, "Steps that use a row stored in float32, or a size.", 1, 255)
    every: int = setting(MISSING, "Steps between halvings of the counts.", 1)

    def __post_init__(self) -> None:
        if isinstance(self.threshold, str) and not bytes_of(self.threshold, "threshold of PrecisionTiers"):
            raise ValueError(f"PrecisionTiers need a size of at least 1 byte, got {self.threshold!r}")


class DeviceRoom:
    """Free memory of accelerators, which the tables of a collection take one after the other."""

    def __init__(self) -> None:
        self._left: dict[torch.device, int] = {}

    def place(self, given: Placement | None, policy: TablePolicy, row_width: int, members: int) -> Placement:
        """`given`, with storage ``"device"`` where ``"auto"`` finds room for all rows that there may be.

        Of `members` logical tables with rows of `row_width` values, as though one rank had them all.
        """
        placement = given or Placement()
        rows = policy.eviction.rows_of(row_width) if policy.eviction else None
        if rows is None or placement.storage != "auto" or placement.chosen().storage == "host":
            return placement
        if placement.cache_rows != Placement().cache_rows:  # who sizes a cache has one
            return placement
        device = usable_device(placement.device)
        left = self._left.setdefault(device, int(DEVICE_SHARE * torch.accelerator.get_memory_info(device)[0]))
        size = members * rows * (4 * row_width + ROW_BYTES)
        if size > left:
            return placement
        self._left[device] = left - size
        return replace(placement, storage="device")


@typed
@dataclass(frozen=True)
class TablePolicy:
    """Policies of a table; by default every key gets a row at once and keeps it, in float32.

    Args:
        eviction: see `Eviction`; None keeps every row.
        admission: a key gets a row in the `admission`-th step that looks it up. Before that it reads as its
            initial row, and its updates are dropped.
        precision: see `PrecisionTiers`; None stores every row in float32.
        admission_window: steps. At multiples of it, keys without a row whose last lookup is more than this
            many steps ago are forgotten, and count from zero again. So the counted keys are at most those of
            two windows, however long the run.
    """

    eviction: Eviction | None = setting(
        None,
        "lru:ROWS, lfu:ROWS (or a size, as 2GiB), ttl:STEPS; :EVERY behind it: steps between sweeps.",
        option="evict",
    )
    admission: int = setting(1, "Give a key a row at its n-th step.", 1, MOST)
    precision: PrecisionTiers | None = setting(
        None,
        "THRESHOLD:EVERY: rows used in fewer steps are stored in 16 bits; access counts halve every EVERY "
        "steps. SIZE:EVERY, as 2GiB:100: the least used rows of a table beyond it are.",
        option="precision_tiers",
    )
    admission_window: int = setting(
        1000, "Forget keys that wait for a row and were not seen for this many steps.", 1, MOST
    )
