"""Interaction logs, jagged batches, loaders, balancing, sample clustering and ranking metrics."""

from tritonrec.data.balancing import SequenceCost, token_spread
from tritonrec.data.batch import Batch, JaggedBatch, per_sample, per_token
from tritonrec.data.click_stream import ClickStream
from tritonrec.data.clustering import payload_inflation, split, tapered
from tritonrec.data.ctr import (
    ClickBatch,
    ClickLoader,
    ClickLog,
    ClickPredictions,
    click_predictions,
    clicks_from_ratings,
    evaluate_clicks,
)
from tritonrec.data.dynamic import DynamicBatchLoader, DynamicStream
from tritonrec.data.impression_loader import ImpressionLoader
from tritonrec.data.impression_stream import ImpressionStream
from tritonrec.data.impressions import ImpressionBatch
from tritonrec.data.interactions import Interactions
from tritonrec.data.jagged import KeyedJaggedTensor, Lookup, WeightedLookup
from tritonrec.data.loader import EvaluationBatch, NextItemLoader
from tritonrec.data.log_format import LogFormat
from tritonrec.data.numbered import NumberedLoader
from tritonrec.data.ranking import auc, evaluate, evaluate_impressions, gauc, popularity_scores, weighted_auc
from tritonrec.data.sequences import NextItemStream
from tritonrec.data.slices import work
from tritonrec.data.sources import load, load_clicks, load_interactions
from tritonrec.data.splits import Split
from tritonrec.data.stream import Stream
from tritonrec.data.topics import KafkaTopic, TopicStream
from tritonrec.data.vocabulary import Vocabulary, hashed_ids

__all__ = [
    "Batch", "ClickBatch", "ClickLoader", "ClickLog", "ClickPredictions", "ClickStream",
    "DynamicBatchLoader", "DynamicStream", "EvaluationBatch", "ImpressionBatch", "ImpressionLoader",
    "ImpressionStream", "Interactions", "JaggedBatch", "KafkaTopic", "KeyedJaggedTensor", "LogFormat",
    "Lookup", "NextItemLoader", "NextItemStream", "NumberedLoader", "SequenceCost", "Split", "Stream",
    "TopicStream", "Vocabulary", "WeightedLookup", "auc", "click_predictions", "clicks_from_ratings",
    "evaluate", "evaluate_clicks", "evaluate_impressions", "gauc", "hashed_ids", "load", "load_clicks",
    "load_interactions", "payload_inflation", "per_sample", "per_token", "popularity_scores", "split",
    "tapered", "token_spread", "weighted_auc", "work",
]  # fmt: skip
