"""State dicts as tensors by name and values that JSON keeps, so that checkpoints do without pickle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

Plain = Any
"""What JSON keeps unchanged: None, bool, int, float, str, lists, and dicts with text keys."""


def flatten(tree: Any, name: str) -> tuple[Plain, dict[str, torch.Tensor]]:
    """Take a state dict apart.

    Args:
        tree: dicts, lists and tuples of tensors, numbers, texts and None.
        name: of the tree; a tensor at ``tree["a"][0]`` is called ``name/a/0``.

    Returns:
        Values as JSON keeps them, with the tensors' names in their places, and the tensors by name.

    Raises TypeError naming the place of anything else, such as a function.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _flat(tree, name, tensors), tensors


def _flat(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Plain:
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        # Pairs and not a JSON object, whose keys are texts: an optimizer's state has numbers for keys.
        return {
            kind: [
                [_flat(key, name, {}), _flat(each, f"{name}/{key}", tensors)] for key, each in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        items = [_flat(each, f"{name}/{number}", tensors) for number, each in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it takes tensors, numbers, "
        "texts, None, and dicts, lists and tuples of these"
    )


def unflatten(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `flatten` took apart. Raises ValueError for anything that it did not make."""
    try:
        return _tree(plain, tensors)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no state that was taken apart for a checkpoint: {error}") from None


def _tree(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_tree(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise ValueError(f"expected a value with one kind, got {sorted(plain)}")
    ((kind, value),) = plain.items()
    if kind == "tensor":
        if value not in tensors:
            raise ValueError(f"the checkpoint has no tensor {value}")
        return tensors[value]
    if kind == "float":
        return float(value)
    if kind == "tuple":
        return tuple(_tree(each, tensors) for each in value)
    if kind in ("dict", "counter"):
        pairs = {_tree(key, tensors): _tree(each, tensors) for key, each in value}
        return Counter(pairs) if kind == "counter" else pairs
    raise ValueError(f"unknown kind of value {kind!r}")
