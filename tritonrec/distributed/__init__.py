"""Process groups, exchanges and launch, over torch.distributed."""

from .agreement import RanksDisagreeError, check_ranks_agree
from .communicator import TIMEOUT, Communicator
from .groups import Communicators
from .join import from_environment
from .launch import RankPool
from .ledger import CorruptionError, Ledger
from .watch import RankDiedError, Watch

__all__ = [
    "TIMEOUT",
    "Communicator",
    "Communicators",
    "CorruptionError",
    "Ledger",
    "RankDiedError",
    "RankPool",
    "RanksDisagreeError",
    "Watch",
    "check_ranks_agree",
    "from_environment",
]
