"""Promise: ranks that disagree about an exchange get an error on all ranks; nothing wrong is returned."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from thread_ranks import ThreadRanks

from tritonrec.distributed import RankDiedError
from tritonrec.kernels import numba_atomics
from tritonrec.serving.bounded_lag import BoundedLagAllToAll, meeting, mpi, numba_puts, window
from tritonrec.serving.bounded_lag.by_messages import MessageTransport
from tritonrec.serving.bounded_lag.messages import (
    EAGER,
    HEADER,
    LAST_TAG,
    NO_MESSAGE,
    SIZES,
    UNKNOWN,
    Deadline,
    Header,
    Layout,
    Tags,
    buffer_size,
)
from tritonrec.serving.bounded_lag.mpi import number_of_rank
from tritonrec.serving.bounded_lag.one_sided import OneSided
from tritonrec.serving.bounded_lag.shared import SharedMemory
from tritonrec.serving.bounded_lag.transport import TRANSPORTS

WORLD = 3
PATIENCE = timedelta(seconds=5)
LOCK = threading.Lock()
ranks = ThreadRanks(WORLD)


@pytest.fixture(params=["shared", "messages"])
def transport(request):
    return request.param


def errors_of(start, bound=0, capacity=0, exchanges=4, transport="auto"):
    """The errors of all ranks, which each make ``start(exchange, rank, number)`` until one of them fails."""

    def run(group):
        rank = group.rank()
        own = [each[rank] if isinstance(each, tuple) else each for each in (bound, capacity)]
        exchange = BoundedLagAllToAll(group, own[0], own[1], PATIENCE, transport=transport)
        for number in range(exchanges):
            start(exchange, rank, number)
        exchange.drain()

    return [str(outcome) for outcome in ranks.outcomes(run)]


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("rows", [1, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("expected", [0.5, 1.5, 3.0], ids=["too small", "a bit too large", "too large"])
def test_receive_counts_that_are_not_what_is_sent_are_refused_on_every_rank(bound, rows, expected, transport):
    rows *= 2

    def start(exchange, rank, number):
        receive = [rows] * WORLD
        if rank == 1 and number == 1:
            receive[0] = int(expected * rows)
        exchange.start(torch.ones(rows * WORLD, 2), [rows] * WORLD, receive)

    expects = f"rank 1 expects {int(expected * rows)} of 2 float32 in all-to-all 1"
    for error in errors_of(start, bound, exchanges=9, transport=transport):
        assert f"rank 0 sent {rows} rows of 2 float32, and {expects}" in error


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (torch.ones(2 * WORLD, dtype=torch.int32), "rank 1 sent 2 rows of 1 int32"),
        (torch.ones(2 * WORLD, dtype=torch.float16), "rank 1 sent 2 rows of 1 float16"),
        (torch.ones(2 * WORLD, 3), "rank 1 sent 2 rows of 3 float32"),
        (torch.ones(2 * WORLD, 0), "rank 1 sent 2 rows of 0 float32"),
        (torch.ones(0, dtype=torch.int64), "rank 1 sent 0 rows of 1 int64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("known", [False, True])
def test_rows_of_another_dtype_or_width_are_refused_on_every_rank(values, named, known, transport):
    def start(exchange, rank, number):
        mine = values if rank == 1 else torch.ones(2 * WORLD)
        send = [len(mine) // WORLD] * WORLD
        receive = [len(values) // WORLD if source == 1 else 2 for source in range(WORLD)]
        exchange.start(mine, send, receive if known else None)

    errors = errors_of(start, capacity=64, transport=transport)
    assert all(named in errors[rank] for rank in (0, 2)), errors
    assert "of 1 float32, and rank 1 expects" in errors[1], errors


@pytest.mark.parametrize("capacity", [(64, 96, 64), (64, 4096, 64), (0, 2**20, 0), (2**20, 0, 2**20)])
def test_another_capacity_is_refused_on_every_rank(capacity):
    def start(exchange, rank, number):
        count = exchange.capacity // 4
        exchange.start(torch.ones(count * WORLD), [count] * WORLD)

    for rank, error in enumerate(errors_of(start, 2, capacity)):
        other = 0 if rank == 1 else 1
        assert f"has capacity={capacity[other]}" in error, error
        assert f"rank {rank} has capacity={capacity[rank]}: give BoundedLagAllToAll the same" in error


def test_another_bound_is_refused_on_every_rank():
    def start(exchange, rank, number):
        exchange.start(torch.ones(WORLD), [1] * WORLD)

    for rank, error in enumerate(errors_of(start, (0, 0, 1), 64)):
        assert f"rank {2 if rank < 2 else 0} has bound={int(rank < 2)} and rank {rank} has" in error


def test_another_transport_is_refused_on_every_rank():
    def run(group):
        chosen = "messages" if group.rank() == 1 else "auto"
        BoundedLagAllToAll(group, 0, 64, PATIENCE, transport=chosen).start(torch.ones(WORLD), [1] * WORLD)

    for rank, error in enumerate(map(str, ranks.outcomes(run))):
        other, own = ("auto", "messages") if rank == 1 else ("messages", "auto")
        assert f"has transport={other} and rank {rank} has transport={own}: give" in error


def test_ranks_on_several_hosts_send_messages_and_cannot_share_memory(monkeypatch):
    def run(group):
        with LOCK:
            monkeypatch.setattr(meeting, "host_words", lambda: (group.rank(), 1))
            auto = BoundedLagAllToAll(group, 0, 64, PATIENCE)
            shared = BoundedLagAllToAll(group, 0, 64, PATIENCE, transport="shared")
        rows = auto.start(torch.arange(WORLD) + 10 * group.rank(), [1] * WORLD).wait()[0].tolist()
        auto.drain()
        with pytest.raises(RuntimeError, match="needs all ranks to be processes of one user on one host"):
            shared.start(torch.ones(WORLD), [1] * WORLD)
        return rows, type(auto._transport)

    for rank, found in enumerate(ranks.run(run)):
        assert found == ([10 * source + rank for source in range(WORLD)], MessageTransport)


@pytest.mark.parametrize(
    "variables, installed, capacity, numbers, chosen",
    [
        ({"PMI_SIZE": str(WORLD)}, True, 64, [2, 0, 1], "mpi"),
        ({"OMPI_COMM_WORLD_SIZE": str(WORLD)}, True, 64, [2, 0, 1], "mpi"),
        ({"PMI_SIZE": str(WORLD)}, True, 64, [], "messages"),  # mpi4py of another MPI than mpiexec
        ({"PMI_SIZE": str(WORLD)}, True, 0, [2, 0, 1], "messages"),
        ({"PMI_SIZE": str(WORLD)}, False, 64, [2, 0, 1], "messages"),
        ({"PMI_SIZE": str(WORLD + 1)}, True, 64, [2, 0, 1], "messages"),
        ({"PMI_SIZE": str(WORLD), "TORCHELASTIC_RUN_ID": "x"}, True, 64, [2, 0, 1], "messages"),
        ({}, True, 64, [2, 0, 1], "messages"),
    ],
)
def test_ranks_of_mpiexec_on_several_hosts_put_by_mpi(
    monkeypatch, variables, installed, capacity, numbers, chosen
):
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "find_spec", lambda name: name if installed else None)
    here = threading.local()
    monkeypatch.setattr(mpi, "place_among", lambda world_size: numbers[here.rank] if numbers else -1)
    monkeypatch.setattr(mpi, "MpiWindows", lambda *given: SimpleNamespace(name="mpi", given=given))

    def run(group):
        here.rank = group.rank()
        with LOCK:
            monkeypatch.setattr(meeting, "host_words", lambda: (group.rank(), 1))
            exchange = BoundedLagAllToAll(group, 0, capacity, PATIENCE)
        before = exchange.transport
        exchange.connect()
        return before, exchange.transport, getattr(exchange._transport, "given", ())

    for rank, found in enumerate(ranks.run(run)):
        assert found == ("", chosen, (numbers, rank, 0, capacity) if chosen == "mpi" else ())


@pytest.mark.if_changed
@pytest.mark.parametrize("sends", [1, 2], ids=["before MPI", "inside of MPI"])
def test_a_rank_that_stops_on_the_way_to_windows_of_mpi_is_named(monkeypatch, sends):
    here, over = threading.local(), threading.Event()
    monkeypatch.setenv("PMI_SIZE", str(WORLD))
    monkeypatch.setattr(meeting, "find_spec", lambda name: name)
    monkeypatch.setattr(mpi, "place_among", lambda world_size: here.rank)
    monkeypatch.setattr(mpi, "MpiWindows", lambda *made: over.wait(60))
    plain = meeting.Meeting._send

    def send(self, group, words):
        here.sent = getattr(here, "sent", 0) + 1
        if here.rank == 1 and here.sent > sends:
            over.wait(60)
            raise ZeroDivisionError
        plain(self, group, words)

    monkeypatch.setattr(meeting.Meeting, "_send", send)

    def run(group):
        here.rank = group.rank()
        with LOCK:
            monkeypatch.setattr(meeting, "host_words", lambda: (group.rank(), 1))
            exchange = BoundedLagAllToAll(group, 0, 64, timedelta(seconds=1))
        try:
            exchange.connect()
        finally:
            over.set()

    for rank, error in enumerate(ranks.outcomes(run)):
        if rank != 1:
            assert isinstance(error, RankDiedError) and "rank 1 did nothing about exchange 0" in str(error)


def test_a_process_that_sees_no_other_one_has_no_place_in_mpis_world(monkeypatch):
    world, module = SimpleNamespace(size=3, rank=2), ModuleType("mpi4py")
    module.MPI = SimpleNamespace(COMM_WORLD=world)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    assert mpi.place_among(3) == 2
    world.size = 1
    assert mpi.place_among(3) == -1


def test_mpi_needs_ranks_of_mpiexec():
    def run(group):
        BoundedLagAllToAll(group, 0, 64, PATIENCE, transport="mpi")

    for error in ranks.outcomes(run):
        assert isinstance(error, ValueError)
        assert str(error) == 'transport="mpi" needs mpi4py, and ranks that mpiexec has started'


def test_one_process_that_mpiexec_started_is_no_rank(monkeypatch):
    world, module = SimpleNamespace(size=1, rank=0), ModuleType("mpi4py")
    module.__spec__, module.MPI = ModuleSpec("mpi4py", None), SimpleNamespace(COMM_WORLD=world)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    with pytest.raises(ValueError, match="and ranks that mpiexec has started"):
        number_of_rank()
    world.size, world.rank = 3, 2
    assert number_of_rank() == 2


def test_a_rank_that_skips_an_exchange_is_refused_on_every_rank(transport):
    def start(exchange, rank, number):
        exchange.started += int(rank == 1 and number == 1)
        exchange.start(torch.ones(WORLD), [1] * WORLD)

    errors = errors_of(start, 0, 64, transport=transport)
    assert all("sent all-to-all 2 and rank" in errors[rank] for rank in (0, 2)), errors


def test_more_than_the_capacity_of_a_rank_that_expects_any_number_is_refused_on_every_rank(transport):
    def start(exchange, rank, number):
        count = 20_000 if rank == 0 else 1
        receive = [20_000 if source == 0 else 1 for source in range(WORLD)]
        exchange.start(torch.ones(count * WORLD), [count] * WORLD, None if rank == 1 else receive)

    wrong = "rank 0 sent 80000 bytes, and rank 1 has a capacity of 64 in all-to-all 0"
    assert all(wrong in error for error in errors_of(start, 0, 64, transport=transport))


@pytest.mark.parametrize("capacity", [0, EAGER + 100])
def test_messages_around_the_size_of_the_first_buffer_arrive_complete(capacity, transport):
    sizes = [0, 1, EAGER - 1, EAGER, EAGER + 1, 2 * EAGER, 2 * EAGER + 1, 5 * EAGER - 3]

    def rows(source, to, number):
        size = sizes[(source + 2 * to + number) % len(sizes)]
        generator = torch.Generator().manual_seed(size + 7 * source + to)
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)

    def run(group):
        exchange = BoundedLagAllToAll(group, 2, capacity, PATIENCE, transport=transport)
        rank, handles = group.rank(), []
        for number in range(len(sizes)):
            parts = [rows(rank, to, number) for to in range(WORLD)]
            receive = [len(rows(source, rank, number)) for source in range(WORLD)]
            handles.append(exchange.start(torch.cat(parts), [len(part) for part in parts], receive))
        exchange.drain()
        return [
            torch.equal(handle.wait()[0], torch.cat([rows(source, rank, number) for source in range(WORLD)]))
            for number, handle in enumerate(handles)
        ]

    assert ranks.run(run) == [[True] * len(sizes)] * WORLD


def strided(*shape):
    return torch.empty(*shape[:-1], 2 * shape[-1])[..., ::2]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            torch.empty(3, dtype=torch.float64),
            "sum.receive. = 3 rows of 1 float32 .* got .3,. float64",
        ),
        (torch.empty(3, dtype=torch.int32), "got .3,. int32"),
        (torch.empty(2), r"3 rows of 1 float32 on cpu, contiguous; got .2,. float32"),
        (torch.empty(4), "got .4,."),
        (torch.empty(3, 2), "got .3, 2."),
        (torch.empty(()), "got ..."),
        (torch.empty(3, device="meta"), "on meta"),
        (strided(3), "not contiguous"),
    ],
)
def test_an_out_that_does_not_fit_is_named(out, message):
    exchange = BoundedLagAllToAll(None, 1)
    with pytest.raises(ValueError, match=message):
        exchange.start(torch.ones(3), [3], [3], out)
    assert exchange.start(torch.ones(3), [3], [3]).wait()[0].tolist() == [1, 1, 1]


def test_an_out_of_another_length_than_what_came_is_named():
    with pytest.raises(RuntimeError, match="out has 2 rows, and rank 0 received 3 in all-to-all 0"):
        BoundedLagAllToAll(None, 0).start(torch.ones(3), [3], None, torch.empty(2)).wait()


@pytest.mark.parametrize(
    ("values", "send", "receive", "message"),
    [
        (torch.ones(3), [2], None, "values must have sum.send. = 2 rows, got .3,."),
        (torch.ones(3), [1, 2], None, "send needs 1 counts"),
        (torch.ones(3), [1.5], None, "send needs 1 counts of at least 0, one for each rank, got .1.5."),
        (torch.ones(3), [3], [-1], "receive needs 1 counts of at least 0"),
        (torch.ones(3), [3], [2], "rank 0 sends itself 3 rows and expects 2"),
        (torch.tensor(1.0), [1], None, "values must have"),
        (torch.ones(3, 2).to_sparse(), [3], None, "values must be a dense tensor"),
        (torch.ones(3, device="meta"), [3], None, "dense tensor with memory"),
    ],
)
def test_bad_arguments_are_named(values, send, receive, message):
    with pytest.raises(ValueError, match=message):
        BoundedLagAllToAll(None, 1).start(values, send, receive)


def test_a_lazy_conjugate_is_sent_as_its_values():
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(BoundedLagAllToAll(None, 0).start(values.conj(), [2]).wait()[0], values.conj())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bound": -1}, "bound must be at least 0 exchanges, and whole, got -1"),
        ({"bound": 1.5}, "bound must be at least 0 exchanges, and whole, got 1.5"),
        ({"bound": 0, "capacity": -1}, "capacity must be at least 0"),
        ({"bound": 0, "capacity": 1e6}, "capacity must be at least 0 bytes, and whole, got 1000000.0"),
        ({"bound": 0, "transport": "tcp"}, "transport must be one of auto, shared, mpi, messages, got 'tcp'"),
        ({"bound": 0, "tag": -5}, "take 129 tags from -5 on, and tags are 0 to 2147483647"),
        ({"bound": 2, "tag": LAST_TAG - 100}, "choose a smaller bound or another tag"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        BoundedLagAllToAll(None, **arguments)


@pytest.mark.parametrize("tag", [0, LAST_TAG - 2 * SIZES])
def test_tags_may_begin_with_the_first_and_end_with_the_last(tag):
    assert BoundedLagAllToAll(None, 0, tag=tag).start(torch.arange(3), [3]).wait()[0].tolist() == [0, 1, 2]


def test_a_message_beyond_the_capacity_is_refused_before_it_is_sent():
    def run(group):
        with pytest.raises(ValueError, match="a message of 68 bytes does not fit the capacity of 64"):
            BoundedLagAllToAll(group, 1, 64).start(torch.ones(17 * WORLD), [17] * WORLD)

    ranks.run(run)


class Unfinished:
    """A send that its group finishes only where it is waited for: until then its buffer is being read."""

    def __init__(self, buffer):
        self.buffer, self.sent, self.waited = buffer, buffer.clone(), False

    def wait(self, timeout=None):
        assert torch.equal(self.buffer, self.sent), "the buffer was overwritten before it was sent"
        self.waited = True


@dataclass
class Answer:
    """A receive of what the peer, which does the same as this rank, has sent."""

    buffer: torch.Tensor
    sent: torch.Tensor

    def wait(self, timeout=None):
        self.buffer[: len(self.sent)] = self.sent


class SlowSends:
    """A group of two whose own sends end only where they are waited for."""

    def __init__(self):
        self.sends, self.received = [], 0

    def rank(self):
        return 0

    def size(self):
        return 2

    def send(self, tensors, to, tag):
        self.sends.append(Unfinished(tensors[0]))
        return self.sends[-1]

    def recv(self, tensors, source, tag):
        if tensors[0].dtype == torch.int64:
            return Answer(tensors[0], torch.tensor([1, 64, TRANSPORTS.index("messages"), *[0] * 5]))
        message = torch.zeros(HEADER + 4, dtype=torch.uint8)
        Header.of(self.received, 1, Layout(torch.float32, 1), UNKNOWN).write(message)
        self.received += 1
        return Answer(tensors[0], message)


def test_every_slot_and_size_has_a_tag_of_its_own():
    tags = Tags(100, slots=3)
    sizes = [0, *(2**bits + more for bits in range(1, 40) for more in (0, 1))]
    buffers = {buffer_size(size) for size in sizes}
    found = [{kind(slot, size) for size in sizes} for slot in range(3) for kind in (tags.first, tags.rest)]
    assert all(len(each) == len(buffers) for each in found)
    used = set.union({tags.settings}, *found)
    assert len(used) == 1 + 6 * len(buffers) and min(used) == 100 and max(used) <= 100 + 3 * 2 * SIZES
    assert tags.first(0, 1) == 101 and tags.rest(2, 1 << SIZES - 1) == 100 + 3 * 2 * SIZES


@pytest.mark.parametrize(("values", "messages"), [(EAGER // 4 - 1, 1), (EAGER // 4, 1), (EAGER // 4 + 1, 2)])
def test_rows_that_fit_behind_the_header_are_one_message(values, messages):
    group = SlowSends()
    exchange = BoundedLagAllToAll(group, 1, 64, PATIENCE, transport="messages")
    before = len(group.sends)
    exchange.start(torch.zeros(values + 1), [1, values], [1, 1])
    assert len(group.sends) - before == messages


def test_a_send_buffer_is_not_overwritten_before_it_was_sent_and_nothing_piles_up():
    group = SlowSends()
    exchange = BoundedLagAllToAll(group, 1, 64, PATIENCE, transport="messages")
    for number in range(20):
        exchange.start(torch.full((2,), float(number)), [1, 1])
        assert all(len(slot.sending) <= 2 for slot in exchange._transport._slots)
    exchange.drain()
    assert all(each.waited for each in group.sends) and len(group.sends) == 21


class Refusing(SlowSends):
    """A group that refuses messages of one kind but for the first `allowed`: the other rank has ended."""

    def __init__(self, kind, allowed):
        super().__init__()
        self.kind, self.left = kind, allowed

    def send(self, tensors, to, tag):
        return self.unless_refused("send", super().send(tensors, to, tag))

    def recv(self, tensors, source, tag):
        return self.unless_refused("recv", super().recv(tensors, source, tag))

    def unless_refused(self, kind, work):
        self.left -= kind == self.kind
        if self.left < 0:
            raise RuntimeError("Connection closed by peer")
        return work


@pytest.mark.parametrize(("values", "allowed"), [(1, 0), (1, 1), (1, 3), (EAGER, 2)])
@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_rank_whose_messages_are_refused_at_once_is_named_then_and_ever_after(kind, values, allowed):
    number = max(0, allowed - 1) if values == 1 else 0
    wrong = f"rank 1 is gone, or gave up on another rank, in exchange {number}: Connection closed by peer$"
    with pytest.raises(RankDiedError, match=f"^{wrong}"):
        exchange = BoundedLagAllToAll(Refusing(kind, allowed), 1, 64, PATIENCE, transport="messages")
        for _ in range(5):
            exchange.start(torch.ones(2 * values), [values] * 2, [values] * 2)
    if allowed:
        with pytest.raises(RankDiedError, match=f"^an earlier exchange failed: {wrong}"):
            exchange.start(torch.ones(2), [1, 1], [1, 1])
    if values == 1 and allowed == 3:
        with pytest.raises(RankDiedError, match=f"^an earlier exchange failed: {wrong}"):
            exchange.drain()


class Waits(OneSided):
    """Rank 0 of three, which waits once: rank 1 has put its rows, and rank 2 has ended before."""

    def __init__(self):
        self.rank, self.world_size, self._others, self._slots, self.waits = 0, 3, [1, 2], 2, 0

    def _await(self, slot, target, seconds):
        self.waits += 1
        assert self.waits == 1
        return numba_puts.OVER

    def _has_ended(self, peer):
        return peer == 2

    def started(self, number, in_flight):
        return [1, 1, 0]

    def _number(self, slot, peer):
        return 0 if peer == 1 else NO_MESSAGE


def test_a_rank_that_has_ended_is_named_though_another_has_put_its_rows():
    with pytest.raises(RankDiedError, match=r"^rank 2 is gone in exchange 0"):
        Waits()._wait(SimpleNamespace(number=0), Deadline(timedelta(seconds=60)))


def test_a_rank_that_has_begun_the_exchange_and_put_nothing_yet_is_waited_for(monkeypatch):
    outcomes = iter([numba_puts.OVER, numba_puts.ALL_HERE])
    monkeypatch.setattr(Waits, "_await", lambda *_: next(outcomes))
    monkeypatch.setattr(Waits, "_has_ended", lambda *_: False)
    monkeypatch.setattr(Waits, "started", lambda *_: [1, 1, 1])
    Waits()._wait(SimpleNamespace(number=0), Deadline(timedelta(seconds=60)))
    assert next(outcomes, None) is None


def test_no_slot_of_a_new_window_has_a_message():
    layout = window.Layout(world_size=9, slots=2, room=64)
    made = window.Window.make(layout)
    heads = [layout.head(slot, rank) for slot in range(2) for rank in range(9)]
    assert [int(made.control.words(head, 1)[0]) for head in heads] == [NO_MESSAGE] * 18


def test_another_file_under_the_number_of_a_window_is_none():
    layout = window.Layout(2, 2, 64)
    made, other = window.Window.make(layout), window.Window.make(layout)
    process, file, _ = made.name
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match=f"file {file} of process {process} is another one"):
        window.Window.open(layout, (process, file, other.name[2]))
    assert len(os.listdir("/proc/self/fd")) == before


def test_settings_that_have_arrived_are_awaited_no_more(transport):
    def start(exchange, rank, number):
        exchange.start(torch.ones(3), [1] * 3, [1] * 3)

    before = len(meeting._unawaited)
    assert errors_of(start, transport=transport) == ["None"] * 3
    assert len(meeting._unawaited) == before


def test_a_process_is_seen_to_end():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = window.Process(child.pid)
    assert not seen.has_ended
    child.communicate(b"\n")
    assert seen.has_ended


def test_a_host_that_cannot_share_memory_has_nothing_in_common_with_another(monkeypatch):
    assert window.host_words() == window.host_words() != (0, 0)
    with monkeypatch.context() as without:
        without.setattr(numba_atomics, "FUTEX", 0)
        assert window.host_words() == (0, 0)
    for missing in (AttributeError, OSError):
        with monkeypatch.context() as without:
            without.setattr(window.os, "pidfd_open", raises(missing))
            assert window.host_words() == (0, 0)


def test_ranks_in_networks_of_their_own_share_no_memory(monkeypatch):
    here = window.host_words()
    monkeypatch.setattr("tritonrec.distributed.machine.NETWORK", "/proc/self/ns/uts")
    assert window.host_words() not in (here, (0, 0))


def raises(error):
    def call(*args):
        raise error

    return call


@pytest.mark.parametrize(("died", "state"), [(True, window.DIED), (False, window.DISAGREED)])
def test_a_report_says_whether_a_rank_died(died, state):
    other = window.Window.make(window.Layout(2, 2, 64))
    told = SimpleNamespace(_told=lambda problem, died: problem.encode(), _others=[1], _windows={1: other})
    SharedMemory.report(told, 0, "gone", died)
    words = [int(other.control.words(at, 1)[0]) for at in (window.FAILED_STATE, window.FAILED_LENGTH)]
    assert words == [state, 4]
