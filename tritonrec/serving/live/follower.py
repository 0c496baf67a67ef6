"""A replica that follows a `Publisher`: at each published step its predictor has the trainer's bits."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.manifest import add_checksum
from ...data.vocabulary import Vocabulary
from ...files.places import Place
from ...kernels.checksums import same_bits
from ...settings import typed
from ..exported_table import ExportedTable, Share, UnknownIds
from ..predictor import Predictor
from .replica import LiveTable, with_values
from .sinks import Sink, sink_of
from .wire import (
    CorruptDeltaError,
    GapError,
    Header,
    LiveError,
    OtherRunError,
    OutOfOrderError,
    digest_of,
    schema_of,
    spelling,
    unpack,
)

Part = tuple[Header, dict[str, Tensor]]


class Follower:
    """A `Predictor` that follows what a `Publisher` puts into a sink; make one by `open`.

    Attributes:
        predictor: the newest state, whole. Who takes it, keeps it: later deltas do not change it. Take it
            once for what belongs together.

    `poll` may be called by any thread; readers never wait for it.
    """

    @typed
    def __init__(
        self,
        sink: Sink,
        unknown: UnknownIds = "initial",
        namespaces: Collection[str] = (),
        share: Share | None = None,
    ):
        self._sink, self._unknown, self._namespaces, self._share = sink, unknown, namespaces, share
        self._lock = threading.Lock()
        self._at: Header | None = None
        self._tables: dict[str, LiveTable] = {}
        self.predictor: Predictor
        if not sink.snapshots():
            raise LiveError(f"{sink.name} has no snapshot: nothing was published there yet")
        self._load_newest()

    @classmethod
    def open(
        cls,
        url: str | Place | Sink,
        *,
        unknown: UnknownIds = "initial",
        namespaces: Collection[str] = (),
        share: Share | None = None,
    ) -> Follower:
        """Load the newest snapshot of a folder, a URL or ``redis://HOST:PORT/DB?key=KEY``, and what follows.

        Args:
            unknown, namespaces, share: as of `Predictor.load`.

        Raises LiveError: nothing is published there, or it is damaged.
        """
        made = cls(sink_of(url), unknown, namespaces, share)
        made.poll()
        return made

    @property
    def step(self) -> int:
        """Steps of the state that is served."""
        return self._state.step

    @property
    def sequence(self) -> int:
        """Number of the publication that is served."""
        return self._state.sequence

    @property
    def published_at(self) -> float:
        """When its publisher took that state, in seconds since 1970 by the publisher's clock."""
        return self._state.published_at

    @property
    def run(self) -> str:
        """The run that is followed."""
        return self._state.run

    def lag_seconds(self) -> float:
        """Age of the state that is served: seconds since `published_at`, at least 0."""
        return max(0.0, time.time() - self.published_at)

    def poll(self, until: int | None = None) -> bool:
        """Apply everything new, or up to the publication `until`; whether there was something.

        A delta that is damaged or missing is passed over by a later snapshot, with a warning, where there is
        one.

        Raises (what is served stays whole, and a later call tries again):
            GapError, CorruptDeltaError, OutOfOrderError, OtherRunError: see there.
            SinkError: the sink cannot be read.
        """
        with self._lock:
            sequence = self.sequence
            while (until is None or self.sequence < until) and self._advance():
                pass
            return self.sequence != sequence

    def prove(self) -> bool:
        """Compare every row, value and word with the snapshot of this sequence number; False without one.

        Takes the time of loading the snapshot. Raises CorruptDeltaError where a bit differs.
        """
        with self._lock:
            if self.sequence not in self._sink.snapshots():
                return False
            _, whole = self._snapshot(self.sequence)
            wrong = [
                f"table {name}"
                for name, table in whole.tables.items()
                if not _same_table(self.predictor.tables[name], table)
            ]
            values = self.predictor.program.state_dict()
            wrong += [
                name
                for name, value in whole.program.state_dict().items()
                if not same_bits(values[name], value)
            ]
            wrong += [
                f"words {name}"
                for name, each in whole.vocabularies.items()
                if each != self.predictor.vocabularies[name]
            ]
            if wrong:
                raise CorruptDeltaError(
                    f"snapshot {self.sequence} differs from its deltas in {', '.join(wrong)}"
                )
            return True

    @property
    def _state(self) -> Header:
        assert self._at is not None
        return self._at

    def _advance(self) -> bool:
        """Apply one delta or snapshot; whether there was one."""
        wanted = self.sequence + 1
        problem: LiveError | None = None
        try:
            parts = self._delta(wanted)
            if parts:
                self._apply(parts)
                return True
        except (CorruptDeltaError, OutOfOrderError, OtherRunError) as error:
            problem = error
        # Deltas come first, since they are small. A snapshot is for what no delta leads to: a new epoch, or
        # damage.
        newer = [each for each in self._sink.snapshots() if each >= wanted]
        if newer:
            if problem is not None:
                warnings.warn(
                    f"{problem}; snapshot {newer[-1]} is loaded instead", RuntimeWarning, stacklevel=4
                )
            self._load_newest()
            return True
        if problem is not None:
            raise problem
        for later in range(self._sink.last(0), wanted, -1):
            if self._delta(later, checked=False):
                if self._delta(wanted, checked=False) or any(
                    each >= wanted for each in self._sink.snapshots()
                ):
                    return self._advance()  # it came meanwhile, or was pruned
                raise GapError(f"delta {wanted} is missing in {self._sink.name}, and delta {later} is there")
        return False

    def _delta(self, sequence: int, checked: bool = True) -> list[Part]:
        """All parts of a delta; [] where one is not there."""
        found: list[Part] = []
        while not found or len(found) < found[0][0].parts:
            part = len(found)
            content = self._sink.get(part, sequence)
            if content is None:
                return []
            name = f"part {part} of delta {sequence} in {self._sink.name}"
            header, tensors = unpack(content, name)
            if checked:
                self._check(header, sequence, part, name)
            if found and header.writer != found[0][0].writer:
                return []  # a publisher that was started again writes it anew
            found.append((header, tensors))
        return found

    def _check(self, header: Header, sequence: int, part: int, name: str) -> None:
        at = self._state
        if header.run != at.run:
            raise OtherRunError(f"{name} is of run {header.run}, and run {at.run} is followed: open it anew")
        if (header.sequence, header.part) != (sequence, part):
            raise OutOfOrderError(f"{name} says it is part {header.part} of delta {header.sequence}")
        if header.schema != at.schema:
            raise OtherRunError(f"{name} is of another model or other tables than those that are followed")
        # A chain: each delta names the publication that it leads on from.
        if (header.epoch, header.before_writer, header.before) != (at.epoch, at.writer, at.step):
            raise OtherRunError(
                f"{name} leads on from step {header.before} of epoch {header.epoch}, writer "
                f"{header.before_writer}, and step {at.step} of epoch {at.epoch}, writer {at.writer}, is "
                "served: do two publishers write there?"
            )

    def _apply(self, parts: list[Part]) -> None:
        """Make the next state beside the one that is served, and put it in its place."""
        header, before = parts[0][0], self.predictor
        name = f"delta {header.sequence} in {self._sink.name}"
        # What is used is taken out: a tensor that is left at the end belongs to no table, value or word of
        # the model.
        left = [dict(tensors) for _, tensors in parts]
        tables = dict(before.tables)
        try:
            for table, live in self._tables.items():
                like = live.table.weights.new_empty(0, before.manifest["tables"][table]["dim"])
                ids, weights, erased = _rows_of(left, table, like, name)
                if self._share is not None:
                    own = self._share.columns({"ids": ids, "weights": weights})
                    ids, weights, erased = own["ids"], own["weights"], erased[self._share.of(erased)]
                if len(ids) or len(erased):
                    tables[table] = live.prepare(ids, weights, erased)
            self._check_rows(header, tables, name)
            program = self._program_of(left[0], before.program, header, name)
            words = _words_of(left[0], before.vocabularies, header, name)
            if unknown := next((each for own in left for each in own), None):
                raise CorruptDeltaError(f"{name} has {unknown}, which is nothing of this model")
        except BaseException:
            for live in self._tables.values():
                live.drop()
            raise
        # All checks have passed: now all tables change together.
        for live in self._tables.values():
            live.commit()
        manifest = _manifest_of(before.manifest, header, tables)
        # Readers take the one attribute `predictor`: the old state or the new one, whole, without a lock.
        self._at, self.predictor = header, Predictor(manifest, tables, program, words)

    def _check_rows(self, header: Header, tables: Mapping[str, ExportedTable], name: str) -> None:
        if self._share is not None and self._share.rank is not None:
            return  # it takes all shares; who has all ids compares their number
        if sorted(each for names, _ in header.rows for each in names) != sorted(tables):
            raise CorruptDeltaError(f"{name} counts rows of {header.rows}, and there are {', '.join(tables)}")
        for names, rows in header.rows:
            got = sum(len(tables[each].ids) for each in names)
            if got != rows:
                raise CorruptDeltaError(
                    f"{name} leaves {got} rows of {', '.join(names)}, its trainer has {rows}"
                )

    def _check_dense(self, header: Header, values: Mapping[str, Tensor], name: str) -> None:
        if digest_of(values) != header.dense:
            raise CorruptDeltaError(f"{name} leaves other dense values than its trainer has")

    def _program_of(self, own: dict[str, Tensor], program: Any, header: Header, name: str) -> Any:
        values = program.state_dict()
        changed = {each: own.pop(f"dense/{each}") for each in values if f"dense/{each}" in own}
        for each, value in changed.items():
            if (value.dtype, value.shape) != (values[each].dtype, values[each].shape):
                raise CorruptDeltaError(f"{name} has {each} as {value.dtype} {tuple(value.shape)}")
        self._check_dense(header, {**values, **changed}, name)
        return with_values(program, changed) if changed else program

    def _load_newest(self) -> None:
        """Load the last snapshot; the next one, where that was pruned meanwhile."""
        while True:
            newest = self._sink.snapshots()[-1]
            try:
                return self._load(newest)
            except LiveError:
                left = self._sink.snapshots()
                if newest in left or not left or left[-1] < newest:
                    raise

    def _load(self, sequence: int) -> None:
        header, predictor = self._snapshot(sequence)
        if self._at is not None and header.run != self._at.run:
            raise OtherRunError(
                f"snapshot {sequence} in {self._sink.name} is of run {header.run}, and run {self._at.run} is "
                "followed: open it anew"
            )
        if self._at is not None and header.schema != self._at.schema:
            raise OtherRunError(f"snapshot {sequence} in {self._sink.name} is of another model: open it anew")
        self._tables = {name: LiveTable(table) for name, table in predictor.tables.items()}
        self._at, self.predictor = header, predictor

    def _snapshot(self, sequence: int) -> tuple[Header, Predictor]:
        name = f"snapshot {sequence} in {self._sink.name}"
        header, sealed = read_document(self._sink, sequence)
        try:
            with self._sink.opened(sequence) as place:
                predictor = Predictor.load(
                    place, unknown=self._unknown, namespaces=self._namespaces, share=self._share
                )
        except ValueError as error:
            raise CorruptDeltaError(f"{name} cannot be loaded: {error}") from error
        values, manifest = predictor.program.state_dict(), predictor.manifest
        schema = schema_of(manifest["tables"], manifest["features"], manifest["dense"], values)
        if (
            manifest["manifest_sha256"] != sealed["manifest"]
            or schema != header.schema
            or digest_of(values) != header.dense
        ):
            raise CorruptDeltaError(f"{name} has files of another one")
        return header, predictor


def read_document(sink: Sink, sequence: int) -> tuple[Header, dict[str, Any]]:
    """What a snapshot says of itself; CorruptDeltaError where it is damaged."""
    name, text = f"snapshot {sequence} in {sink.name}", sink.document(sequence)
    try:
        sealed = json.loads(text or "")
        body = {each: value for each, value in sealed.items() if each != "manifest_sha256"}
        if add_checksum(body) != sealed or sealed["sequence"] != sequence:
            raise ValueError("its own checksum does not fit")
        return Header(**{each.name: sealed[each.name] for each in fields(Header)}), sealed
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDeltaError(f"{name} was altered: {type(error).__name__}: {error}") from error


def _rows_of(
    parts: list[dict[str, Tensor]], table: str, like: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (r,) ascending, weights (r, d) and erased ids (e,) of all parts, which are taken out of them."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    found = []
    for column, empty in (("ids", none), ("weights", like), ("erased", none)):
        own = [part.pop(f"table/{table}/{column}", empty) for part in parts]
        for each in own:  # torch.cat would make one dtype of several
            if (each.dtype, each.shape[1:], each.dim()) != (empty.dtype, empty.shape[1:], empty.dim()):
                raise CorruptDeltaError(
                    f"{name} has {column} of table {table} as {each.dtype} {tuple(each.shape)}"
                )
        found.append(own)
    if [*map(len, found[0])] != [*map(len, found[1])]:
        raise CorruptDeltaError(f"{name} has other numbers of ids than of weights of table {table}")
    ids, weights, erased = map(torch.cat, found)
    if len(parts) > 1:
        ids, order = ids.sort()
        weights, erased = weights[order], erased.sort().values
    if any(bool((each[1:] <= each[:-1]).any()) for each in (ids, erased)):
        raise CorruptDeltaError(f"{name} has an id of table {table} twice")
    if bool(torch.isin(ids, erased, assume_unique=True).any()):
        raise CorruptDeltaError(f"{name} has a row of table {table} and erases it")
    return ids, weights, erased


def _words_of(
    own: dict[str, Tensor], before: Mapping[str, Vocabulary], header: Header, name: str
) -> dict[str, Vocabulary]:
    words = dict(before)
    for each, count in header.words.items():
        state = {
            part: own.pop(f"words/{each}/{part}")
            for part in ("bytes", "offsets")
            if f"words/{each}/{part}" in own
        }
        if state:
            grown = Vocabulary(words[each].words) if each in words else Vocabulary()
            grown.encode(Vocabulary.from_state(state).words, extend=True)
            words[each] = grown
        if len(words.get(each, ())) != count:
            raise CorruptDeltaError(
                f"{name} leaves another number of words of {each!r} than its trainer has, {count}"
            )
        if state and spelling(words[each], count) != header.spelled.get(each):
            raise CorruptDeltaError(f"{name} leaves other words of {each!r} than its trainer has")
    return words


def _manifest_of(
    before: Mapping[str, Any], header: Header, tables: Mapping[str, ExportedTable]
) -> dict[str, Any]:
    """That of the export which the state would be; its checksum names the version."""
    own = {name: {**told, "rows": len(tables[name].ids)} for name, told in before["tables"].items()}
    body = {name: value for name, value in before.items() if name != "manifest_sha256"}
    live = {"run": header.run, "epoch": header.epoch, "sequence": header.sequence}
    return add_checksum({**body, "step": header.step, "tables": own, "live": live})


def _same_table(left: ExportedTable, right: ExportedTable) -> bool:
    return torch.equal(left.ids, right.ids) and same_bits(left.weights, right.weights)
