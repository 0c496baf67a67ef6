"""Interaction logs, jagged batches, sample clustering and ranking metrics."""

from tritonrec.data.batch import Batch, JaggedBatch, Lookup
from tritonrec.data.clustering import payload_inflation, split
from tritonrec.data.impressions import ImpressionBatch
from tritonrec.data.interactions import Interactions
from tritonrec.data.loader import EvaluationBatch, NextItemLoader
from tritonrec.data.ranking import evaluate, popularity_scores
from tritonrec.data.sources import load

__all__ = [
    "Batch",
    "EvaluationBatch",
    "ImpressionBatch",
    "Interactions",
    "JaggedBatch",
    "Lookup",
    "NextItemLoader",
    "evaluate",
    "load",
    "payload_inflation",
    "popularity_scores",
    "split",
]
