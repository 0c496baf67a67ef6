"""What keeps a run alive and right on machines that fail: elastic ranks, copies in peers' memory, replay."""

from .elastic import run_elastic
from .elastic_pool import ElasticPool
from .peer_copies import PeerCopies
from .replay import Replay

__all__ = ["ElasticPool", "PeerCopies", "Replay", "run_elastic"]
