"""The position of a loader in a checkpoint: what its ``state_dict()`` is on every rank."""

from __future__ import annotations

import base64
import json
from typing import Any, Protocol

from safetensors.torch import load, save

from ..checkpoint import flatten, unflatten
from ..distributed import Communicators

LOADER = "loader"
"""The key of the ranks' states among a checkpoint's metadata."""


class SupportsState(Protocol):
    """A loader with a position: `tritonrec.data.Stream`, torchdata's StatefulDataLoader, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def positions(communicators: Communicators, loader: SupportsState, step: int) -> list[str]:
    """The state of each rank's loader as a text, or one where they are all equal. Collective.

    Raises ValueError where the loader counts its batches in ``step`` and is elsewhere than the training, and
    TypeError for a state that is no tensor, number or text.
    """
    read = getattr(loader, "step", step)
    if read != step:
        raise ValueError(
            f"the loader is at step {read} and the training at step {step}: train on every batch that is "
            "read before a save"
        )
    plain, tensors = flatten(loader.state_dict(), LOADER)
    raw = save({name: tensor.contiguous() for name, tensor in tensors.items()}) if tensors else b""
    text = json.dumps({"state": plain, "tensors": base64.b64encode(raw).decode()})
    every = communicators.control.all_gather_texts(text)
    return every[:1] if len(set(every)) == 1 else every


def position_of(communicators: Communicators, saved: Any) -> dict[str, Any]:
    """The state of this rank's loader.

    Raises ValueError where none was saved, one of each of another number of ranks, or something else.
    """
    if saved is None:
        raise ValueError("the checkpoint has no position of a loader: it was saved without loader=")
    if not isinstance(saved, list) or len(saved) not in (1, communicators.world_size):
        count = len(saved) if isinstance(saved, list) else 0
        raise ValueError(
            f"each of {count} ranks saved a position of its own, and here are "
            f"{communicators.world_size}: go on with as many ranks, or use a loader whose position holds for "
            "any, such as tritonrec.data.Stream"
        )
    try:
        found = json.loads(saved[communicators.rank if len(saved) > 1 else 0])
        raw = base64.b64decode(found["tensors"], validate=True)
        state = unflatten(found["state"], load(raw) if raw else {})
    except Exception as error:  # safetensors raises many types
        raise ValueError(f"the position of the loader cannot be read: {error!r}") from error
    if not isinstance(state, dict):
        raise ValueError(f"the position of the loader is no mapping, but {type(state).__name__}")
    return state
