"""Ranks that go on without those that were lost, in their processes and with new groups.

Each rank serves a store. After a `RankDiedError` the ranks leave their groups, which ends the waits of all
others, and meet at the store of the first rank that answers. That rank waits for all that are alive and
names those that go on.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..distributed.communicator import TIMEOUT, Communicator
from ..distributed.environment import rank_here
from ..distributed.groups import Communicators, validate_division
from ..distributed.join import from_environment, join_environment, made_within
from ..distributed.limits import LATE, READ_TIMEOUT, within
from ..distributed.stores import serve_store, token
from ..distributed.watch import RankDiedError, Watch, of_another_rank
from ..settings import typed

Result = TypeVar("Result")

LAG = 10.0
"""Seconds, besides the timeout, until every rank that is alive has noticed: reports, lanes, a save."""

POLL = 0.02
PROBE = 0.2
"""Seconds between two looks at a store, and between two connections to a rank."""


@typed
def run_elastic(
    function: Callable[[Communicators], Result],
    timeout: timedelta = TIMEOUT,
    replicas: int = 1,
    min_ranks: int = 1,
) -> Result:
    """Call ``function(communicators)``, and again with the ranks that are left after some were lost.

    The ranks are those of torchrun's variables, or of SLURM's or MPI's, with one agent for each rank or
    machine and without restarts: ``torchrun --nnodes 4 --nproc-per-node 1 ...``. A rank is lost if its
    process or its machine ends, if it raises an error of its own, or if it stands still for the timeout.
    `function` makes model, tables and trainer anew and loads a state that all ranks have
    (`PeerCopies.restore`, `Trainer.load`). The process, with its kernels and data, stays.

    Args:
        timeout: of collectives. replicas: of the tables, at first; later the largest number up to it that
            divides the ranks.
        min_ranks: with fewer ranks than that nobody goes on; above half of them, no two parts of a divided
            network can both go on.

    Returns the result of the last call. Raises its error where no other rank caused it, where no rank was
    lost (a network that fails), and on a rank that the others went on without; `RankDiedError` where fewer
    than `min_ranks` are left.
    """
    if min_ranks < 1:
        raise ValueError(f"min_ranks must be at least 1, got {min_ranks}")
    if rank_here().world_size == 1:
        with from_environment(timeout, replicas) as communicators:
            return function(communicators)
    ranks = _Ranks(timeout, replicas, min_ranks)
    try:
        while True:
            try:
                with ranks.groups() as communicators:
                    return function(communicators)
            except Exception as error:
                if of_another_rank(error) is None:
                    raise
                ranks.meet(error)
            gc.collect()  # tables of the call before
    finally:
        ranks.close()


class Member(NamedTuple):
    """A rank by its number in the first groups, and its store, the names of whose keys begin with `token`."""

    number: int
    address: str
    port: int
    token: str = ""

    def is_gone(self) -> bool:
        """Whether its process has ended; False where its machine does not answer."""
        try:
            socket.create_connection((self.address, self.port), READ_TIMEOUT).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def connect(self, seconds: float = READ_TIMEOUT) -> dist.Store:
        """A connection to its store; RuntimeError where nobody listens, TimeoutError where it stalls."""
        limit = timedelta(seconds=seconds)
        store = within(
            seconds + LATE,
            lambda: dist.TCPStore(self.address, self.port, None, False, limit, wait_for_workers=False),
        )
        return dist.PrefixStore(self.token, store)


class _Ranks:
    """The ranks that are left, as this one knows them, and their groups."""

    def __init__(self, timeout: timedelta, replicas: int, min_ranks: int):
        self.timeout, self.replicas, self.min_ranks = timeout, replicas, min_ranks
        self.patience = timeout.total_seconds() + LAG
        self.generation = 0
        self.still: set[int] = set()  # numbers of ranks that said nothing for the timeout
        world_size = rank_here().world_size
        validate_division(world_size, replicas, nodes=1)
        self.store: dist.Store | None
        watch = join_environment(timeout)
        try:
            self.members = made_within(timeout, lambda: self._tell(watch), watch)
        finally:
            watch.close()
        self.own = self.members[dist.get_rank()]

    def _tell(self, watch: Watch) -> list[Member]:
        """Serve a store, and tell the others where; all ranks with theirs. Collective."""
        everyone = Communicator(dist.group.WORLD, "members", watch, range(watch.world_size))
        address = _own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        found = everyone.all_gather_texts(address)
        outside = [each for each in found if not ipaddress.ip_address(each).is_loopback]
        if outside and address not in outside:  # the name of this machine is its loopback interface here
            address = _own_address(outside[0], 1)
        served, secret = serve_store(address, timeout=self.timeout), token()
        self.store = dist.PrefixStore(secret, served)
        texts = everyone.all_gather_texts(json.dumps((everyone.rank, address, served.port, secret)))
        return [Member(*json.loads(text)) for text in texts]

    def close(self) -> None:
        """End the store, by which the others see that this rank has left."""
        self.store = None

    @contextmanager
    def groups(self) -> Iterator[Communicators]:
        """Groups of the ranks that are left; the first ones are those of torchrun's variables."""
        members = self.members
        world, rank = len(members), members.index(self.own)
        watch: Watch | None = None
        try:
            if world == 1:
                yield Communicators.local()
                return
            try:
                reports = dist.PrefixStore(f"reports {self.generation}", self._connect_to_first())
                watch = Watch(reports, rank, world, self.timeout, lambda rank: members[rank].is_gone())
                if self.generation:
                    store = dist.PrefixStore(f"groups {self.generation}", self._connect_to_first())
                    made_within(
                        self.timeout,
                        lambda: dist.init_process_group(
                            "gloo", store=store, rank=rank, world_size=world, timeout=self.timeout
                        ),
                        watch,
                    )
                replicas = max(each for each in range(1, self.replicas + 1) if world % each == 0)
                communicators = made_within(
                    self.timeout,
                    lambda: Communicators.over(range(world), self.timeout, replicas, "gloo", watch),
                    watch,
                )
                assert communicators is not None
            except RankDiedError:
                raise
            except (RuntimeError, TimeoutError) as error:
                raise RankDiedError(
                    f"a rank was lost while {world} ranks made their groups: {error}"
                ) from error
            try:
                yield communicators
            except BaseException as error:
                watch.fail(error)
                raise
        finally:
            if watch is not None:
                watch.close()
                self.still = {members[each].number for each in watch.still}
            if dist.is_initialized():
                dist.destroy_process_group()  # closes the connections, and the others' waits end

    def _connect_to_first(self) -> dist.Store:
        return self.members[0].connect(self.timeout.total_seconds())

    def meet(self, error: Exception) -> None:
        """Agree with the others who goes on, after `error`, which is raised where all ranks are alive."""
        if self.still and self.own == next(each for each in self.members if each.number not in self.still):
            warnings.warn(f"{of_another_rank(error)}\nthe other ranks meet", RuntimeWarning, stacklevel=3)
        generation, numbers = self._agree()
        lost = [each.number for each in self.members if each.number not in numbers]
        left = [each for each in self.members if each.number in numbers]
        if not lost:
            raise error
        words = f"lost {_listed(lost)}: {of_another_rank(error)}"
        if len(left) < self.min_ranks:
            raise RankDiedError(
                f"{_listed(numbers)} cannot go on, since {self.min_ranks} are needed: {words}"
            ) from error
        self.generation, self.members = generation, left
        if self.own == left[0]:
            warnings.warn(
                f"{words}\n{_listed(numbers)} go{'es'[: 2 * (len(left) == 1)]} on",
                RuntimeWarning,
                stacklevel=3,
            )

    def _agree(self) -> tuple[int, list[int]]:
        """Number of the next groups, and the ranks in them."""
        others = [each for each in self.members if each != self.own]
        with ThreadPoolExecutor(max(1, min(len(others), 32))) as threads:
            answers = dict(zip(others, threads.map(self._answers, others), strict=True))
        # Nobody waits once more for ranks that have been waited for and give no answer now either.
        still = [each for each in others if each.number in self.still and not answers[each]]
        # The first rank that is alive decides. Ranks before this
        # one are asked in order; if none answers, it is this one.
        for member in self.members[: self.members.index(self.own)]:
            if member not in still and not member.is_gone():
                found = self._join(member)
                if found is not None:
                    return found
        return self._decide(still)

    def _answers(self, member: Member) -> bool:
        """Whether its store answers; False where its process ends, or stands still."""
        try:
            within(READ_TIMEOUT, lambda: self._raise_if_left(member.connect()))
        except LeftBehindError:
            raise
        except (RuntimeError, TimeoutError):
            return False
        return True

    def _raise_if_left(self, store: dist.Store) -> None:
        if store.check([f"left {self.own.number}"]):
            raise LeftBehindError(
                f"rank {self.own.number} did not answer for {self.patience:g} s, and the others went on "
                "without it"
            )

    def _join(self, first: Member) -> tuple[int, list[int]] | None:
        """What `first` decides; None where its process ends, or stands still for the timeout."""
        mine, silence = f"decision for {self.own.number}", self.timeout.total_seconds()
        deadline = time.monotonic() + 2 * self.patience

        def decided() -> bool:
            found = store.check([mine])
            if not found:
                self._raise_if_left(store)
            return found

        try:
            store = within(silence, first.connect)
            within(silence, lambda: store.set(f"joined {self.own.number}", str(self.generation)))
            while not within(silence, decided):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL)
            generation, numbers = json.loads(within(silence, lambda: store.get(mine)))
            within(silence, lambda: store.delete_key(mine))
        except LeftBehindError:
            raise
        except (RuntimeError, TimeoutError):
            return None
        return generation, numbers

    def _decide(self, still: Sequence[Member]) -> tuple[int, list[int]]:
        """Wait for every other rank that does not stand `still` until it joins or is gone, or for as long as
        it may take to notice.
        """
        assert self.store is not None
        joined = {self.own.number: self.generation}
        waiting = [each for each in self.members if each != self.own and each not in still]
        now = time.monotonic()
        deadline, probe = now + self.patience, now
        while waiting and now < deadline:
            for each in waiting:
                key = f"joined {each.number}"
                if self.store.check([key]):
                    joined[each.number] = int(self.store.get(key))
                    self.store.delete_key(key)
            waiting = [each for each in waiting if each.number not in joined]
            if now >= probe:
                waiting = [each for each in waiting if not each.is_gone()]
                probe = time.monotonic() + PROBE
            time.sleep(POLL)
            now = time.monotonic()
        # A rank may have missed a round that failed on others: the
        # highest number of all, so that no store's keys are used twice.
        decision = max(joined.values()) + 1, sorted(joined)
        for each in self.members:
            if each.number not in joined:
                # A rank that wakes up later finds this and ends, instead of training beside the others.
                self.store.set(f"left {each.number}", "")
            elif each != self.own:
                self.store.set(f"decision for {each.number}", json.dumps(decision))
        reading = [each for each in self.members if each.number in joined and each != self.own]
        deadline = time.monotonic() + self.patience  # one that stands still is missed by the next groups
        while reading and time.monotonic() < deadline:  # this process may end after it
            time.sleep(POLL)
            unread = [each for each in reading if self.store.check([f"decision for {each.number}"])]
            reading = [each for each in unread if not each.is_gone()]
        return decision


class LeftBehindError(RankDiedError):
    """The other ranks went on without this one."""


def _own_address(peer: str, port: int) -> str:
    """The address of this machine in the network of `peer`."""
    family, kind, _, _, address = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as connection:
        connection.connect(address)  # sends nothing
        return str(connection.getsockname()[0])


def _listed(numbers: Sequence[int]) -> str:
    return f"rank{'s'[: len(numbers) > 1]} {', '.join(map(str, numbers))}"
