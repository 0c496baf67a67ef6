"""Ways in which arguments go wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from draws import bounds_of, chosen, chosen_by

INTEGERS = [0, 1, -1, 2, 7, 8, 2**15, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, 0.5, 2.0**26]
DTYPES = [
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64,
    torch.float16, torch.bfloat16, torch.complex64,
]  # fmt: skip
OTHERS = [None, "cpu", [1, 2], 1.5, 2**64, -(2**64), True, object()]
MOST_VALUES = 10_000  # changed in a tensor that is long by mistake twice
NO_MEMORY = ["meta", "sparse", "list", "none", "requires_grad", "negated"]


@dataclasses.dataclass
class Hostile:
    """Arguments, and how they lie in memory."""

    arguments: dict[str, Any]
    together: list[str] = dataclasses.field(default_factory=list)  # these two begin at one byte
    replaced: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # made anew, after they have their memory
    changes: list[str] = dataclasses.field(default_factory=list)


def spoil(arguments: dict[str, Any], rng: np.random.Generator) -> Hostile:
    """None to three changes of arguments."""
    spoiled = Hostile(dict(arguments))
    for _ in range(chosen(rng, (0, 1, 1, 1, 2, 3))):
        given = spoiled.arguments
        name = chosen(rng, [name for name in given if name != "impl"])
        value = given[name]
        if isinstance(value, torch.Tensor):
            change = chosen_by(rng, WAYS, LIKELY)
            if change == "memory":
                _share(spoiled, name, rng)
                continue
            if change == "kind":
                spoiled.replaced[name] = change = chosen(rng, NO_MEMORY)
            else:
                given[name] = TENSORS[change](value, rng)
        else:
            change, given[name] = "number", _number(value, rng)
        spoiled.changes.append(f"{name}: {change}")
    return spoiled


def _share(spoiled: Hostile, name: str, rng: np.random.Generator) -> None:
    tensors = [n for n, v in spoiled.arguments.items() if isinstance(v, torch.Tensor) and n != name]
    if tensors and not spoiled.together:
        spoiled.together = [name, chosen(rng, tensors)]
        spoiled.changes.append(f"{name}: memory of {spoiled.together[1]}")


def replace(tensor: torch.Tensor, kind: str) -> Any:
    if kind == "meta":
        return tensor.to("meta")
    if kind == "sparse":
        return tensor.to_sparse() if tensor.dim() else tensor
    if kind == "list":
        return tensor.tolist()
    if kind == "requires_grad":
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor
    if kind == "negated":
        return tensor if tensor.dtype == torch.bool else tensor._neg_view()
    return None


def _number(value: Any, rng: np.random.Generator) -> Any:
    if rng.random() < 0.1:
        return OTHERS[int(rng.integers(0, len(OTHERS)))]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return INTEGERS[int(rng.integers(0, len(INTEGERS)))]
    if isinstance(value, float):
        return FLOATS[int(rng.integers(0, len(FLOATS)))]
    if isinstance(value, list):
        changed = [*value]
        if rng.random() < 0.2 or not changed:
            return changed[1:] if rng.random() < 0.5 else [*changed, 1]
        changed[int(rng.integers(0, len(changed)))] = INTEGERS[int(rng.integers(0, len(INTEGERS)))]
        return changed
    if isinstance(value, str):
        return chosen(rng, ["window", "batch", "", "x", "other"])
    return value


def _shape(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    if tensor.dim() == 0 or rng.random() < 0.2:
        return tensor[None]
    axis = int(rng.integers(0, tensor.dim()))
    size = tensor.shape[axis]
    way = int(rng.integers(0, 6))
    if way == 0:
        return tensor.flatten()
    if way == 1:
        return tensor.narrow(axis, 0, 0)
    if way == 2 and size:
        return tensor.narrow(axis, 0, size - 1)
    if way == 3 and size:
        return tensor.select(axis, 0)
    if way == 4:
        return torch.cat([tensor] * 3, axis)
    extra = list(tensor.shape)
    extra[axis] = 1
    return torch.cat([tensor, torch.zeros(extra, dtype=tensor.dtype)], axis)


def _dtype(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return tensor.to(DTYPES[int(rng.integers(0, len(DTYPES)))])


def _strides(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """The same shape, another layout."""
    way = int(rng.integers(0, 5))
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    axis = int(rng.integers(0, tensor.dim()))
    if way == 0:
        return tensor.narrow(axis, 0, 1).expand(tensor.shape)
    if way == 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if way == 2:
        wide = torch.cat([tensor, tensor], axis)
        return wide.narrow(axis, 1, tensor.shape[axis])
    if way == 3:
        return torch.stack([tensor, tensor], -1)[..., 0]
    strides = [int(rng.integers(0, 4)) for _ in tensor.shape]
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    flat = tensor.flatten()
    flat = torch.cat([flat] * (1 + reach // len(flat)))
    return flat.as_strided(tensor.shape, strides)


def _values(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Some elements, or all."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    pool: list[Any] = FLOATS if tensor.is_floating_point() else INTEGERS
    if tensor.dtype == torch.bool or tensor.is_complex() or tensor.numel() == 0:
        return tensor
    info = None if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    flat = tensor.view(-1)
    for _ in range(min(chosen(rng, (1, 1, 2, len(flat))), MOST_VALUES)):
        value = pool[int(rng.integers(0, len(pool)))]
        if rng.random() < 0.3 and info:
            value = int(rng.integers(-3, 40))
        flat[int(rng.integers(0, len(flat)))] = value if info is None else max(info.min, min(info.max, value))
    return tensor


def _reorder(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    if tensor.dim() == 0 or len(tensor) < 2:
        return tensor
    return tensor[torch.from_numpy(rng.integers(0, len(tensor), len(tensor)))]


def _long(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Many equal elements in the memory of one."""
    if tensor.dim() == 0 or tensor.shape[0] == 0:
        return tensor
    return tensor[:1].expand(chosen(rng, (64, 1000, 5000)), *tensor.shape[1:])


TENSORS = {
    "shape": _shape, "dtype": _dtype, "strides": _strides, "values": _values, "order": _reorder,
    "long": _long, "memory": None, "kind": None,
}  # fmt: skip
WAYS, LIKELY = list(TENSORS), bounds_of([0.17, 0.08, 0.2, 0.25, 0.07, 0.03, 0.12, 0.08])
