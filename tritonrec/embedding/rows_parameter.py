"""A parameter that stands for the rows of hash embeddings, where torch's idioms look for one."""

from __future__ import annotations

import sys
from typing import Any

import torch

FILLS = {"copy_", "normal_", "uniform_", "fill_", "zero_", "set_"}
AVERAGES = {
    "add",
    "sub",
    "lerp",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "_foreach_add",
    "_foreach_lerp",
}
KEPT = {"detach", "to", "clone", "mul", "__mul__", "__rmul__"}
"""What torch's averages and those of one's own write to, or add up."""
HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


class RowsParameter(torch.nn.Parameter):
    """(0,) float32 among a module's parameters: ``requires_grad_(False)`` freezes the rows.

    Optimizers of torch change nothing in it. Copies, averages with another one, initialisations and torch's
    clipping of parameters without the rows are refused with TypeError: the rows would stay as they are.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> RowsParameter:
        empty = torch.empty(0, dtype=torch.float32, device="cpu") if data is None else data
        made: Any = torch.Tensor._make_subclass(cls, empty.as_subclass(torch.Tensor), requires_grad)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOOKS:
            raise TypeError(
                f"{name} of a parameter that stands for rows of a hash embedding would see no gradient: hook "
                "the module's output, and clip by HashOptimizer.clip_grad_norm_"
            )
        if func == torch.Tensor.grad.__get__ and args[0].requires_grad and _clips_without_rows():  # type: ignore[union-attr]
            raise TypeError(
                "torch's clipping of these parameters would leave out the gradients of rows of a hash "
                "embedding: take HashOptimizer.clip_grad_norm_(model.parameters(), max_norm), or clip the "
                "parameters that are no tritonrec.embedding.RowsParameter"
            )
        if name in AVERAGES or (name.endswith("_") and not name.startswith("__")):
            ours = [each for each in (*args, *(kwargs or {}).values()) if _holds(each, cls)]
            onto_itself = len(args) > 1 and args[0] is args[1]  # as load_state_dict copies it
            if ours and (len(ours) > 1 or name in FILLS) and not onto_itself:
                kind = RuntimeError if name in AVERAGES else TypeError  # which an operator would hide
                raise kind(
                    f"{name} of a parameter that stands for rows of a hash embedding does not reach them: "
                    "average rows with module.lerp_rows_(trained, weight), and leave the module out of "
                    "AveragedModel; write rows with module.tables.load_weights. "
                    "isinstance(parameter, tritonrec.embedding.RowsParameter) tells which these are"
                )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        keeps = name in KEPT or func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
        if keeps and isinstance(found, torch.Tensor) and found.numel() == 0 and found.dim() == 1:
            return found.as_subclass(cls)
        return found

    def __deepcopy__(self, memo: Any) -> RowsParameter:
        return memo.setdefault(id(self), RowsParameter(None, self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RowsParameter, (None, self.requires_grad)


def _clips_without_rows() -> bool:
    """Whether torch.nn.utils' clipping reads a gradient, of parameters without those of a `HashOptimizer`.

    It is a plain function of a list, which no parameter hears of: the frames of the call tell.
    """
    frame = sys._getframe(2)
    for _ in range(2):  # before Python 3.12 a comprehension has a frame of its own
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad" and "parameters" in frame.f_locals:
            return not any(hasattr(each, "gradients") for each in frame.f_locals["parameters"])
        assert frame.f_back is not None
        frame = frame.f_back
    return False


def _holds(argument: Any, kind: type) -> bool:
    """Whether an argument is one, or has one in a list."""
    parts = argument if isinstance(argument, (list, tuple)) else (argument,)
    return any(isinstance(part, kind) for part in parts)
