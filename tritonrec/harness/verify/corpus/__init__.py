"""The corpus: public bugs of recommender and distributed training, each injected into our code.

Every fault names the thread that reports or repairs the bug. Most were found in other systems' caches,
exchanges, optimizers or checkpoints; here each is the same mistake in the place that does that work.
"""

from .. import in_batch, injections, kept_state  # noqa: F401 (they add to the faults)
from ..faults import FAULTS, SOURCES
from . import dense, gradients, restarts, rows, tables  # noqa: F401 (they add to the corpus)
from .bug import CORPUS

PUBLIC = [*(fault for fault in FAULTS if fault.name in SOURCES), *CORPUS]
"""Every fault that has a source."""
