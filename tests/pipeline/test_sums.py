"""Promise: sums that ranks exchange are complete: in fixed point in every bit, in float32 in rank order."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec import ops
from tritonrec.distributed import Communicators
from tritonrec.ops import ExactSumError
from tritonrec.pipeline.reduce_scatter import ReduceScatter, even_reduce_scatter
from tritonrec.pipeline.sums import Sent, Sums
from tritonrec.pipeline.window import ExchangeConfig, LookupCounts, WindowConfig

BITS = 36


class Mail:
    """All-to-alls among threads; a message of another length than was announced fails, as it does in gloo."""

    def __init__(self, world_size):
        self.world_size, self.barrier, self.boxes = world_size, threading.Barrier(world_size, timeout=30), {}

    def rank(self, number):
        end = End()
        end.mail, end.rank, end.world_size, end.sent = self, number, self.world_size, 0
        return end


class End:
    """One rank's communicator."""

    def all_to_all(self, values, send, receive, out=None):
        assert sum(send) == len(values)
        boxes = self.mail.boxes
        for peer, part in enumerate(values.split(send)):
            boxes[self.rank, peer] = part.clone()
            self.sent += part.nbytes * (peer != self.rank)
        self.mail.barrier.wait()
        came = [boxes[peer, self.rank] for peer in range(self.world_size)]
        assert [len(part) for part in came] == receive
        self.mail.barrier.wait()
        return torch.cat(came) if out is None else out.copy_(torch.cat(came))


def on_ranks(world_size, function):
    mail = Mail(world_size)
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: function(mail.rank(rank)), range(world_size)))


def magnitudes(generator, rows, dim):
    """int64 sums from 0 up to 58 bits, some of them float32 values, as those of one occurrence are."""
    bits = torch.randint(0, 59, (rows, 1), generator=generator)
    values = torch.randint(-(2**62), 2**62, (rows, dim), generator=generator) >> (62 - bits)
    short = torch.rand(rows, generator=generator) < 0.4
    values[short] = values[short].to(torch.float32).to(torch.int64)
    return values


def planned(world_size, seed, most=40, dim=5):
    """What each rank sends to each: rows of its sums, and which of the owner's they are."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (world_size, world_size), generator=generator)
    targets = [
        [torch.randint(0, 7, (int(n),), generator=generator) for n in counts[rank]]
        for rank in range(world_size)
    ]
    values = [magnitudes(generator, int(n) + 3, dim) for n in counts.sum(1)]
    rows = [
        torch.randperm(len(v), generator=generator)[: int(n)]
        for v, n in zip(values, counts.sum(1), strict=True)
    ]
    return counts, targets, values, rows


@given(
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    dims=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    consistency=st.sampled_from(["batch", "window"]),
    exchange=st.sampled_from(["packed", "whole"]),
)
def test_every_sum_of_every_table_arrives_at_its_owner(world_size, seed, dims, consistency, exchange):
    dtype = torch.int64 if consistency == "batch" else torch.float32
    tables = []
    for number, dim in enumerate(dims):
        counts, targets, values, rows = planned(world_size, seed + number, dim=dim)
        if consistency == "window":
            values = [v.to(torch.float32) / 2**BITS for v in values]
        start = magnitudes(torch.Generator().manual_seed(seed + 1 + number), 7, dim).to(dtype)
        tables.append((counts, targets, values, rows, start))
    config = WindowConfig(consistency=consistency, exchange=ExchangeConfig(sums=exchange))
    sums = Sums(config, torch.device("cpu"))

    def run(end):
        me, sent, parts = end.rank, LookupCounts(), []
        for counts, targets, values, rows, start in tables:
            to = torch.cat([targets[peer][me] for peer in range(world_size)])
            parts.append(
                Sent(values[me], rows[me], counts[me].tolist(), start.clone(), to, counts[:, me].tolist())
            )
        sums.send_to_owners(sent, end, parts)
        assert sent.row_bytes == end.sent
        return [part.out for part in parts]

    for me, found in enumerate(on_ranks(world_size, run)):
        for (counts, targets, values, rows, start), got in zip(tables, found, strict=True):
            expected = start.clone()
            for peer in range(world_size):
                first = int(counts[peer, :me].sum())
                sent = values[peer][rows[peer][first : first + int(counts[peer, me])]]
                for target, row in zip(targets[peer][me].tolist(), sent, strict=True):
                    expected[target] += row
            assert torch.equal(got, expected)


@given(world_size=st.integers(1, 4), count=st.sampled_from([0, 1, 2, 3, 9, 64]), seed=st.integers(0, 2**32))
def test_means_are_those_of_the_whole_sum_on_every_rank(world_size, count, seed):
    generator = torch.Generator().manual_seed(seed)
    values = [magnitudes(generator, count, 4) for _ in range(world_size)]
    sums = Sums(WindowConfig(), torch.device("cpu"))

    def run(end):
        plan = even_reduce_scatter(count, world_size, end.rank)
        return sums.all_reduce_mean(None, end, values[end.rank], plan, 3)

    expected = ops.from_fixed_point(sum(values), 3.0, BITS)
    for got in on_ranks(world_size, run):
        assert torch.equal(got, expected)


def test_sums_are_packed_over_links_between_hosts_alone():
    def is_packed(choice, device, copied):
        return Sums(WindowConfig(exchange=ExchangeConfig(sums=choice)), torch.device(device), copied).packed

    places = [(device, copied) for device in ("cpu", "cuda") for copied in (False, True)]
    assert [place for place in places if is_packed("auto", *place)] == [("cpu", False)]
    assert all(is_packed("packed", *place) and not is_packed("whole", *place) for place in places)
    assert not Sums(WindowConfig(consistency="window"), torch.device("cpu")).packed


def test_float_means_are_summed_in_rank_order():
    values = [torch.tensor([[1e8, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[-1e8, 3.0]])]
    sums = Sums(WindowConfig(consistency="window"), torch.device("cpu"))
    found = on_ranks(
        3,
        lambda end: sums.all_reduce_mean(None, end, values[end.rank], even_reduce_scatter(1, 3, end.rank), 1),
    )
    assert all(got.tolist() == [[0.0, 6.0]] for got in found)  # 1e8 + 1 is 1e8 in float32


def test_rows_that_few_ranks_hold_are_reduced_by_one_of_them():
    places = [torch.tensor([4, 0, 2]), torch.tensor([1]), torch.tensor([3, 2, 4])]
    values = [
        torch.arange(3 * rank, 3 * rank + len(at)).view(-1, 1) * 2**40 for rank, at in enumerate(places)
    ]
    sums = Sums(WindowConfig(), torch.device("cpu"))
    total = torch.zeros(5, 1, dtype=torch.int64)
    for at, value in zip(places, values, strict=True):
        total[at] += value
    found = on_ranks(
        3,
        lambda end: sums.all_reduce_mean(
            None, end, values[end.rank], ReduceScatter.of(places, 5, end.rank), 7
        ),
    )
    assert all(torch.equal(got, ops.from_fixed_point(total, 7.0, BITS)) for got in found)


@pytest.mark.parametrize("exchange", ["packed", "whole"])
@pytest.mark.parametrize("send", [[[2]], [[0, 2], [2, 0]]])
def test_a_sum_that_leaves_int64_names_its_tensor(send, exchange):
    sums = Sums(WindowConfig(exchange=ExchangeConfig(sums=exchange)), torch.device("cpu"))

    def run(end):
        values, rows = torch.full((2, 3), 2**62), torch.tensor([0, 1])
        receive = [column[end.rank] for column in send]
        with pytest.raises(ExactSumError, match="dense gradients"):
            part = Sent(values, rows, send[end.rank], sums.zeros(1, 3), rows * 0, receive)
            sums.send_to_owners(None, end, [part], "dense gradients")
        return True

    assert all(on_ranks(len(send), run))


def test_messages_are_copied_between_processes_of_one_machine_that_compute_on_its_cpu():
    unknown, together, apart = (replace(Communicators.local(), machines=count) for count in range(3))
    devices = torch.device("cpu"), torch.device("cuda")
    assert [together.copies_messages(device) for device in devices] == [True, False]
    assert not any(each.copies_messages(device) for device in devices for each in (unknown, apart))
