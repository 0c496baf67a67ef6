"""A run's settings as the tables of a TOML file, which is also in the metadata of its checkpoints.

The tables are the dataclasses' fields: ``[job]``, ``[job.sizes]``, ``[window]`` and so on, those of `Run` on
top. Fields that are one option are one key, in the table that comes first: ``job.seed`` is every seed.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ... import checkpoint
from ...checkpoint.files import manifest_of
from ...checkpoint.manifest import read_manifest
from ...files.places import given_path, place_of, read_document
from ...settings import KEY, Setting

CONFIG = "config"
"""The key of the file's text among a checkpoint's metadata; JSON lacks infinity."""
LEFT_OUT = {
    "resume", "new_data", "plan", "job.words", "job.slipstream", "job.placement.device", "job.target.device",
}  # fmt: skip
"""Fields that no run is described by."""
DERIVED = {"job.sizes.qk_dim": "dim and heads", "job.sizes.v_dim": "dim and heads"}
"""Fields that follow from others, and these."""

PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    Path: ((str,), "a path"),
}
"""By type those of TOML's values that it takes, and what they are called."""

Plan = TypeVar("Plan")
Tables = dict[str, Any]
Names = tuple[str, ...]


@dataclass
class Key:
    """A key of the tables.

    Args:
        kind: its type. setting: its range, if it is an option. places: the fields that it sets.
    """

    kind: Any
    setting: Setting | None
    places: list[Names]

    @property
    def names(self) -> set[str]:
        """Those that a user may know it by."""
        return {self.places[0][-1], *([self.setting.option] if self.setting and self.setting.option else [])}


def keys_of(plan: Any) -> dict[str, Key]:
    """The keys of a dataclass by their dotted names, in its order."""
    found: dict[str, Key] = {}
    options: dict[str, Key] = {}
    for place, kind, setting in _leaves(plan, ()):
        name = ".".join(place)
        if name in LEFT_OUT or name in DERIVED:
            continue
        option = setting and (setting.option or place[-1])
        if option in options:
            options[option].places.append(place)
            continue
        key = found[name] = Key(kind, setting, [place])
        if option:
            options[option] = key
    return found


def tables_of(plan: Any) -> Tables:
    """All keys with their values, as TOML holds them; a key whose value is None is left out."""
    tables: Tables = {}
    for key in keys_of(plan).values():
        value = plan
        for name in key.places[0]:
            value = getattr(value, name)
        if value is not None:
            *parents, last = key.places[0]
            table = tables
            for name in parents:
                table = table.setdefault(name, {})
            table[last] = _plain(value)
    return tables


def flat(tables: Tables, path: str = "") -> dict[str, Any]:
    """The values by their tables' and their own names, between dots."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return found


def to_toml(tables: Tables, path: Names = ()) -> str:
    """The text of a TOML file."""
    values = [f"{name} = {_toml(value)}\n" for name, value in tables.items() if not isinstance(value, dict)]
    header = [f"\n[{'.'.join(path)}]\n"] if path and values else []
    inner = [to_toml(table, (*path, name)) for name, table in tables.items() if isinstance(table, dict)]
    return "".join([*header, *values, *inner])


def read_config(path: Path, plan: Plan) -> Plan:
    """`plan` with the values of a TOML file, or of the newest checkpoint in a directory.

    Raises ValueError naming file and key for an unknown key, a value of another type or out of range.
    """
    place = place_of(path)
    if place.is_dir():
        found = checkpoint.steps(place)
        if not found:
            raise ValueError(f"{path} holds no checkpoint, and no config file either")
        manifest = manifest_of(place, found[-1])
        text = read_manifest(manifest)["meta"].get(CONFIG)
        if text is None:
            raise ValueError(f"{manifest} has no settings of tritonrec train: an earlier version saved it")
        return from_tables(plan, tomllib.loads(text), manifest)
    try:
        tables = tomllib.loads(read_document(place, "config file").decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from error
    changed = from_tables(plan, tables, path)
    if not any(_flat(keys_of(plan), tables, ())):  # a file that was cut off, or whose lines are comments
        raise ValueError(f"{path} sets nothing: leave --config out to take all defaults")
    return changed


def from_tables(plan: Plan, tables: Mapping[str, Any], source: object) -> Plan:
    """`plan` with the values of tables; `source` is named in errors."""
    keys = keys_of(plan)
    changes: dict[Names, Any] = {}
    try:
        for name, value in _flat(keys, tables, ()):
            given = _value(name, keys[name].kind, value, keys[name].setting)
            changes |= dict.fromkeys(keys[name].places, given)
        return _replaced(plan, changes)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _leaves(plan: Any, path: Names) -> Iterator[tuple[Names, Any, Setting | None]]:
    """Path, type and setting of all fields that are no dataclass of their own."""
    hints = get_type_hints(type(plan))
    for each in fields(plan):
        value, setting = getattr(plan, each.name), each.metadata.get(KEY)
        if setting is None and is_dataclass(value):
            yield from _leaves(value, (*path, each.name))
        else:
            yield (*path, each.name), hints[each.name], setting


def _flat(keys: Mapping[str, Key], table: Mapping[str, Any], path: Names) -> Iterator[tuple[str, Any]]:
    for last, value in table.items():
        name = ".".join((*path, last))
        if name in keys:
            yield name, value
        elif not any(key.startswith(f"{name}.") for key in keys):
            raise ValueError(_unknown(keys, name, last))
        elif isinstance(value, dict):
            yield from _flat(keys, value, (*path, last))
        else:
            raise ValueError(f"{name} is a table, got {value!r}")


def _unknown(keys: Mapping[str, Key], name: str, last: str) -> str:
    if name in DERIVED:
        return f"{name} cannot be set: it follows from {DERIVED[name]}"
    same = [key for key, each in keys.items() if last in each.names]
    table = name.rpartition(".")[0]
    near = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == table}
    close = [near[word] for word in get_close_matches(last, near, 1)]
    anywhere = {word: key for key, each in keys.items() for word in each.names}
    far = [anywhere[word] for word in get_close_matches(last, anywhere, 1, cutoff=0.0)]
    return f"unknown key {name}; did you mean {[*same, *close, *far, *keys][0]}?"


def _value(name: str, kind: Any, value: Any, setting: Setting | None) -> Any:
    """`value` as a field of type `kind` has it; ValueError naming the key otherwise."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        kind = next((each for each in kinds[1:] if type(value) is each), kinds[0])
    if is_dataclass(kind) and isinstance(kind, type):
        return _made(name, kind, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} takes a list, got {value!r}")
        return tuple(_value(name, get_args(kind)[0], each, setting) for each in value)
    if get_origin(kind) is Literal:
        words = get_args(kind)
        if value not in words:
            near = get_close_matches(str(value), words, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name} takes one of {', '.join(words)}, got {value!r}{meant}")
        return value
    taken, words_for = PLAIN[kind]
    if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} takes {words_for}, got {value!r}")
    if isinstance(value, (int, float)) and setting is not None:
        least = -math.inf if setting.least is None else setting.least
        most = math.inf if setting.most is None else setting.most
        if not least <= value <= most:
            raise ValueError(f"{name} takes {words_for} from {least} to {most}, got {value}")
    if kind is Path:
        try:
            return given_path(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(value)


def _made(name: str, kind: type, value: Any) -> Any:
    """A dataclass from a table of its fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a table, got {value!r}")
    hints = get_type_hints(kind)
    for given in value:
        if given not in hints:
            near = get_close_matches(given, hints, 1, cutoff=0.0)[0]
            raise ValueError(f"unknown key {name}.{given}; did you mean {name}.{near}?")
    try:
        return kind(
            **{each: _value(f"{name}.{each}", hints[each], part, None) for each, part in value.items()}
        )
    except TypeError as error:  # a field that has no default
        raise ValueError(f"{name}: {error}".replace(f"{kind.__name__}.__init__() ", "")) from error


def _replaced(plan: Any, changes: Mapping[Names, Any]) -> Any:
    """`plan` with other values, by their places."""
    inner: dict[str, dict[Names, Any]] = {}
    for (first, *rest), value in changes.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    return replace(
        plan,
        **{
            name: values[()] if () in values else _replaced(getattr(plan, name), values)
            for name, values in inner.items()
        },
    )


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        return {name: _plain(part) for name, part in parts.items() if part is not None}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, (str, Path)) else value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)
