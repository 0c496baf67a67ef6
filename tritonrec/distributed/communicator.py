"""Collectives of a group of ranks, over torch.distributed; with one rank they are local copies."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..ops import FRACTION_BITS, ExactSumError
from .ledger import Ledger
from .watch import RankDiedError, Watch

TIMEOUT = timedelta(seconds=60)
"""Timeout of a collective that waits for a rank."""

SAVE_TIMEOUT = timedelta(minutes=30)
"""Timeout of the checkpoint group, where ranks wait for each other's disks as long as all of them report.
A rank that stalls or dies is noticed within the timeout of the other groups."""

PEER_FAILURE = re.compile("gloo|connection|timed out|timeout|NCCL|HCCL|socket", re.IGNORECASE)
"""Matches backends' errors about another rank; all other errors are this rank's own."""


class Communicator:
    """Collectives of one process group.

    Args:
        group: a process group of the calling rank, or None for a run of one rank.
        name: of the group, unique, and the same on all its ranks. watch: names a rank that is missing.
        peers: the group's ranks by their numbers in `watch`.
        monitored: before each collective wait up to `SAVE_TIMEOUT` for ranks that are busy but report.

    Attributes:
        ledger: of the messages of its all-to-alls, on all ranks alike; None: they are not looked at.
        turn: of a caller whose collectives come one after the other, where several threads have some. Taken
            in one order on all ranks, by the thread that makes steps.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        name: str = "",
        watch: Watch | None = None,
        peers: Sequence[int] = (),
        monitored: bool = False,
    ):
        self.group, self.name, self.peers, self.monitored = group, name, tuple(peers), monitored
        self.watch = watch
        self.ledger: Ledger | None = None
        self.turn = threading.Lock()
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def __deepcopy__(self, memo: object) -> Communicator:
        """The communicator itself: a copied module communicates over the same group."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Of a run of one rank, as a module is saved with it; a group is no file's."""
        return {name: value for name, value in vars(self).items() if name != "turn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, turn=threading.Lock())

    def supports(self, device: torch.device) -> bool:
        """Whether tensors on `device` can be exchanged; gloo takes those of the host only."""
        if self.group is None or device.type == "cpu":
            return True
        pairs = (pair.split(":") for pair in str(dist.get_backend_config(self.group)).split(","))
        return dict(pairs).get(device.type, "gloo") != "gloo"

    def all_to_all(
        self, values: torch.Tensor, send: list[int], receive: list[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send the next ``send[r]`` rows of `values` to each rank r, and return the received rows.

        Args:
            values: (sum(send), ...) rows grouped by destination rank.
            send, receive: rows to and from each rank, world_size entries each.
            out: for the result, contiguous; new by default.

        Returns:
            (sum(receive), ...) rows grouped by source rank.

        Raises `CorruptionError` where the `ledger` finds a message that changed on its way.
        """
        received = self.exchange(values, send, receive, out)
        if self.ledger is not None and self.world_size > 1:
            self.ledger.note(self, values, send, received, receive)
        return received

    def exchange(
        self, values: torch.Tensor, send: list[int], receive: list[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`all_to_all` without the ledger."""
        if self.group is None:
            return values.clone() if out is None else out.copy_(values)
        received = values.new_empty((sum(receive), *values.shape[1:])) if out is None else out
        self._collective(
            lambda: dist.all_to_all_single(received, values.contiguous(), receive, send, group=self.group)
        )
        return received

    def all_to_all_equal(self, values: torch.Tensor) -> torch.Tensor:
        """Row r of `values` (world_size, ...) goes to rank r; row r of the result came from rank r."""
        return self.all_to_all(values, [1] * self.world_size, [1] * self.world_size)

    def all_to_all_counted(self, values: torch.Tensor, send: list[int]) -> torch.Tensor:
        """`all_to_all` where the receivers do not know the numbers of rows: these are exchanged before."""
        counts = torch.tensor(send, dtype=torch.int64, device=values.device).unsqueeze(1)
        return self.all_to_all(values, send, self.all_to_all_equal(counts).flatten().tolist())

    def ring_shift(self, values: torch.Tensor, distance: int = 1) -> torch.Tensor:
        """Send rows (n, ...) `distance` ranks further; the rows (m, ...) of the rank as far before."""
        to = (self.rank + distance) % self.world_size
        send = [len(values) if rank == to else 0 for rank in range(self.world_size)]
        return self.all_to_all_counted(values, send)

    def all_reduce(self, values: torch.Tensor, name: str, bounded: bool = False) -> torch.Tensor:
        """Sum `values` over the ranks, in place.

        int64 sums of fixed-point numbers are exact. A value that could overflow in the sum raises
        `ExactSumError` naming `name`, before the exchange; values that are `bounded` are not looked at.
        """
        if self.group is None:
            return values
        if not bounded:
            self._check_overflow(values, name)
        self._collective(lambda: dist.all_reduce(values, group=self.group))
        return values

    def _collective(self, function: Callable[[], object]) -> None:
        """Call `function`; where another rank makes it fail, raise `RankDiedError`.

        A watch knows which rank, and its stage.
        """
        watch = self.watch
        if watch is None:  # of the caller's own process group
            try:
                function()
            except RuntimeError as error:
                if not PEER_FAILURE.search(str(error)):
                    raise
                raise RankDiedError(
                    "another rank has not joined an exchange of rows: it has ended, or has fewer batches, or "
                    "looks other tables up: give every rank the same number of batches (drop_last=True). The "
                    f"backend says: {error}"
                ) from error
            return
        # A rank that one collective has named is not waited for again, by another thread or in the next call.
        if watch.lost:
            raise RankDiedError(watch.lost)
        if self.monitored:
            try:
                watch.monitored_barrier(self.name, self.peers, SAVE_TIMEOUT)
            except RankDiedError as error:
                watch.lost = str(error)
                raise
        # Counted on all ranks alike: a rank whose count is lower
        # has not reached this collective (`Watch.explain`).
        number, began = watch.begin_call(self.name), time.monotonic()
        try:
            function()
        except RuntimeError as error:
            # An error of this rank's own arguments is not the fault of another rank.
            if not PEER_FAILURE.search(str(error)):
                raise
            waited = time.monotonic() - began
            raise watch.explain(self.name, number, self.peers, waited, error) from error

    def _check_overflow(self, values: torch.Tensor, name: str) -> None:
        """Raise `ExactSumError` where an int64 could overflow in the sum over the ranks."""
        if values.dtype != torch.int64 or not values.numel():
            return
        # W values of at most this size cannot leave int64, whatever the order in which the backend adds them.
        limit = (2**63 - 1) // self.world_size
        for at in (int(values.argmax()), int(values.argmin())):
            value = int(values.view(-1)[at])
            if abs(value) > limit:
                raise ExactSumError(
                    name, (at,), value, FRACTION_BITS, f"the others of {self.world_size} ranks"
                )

    def all_reduce_bytes(self, values: torch.Tensor) -> int:
        """Bytes that a rank sends in a ring all-reduce: 2 (W - 1) / W of the values."""
        return 2 * values.numel() * values.element_size() * (self.world_size - 1) // self.world_size

    def all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """All-gather of rows (n, ...), of which each rank may have another number; in rank order."""
        world = self.world_size
        if world == 1:
            return [values]
        # Two all-to-alls, since the ranks' parts differ in length: the same part goes to everybody.
        lengths = torch.full((world, 1), len(values), dtype=torch.int64, device="cpu")
        counts = self.all_to_all_equal(lengths).flatten().tolist()
        repeated = values.repeat(world, *(1 for _ in values.shape[1:]))
        return list(self.all_to_all(repeated, [len(values)] * world, counts).split(counts))

    def all_gather_texts(self, text: str) -> list[str]:
        """All-gather of texts, in rank order."""
        mine = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            if text
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        parts = self.all_gather(mine)
        return [bytes(part.tolist()).decode() for part in parts]
