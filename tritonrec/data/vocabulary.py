"""Words as ids: the vocabulary of a column, and hashes where no vocabulary is wanted.

::

    words        ["B00X", "A17",  "B00X", "C3"]                         day 1
    ids          [  0,      1,      0,      2 ]     extend=True
    words        ["C3",   "D9",   "A17"]                                day 2
    ids          [  2,      3,      1  ]            extend=True: what has an id keeps it
    decode([3])  ["D9"]

A vocabulary numbers distinct words 0, 1, 2, ... in the order in which they first occur. It belongs to the
tables whose rows have these ids: it is saved and exported with them, and extended by the next log.

`hashed_ids` needs no state: the id of a word is its hash, the same on every machine and in every run. There
is no way back from an id to its word, and two words may share one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from tritonrec.files import atomic_write
from tritonrec.settings import typed

if TYPE_CHECKING:
    import pyarrow as pa

Words: TypeAlias = "pa.Array | pa.ChunkedArray | Iterable[str]"
ROWS = 1 << 18
"""Words that are numbered by one call of the kernel: there must be room for as many new ones."""
PREFIX = "vocabulary/"
"""How the names of its tensors begin in a checkpoint."""
WORDS_FILE = "_{}_words.parquet"
"""The vocabulary of a column, as user or item, beside shards whose ids are numbers of its words."""
COLUMN = "word"
"""The column of a saved vocabulary."""


class Vocabulary:
    """Distinct words, numbered in the order in which they first occurred.

    A word is a text, byte for byte: case, blanks and Unicode forms count, and ``""`` is a word. The memory is
    that of the words, 16 bytes a word for numbers and bounds, and room to grow: at most about three times as
    much after it has grown. Several threads may encode at a time where none extends.

    Args:
        words: to begin with, in this order; words that occur again keep their first number.

    Raises the errors of `encode`.
    """

    def __init__(self, words: Words = ()) -> None:
        self._count = 0
        self._store = np.empty(1 << 10, dtype=np.uint8)
        self._bounds = np.zeros(1 << 6, dtype=np.int64)
        self._slots = np.zeros(1 << 7, dtype=np.int64)
        self.encode(words, extend=True)

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.words.equals(other.words)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __copy__(self) -> Vocabulary:
        return copy.deepcopy(self)  # two that grow in the same arrays would number each other's words

    def __repr__(self) -> str:
        return f"Vocabulary of {len(self):,} words"

    @property
    def words(self) -> pa.Array:
        """The words in the order of their numbers, an Arrow array of large_string without a copy."""
        import pyarrow as pa

        bounds, store = self._bounds[: self._count + 1], self._store[: self._bounds[self._count]]
        return pa.LargeStringArray.from_buffers(self._count, pa.py_buffer(bounds), pa.py_buffer(store))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._store.nbytes + self._bounds.nbytes + self._slots.nbytes

    def encode(self, words: Words, extend: bool = False, unknown: int | None = None) -> np.ndarray:
        """(n,) int64: the number of each word.

        Args:
            words: an Arrow array of any type of strings or a dictionary of them, chunked or not, or texts.
            extend: give new words the next numbers.
            unknown: the id of a word that is not there; None: an error.

        Raises ValueError for a missing word and, where `extend` is not set, an unknown one, and TypeError for
        something else than words; nothing is added then.
        """
        columns = large_strings(words)
        out = np.empty(sum(map(len, columns)), dtype=np.int64)
        row = 0
        for column in columns:
            for first in range(0, len(column), ROWS):
                part = column.slice(first, ROWS)
                self._encode(part, out[row : row + len(part)], extend, -1 if unknown is None else unknown)
                row += len(part)
        if not extend and unknown is None and len(out) and out.min() < 0:
            _raise_unknown(columns, out, len(self))
        return out

    def decode(self, ids: Any) -> pa.Array:
        """The words of `ids`, (n,) integers; an Arrow array of large_string.

        Raises ValueError for an id that no word has.
        """
        import pyarrow as pa

        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"ids must be integers of one dimension, got {ids.dtype} of shape {ids.shape}")
        wrong = (ids < 0) | (ids >= len(self))
        if wrong.any():
            raise ValueError(
                f"the vocabulary has the ids 0 to {len(self) - 1}, got {ids[wrong][0]} in row "
                f"{wrong.argmax()}: it is another vocabulary than the ids are of, or an earlier one"
                if len(self)
                else f"the vocabulary is empty, got the id {ids[0]}"
            )
        return self.words.take(pa.array(ids.astype(np.int64)))

    def save(self, path: Path | str) -> None:
        """Write a Parquet file with the column ``word``, whose row i is word i; it appears when complete."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with atomic_write(path) as part:
            pq.write_table(
                pa.table({COLUMN: self.words}),
                part,
                compression="zstd",
                use_dictionary=False,
                write_page_checksum=True,
            )

    @classmethod
    def load(cls, path: Path | str, filesystem: Any = None) -> Vocabulary:
        """Read what `save` wrote; from a file system, by default that of the path.

        Raises ValueError for a file that holds no vocabulary, and OSError.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        from tritonrec.data.log_files import filesystem_of

        filesystem, place = filesystem_of(path, filesystem)
        try:
            table = pq.read_table(
                place, filesystem=filesystem, partitioning=None, page_checksum_verification=True
            )
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is no vocabulary: {error}") from None
        if table.column_names != [COLUMN]:
            raise ValueError(
                f"{path} is no vocabulary: it has the columns {table.column_names}, not [{COLUMN!r}]"
            )
        try:
            return cls._of_distinct(table[COLUMN])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no vocabulary: {error}") from None

    def state_dict(self) -> dict[str, Tensor]:
        """``bytes`` (n,) uint8, all words end to end, and their ``offsets`` (words + 1,) int64.

        The tensors share memory with the vocabulary, which leaves what they hold unchanged when it grows.
        """
        offsets = torch.from_numpy(self._bounds[: self._count + 1])
        return {"bytes": torch.from_numpy(self._store[: int(offsets[-1])]), "offsets": offsets}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Become that of `state_dict`. Raises ValueError for a damaged one; nothing changes then."""
        self.__dict__.update(self.from_state(state).__dict__)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Vocabulary:
        """The vocabulary of `state_dict`. Raises ValueError for a damaged state."""
        import pyarrow as pa

        if set(state) != {"bytes", "offsets"}:
            raise ValueError(f"a vocabulary's state has bytes and offsets, got {sorted(state)}")
        if not all(isinstance(each, Tensor) and not each.is_meta for each in state.values()):
            raise ValueError("a vocabulary's bytes and offsets are tensors with values")
        store, offsets = state["bytes"].cpu().numpy(), state["offsets"].cpu().numpy()
        if store.dtype != np.uint8 or store.ndim != 1 or offsets.dtype != np.int64 or offsets.ndim != 1:
            raise ValueError("a vocabulary's bytes must be (n,) uint8 and its offsets (words + 1,) int64")
        if not len(offsets) or offsets[0] or offsets[-1] != len(store) or (np.diff(offsets) < 0).any():
            raise ValueError(f"a vocabulary's offsets must rise from 0 to its {len(store)} bytes")
        words = pa.LargeStringArray.from_buffers(
            len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(store))
        )
        return cls._of_distinct(words)

    def check_extends(self, before: Vocabulary, name: str = "") -> None:
        """Raise ValueError unless each word of `before`, vocabulary `name` of a checkpoint, has its id."""
        own, other = self._bounds[: self._count + 1], before._bounds[: before._count + 1]
        alike = len(own) >= len(other) and np.array_equal(own[: len(other)], other)
        if alike and np.array_equal(self._store[: other[-1]], before._store[: other[-1]]):
            return
        pairs = zip(before.words, [*self.words, None], strict=False)
        at, (was, now) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        here = f"is {now.as_py()!r}" if now is not None else "is none"
        raise ValueError(
            f"the vocabulary {name!r} has other ids than the checkpoint's: id {at} is {was.as_py()!r} there "
            f"and {here} here. Read the new log with the checkpoint's (saved_vocabularies), which it extends"
        )

    @classmethod
    def _of_distinct(cls, words: pa.Array | pa.ChunkedArray) -> Vocabulary:
        """Of words that have been numbered before: whatever would move a number is refused."""
        import pyarrow as pa

        try:
            words.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError(str(error)) from None
        made = cls()
        ids = made.encode(words, extend=True)
        if len(made) != len(ids):
            row = int((ids != np.arange(len(ids))).argmax())
            raise ValueError(f"row {row} repeats the word {words[row].as_py()!r} of row {ids[row]}")
        return made

    def _encode(self, part: pa.Array, out: np.ndarray, extend: bool, unknown: int) -> None:
        from tritonrec.kernels.numba_words import number_words

        data, offsets = _buffers(part)
        if extend:
            self._make_room(len(part), int(offsets[-1] - offsets[0]))
        self._count = number_words(
            *map(np.int64, (len(part), data, offsets.ctypes.data, out.ctypes.data, self._count)),
            *map(np.int64, (self._store.ctypes.data, self._bounds.ctypes.data)),
            *map(np.int64, (self._slots.ctypes.data, len(self._slots), unknown, extend)),
        )

    def _make_room(self, words: int, count: int) -> None:
        """Room for so many words more, of `count` bytes in all, in at most two thirds of the slots."""
        from tritonrec.kernels.numba_words import fill_slots

        used = int(self._bounds[self._count])
        self._store = _grown(self._store, used, used + count)
        self._bounds = _grown(self._bounds, self._count + 1, self._count + 1 + words)
        capacity = len(self._slots)
        while 2 * capacity < 3 * (self._count + words):
            capacity *= 2
        if capacity > len(self._slots):
            self._slots = np.zeros(capacity, dtype=np.int64)  # whose pages come when the old ones have gone
            fill_slots(
                *map(np.int64, (self._count, self._store.ctypes.data, self._bounds.ctypes.data)),
                *map(np.int64, (self._slots.ctypes.data, capacity)),
            )


def words_of(folder: Path | str, filesystem: Any = None) -> dict[str, Vocabulary]:
    """The vocabularies beside converted or grouped shards, by column; {} where ids are numbers.

    Args:
        filesystem: in which the folder is; by default that of its path.
    """
    from pyarrow.fs import FileSelector

    from tritonrec.data.log_files import filesystem_of

    filesystem, place = filesystem_of(folder, filesystem)
    before, behind = WORDS_FILE.split("{}")
    found = filesystem.get_file_info(FileSelector(place or ".", allow_not_found=True))
    files = {each.base_name: each.path for each in sorted(found, key=lambda each: each.base_name)}
    return {
        unquote(name.removeprefix(before).removesuffix(behind)): Vocabulary.load(file, filesystem)
        for name, file in files.items()
        if name.startswith(before) and name.endswith(behind)
    }


def save_words(vocabularies: Mapping[str, Vocabulary], folder: Path) -> None:
    """Write what `words_of` reads."""
    for role, vocabulary in vocabularies.items():
        vocabulary.save(folder / WORDS_FILE.format(quote(role, safe="")))


@contextmanager
def kept_on_error(vocabularies: dict[str, Vocabulary]) -> Iterator[None]:
    """Undo what is added to vocabularies where the block raises: a log is read whole or not at all."""
    before = {name: each.state_dict() for name, each in vocabularies.items()}
    try:
        yield
    except BaseException:
        for name, each in list(vocabularies.items()):
            if name not in before:
                del vocabularies[name]
            elif len(each) + 1 > len(before[name]["offsets"]):
                each.load_state_dict(before[name])
        raise


def tensors_of(vocabularies: Mapping[str, Vocabulary]) -> dict[str, Tensor]:
    """The states of vocabularies, by the names that they have among the tensors of a checkpoint."""
    states = {name: each.state_dict() for name, each in vocabularies.items()}
    return {f"{PREFIX}{name}/{part}": each for name, state in states.items() for part, each in state.items()}


def vocabularies_of(tensors: Mapping[str, Tensor]) -> dict[str, Vocabulary]:
    """The vocabularies among the tensors of a checkpoint. Raises ValueError for a damaged one."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(PREFIX):
            name, _, part = key.removeprefix(PREFIX).rpartition("/")
            states.setdefault(name, {})[part] = tensor
    return {name: Vocabulary.from_state(state) for name, state in sorted(states.items())}


@typed
def hashed_ids(words: Words, bits: int = 64) -> np.ndarray:
    """(n,) int64: the hash of each word, the same on every machine, in every run and version.

    It is XXH64 with seed 0 of the word's UTF-8 bytes (https://github.com/Cyan4973/xxHash), of which the
    highest `bits` are kept: an id in [0, 2**bits), or with 64 bits its two's complement, any int64.
    Among n words the expected number of pairs that share an id is about n**2 / 2**(bits + 1): 0.0000027 for
    ten million words and 64 bits, 0.0007 with 56 bits, 0.7 with 46.

    Args:
        words: as of `Vocabulary.encode`.
        bits: 1 to 64. Tables that share storage leave fewer than 64 for an id (`HashTableCollection`).

    Raises ValueError for a missing word or `bits` out of range, TypeError for something else than words.
    """
    from tritonrec.kernels.numba_words import hash_words

    if not 1 <= bits <= 64:
        raise ValueError(f"bits must be in [1, 64], got {bits}")
    columns = large_strings(words)
    out = np.empty(sum(map(len, columns)), dtype=np.int64)
    row = 0
    for column in columns:
        data, offsets = _buffers(column)
        hash_words(*map(np.int64, (len(column), data, offsets.ctypes.data, out[row:].ctypes.data)))
        row += len(column)
    return out if bits == 64 else (out.view(np.uint64) >> np.uint64(64 - bits)).view(np.int64)


def large_strings(words: Words) -> list[pa.Array]:
    """Arrow arrays of large_string, without a missing word. Raises ValueError and TypeError otherwise."""
    import pyarrow as pa

    if isinstance(words, (str, bytes)) or not hasattr(words, "__iter__"):
        raise TypeError(f"words must be an Arrow array or several texts, got one: {words!r}")
    if isinstance(words, pa.ChunkedArray):
        columns = words.chunks
    elif isinstance(words, pa.Array):
        columns = [words]
    else:
        try:
            columns = [pa.array(words if hasattr(words, "__len__") else list(words), pa.large_string())]
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise TypeError(f"words must be texts: {error}") from None
    columns, row = [_large_string(column) for column in columns], 0
    for column in columns:
        if column.null_count:
            at = row + column.is_null().to_numpy(zero_copy_only=False).argmax()
            raise ValueError(f"row {at} has no word: leave the row out, or fill it")
        row += len(column)
    return columns


def _large_string(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    held = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(is_text(held) for is_text in texts):
        raise TypeError(f"words must be strings, got {column.type}")
    return column.cast(held).cast(pa.large_string())


def _buffers(column: pa.Array) -> tuple[int, np.ndarray]:
    """The address of an array's bytes, and its bounds (n + 1,) int64 among them."""
    _, bounds, data = column.buffers()
    if bounds is None or not bounds.size:
        return 0, np.zeros(1, dtype=np.int64)
    offsets = np.frombuffer(bounds, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    return data.address if data is not None else 0, offsets


def _grown(array: np.ndarray, used: int, room: int) -> np.ndarray:
    """An array with `room` elements at least, and the first `used` ones of `array`."""
    if room <= len(array):
        return array
    grown = np.empty(max(room, len(array) + len(array) // 2), dtype=array.dtype)
    grown[:used] = array[:used]
    return grown


def _raise_unknown(columns: list[pa.Array], ids: np.ndarray, size: int) -> None:
    import pyarrow as pa

    unknown = ids < 0
    row = int(unknown.argmax())
    word = pa.chunked_array(columns)[row].as_py()
    raise ValueError(
        f"{unknown.sum()} of {len(ids)} words are not among the {size} of the vocabulary, the first is "
        f"{word!r} in row {row}: extend it (extend=True), or name the id of unknown words (unknown=)"
    )
