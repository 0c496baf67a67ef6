"""Hash embeddings in traced and transformed models: one call in a graph of `torch.fx`, and none elsewhere."""

from __future__ import annotations

from typing import Any

import torch.fx

from ..kernels.dispatch import is_compiling

UNSCRIPTABLE = (
    "TorchScript has no type for a table that grows: its rows are no parameters, and numba or Triton kernels "
    "look them up. Trace with torch.fx, compile with torch.compile, or export for serving"
)
"""Why ``torch.jit`` is refused."""


def refuse_transforms() -> None:
    """Raise TypeError where torch records a call of a hash embedding, or gives it tensors without values."""
    if torch._C._get_tracing_state() is not None:
        raise TypeError(UNSCRIPTABLE)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise TypeError(
            "a transform of torch.func (grad, vmap, jacrev) would not reach the rows of a hash embedding: "
            "look them up outside of it, and give them to the function as an argument"
        )
    if is_compiling() and torch.compiler.is_exporting():  # the flag alone is the process's
        raise TypeError(
            "torch.export has no place for a table that grows: tritonrec.serving.export writes rows and model"
        )


def leaf_call(module: torch.nn.Module, *args: Any) -> Any:
    """The call of `module` as one node of the graph of its arguments, the first of which is a proxy.

    Raises ValueError where the module is all that is traced.
    """
    tracer = args[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError("a hash embedding is one call of a traced model: trace the model that calls it")
    return tracer.create_proxy("call_module", path, args, {})
