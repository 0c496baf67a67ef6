"""Hash embeddings in traced models: one call in a graph of `torch.fx`, and none in TorchScript."""

from __future__ import annotations

from typing import Any

import torch.fx

UNSCRIPTABLE = (
    "TorchScript has no type for a table that grows: its rows are no parameters, and numba or Triton kernels "
    "look them up. Trace with torch.fx, compile with torch.compile, or export for serving"
)
"""Why ``torch.jit.script`` is refused."""


def leaf_call(module: torch.nn.Module, *args: Any) -> Any:
    """The call of `module` as one node of the graph of its arguments, the first of which is a proxy.

    Raises ValueError where the module is all that is traced.
    """
    tracer = args[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError("a hash embedding is one call of a traced model: trace the model that calls it")
    return tracer.create_proxy("call_module", path, args, {})
