"""Publishing a training: what changed since the last publication, and now and then everything."""

from __future__ import annotations

import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.manifest import add_checksum
from ...checkpoint.rows import close_rows
from ...data import Batch
from ...data.batch import iterator_of
from ...distributed.watch import in_words
from ...files.places import Place
from ...kernels.checksums import same_bits
from ...pipeline import StepResult, Trainer
from ...pipeline.results import to_be_taken
from ...settings import typed
from ..exporter import copied_scorer
from ..programs import Arguments, save_program
from .follower import read_document
from .sinks import Sink, sink_of
from .snapshot import Dense, Files, Tables, ascending, name_of_part, write_manifest, write_tables
from .wire import (
    Header,
    LiveError,
    OtherRunError,
    SinkError,
    digest_of,
    pack,
    schema_of,
    spelling,
    unpack,
)

QUEUED = 2
"""Deltas that wait for the sink; a further publication waits for it."""
LONGEST_STRETCH = 1000
"""Steps between two publications by time, at most."""


@typed
class Publisher:
    """Publishes a trainer's state for `Follower`: deltas every few steps, and full snapshots among them::

        with Publisher(trainer, "s3://bucket/live", every=100) as publisher:
            for result in publisher.run(loader.batch(step) for step in range(steps)):
                ...

    All calls are collective. Each rank that owns a shard writes its own part, on threads beside the training;
    what is published holds up a step for its copy. The pipeline drains before each publication, as before a
    checkpoint.

    A publisher on a sink that has publications of the same model begins a new epoch of that run, by a new
    snapshot: nobody has compared all rows with those that were published. It warns where the trainer is not
    at the last published step, or its dense values, words, numbers of rows or ranks are others.

    Args:
        trainer: between runs; loaded already, where it goes on from a checkpoint.
        sink: see `sink_of`. every: steps between publications. seconds: or about as many seconds, by the pace
            of rank 0.
        model, scorer, examples: as of `export`; the trainer's model by default, of the average where there is
            one.
        snapshot_every: publications from a full snapshot to the next; the last two snapshots are kept.
        patience: seconds for which a write is tried again; then the next publication raises.

    Attributes:
        run_id: of the run. epoch, sequence, step: of the last publication.

    Raises ValueError for arguments out of range, `OtherRunError` where the sink has publications of another
    model, and the errors of `export` for a model that cannot be exported.
    """

    def __init__(
        self,
        trainer: Trainer,
        sink: str | Place | Sink,
        *,
        every: int = 0,
        seconds: float = 0.0,
        model: torch.nn.Module | None = None,
        scorer: torch.nn.Module | None = None,
        examples: Sequence[Arguments] = (),
        snapshot_every: int = 64,
        patience: float = 60.0,
    ):
        config = trainer.config
        if every < 0 or seconds < 0 or bool(every) == bool(seconds):
            raise ValueError(f"give every= steps or seconds=, above 0, got {every} and {seconds}")
        if every % config.accumulate:
            raise ValueError(
                f"every is {every} steps, and an update takes {config.accumulate}: give a multiple"
            )
        if snapshot_every < 1 or patience <= 0:
            raise ValueError(
                f"snapshot_every must be 1 at least and patience above 0, got {snapshot_every}, {patience}"
            )
        if config.average_every:
            raise ValueError(
                "replicas that are averaged now and then have no one state to publish: average_every=0"
            )
        self._trainer, self._groups, self._sink = trainer, trainer.communicators, sink_of(sink)
        self._every, self._seconds, self._stretch = every, seconds, every or config.accumulate
        self._snapshot_every, self._patience = snapshot_every, patience
        self._described = trainer.tables.describe()
        self._writer = self._groups.control.all_gather_texts(token_hex(4))[0]
        self._reader = f"deltas of {id(self)}"  # each publisher of a trainer gets every change
        self._closing, self._broken, self._lost, self._fresh = Event(), False, False, True
        self._deltas, self._snapshots = (
            ThreadPoolExecutor(1, f"publisher-{each}") for each in ("delta", "snapshot")
        )
        self._under_way: deque[Future[None]] = deque()
        self._snapshot: Future[None] | None = None
        self._complete: list[int] = []  # sequence numbers of this publisher's snapshots
        self._began, self._steps = time.monotonic(), 0
        self._words: dict[str, int] = {}
        own = model or trainer.dense.model
        copied, made = copied_scorer(own, scorer, examples, self._described)
        self._scorer = replace(made, precision=config.precision)
        self._values: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}
        self._schema = ""
        self._header = self._resumed(copied)
        self.publish()

    @property
    def run_id(self) -> str:
        """Of the publications in the sink, through all epochs."""
        return self._header.run

    @property
    def epoch(self) -> int:
        """Of the last publication."""
        return self._header.epoch

    @property
    def sequence(self) -> int:
        """Of the last publication."""
        return self._header.sequence

    @property
    def step(self) -> int:
        """Steps of the last published state."""
        return self._header.step

    @to_be_taken
    def run(self, batches: Iterable[Batch]) -> Iterator[StepResult]:
        """`Trainer.run`, with a publication after every stretch, and one at the end."""
        source, every = iterator_of(batches), self._trainer.config.accumulate
        while True:
            done = 0
            for result in self._trainer.run(islice(source, self._stretch)):
                done += 1
                yield result
            self._steps += done
            if self._trainer.next_step != self.step:
                self.publish()
            if done < self._stretch:
                return
            if self._seconds:
                self._stretch = self._paced(every)

    def publish(self) -> int:
        """Publish the trainer's state now; returns its sequence number. Collective.

        Raises RuntimeError while batches are in flight, and `SinkError` where what was published before could
        not be written; the next call begins a new epoch then.
        """
        trainer, tables = self._trainer, self._trainer.tables
        if trainer.in_flight():
            raise RuntimeError(
                f"batches are in flight: publish when run() has ended, not at {trainer.in_flight()}"
            )
        rows = [(list(group.layout.names), len(group.table)) for group in tables.groups]
        # Each rank knows of its own writes alone. After this exchange all decide alike: to raise, to begin an
        # epoch, or to write a snapshot.
        failed = self._settled()
        note: dict[str, Any] = {
            "failed": failed and in_words(failed),
            "lost": self._lost,
            "busy": self._is_busy(),
        }
        note |= {"rows": rows, "saves": self._groups.saves}
        notes = [json.loads(text) for text in self._groups.control.all_gather_texts(json.dumps(note))]
        for rank, each in enumerate(notes):
            if each["failed"]:
                self._fresh = True
                raise SinkError(
                    f"rank {rank} could not publish: {each['failed']}; the next publication begins an epoch"
                )
        owners = [each for each in notes if each["saves"]]
        total = [(names, sum(each["rows"][at][1] for each in owners)) for at, (names, _) in enumerate(rows)]
        words = {name: len(each) for name, each in trainer.vocabularies.items()}
        spelled = {name: spelling(each, len(each)) for name, each in trainer.vocabularies.items()}
        # Deltas append words. A word that has another number than before, or is gone, needs a new epoch.
        renumbered = any(
            words.get(name, 0) < count
            or spelling(trainer.vocabularies[name], count) != self._header.spelled[name]
            for name, count in self._words.items()
        )
        fresh = self._fresh or renumbered or any(each["lost"] for each in notes)
        before = self._header
        since = before.sequence + 1 - (self._complete[-1] if self._complete else before.sequence + 1)
        due = fresh or (since >= self._snapshot_every and not any(each["busy"] for each in notes))
        changed = self._changed_values()
        if fresh:
            self._wait_for_snapshot()
            tables.track_changes(self._reader)
        header = replace(
            before, sequence=before.sequence + 1, epoch=before.epoch + fresh, writer=self._writer,
            before_writer=before.writer, before=before.step, step=trainer.next_step, published_at=time.time(),
            rows=total, dense="", words=words, part=self._groups.shard,
            parts=self._groups.shards, spelled=spelled,
        )  # fmt: skip
        if not fresh:
            content = self._delta(changed)
            rows_changed, erased = tables.snapshot_of_changes(self._reader)
        self._words, self._header, self._fresh = words, header, False
        self._lost = self._broken = False
        # This replica's rows are not written, but the log of its changes begins anew as it does elsewhere.
        if not fresh and not self._groups.saves:
            close_rows(rows_changed)
        elif not fresh:
            # On the thread: rows, their digest and the writes. `_values` is copied, since the next
            # publication changes it.
            delta = self._deltas.submit(
                self._put_delta, header, content, rows_changed, erased, dict(self._values)
            )
            delta.add_done_callback(lambda _: _done_with(rows_changed))
            self._under_way.append(delta)
        if due and self._groups.saves:
            self._begin_snapshot(header)
        return header.sequence

    def flush(self) -> None:
        """Wait until all of this rank's publications are in the sink, for `patience` seconds at most.

        Raises `SinkError` where one is not.
        """
        wait([*self._under_way, *filter(None, [self._snapshot])], self._patience + 1)
        if failed := self._settled(0):
            raise SinkError(f"the last publications are not complete: {in_words(failed)}") from failed

    def close(self) -> None:
        """`flush`, and end the threads."""
        try:
            self.flush()
        finally:
            self._closing.set()
            for pool in (self._deltas, self._snapshots):
                pool.shutdown(cancel_futures=True)
            self._trainer.tables.forget_changes(self._reader)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: Any) -> None:
        try:
            self.close()
        except LiveError as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")

    def _trace(self, copied: torch.nn.Module) -> None:
        """Trace the program, and find which of its tensors are the model's."""
        with TemporaryDirectory(prefix="tritonrec-") as folder:
            self._program = save_program(self._scorer, Path(folder, "dense.pt2"))
        own = {id(each): name for name, each in copied.state_dict(keep_vars=True).items()}
        for name, each in self._scorer.program().state_dict(keep_vars=True).items():
            if name in self._program.state_dict:
                self._values[name] = each.detach().clone()
                if id(each) in own:
                    self._names[name] = own[id(each)]
        described = self._described
        self._schema = schema_of(
            described["tables"], described["features"], self._scorer.described, self._values
        )

    def _changed_values(self) -> dict[str, Tensor]:
        """Dense values that are others than at the last publication; collective where they are sharded."""
        dense = self._trainer.dense
        if dense.shards is None:
            state: Mapping[str, Any] = dense.evaluated.state_dict()
        else:
            state = dense.state_dict()["model"]
        now = {name: state[own].detach().cpu().contiguous() for name, own in self._names.items()}
        changed = {
            name: each.clone() for name, each in now.items() if not same_bits(each, self._values[name])
        }
        self._values |= changed
        return changed

    def _delta(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of this rank's part but its rows; see `wire`."""
        found = {f"dense/{name}": each for name, each in dense.items()}
        if self._groups.rank == 0:
            for name, vocabulary in self._trainer.vocabularies.items():
                known, state = self._words.get(name, 0), vocabulary.state_dict()
                offsets = state["offsets"][known:]
                if len(offsets) > 1:
                    found[f"words/{name}/offsets"] = offsets - offsets[0]
                    found[f"words/{name}/bytes"] = state["bytes"][int(offsets[0]) : int(offsets[-1])].clone()
        return found

    def _rows_of(self, changed: Tables, erased: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of this rank's rows; see `wire`."""
        found = {}
        for name, told in self._described["tables"].items():
            columns = ascending(changed[name])
            if len(columns["keys"]):
                found[f"table/{name}/ids"] = columns["keys"]
                found[f"table/{name}/weights"] = columns["rows"][:, : told["dim"]].clone()
            if len(erased[name]):
                found[f"table/{name}/erased"] = erased[name]
        return found

    def _put_delta(
        self,
        header: Header,
        content: Mapping[str, Tensor],
        changed: Tables,
        erased: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
    ) -> None:
        if self._broken:
            return  # it would follow on one that is missing
        try:
            header = replace(header, dense=digest_of(values))
            tensors = {**content, **self._rows_of(changed, erased)}
            self._persist(self._sink.put, header.part, header.sequence, pack(header, tensors))
            if header.part == 0 and self._complete:
                # A sink that has lost its last snapshot (a Redis that was started again) is of no use to a
                # new follower.
                self._lost = self._persist(self._sink.document, self._complete[-1]) is None
        except BaseException:
            self._broken = True
            raise

    def _begin_snapshot(self, header: Header) -> None:
        rows = {name: each for name, each in self._trainer.tables.snapshot().items()}
        for name in rows.keys() - self._described["tables"].keys():  # of keys that are not admitted
            rows.pop(name)
        dense = None
        if self._groups.rank == 0:
            words = {name: each.state_dict() for name, each in self._trainer.vocabularies.items()}
            dense = Dense(self._scorer, self._program, dict(self._values), words)
        self._snapshot = self._snapshots.submit(self._put_snapshot, header, rows, dense)
        self._snapshot.add_done_callback(lambda _: close_rows(rows))

    def _put_snapshot(self, header: Header, rows: Any, dense: Dense | None) -> None:
        sequence, sink, watch = header.sequence, self._sink, self._groups.watch
        with watch.doing(f"snapshot({sequence})"):
            number = watch.begin_call("snapshots")
            told = self._described["tables"]
            files = [write_tables(sink, sequence, header.part, rows, told, self._persist)]
            if dense is not None:
                files += self._files_of_others(sequence, header.parts, number)
        if dense is None:
            self._complete = [*self._complete[-1:], sequence]
            return
        manifest = write_manifest(sink, sequence, header.step, files, self._described, dense, self._persist)
        body = add_checksum({**asdict(header), "dense": digest_of(dense.values), "manifest": manifest})
        # The document comes last, and makes the files a snapshot. Older ones are pruned after that alone, and
        # the one before is kept: a follower may be loading it.
        self._persist(sink.put_document, sequence, json.dumps(body))
        self._complete = [*self._complete[-1:], sequence]
        self._persist(sink.prune, header.parts, self._complete[0])

    def _files_of_others(self, sequence: int, parts: int, number: int) -> list[Files]:
        """The shards of the other ranks, when they are there; `RankDiedError` naming one that stalls."""
        found: dict[int, Files] = {}
        watch, peers = self._groups.watch, self._groups.routing.peers

        def missing() -> list[int]:
            if self._closing.is_set():
                raise SinkError(f"closed before all shards of snapshot {sequence} were there")
            for part in set(range(1, parts)) - found.keys():
                if content := self._persist(self._sink.get_file, sequence, name_of_part(part)):
                    found[part] = json.loads(content)
            return [peers[part] for part in range(1, parts) if part not in found]

        watch.wait_for(missing, "snapshots", number, timedelta(seconds=self._patience))
        return [found[part] for part in range(1, parts)]

    def _persist(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call of the sink, again until it succeeds or patience ends."""
        until, pause = time.monotonic() + self._patience, 0.02
        while True:
            try:
                return call(*arguments)
            except SinkError:
                if time.monotonic() + pause > until or self._closing.wait(pause):
                    raise
                pause = min(2 * pause, 1.0)

    def _settled(self, queued: int = QUEUED) -> BaseException | None:
        """Wait until at most `queued` deltas are under way; the error of one that failed."""
        failed = None
        if self._snapshot is not None and self._snapshot.done():
            failed, self._snapshot = self._snapshot.exception(), None
        while self._under_way and (self._under_way[0].done() or len(self._under_way) > queued - 1):
            failed = self._under_way.popleft().exception(self._patience + 10) or failed
        return failed

    def _is_busy(self) -> bool:
        return self._snapshot is not None and not self._snapshot.done()

    def _wait_for_snapshot(self) -> None:
        if self._snapshot is not None:
            wait([self._snapshot], self._patience + 10)
            self._snapshot = None

    def _paced(self, multiple: int) -> int:
        """Steps of the next stretch, the same on all ranks."""
        pace = (time.monotonic() - self._began) / max(self._steps, 1)
        self._began, self._steps = time.monotonic(), 0
        wanted = min(LONGEST_STRETCH, 2 * self._stretch, max(1, round(self._seconds / max(pace, 1e-9))))
        # Rank 0's number for all: clocks differ, and stretches have to end at one step.
        text = self._groups.control.all_gather_texts(str(max(multiple, wanted - wanted % multiple)))[0]
        return int(text)

    def _resumed(self, copied: torch.nn.Module) -> Header:
        """What this publisher goes on from; rank 0 traces and looks, and all do the same. Collective."""
        rows = [len(group.table) * self._groups.saves for group in self._trainer.tables.groups]
        gather = self._groups.control.all_gather_texts
        counts = [json.loads(text) for text in gather(json.dumps(rows))]
        found: dict[str, Any] = {}
        failure: Exception | None = None
        if self._groups.rank == 0:
            try:
                self._trace(copied)
                found = self._found([sum(each) for each in zip(*counts, strict=True)])
            except Exception as error:
                failure, found = error, {"error": str(error)}
        found = json.loads(gather(json.dumps(found))[0])
        if failure is not None:
            raise failure
        if "error" in found:
            raise ValueError(f"nothing is published, because rank 0 cannot: {found['error']}")
        header = Header(**found["header"])
        if found["why"] and self._groups.rank == 0:
            warnings.warn(
                f"{self._sink.name} ends with step {header.step}, and this training begins epoch "
                f"{header.epoch + 1} at step {self._trainer.next_step}: {found['why']}",
                RuntimeWarning,
                stacklevel=3,
            )
        if self._groups.saves:
            self._persist(self._sink.truncate, self._groups.shard, header.sequence)
        gather("")  # nobody writes before all have removed what was left
        return header

    def _found(self, rows: list[int]) -> dict[str, Any]:
        sink, parts = self._sink, self._groups.shards
        sink.prepare()  # at once: patience is for what worked before
        snapshots = self._persist(sink.snapshots)
        if not snapshots:
            last = max(sink.last(part) for part in range(parts))
            new = Header(
                token_hex(8), 0, self._writer, self._writer, last, 0, parts, self._trainer.next_step, 0,
                self._schema, 0.0, [], "", {}, {},
            )  # fmt: skip
            return {"header": asdict(new), "why": ""}
        header, _ = read_document(sink, snapshots[-1])
        if header.schema != self._schema:
            raise OtherRunError(
                f"{sink.name} has publications of another model or other tables: choose another place"
            )
        try:
            while all(contents := [sink.get(part, header.sequence + 1) for part in range(header.parts)]):
                headers = [unpack(each, "a part")[0] for each in contents if each is not None]
                if len({each.writer for each in headers}) > 1 or headers[0].before_writer != header.writer:
                    break
                header = headers[0]
        except LiveError:
            pass  # a damaged one is no end to go on from, and is written anew
        self._changed_values()
        words = {name: spelling(each, len(each)) for name, each in self._trainer.vocabularies.items()}
        last = max([header.sequence, *(sink.last(part) for part in range(header.parts))])
        why = ""  # rows may still be others, which only reading all of them would show: an epoch begins
        if header.parts != parts:
            why = f"it has {parts} shards, and that had {header.parts}"
        elif header.step != self._trainer.next_step:
            why = "steps were published that it does not go on from"
        elif (header.dense, [count for _, count in header.rows], header.spelled) != (
            digest_of(self._values),
            rows,
            words,
        ):
            why = "its state is another one"
        if why:
            header = replace(header, sequence=last)
        return {"header": asdict(header), "why": why}


def _done_with(rows: dict[str, Any]) -> None:
    """Close them, and free their memory on this thread: a future keeps its callbacks, and their closures."""
    close_rows(rows)
    rows.clear()
