"""Process groups, exchanges and launch, over torch.distributed."""

from .communicator import TIMEOUT, Communicator, Communicators
from .launch import RankDiedError, RankPool, from_environment

__all__ = ["TIMEOUT", "Communicator", "Communicators", "RankDiedError", "RankPool", "from_environment"]
