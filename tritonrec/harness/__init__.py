"""The harness: proofs of bit-equality, training, traces, and what a machine has.

``tritonrec.harness.verify(build_model, batches, dim=...)`` checks your own model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .user_model import ModelReport, verify

__all__ = ["ModelReport", "verify"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line starts without loading torch."""
    if name in __all__:
        from . import user_model

        return getattr(user_model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
