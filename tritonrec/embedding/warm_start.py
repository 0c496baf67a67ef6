"""A warm start: tables and parameters of another training, chosen, renamed and checked before a load."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from .features import HashTableCollection
from .state_check import check_distinct, check_values

_OF_A_TABLE = re.compile(r"(?:(?P<path>.*)\.)?(?P<table>[^.]+)\.weight")

Tables = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By table ids (n,) int64 and weights (n, dim) float32."""


@dataclass
class WarmStart:
    """What a warm start took, printed by ``print(report)``.

    Attributes:
        tables: by table here, the name it has there and the rows taken on this rank.
        dense: by parameter or buffer here, its name there.
        initial: by name here, why it keeps its initial values.
        unused: names there that nothing here took.
    """

    tables: dict[str, tuple[str, int]] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    initial: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"table {here}: {rows} rows{_from(here, there)}" for here, (there, rows) in self.tables.items()
        ]
        renamed = [f"{here}{_from(here, there)}" for here, there in self.dense.items() if here != there]
        lines.append(f"dense: {len(self.dense)} tensors{': ' if renamed else ''}{', '.join(renamed)}")
        lines += [f"{name} begins anew: {reason}" for name, reason in self.initial.items()]
        if self.unused:
            lines.append(f"not used: {', '.join(self.unused)}")
        return "\n".join(lines)


def _from(here: str, there: str) -> str:
    return "" if here == there else f" from {there}"


def tables_of(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Tables and other tensors of a module's ``state_dict``: TorchRec's, torch's, or ours.

    ``PATH.embedding_bags.item.weight`` and ``PATH.embeddings.item.weight`` of TorchRec are a table ``"item"``
    with the ids 0 up to its rows, ``PATH.item.keys`` and ``PATH.item.weight`` of ours one of these ids. A
    weight of any other name, as of `torch.nn.Embedding`, is dense unless it is renamed to a table.

    Raises ValueError for two tables of one name.
    """
    tables: dict[str, Any] = {}
    dense: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for name, values in state.items():
        found = _OF_A_TABLE.fullmatch(name)
        if hasattr(values, "full_tensor"):
            values = values.full_tensor()
        if not isinstance(values, torch.Tensor):
            continue  # an extra state
        if values.is_meta:
            raise ValueError(f"{name} is on the meta device, without values")
        path, table = (found["path"] or "", found["table"]) if found else ("", "")
        beside = f"{path}." if path else ""
        keys = state.get(f"{beside}{table}.keys")
        is_table = path.rpartition(".")[2] in ("embeddings", "embedding_bags") and values.dim() == 2
        if keys is None and is_table and {f"{beside}lookups", f"{beside}seed"} <= state.keys():
            raise ValueError(f"{name} is of ours, and has no {beside}{table}.keys: whose rows are these?")
        if keys is not None:
            check_values(keys, f"{beside}{table}.keys")
        if found and (is_table or isinstance(keys, torch.Tensor)):
            if table in tables:
                raise ValueError(f"{places[table]} and {name} are both of a table {table!r}: leave one out")
            ids = torch.arange(len(values), dtype=torch.int64, device="cpu") if keys is None else keys
            tables[table], places[table] = (ids, values), name
        else:
            dense[name] = values
    of_tables = {place.rpartition(".")[0] for place in places.values()}
    modules = {place.rpartition(".")[0] for place in of_tables}
    # What stands beside a table in its module is the module's own, and no parameter of the model.
    for name in list(dense):
        module, _, last = name.rpartition(".")
        if module in of_tables or any(name.startswith(f"{each}.") for each in of_tables):
            del dense[name]  # keys, and what policies keep
        elif module in modules and last in ("seed", "lookups"):
            del dense[name]
    return tables, dense


@dataclass
class Choice:
    """What is taken of a source, and from where.

    Args:
        rename: by name there, the name here; one that ends with a dot renames all names that begin so.
    """

    tables: Collection[str] | None = None
    features: Collection[str] | None = None
    dense: Collection[str] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """By name here, the name there. Raises ValueError where two have one name here."""
        found: dict[str, str] = {}
        for name in names:
            prefixes = [old for old in self.rename if old.endswith(".") and name.startswith(old)]
            here = self.rename.get(name, name)
            if name not in self.rename and prefixes:
                longest = max(prefixes, key=len)
                here = self.rename[longest] + name.removeprefix(longest)
            if here in found:
                raise ValueError(f"{found[here]} and {name} would both be {here} here: rename one of them")
            found[here] = name
        return found


def choose_tables(
    tables: HashTableCollection,
    there: Tables,
    dense: dict[str, torch.Tensor],
    choice: Choice,
    report: WarmStart,
    owns: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[], None]:
    """Check the tables that are taken and note them; the function returned loads them.

    Args:
        dense: other tensors there; one that is renamed to a table is taken out. owns: which ids (n,) have
            their rows on this rank.
    """
    there = dict(there)
    for old, new in choice.rename.items():
        if old in dense and new in tables.table_names:
            weights = dense.pop(old)
            there[old] = torch.arange(len(weights), dtype=torch.int64, device="cpu"), weights
    by_name = choice.renamed(there)
    wanted = choice.tables
    if choice.features is not None:
        unknown = [name for name in choice.features if name not in tables.features]
        if unknown:
            raise ValueError(f"there is no feature {unknown[0]!r}, but {', '.join(tables.features)}")
        named = (tables.features[name] for name in choice.features)
        wanted = [*(wanted or ()), *(each.table or each.name for each in named)]
    for name in wanted or ():
        if name not in tables.table_names:
            raise ValueError(f"there is no table {name!r} here, but {', '.join(tables.table_names)}")
        if name not in by_name:
            raise ValueError(
                f"the source has no table {name!r}, but {', '.join(by_name) or 'none'}: rename= gives one of "
                "these its name here"
            )
    taken: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in tables.table_names:
        if name not in by_name or (wanted is not None and name not in wanted):
            report.initial[f"table {name}"] = "not there" if name not in by_name else "not chosen"
            continue
        ids, weights = there[by_name[name]]
        dim = tables.dim_of(name)
        if weights.dim() != 2 or weights.shape[1] != dim or weights.dtype != torch.float32:
            problem = f"weights {tuple(weights.shape)} {weights.dtype} there, (n, {dim}) float32 here"
            if wanted is not None:
                raise ValueError(f"table {name!r} has {problem}")
            report.initial[f"table {name}"] = problem
            continue
        if ids.shape != weights.shape[:1] or ids.dtype != torch.int64:
            raise ValueError(f"table {name!r} has ids {tuple(ids.shape)} {ids.dtype} for {len(weights)} rows")
        check_distinct(ids, f"table {name!r} of the source")
        tables.check_ids(name, ids)
        here = owns(ids.cpu())
        taken[name] = ids.cpu()[here], weights.detach().cpu()[here]
        report.tables[name] = by_name[name], int(here.sum())
    report.unused += [f"table {old}" for new, old in by_name.items() if new not in taken]

    def load() -> None:
        for name, (ids, weights) in taken.items():
            tables.load_weights(name, ids, weights)

    return load


def choose_dense(
    own: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor], choice: Choice, report: WarmStart
) -> dict[str, torch.Tensor]:
    """Check the tensors that are taken and note them; returns them by their names here.

    Args:
        own: parameters and buffers here. there: of the source.
    """
    by_name = choice.renamed(there)
    patterns = choice.dense
    for pattern in patterns or ():
        if not any(_fits(name, pattern) for name in own):
            raise ValueError(f"no parameter here is named {pattern!r}; they are {', '.join(own)}")
    taken: dict[str, torch.Tensor] = {}
    for name, values in own.items():
        chosen = patterns is None or any(_fits(name, pattern) for pattern in patterns)
        if not chosen or name not in by_name:
            report.initial[name] = "not there" if chosen else "not chosen"
            if chosen and patterns is not None:
                raise ValueError(f"the source has no {name!r}, but {', '.join(by_name) or 'nothing'}")
            continue
        found = there[by_name[name]]
        if found.shape != values.shape or found.dtype != values.dtype:
            problem = f"{_told(found)} there, {_told(values)} here"
            if patterns is not None:
                raise ValueError(f"{name} is {problem}")
            report.initial[name] = problem
            continue
        taken[name] = found
        report.dense[name] = by_name[name]
    report.unused += [old for new, old in by_name.items() if new not in taken]
    return taken


def load_table_weights(
    module: torch.nn.Module,
    state: Mapping[str, Any],
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> WarmStart:
    """Give the hash embeddings in `module` the weights of another state dict, such as TorchRec's.

    Dense parameters are torch's: ``module.load_state_dict(state, strict=False)`` loads those of equal names.
    Optimizer states begin anew.

    Args:
        state: see `tables_of`. tables: names here; by default all that are there. rename: by name there, the
            name here; ``{"item_embedding.weight": "item"}`` takes one of `torch.nn.Embedding`.

    Raises ValueError for a table that is not there, or of another dimension; nothing is loaded then.
    """
    from .hash_optimizer import HasRows

    report, there = WarmStart(), tables_of(state)
    owners = [each for each in module.modules() if isinstance(each, HasRows)]
    if not owners:
        raise ValueError(f"{type(module).__name__} has no hash embeddings")
    known = [name for owner in owners for name in owner.tables.table_names]
    for name in tables or ():
        if name not in known:
            raise ValueError(f"there is no table {name!r} here, but {', '.join(known)}")
    loads = []
    for owner in owners:
        names = owner.tables.table_names
        wanted = tables if tables is None or len(owners) == 1 else [name for name in tables if name in names]
        choice = Choice(wanted, rename=rename or {})
        loads.append(choose_tables(owner.tables, there[0], dict(there[1]), choice, report, owner.owns))
    used = {old for old, _ in report.tables.values()}
    report.unused = [name for name in there[0] if name not in used]
    check_renames(rename or {}, report)
    for load in loads:
        load()
    return report


def check_renames(rename: Mapping[str, str], report: WarmStart) -> None:
    """Raise ValueError for names there that nothing here took."""
    taken = {old for old, _ in report.tables.values()} | {*report.dense.values()}
    unknown = [
        old
        for old in rename
        if old not in taken and not (old.endswith(".") and any(each.startswith(old) for each in taken))
    ]
    if unknown:
        raise ValueError(f"rename= has {', '.join(unknown)}, which nothing here took:\n{report}")


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _told(values: torch.Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"
