"""Batches of a topic of messages, as Kafka's, with a position that is a step.

A message has an offset in its partition. A batch takes messages from the partitions in turn, so that the
samples of a step depend neither on when a message came nor on the world size. Three partitions, four samples
a batch::

    partition 0   a0  a1  a2  a3                     step 0   a0 b0 c0 a1
    partition 1   b0  b1  b2                         step 1   b1 c1 a2 b2
    partition 2   c0  c1  c2  c3  c4                 step 2   c2 a3 and b3, for which it waits

Rank r reads the partitions r, r + world_size, ... and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonrec.data.epochs import BatchType, Endless, check_at_least, check_same
from tritonrec.data.slices import work
from tritonrec.optional import require
from tritonrec.settings import counts_of, typed


class Topic(Protocol):
    """Messages in partitions that only grow at their ends, and that can be read again."""

    name: str
    partitions: int

    def read(self, partition: int, first: int, count: int, wait: float) -> list[Any]:
        """The messages at offsets `first`, ...; fewer than `count` where no more come in `wait` seconds."""

    def ends(self) -> list[int]:
        """By partition the offset behind its last message."""


class TopicStream(Endless[BatchType]):
    """This rank's batches of a topic, in the order of the module's docstring; an iterator without an end.

    Args:
        topic: a `KafkaTopic`, or a `Topic` of your own.
        collate: makes a batch of its step, sample ids (b,) int64 and b messages; b may be 0.
        batch_size: messages of a global batch, over all ranks.
        start: offset of the first message, of all partitions or of each, such as ``topic.ends()``; the same
            on all ranks.
        wait: seconds for messages that have not come yet, at most; ``math.inf`` has no end.

    Attributes:
        step: of the next batch.

    Raises ValueError for a number out of range and more ranks than partitions. `batch` raises TimeoutError
    naming the partition and the offset of a message that does not come, and the errors of the topic.
    """

    @typed
    def __init__(
        self,
        topic: Any,
        collate: Callable[[int, Tensor, list[Any]], BatchType],
        batch_size: int,
        start: int | Sequence[int] = 0,
        rank: int = 0,
        world_size: int = 1,
        wait: float = 60.0,
    ) -> None:
        check_at_least("batch_size", batch_size, 1)
        if not 0 <= rank < world_size <= topic.partitions:
            raise ValueError(f"rank {rank} of {world_size} has none of the {topic.partitions} partitions")
        starts = [start] * topic.partitions if isinstance(start, int) else list(start)
        if len(starts) != topic.partitions or min(starts) < 0:
            raise ValueError(f"start must be {topic.partitions} offsets of at least 0, got {starts}")
        self.topic, self.collate, self.batch_size, self.start = topic, collate, batch_size, starts
        self.rank, self.world_size, self.wait, self.step = rank, world_size, wait, 0

    def __iter__(self) -> Iterator[BatchType]:
        return self

    def __next__(self) -> BatchType:
        return self.batch(self.step)

    def batch(self, step: int) -> BatchType:
        """This rank's samples of the global batch at `step`; the next one is at ``step + 1``."""
        ids: list[int] = []
        messages: list[Any] = []
        every = self.topic.partitions
        with work("read"):
            for partition in range(self.rank, every, self.world_size):
                turns = (partition - at * self.batch_size for at in (step, step + 1))
                first, last = (self.start[partition] - turn // every for turn in turns)
                found = self.topic.read(partition, first, last - first, self.wait)
                if len(found) < last - first:
                    raise TimeoutError(
                        f"topic {self.topic.name}: partition {partition} has no message at offset "
                        f"{first + len(found)} after {self.wait:g} s: wait longer, or train ready() steps"
                    )
                ids += range(first * every + partition, last * every + partition, every)
                messages += found
        with work("collate"):
            batch = self.collate(step, torch.tensor(ids, dtype=torch.int64, device="cpu"), messages)
        self.step = step + 1
        return self.divided(batch)

    def ready(self) -> int:
        """Steps from the next one on whose messages are all there; one rank counts for all."""
        every, ends = self.topic.partitions, self.topic.ends()
        missing = min((ends[each] - self.start[each]) * every + each for each in range(every))
        return max(missing // self.batch_size - self.step, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank."""
        return {"step": self.step, **self.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position, also of another world size and start; ValueError naming what else differs."""
        check_same(state, {name: each for name, each in self.identity().items() if name != "start"}, "stream")
        (step,), start = counts_of(state, "step"), state.get("start")
        if not isinstance(start, list) or len(start) != self.topic.partitions:
            raise ValueError(f"start of a saved state has an offset of each partition, got {start!r}")
        offsets = {f"start[{place}]": each for place, each in enumerate(start)}
        self.step, self.start, self._shard = step, [*counts_of(offsets, *offsets)], None

    def identity(self) -> dict[str, Any]:
        about = {"topic": self.topic.name, "partitions": self.topic.partitions, "batch_size": self.batch_size}
        return {"kind": type(self).__name__, "start": self.start, **about}


@typed
class KafkaTopic:
    """A topic of Kafka, or of what speaks its protocol, by the package confluent-kafka (extra ``kafka``).

    It joins no group and commits nothing: positions are in checkpoints.

    Args:
        name: of the topic.
        config: of librdkafka, such as ``{"bootstrap.servers": "host:9092"}``.
        timeout: seconds in which the broker answers a question.

    Raises ConnectionError where no broker answers, and ValueError for a topic that is not there. `read`
    raises ValueError for an offset that the partition has not or no longer, and where offsets have gaps.
    """

    def __init__(self, name: str, config: Mapping[str, Any], timeout: float = 10.0) -> None:
        require("confluent_kafka", "KafkaTopic")
        import confluent_kafka

        self.name, self._timeout, self._kafka = name, timeout, confluent_kafka
        own = {"group.id": "tritonrec", "queued.max.messages.kbytes": 8192, **config}
        self._config = {**own, "enable.auto.commit": False, "auto.offset.reset": "error"}
        self._asking = confluent_kafka.Consumer(self._config)
        self._consumers: dict[int, Any] = {}
        self._next: dict[int, int] = {}  # offset by partition
        try:
            found = self._asking.list_topics(name, timeout).topics[name]
        except confluent_kafka.KafkaException as error:
            raise ConnectionError(f"topic {name}: {error.args[0].str()}") from error
        if found.error is not None or not found.partitions:
            raise ValueError(f"topic {name}: {found.error.str() if found.error else 'it has no partitions'}")
        self.partitions = len(found.partitions)

    def ends(self) -> list[int]:
        """By partition the offset behind its last message."""
        return [self._bounds(partition)[1] for partition in range(self.partitions)]

    def read(self, partition: int, first: int, count: int, wait: float) -> list[Any]:
        """As of `Topic`; a message is its value, bytes or None."""
        if self._next.pop(partition, None) != first:
            if partition not in self._consumers:
                self._consumers[partition] = self._kafka.Consumer(self._config)
            self._consumers[partition].assign([self._kafka.TopicPartition(self.name, partition, first)])
        found: list[Any] = []
        until, left = monotonic() + wait, 0.1
        while len(found) < count and left > 0:
            left = max(until - monotonic(), 0)
            for message in self._consumers[partition].consume(count - len(found), min(left, 0.1)):
                self._check(message, partition, first + len(found))
                found.append(message.value())
        self._next[partition] = first + len(found)
        return found

    def _bounds(self, partition: int) -> tuple[int, int]:
        where = self._kafka.TopicPartition(self.name, partition)
        return self._asking.get_watermark_offsets(where, self._timeout)

    def _check(self, message: Any, partition: int, expected: int) -> None:
        where = f"topic {self.name}, partition {partition}"
        if (error := message.error()) is not None:
            if error.code() != self._kafka.KafkaError._AUTO_OFFSET_RESET:
                raise ConnectionError(f"{where}: {error.str()}")
            low, high = self._bounds(partition)
            raise ValueError(f"{where} has the offsets from {low} to {high - 1}, and none is {expected}")
        if message.offset() != expected:
            raise ValueError(
                f"{where} has no message at offset {expected}, and one at {message.offset()}: a position is "
                "a step, which needs offsets without gaps, so neither compaction nor transactions"
            )
