"""The handle of each key in device memory: the ops on a hash table, and no wait of the host.

How many keys of a lookup are new only the device knows. So the numbers that follow from it (keys, handles,
free handles) are tensors, and the host goes by upper bounds: every key of a lookup may be new. The bounds
tighten when a copy of the numbers arrives, at the latest some lookups later.
"""

from __future__ import annotations

import torch

from ..kernels import launch, murmur
from .key_index import LOAD_FACTOR
from .pools import DevicePool
from .selection import select, valid
from .shared_state import use_here

_KEYS, _ERASED = 2, 3  # of the pool's numbers: keys in the structure, keys erased since it was made
MAX_ERASED = 0.125
"""Share of the slots that erased keys may have left behind before the structure is made anew."""


class DeviceIndex:
    """int64 key -> handle, as `KeyIndex`, in the memory of `device`; any of the 2**64 keys is legal.

    Work is queued on the current stream; calls must come from streams that are ordered among themselves.

    Args:
        slots: initial slots, a power of two and at least 8.
    """

    def __init__(self, slots: int, device: torch.device):
        if slots < 8 or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two and at least 8, got {slots}")
        self._device = device
        self._keys = torch.zeros(slots, dtype=torch.int64, device=device)
        self._rows = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self._handles = DevicePool(device, others=2)
        self._numbers = self._handles.numbers

    def __len__(self) -> int:
        return self._numbers.exact()[_KEYS]

    @property
    def end(self) -> int:
        """Upper bound of all handles so far."""
        return self._handles.end

    @property
    def slots(self) -> int:
        """Slots of the key structure."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the key structure."""
        return self._keys.nbytes + self._rows.nbytes

    @property
    def disk_nbytes(self) -> int:
        """Bytes in files."""
        return 0

    @property
    def free_nbytes(self) -> int:
        """Bytes of the list of free handles."""
        return self._handles.nbytes

    def find(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """The handle of each key (K,) int64, repeats allowed; -1 where absent, and behind the count."""
        return launch.hash_find(self._keys, self._rows, keys ^ murmur.SECRET, count)

    def find_or_insert(
        self, keys: torch.Tensor, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KeyIndex.find_or_insert`; behind the count -1 and false."""
        size = len(keys)
        self._handles.end_after(size)  # raises where they do not fit
        self.grow(size)
        # Handles for all, as if every key were new. Only as many as were inserted are claimed.
        fresh = self._handles.next(size)
        handles, inserted = self._insert(keys ^ murmur.SECRET, fresh, count, self._numbers.values[_KEYS])
        self._handles.claim(inserted.sum(), size, (size,))
        return handles, inserted

    def erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """See `KeyIndex.erase`; -1 behind the count."""
        size = len(keys)
        if self._numbers.bound(_ERASED) > MAX_ERASED * self.slots:  # of earlier calls, whose number is known
            self._make_anew()
        values = self._numbers.values
        handles = launch.hash_erase(self._keys, self._rows, keys ^ murmur.SECRET, count, values[_KEYS])
        none = torch.zeros_like(values[_KEYS])
        gone = (handles >= 0).sum()
        self._numbers.add(torch.stack([none, none, none, gone]), (0, 0, 0, size))
        return handles

    def release(self, handles: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """See `KeyIndex.release`; those of -1 and behind the count are none."""
        self._handles.release(handles, (handles >= 0) & valid(len(handles), count, self._device))

    def items(self, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys (n,) and their handles (n,) of `dtype`, in no particular order; waits for the device."""
        used = (self._rows >= 0).nonzero().squeeze(1)
        return self._keys[used] ^ murmur.SECRET, self._rows[used].to(dtype)

    def slots_in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StoredTable.slots_in_order`."""
        return self._keys ^ murmur.SECRET, self._rows.clamp(min=-1).to(torch.int64)

    def grow(self, keys: int) -> None:
        """Make room for `keys` more keys, behind the work that is queued."""
        while self._numbers.bound(_KEYS) + keys > LOAD_FACTOR * self.slots:
            self._replace(*launch.hash_grow(self._keys, self._rows))

    def _make_anew(self) -> None:
        """The same keys and handles in as many slots, without tombstones."""
        used = select(self._rows >= 0, padded=True)
        keys, handles = used.take(self._keys), used.take(self._rows).clamp(min=0)
        self._replace(torch.zeros_like(self._keys), torch.full_like(self._rows, -1))
        self._insert(keys, handles, used.count, torch.zeros_like(self._numbers.values[_KEYS]))

    def _replace(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Take slots without tombstones."""
        use_here(self._keys)
        use_here(self._rows)
        self._keys, self._rows = keys, rows
        self._numbers.reset(_ERASED)

    def _insert(
        self, keys: torch.Tensor, handles: torch.Tensor, count: torch.Tensor | None, used: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Insert keys, of which new ones get the next of `handles`; there is room, so none is refused."""
        status = torch.zeros((), dtype=torch.int64, device=self._device)
        return launch.hash_insert(self._keys, self._rows, keys, 0, handles, count, None, status, used)
