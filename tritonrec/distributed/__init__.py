"""Process groups, exchanges and launch, over torch.distributed."""

from .agreement import RanksDisagreeError, demand_equal
from .communicator import TIMEOUT, Communicator
from .groups import Communicators
from .launch import RankPool, from_environment
from .watch import RankDiedError, Watch

__all__ = [
    "TIMEOUT",
    "Communicator",
    "Communicators",
    "RankDiedError",
    "RankPool",
    "RanksDisagreeError",
    "Watch",
    "demand_equal",
    "from_environment",
]
