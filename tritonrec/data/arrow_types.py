"""All spellings of a type in Arrow are one plain type.

An integer may be of any width or a whole decimal; text may be large, a view, a dictionary or run-end encoded;
lists may be large, views or of a fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Column: TypeAlias = "pa.Array | pa.ChunkedArray"


_PLAIN = {kind().id for kind in (pa.int8, pa.int32, pa.int64, pa.float32, pa.float64, pa.string)}
"""The most frequent ones of those that stand for themselves."""
_LISTS = {getattr(pa.lib, f"Type_{kind}LIST{view}") for kind in ("", "LARGE_") for view in ("", "_VIEW")}
_LISTS |= {pa.lib.Type_FIXED_SIZE_LIST}


def plain(values: Column) -> pa.Array:
    """The same values in the plain type of their kind."""
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()  # which copies
        if isinstance(values, pa.ChunkedArray):  # of a type that has no larger offsets
            values = pa.concat_arrays([plain(chunk) for chunk in values.chunks])
    if values.type.id in _PLAIN:
        return values
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = values.type
    if pa.types.is_dictionary(kind):
        return plain(values.dictionary).take(values.indices)
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(values))
    if is_list(kind):
        inner = plain_type(kind.value_type)
        return values if kind == pa.large_list(inner) else _large_list(values, inner)
    return values if kind == plain_type(kind) else values.cast(plain_type(kind))


def filled(values: pa.Array, value: object) -> pa.Array:
    """`values` with `value` in the place of missing ones; itself where there are none."""
    return pc.fill_null(values, value) if values.null_count else values


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The plain type of a kind."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.string()
    return kind


def common_type(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """The plain type that takes the values of several, as of a column's shards; None for different kinds."""
    kinds = list(dict.fromkeys(map(plain_type, kinds)))
    if len(kinds) == 1:
        return kinds[0]
    if all(map(is_list, kinds)):
        inner = common_type([kind.value_type for kind in kinds])
        return inner and pa.large_list(inner)
    if all(map(is_integer, kinds)):
        return pa.int64()
    if all(is_integer(kind) or pa.types.is_string(kind) for kind in kinds):
        return pa.string()
    if all(map(pa.types.is_floating, kinds)):
        return pa.float64()
    if all(map(is_date, kinds)):
        zones = {getattr(kind, "tz", None) is not None for kind in kinds}
        return pa.timestamp("us", "UTC" if zones.pop() else None) if len(zones) == 1 else None
    others = [kind for kind in kinds if not pa.types.is_null(kind)]  # a shard whose values are all missing
    return common_type(others) if len(others) < len(kinds) else None


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists."""
    return kind.id in _LISTS


def _large_list(values: pa.Array, inner: pa.DataType) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int64())
    mask = values.is_null() if values.null_count else None
    return pa.LargeListArray.from_arrays(offsets, plain(pc.list_flatten(values)).cast(inner), mask=mask)


def is_date(kind: pa.DataType) -> bool:
    """Whether a plain type holds dates."""
    return pa.types.is_date(kind) or pa.types.is_timestamp(kind)


def is_integer(kind: pa.DataType) -> bool:
    """Whether a plain type holds integers, as whole decimals do."""
    return pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale <= 0)


def is_number(kind: pa.DataType) -> bool:
    """Whether a plain type holds numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
