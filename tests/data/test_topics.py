"""Promise: the batches of a topic are the same whenever its messages come and at any world size, and a
training that was killed goes on with the same bits; by librdkafka's broker in memory.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st
from trainer_parts import DIM, parts, same, state, trainer

from tritonrec import nn, optional
from tritonrec.data import Batch, KafkaTopic, KeyedJaggedTensor, Lookup, TopicStream

ROOT = Path(__file__).parents[2]
COUNT = 40
"""Messages of the topic "clicks"."""


class Listed:
    """A topic in memory."""

    name = "listed"

    def __init__(self, *partitions):
        self.messages, self.partitions = partitions, len(partitions)

    def read(self, partition, first, count, wait):
        return list(self.messages[partition][first : first + count])

    def ends(self):
        return [len(each) for each in self.messages]


class Broker:
    """One whose topics have four partitions."""

    def __init__(self):
        self._keeper = Producer({"test.mock.num.brokers": 1, "log_level": 3})
        (about,) = self._keeper.list_topics(timeout=30).brokers.values()
        self.servers = f"{about.host}:{about.port}"
        self._producer = Producer({"bootstrap.servers": self.servers, "log_level": 3})

    def add(self, topic, *messages):
        for place, message in enumerate(messages):
            self._producer.produce(topic, json.dumps(message), partition=place % 4)
        assert self._producer.flush(30) == 0


@pytest.fixture(scope="module")
def broker():
    made = Broker()
    made.add("clicks", *({"items": [n, 3 * n % 7, n % 5]} for n in range(COUNT)))
    return made


def topic_at(servers, name="clicks", **config):
    return KafkaTopic(name, {"bootstrap.servers": servers, "log_level": 2, **config}, timeout=30)


def listed(step, ids, messages):
    return list(zip(ids.tolist(), messages, strict=True))


def items(step, ids, messages):
    bags = [json.loads(message)["items"] for message in messages]
    offsets = torch.tensor([0, *map(len, bags)]).cumsum(0)
    lookup = Lookup(torch.tensor([item for bag in bags for item in bag], dtype=torch.int64), offsets)
    return Batch(step, ids, KeyedJaggedTensor.from_dict({"item": lookup}))


@given(st.data())
def test_ranks_divide_the_messages_that_come_in_turn(data):
    every = data.draw(st.integers(1, 5), label="partitions")
    size, world_size = data.draw(st.integers(1, 11)), data.draw(st.integers(1, every))
    start = data.draw(st.lists(st.integers(0, 3), min_size=every, max_size=every))
    topic = Listed(*([(partition, offset) for offset in range(60)] for partition in range(every)))
    turns = [(at % every, start[at % every] + at // every) for at in range(4 * size)]
    ranks = [TopicStream(topic, listed, size, start, rank, world_size) for rank in range(world_size)]
    for step in range(4):
        found = dict(each for rank in ranks for each in next(rank))  # by sample id
        assert sorted(found.values()) == sorted(turns[step * size : (step + 1) * size])
        assert all(ranks[0].state_dict() == rank.state_dict() for rank in ranks)
    other = TopicStream(topic, listed, size, rank=world_size - 1, world_size=world_size)
    other.load_state_dict(json.loads(json.dumps(ranks[-1].state_dict() | {"step": 2})))
    assert next(other) == ranks[-1].batch(2) and other.step == 3


def test_ranks_that_ask_for_the_end_while_a_topic_grows_have_other_shards():
    """A trainer names them: each rank would begin elsewhere."""
    one, same, other = (
        TopicStream(Listed(*[['{"items": [7]}'] * 9] * 2), items, 2, start, rank, 2).batch(0).shard
        for start, rank in [([1, 0], 0), ([1, 0], 1), ([1, 1], 1)]
    )
    assert one == same != other and other.settings["start"] == "[1, 1]"


def test_steps_are_ready_when_the_slowest_partition_has_their_messages():
    assert TopicStream(Listed("abcdefg", "ab", "abcd"), listed, 3).ready() == 2
    assert TopicStream(Listed("abcdefg", "ab", "abcd"), listed, 7).ready() == 1
    stream = TopicStream(Listed("abc", "abcdefg"), listed, 2, start=[0, 4])
    assert stream.ready() == 3 and len(list(islice(stream, 2))) == 2 and stream.ready() == 1
    assert TopicStream(Listed("abc", "abcdefg"), listed, 2, start=[3, 7]).ready() == 0


@pytest.mark.if_changed
def test_a_topic_of_kafka_is_read_from_any_step(broker):
    topic = topic_at(broker.servers)
    assert topic.partitions == 4 and topic.ends() == [COUNT // 4] * 4
    streams = [TopicStream(topic, listed, 6, rank=rank, world_size=3, wait=30) for rank in range(3)]
    assert streams[0].ready() == COUNT // 6
    for step in (0, 1, 2, 5, 3, 1):
        found = sorted(each for stream in streams for each in stream.batch(step))
        assert [json.loads(message)["items"][0] for _, message in found] == [*range(6 * step, 6 * step + 6)]
        assert [sample for sample, _ in found] == [*range(6 * step, 6 * step + 6)]


def test_a_message_that_has_not_come_is_waited_for_and_named_where_it_does_not(broker):
    broker.add("late", *range(5))
    stream = TopicStream(topic_at(broker.servers, "late"), listed, 4, wait=0.3)
    assert len(next(stream)) == 4
    with pytest.raises(TimeoutError, match=r"topic late: partition 1 has no message at offset 1 after 0.3 s"):
        next(stream)
    stream.wait = math.inf
    later = threading.Timer(0.5, broker.add, ["late", "x", *range(5, 8)])
    before = time.monotonic()
    later.start()
    found = next(stream)
    assert time.monotonic() - before > 0.4 and [message for _, message in found] == [b"4", b"5", b"6", b"7"]
    later.join()


def test_what_a_topic_has_not_is_named(broker, monkeypatch):
    said = "clicks, partition 0 has the offsets from 0 to 9, and none is 11"
    for config in ({}, {"auto.offset.reset": "earliest"}):
        with pytest.raises(ValueError, match=said):
            next(TopicStream(topic_at(broker.servers, **config), items, 8, start=11))
    with pytest.raises(ConnectionError, match="topic clicks: "):
        KafkaTopic("clicks", {"bootstrap.servers": "127.0.0.1:9", "log_level": 0}, timeout=0.5)
    topic = topic_at(broker.servers)
    message = SimpleNamespace(error=lambda: None, offset=lambda: 4)  # behind the mark of a transaction
    found = SimpleNamespace(assign=lambda where: None, consume=lambda *of: [message])
    monkeypatch.setattr(topic, "_consumers", {0: found})
    with pytest.raises(
        ValueError, match=r"no message at offset 3, and one at 4: .* compaction nor transactions"
    ):
        topic.read(0, 3, 2, 1.0)
    for wrong in (dict(batch_size=0), dict(rank=4, world_size=5), dict(start=[1, 2]), dict(start=-1)):
        with pytest.raises(ValueError, match=r"batch_size must|none of the 4 partitions|start must be 4"):
            TopicStream(topic, items, **({"batch_size": 4} | wrong))
    position = TopicStream(topic, items, 8).state_dict()
    with pytest.raises(ValueError, match="a stream with batch_size 8, and this one has 9"):
        TopicStream(topic, items, 9).load_state_dict(position)
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install confluent-kafka, .*tritonrec\[kafka\]"):
        topic_at(broker.servers)


class Scores(torch.nn.Module):
    """A loss per sample of its items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, batch, rows, seed):
        offsets = batch.features["item"].offsets
        return nn.sum_by_sample(torch.tanh(self.mix(rows["item"], offsets)).sum(1), offsets)


def train(servers, folder, steps=9):
    """The state after training on a topic, saved at every step; it begins where `folder` has a checkpoint."""
    made = parts(Scores)
    stream = TopicStream(topic_at(servers), items, 4, wait=30)
    with trainer(made, micro_batches=2) as training:
        if Path(folder).exists():
            training.load(folder, loader=stream)
        while stream.step < steps:
            list(training.run([next(stream)]))
            training.save(folder, loader=stream)
            print(stream.step, flush=True)
    return state(made)


@pytest.mark.if_changed
@pytest.mark.multi_rank
def test_a_training_that_was_killed_goes_on_with_the_same_bits(broker, tmp_path, capsys):
    paths = map(str, (Path(__file__).parent, ROOT / "tests", ROOT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    program = f"import test_topics; test_topics.train({broker.servers!r}, 'run')"
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    for line in child.stdout:
        if line == "3\n":
            child.kill()
            break
    child.communicate()
    assert child.returncode == -9
    went_on = train(broker.servers, tmp_path / "run")
    assert capsys.readouterr().out.split() in (["4", "5", "6", "7", "8", "9"], ["5", "6", "7", "8", "9"])
    assert same(went_on, train(broker.servers, tmp_path / "whole"))
