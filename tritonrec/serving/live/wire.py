"""A part of a delta as bytes, and what can be wrong with one.

::

    tritonrec-live-1\\n | SHA-256 of the rest (32 bytes) | safetensors, whose metadata are the `Header`

    table/NAME/ids (r,) int64 ascending, table/NAME/weights (r, d) float32     changed and new rows
    table/NAME/erased (e,) int64 ascending                                     tombstones
    dense/NAME                                                                 changed values of the program
    words/NAME/bytes, words/NAME/offsets                                       words that the vocabulary got

Each shard of the trainer's tables is one part; dense values and words are in part 0. A delta is there when
all of its parts are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ...data.vocabulary import Vocabulary
from ...kernels.checksums import as_bytes
from ...settings import typed

MAGIC = b"tritonrec-live-1\n"
_HEADER = "live"


class LiveError(RuntimeError):
    """A delta cannot be published or applied; what is served is whole, and stays."""


class GapError(LiveError):
    """A delta is missing, and later ones are there."""


class CorruptDeltaError(LiveError):
    """A delta or a snapshot is damaged, or does not give the state that its publisher had."""


class OutOfOrderError(LiveError):
    """A delta stands in the place of another one: it was repeated or moved."""


class OtherRunError(LiveError):
    """A delta is of another run, of another model, or of a second publisher."""


class SinkError(LiveError):
    """The place of the deltas cannot be read or written."""


@typed
@dataclass(frozen=True)
class Header:
    """What a part of a delta says of itself.

    Args:
        run: of the publications in one sink. epoch: a part of it, which begins with a snapshot. writer: the
            `Publisher` that wrote it, and before_writer the one that wrote the delta before.
        sequence: 1, 2, ... over all epochs. part, parts: see the module.
        step, before: steps of the state that it leads to, and of that it is applied to.
        schema: `schema_of`. published_at: seconds since 1970, when the state was taken.
        rows: numbers of rows after it: for each merged table its names, and this part's rows.
        dense: `digest_of` all dense values after it. words: by vocabulary, after it; and
        spelled: `spelling` of these.
    """

    run: str
    epoch: int
    writer: str
    before_writer: str
    sequence: int
    part: int
    parts: int
    step: int
    before: int
    schema: str
    published_at: float
    rows: list[tuple[list[str], int]]
    dense: str
    words: dict[str, int]
    spelled: dict[str, str]

    def __post_init__(self) -> None:
        named = [
            *self.words,
            *self.spelled,
            *self.spelled.values(),
            *(each for own, _ in self.rows for each in own),
        ]
        if not all(isinstance(each, str) for each in named):
            raise ValueError(f"no publication has the names {named}")
        counts = [self.epoch, self.sequence, self.part, self.parts, self.step, self.before]
        counts += [*self.words.values(), *(rows for _, rows in self.rows)]
        if not all(type(each) is int and 0 <= each < 2**63 for each in counts) or not self.part < self.parts:
            raise ValueError(f"no publication has {counts} as its numbers")
        if not 0 <= self.published_at < math.inf:
            raise ValueError(f"it was published at {self.published_at}")


def pack(header: Header, tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a part."""
    body = save(dict(tensors), {_HEADER: json.dumps(asdict(header))})
    return b"".join([MAGIC, hashlib.sha256(body).digest(), body])


def unpack(content: bytes, name: str) -> tuple[Header, dict[str, Tensor]]:
    """Header and tensors of a part; CorruptDeltaError naming it where a byte of it is another one."""
    start = len(MAGIC) + 32
    body = content[start:]
    if content[: len(MAGIC)] != MAGIC:
        raise CorruptDeltaError(f"{name} is no delta: it begins with {content[: len(MAGIC)]!r}")
    if hashlib.sha256(body).digest() != content[len(MAGIC) : start]:
        raise CorruptDeltaError(f"{name} was altered: its {len(content)} bytes do not have its checksum")
    try:
        size = int.from_bytes(body[:8], "little")
        told = json.loads(json.loads(body[8 : 8 + size])["__metadata__"][_HEADER])
        header = Header(**{each.name: told[each.name] for each in fields(Header)})
        return header, load(body)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDeltaError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def digest_of(values: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(as_bytes(value.detach().cpu().contiguous()).numpy().data)
    return digest.hexdigest()


def spelling(vocabulary: Vocabulary, count: int) -> str:
    """SHA-256 of the first `count` words, and of their ids."""
    state = vocabulary.state_dict()
    offsets = state["offsets"][: count + 1]
    return digest_of({"bytes": state["bytes"][: int(offsets[-1])], "offsets": offsets})


def schema_of(
    tables: Mapping[str, Any],
    features: Mapping[str, Any],
    dense: Mapping[str, Any],
    values: Mapping[str, Tensor],
) -> str:
    """Digest of what stays: tables with their initial values, features, the program and its tensors."""
    kept = ("dim", "seed", "table_id", "scale")
    told = {
        "tables": {name: [table[each] for each in kept] for name, table in tables.items()},
        "features": dict(features),
        "dense": {
            name: value for name, value in dense.items() if name not in ("program", "compiled", "torch")
        },
        "values": {name: [str(each.dtype), list(each.shape)] for name, each in values.items()},
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
