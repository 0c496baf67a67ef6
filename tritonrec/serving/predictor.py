"""An exported model in memory: embedding rows, scores and retrieval, with the bits of the trainer's.

Dimensions: L tokens, B samples, C features, F dense features, I items, d model dimension; of impressions Lh
history and Le exposed tokens, T tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..data.impressions import ImpressionBatch
from ..data.jagged import Lookup, check_offsets, check_tensor, offsets_of
from ..data.vocabulary import Vocabulary
from ..embedding.bags import pool
from ..files.places import Place, place_of
from ..kernels.gradients import keep_made
from ..nn import sigmoid
from ..settings import typed
from .exported_table import ExportedTable, Share, UnknownIds, load_table, rows_side_by_side
from .histories import Ids, array_of, ids_of, times_of, told
from .manifest import checked_file, local_copy, read_manifest
from .programs import CLICK, IMPRESSION, NEXT_ITEM, Program, load_compiled, load_program, without_dispatcher
from .retrieval import best_items, check_k, seen_places
from .whole import program_or_whole


class Predictor:
    """A model of `tritonrec.serving.export`, on the CPU; make one by `load`.

    Attributes:
        manifest: of the export. step: of the checkpoint. tables: by name. program: the dense part, called
            with the tensors of its scorer; None where the tables were exported alone.
        vocabularies: of the words that the log had, by name.
    """

    @property
    def failure(self) -> str:
        """Why it answers nothing any more."""
        return ""

    def __init__(
        self,
        manifest: dict[str, Any],
        tables: dict[str, ExportedTable],
        program: Any,
        vocabularies: Mapping[str, Vocabulary] | None = None,
    ):
        self.manifest, self.tables, self.program = manifest, tables, program
        self.vocabularies = dict(vocabularies or {})
        self.step: int = manifest["step"]
        self._weights: list[dict[str, Any]] = []
        self._made: tuple[list[Any], list[int], Program] | None = None
        if isinstance(program, torch.nn.Module):
            keep_made(program.parameters())
            self._weights = [each._parameters for each in program.modules()]

    @classmethod
    @typed
    def load(
        cls,
        path: Place | str,
        *,
        compiled: bool = False,
        unknown: UnknownIds = "initial",
        namespaces: Collection[str] = (),
        features: Collection[str] | None = None,
        share: Share | None = None,
    ) -> Predictor:
        """Load a folder of `export`; every file is compared with its checksum.

        No code of the folder runs, unless `compiled`: the program is checked first (`vetted`).

        Args:
            compiled: run the dense part that AOTInductor compiled, which is machine code: for a folder whose
                author you trust.
            unknown: what ids without a row read as: their ``"initial"`` values, as in training, or
                ``"zeros"``.
            namespaces: of ``torch.ops``, operators of other libraries that the program may call.
            features: whose tables are loaded; None: all. share: of their rows, see `spread_rows`.

        Raises ValueError for a folder that is no export, a file that is missing or altered, a program that
        could run code, and `compiled` where nothing was compiled.
        """
        folder = place_of(path)
        manifest = read_manifest(folder)
        names = manifest["tables"]
        if features is not None:
            names = dict.fromkeys(manifest["features"][each]["table"] for each in features)
        tables = {name: load_table(folder, manifest["tables"][name], unknown, share) for name in names}
        dense, program = manifest["dense"], None
        if compiled and not (dense or {}).get("compiled"):
            raise ValueError(f"{folder} has no compiled program: export with compiled=True (--compiled)")
        if compiled:
            with local_copy(folder, dense["compiled"]) as here:
                program = load_compiled(checked_file(here, dense["compiled"]))
        elif dense:
            with local_copy(folder, dense["program"]) as here:
                program = load_program(checked_file(here, dense["program"]), namespaces)
            program = without_dispatcher(program, dense["kind"])
            program.requires_grad_(False)
        entries = manifest.get("vocabularies", {})
        words = {name: _load_vocabulary(folder, name, entry) for name, entry in entries.items()}
        return cls(manifest, tables, program, words)

    def rows(self, feature: str, ids: Any, offsets: Tensor | None = None) -> Tensor:
        """Embeddings of a feature, as `HashTableCollection.peek` gives them: (n, d) of ids (n,) int64, or of
        words.

        A pooled feature takes the `offsets` (m + 1,) of its bags and gives (m, d).
        """
        return self.rows_of({feature: (ids, offsets)})[feature]

    def rows_of(self, lookups: Mapping[str, tuple[Any, Tensor | None]]) -> dict[str, Tensor]:
        """`rows` of several features."""
        found = {}
        for feature, (ids, _) in lookups.items():
            described = self.manifest["features"].get(feature)
            if described is None:
                raise ValueError(
                    f"there is no feature {feature!r}, but {', '.join(self.manifest['features'])}"
                )
            if not isinstance(ids, Tensor):
                ids = array_of(ids, f"feature {feature!r}", self.vocabularies.get(feature))[0]
            if ids.dtype != torch.int64 or ids.dim() != 1:
                raise ValueError(f"ids of feature {feature!r} must be (n,) int64, got {told(ids)}")
            found[feature] = described["table"], ids
        rows = self._looked_up(found)
        for feature, (_, offsets) in lookups.items():
            pooling = self.manifest["features"][feature]["pooling"]
            if pooling == "none":
                continue
            if offsets is None:
                raise ValueError(f"feature {feature!r} is pooled: give the offsets of its bags")
            check_offsets(offsets, len(found[feature][1]), f"offsets of {feature!r}", "ids")
            rows[feature] = pool(rows[feature], offsets, pooling)
        return rows

    def _looked_up(self, wanted: Mapping[str, tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Rows (n, d), by feature, of a table and ids (n,)."""
        return {feature: self.tables[table].rows(ids) for feature, (table, ids) in wanted.items()}

    def encode(self, history: Any, timestamps: Tensor | None = None) -> Tensor:
        """User vectors (B, d) of a next-item model, from histories of items, oldest first.

        Args:
            history: one user's ids (L,) int64, or words, or a list of these for B users; a `JaggedBatch`, a
                `KeyedJaggedTensor` or a mapping with the key ``"item"``, ids with offsets (B + 1,) int64.
            timestamps: (L,) int64, or lists as those of `history`, for a model with times; a `JaggedBatch`
                brings its own.

        Raises ValueError for an empty, a too long or a weighted history, an unknown word, and for missing
        timestamps.
        """
        given, times = self.read(history, timestamps)
        return self.vectors(given.ids, given.offsets, times)

    def read(self, history: Any, timestamps: Any = None) -> tuple[Ids, Tensor]:
        """Histories and timestamps (L,) int64 of `encode`, checked, with its errors."""
        dense = self.dense_of(NEXT_ITEM, "encode")
        given = ids_of(history, "history", self.vocabularies.get("item"))
        ids, offsets, _ = given
        timestamps = times_of(timestamps, history, ids, dense["timestamps"])
        lengths, longest = np.diff(offsets.numpy()), dense["max_seq_len"]
        wrong = (lengths < 1) | (lengths > longest)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(f"history {at} has {int(lengths[at])} items, the model takes 1 to {longest}")
        return given, timestamps

    def vectors(self, ids: Tensor, offsets: Tensor, timestamps: Tensor) -> Tensor:
        """User vectors (B, d) of what `read` has checked."""
        with torch.no_grad():
            return self._encoder(self.rows("item", ids), offsets, timestamps)

    @property
    def _encoder(self) -> Program:
        """The program, or what computes the same faster; made at the first call (ranks that hold rows
        make none), and anew where the program's weights were changed, in place or for other tensors.
        """
        weights = [each for own in self._weights for each in own.values()]
        now = [-1 if each.is_inference() else each._version for each in weights]  # no change of those shows
        made = self._made
        if made is None or made[1] != now or not all(map(is_, made[0], weights)):
            made = self._made = weights, now, program_or_whole(self.manifest["dense"], self.program)
        return made[2]

    def scores(self, history: Any, items: Tensor | None = None, timestamps: Tensor | None = None) -> Tensor:
        """(B, I) float32, of `items` (I,) int64, or of all of the table in ascending order (`item_ids`)."""
        return self.scores_of(self.encode(history, timestamps), items)

    def scores_of(self, vectors: Tensor, items: Tensor | None = None) -> Tensor:
        """`scores` from user vectors (B, d) of `encode`."""
        weights = self._items().whole if items is None else self.rows("item", items)
        return ops.linear(vectors, weights, None)

    def retrieve(
        self, history: Any, k: int, timestamps: Any = None, exclude: Any = "history"
    ) -> tuple[Any, Tensor]:
        """The k items of the highest scores by exact search: ids (B, k) int64 and scores (B, k) float32.

        Best first; of equal scores the smaller id. Items of the history are left out, as in the evaluation.
        Where the history has words, the items are words too, B lists of k.

        Args:
            history, timestamps: see `encode`.
            exclude: ``"history"``; None leaves nothing out; or the items that each user has seen, in any form
                of `history`, which may be longer than the model takes.

        Raises ValueError as `encode`, and for a k outside [1, items that are left to a user].
        """
        given, times = self.read(history, timestamps)
        return self.best_of(self.vectors(given.ids, given.offsets, times), k, exclude, given)

    def best_of(self, vectors: Tensor, k: int, exclude: Any, given: Ids) -> tuple[Any, Tensor]:
        """`retrieve` from user vectors (B, d) of `encode`; `given` are the histories."""
        ids, scores = self.best_without(vectors, k, *self.left_out(k, exclude, given))
        return (self.words_of(ids) if given.words else ids), scores

    def left_out(self, k: int, exclude: Any, given: Ids) -> tuple[Tensor, Tensor]:
        """Places of the items that `retrieve` leaves out, and offsets (B + 1,), with its errors."""
        ids = self.item_ids
        check_k(k, len(ids))
        return seen_places(ids, *self._excluded(exclude, given), k)

    def best_without(self, vectors: Tensor, k: int, places: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (B, k) int64 and scores (B, k) of `best_of`, without what `left_out` gives."""
        table = self._items()
        best, scores = best_items(vectors, table.whole, k, places, offsets)
        return table.ids[best], scores

    def words_of(self, ids: Tensor) -> list[list[str]]:
        """The words of items (B, k) int64."""
        words, k = self.vocabularies["item"].decode(ids.flatten()).to_pylist(), ids.shape[1]
        return [words[first : first + k] for first in range(0, len(words), k)]

    def _excluded(self, exclude: Any, history: Ids) -> tuple[Tensor, Tensor]:
        """Ids and offsets of the items that are left out."""
        users = len(history.offsets) - 1
        if isinstance(exclude, str) and exclude == "history":
            return history.ids, history.offsets
        if exclude is None:
            return history.ids[:0], torch.zeros_like(history.offsets)
        if isinstance(exclude, str):
            raise ValueError(f"exclude must be 'history', None or the items of each user, got {exclude!r}")
        ids, offsets, _ = ids_of(exclude, "exclude", self.vocabularies.get("item"))
        if len(offsets) != users + 1:
            raise ValueError(f"exclude has items of {len(offsets) - 1} users, and the history {users}")
        return ids, offsets

    @property
    def item_ids(self) -> Tensor:
        """(I,) int64: ids of the table of feature ``"item"``, ascending; the order of `scores`."""
        return self._items().ids

    def predict(self, batch: Any, features: Mapping[str, Any] | None = None) -> Tensor:
        """Probabilities (B,) of a click, or (Le, T) of each task for the exposed items of a `GRM`.

        Args:
            batch: a `ClickBatch`, or dense features (B, F) float32 with `features`: ids (B,) int64 by name,
                or words; of a pooled one a `Lookup` of bags, or B lists. An `ImpressionBatch` for a `GRM`;
                its labels are not read.

        Raises ValueError for a missing feature, another number of ids than samples, and a sample of more
        tokens than the model takes.
        """
        if isinstance(batch, ImpressionBatch):
            return self._predict_impressions(batch)
        dense = batch if isinstance(batch, Tensor) else getattr(batch, "dense", batch)
        if features is None and not isinstance(batch, Tensor):
            features = batch.lookups()
        return self.clicks(dense, self.read_clicks(dense, features))

    def read_clicks(self, dense: Tensor, features: Mapping[str, Any] | None) -> dict[str, Tensor | Lookup]:
        """Ids (B,) int64 or bags of `predict`, in the order of the model's features, with its errors."""
        facts = self.dense_of(CLICK, "predict")
        names, width, found = facts["features"], facts["dense"], dict[str, Tensor | Lookup]()
        check_tensor("dense features", dense, torch.float32, 2)
        if dense.shape[1] != width:
            raise ValueError(f"dense features must be (B, {width}), got {tuple(dense.shape)}")
        if features is None:
            raise ValueError(f"give the ids of features {', '.join(names)}")
        for name in names:
            if name not in features:
                raise ValueError(f"ids of feature {name!r} are missing, there are {sorted(features)}")
            ids = features[name]
            if self.manifest["features"][name]["pooling"] != "none":
                found[name] = self._bags(name, ids, len(dense))
                continue
            if isinstance(ids, Lookup):
                ids = ids.ids
            if not isinstance(ids, Tensor):
                ids = array_of(ids, f"feature {name!r}", self.vocabularies.get(name))[0]
            if getattr(ids, "shape", None) != dense.shape[:1]:
                raise ValueError(
                    f"ids of feature {name!r} must be ({len(dense)},) like the dense features, got "
                    f"{told(ids)}"
                )
            check_tensor(f"ids of feature {name!r}", ids, torch.int64, 1)
            found[name] = ids
        return found

    def _bags(self, name: str, value: Any, count: int) -> Lookup:
        """Bags of a pooled feature, one for each sample."""
        what, words = f"feature {name!r}", self.vocabularies.get(name)
        if isinstance(value, list) and not any(isinstance(bag, (int, str)) for bag in value):
            bags = [array_of(bag, what, words)[0] for bag in value]
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            value = Lookup(
                torch.cat([none, *bags]),
                offsets_of(torch.tensor([*map(len, bags)], dtype=torch.int64, device="cpu")),
            )
        if not isinstance(value, Lookup) or value.offsets is None:
            raise ValueError(f"{what} is pooled: give a bag of ids, without weights, for each sample")
        check_tensor(f"ids of {what}", value.ids, torch.int64, 1)
        check_offsets(value.offsets, len(value.ids), f"offsets of {what}", "ids")
        if len(value.offsets) != count + 1:
            raise ValueError(f"{what} has {len(value.offsets) - 1} bags for {count} samples")
        return value

    def clicks(self, dense: Tensor, ids: Mapping[str, Tensor | Lookup]) -> Tensor:
        """Probabilities (B,) of what `read_clicks` has checked."""
        single = {name: each for name, each in ids.items() if isinstance(each, Tensor)}
        with torch.no_grad():
            if len(single) == len(ids):
                rows = self._side_by_side(single)
            else:
                found = self.rows_of({name: (each, None) for name, each in single.items()})
                found |= self.rows_of(
                    {n: (each.ids, each.offsets) for n, each in ids.items() if isinstance(each, Lookup)}
                )
                rows = torch.stack([found[name] for name in ids], 1)
            return sigmoid(self._encoder(dense, rows)).squeeze(1)

    def _side_by_side(self, ids: Mapping[str, Tensor]) -> Tensor:
        """Rows (B, C, d) of ids (B,), checked, by feature."""
        return rows_side_by_side([self.tables[self._table_of[name]] for name in ids], [*ids.values()])

    @cached_property
    def _table_of(self) -> dict[str, str]:
        """Names of the tables, by feature of a click."""
        names = self.manifest["dense"]["features"]
        return {name: self.manifest["features"][name]["table"] for name in names}

    def _predict_impressions(self, batch: ImpressionBatch) -> Tensor:
        dense = self.dense_of(IMPRESSION, "predict of an ImpressionBatch")
        lookups = batch.validate().lookups()
        wanted = ["item", "action", *dense["context"], *(["genre"] if dense["genres"] else [])]
        if missing := [name for name in wanted if name not in lookups]:
            raise ValueError(f"the batch has no feature {missing[0]!r}, but {', '.join(lookups)}")
        longest = dense["max_seq_len"]
        if batch.num_samples and int(batch.lengths.max()) > longest:
            at = int(batch.lengths.argmax())
            raise ValueError(f"sample {at} has {int(batch.lengths[at])} tokens, the model takes {longest}")
        rows = self.rows_of({name: lookups[name] for name in wanted})
        genre = rows.get("genre", rows["item"][:0])
        none = rows["item"].new_empty(batch.num_samples, 0)
        context = torch.cat([none, *(rows[name] for name in dense["context"])], 1)
        offsets = batch.history_offsets, batch.exposed_offsets
        with torch.no_grad():
            return sigmoid(
                self.program(rows["item"], rows["action"], genre, context, *offsets, batch.timestamps)
            )

    def _items(self) -> ExportedTable:
        self.dense_of(NEXT_ITEM, "retrieve")
        return self.tables[self.manifest["features"]["item"]["table"]]

    def dense_of(self, kind: str, what: str) -> dict[str, Any]:
        """The manifest's part of the dense model, which must be of a kind."""
        dense = self.manifest["dense"]
        if dense is None:
            raise ValueError(f"{what} needs a dense model, and the tables were exported alone")
        if dense["kind"] != kind:
            raise ValueError(
                f"{what} needs a dense model of kind {kind}, and this one is of kind {dense['kind']}"
            )
        return dense


def _load_vocabulary(folder: Place, name: str, entry: Mapping[str, Any]) -> Vocabulary:
    with local_copy(folder, entry) as here:
        vocabulary = Vocabulary.load(file := checked_file(here, entry))
    if len(vocabulary) != entry["words"]:
        raise ValueError(
            f"{file} has {len(vocabulary)} words of {name!r}, the manifest says {entry['words']}"
        )
    return vocabulary
