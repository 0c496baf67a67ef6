"""Synthetic logs of clicks in the shapes of Criteo and Avazu: columns, table sizes, skew and rate of clicks.

Table sizes are those of the published training sets (Criteo Kaggle, 45.8 million impressions; Avazu, 40.4
million), times `scale`, but not below `MIN_TABLE_ROWS` or the published size. The id of popularity rank r is
drawn with a probability proportional to r ** -a. Each table has its own a, within 0.2 of `exponent`.

Labels come from a hidden logistic model: every id has a weight, the ids of `NUM_CROSSED` pairs of tables also
interact by an inner product, and dense features have weights. The constant term gives the published rate of
clicks. The distribution does not change with time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tritonrec.data.ctr import ClickLog, num_training_rows
from tritonrec.data.presets import CRITEO_CATEGORIES as CATEGORIES
from tritonrec.data.zipf import parsed

MIN_TABLE_ROWS = 64
NUM_CROSSED = 8
SIGNAL = 1.5
"""Standard deviation of the hidden logit, whose AUC is then about 0.8, as of models of Criteo."""
DAYS = 10
"""Days of an Avazu-shaped log; the last one is held out."""
_SPREAD = np.uint64(0x9E3779B1)  # odd, so that multiplying by it modulo 2**32 keeps ids distinct


class Shape(NamedTuple):
    """Shape of a published log: rows of each feature's table, dense features, rate of clicks."""

    tables: dict[str, int]
    dense: int
    rate: float


_CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
SHAPES = {
    "criteo": Shape(dict(zip(CATEGORIES, _CRITEO_ROWS, strict=True)), 13, 0.256),
    "avazu": Shape(
        {
            "C1": 7, "banner_pos": 7, "site_id": 4737, "site_domain": 7745, "site_category": 26,
            "app_id": 8552, "app_domain": 559, "app_category": 36, "device_id": 2686408,
            "device_ip": 6729486, "device_model": 8251, "device_type": 5, "device_conn_type": 4, "C14": 2626,
            "C15": 8, "C16": 9, "C17": 435, "C18": 4, "C19": 68, "C20": 172, "C21": 60,
        },
        1,
        0.170,
    ),
}  # fmt: skip
"""Avazu's dense feature is the hour."""


@dataclass(frozen=True)
class SyntheticClickOptions:
    """Options of `generate`. Raises ValueError naming an option out of range."""

    samples: int = 20_000
    scale: float = 1e-3
    exponent: float = 1.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale must be in (0, 1], got {self.scale}")
        if not 0.2 <= self.exponent < 10:
            raise ValueError(f"exponent must be in [0.2, 10), got {self.exponent}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")

    @classmethod
    def parse(cls, text: str) -> SyntheticClickOptions:
        """Options from ``name=value,name=value``; an empty text gives the defaults."""
        return parsed(cls, text)


def table_rows(shape: Shape, scale: float) -> dict[str, int]:
    """Rows of each feature's table at `scale`."""
    return {name: min(rows, max(MIN_TABLE_ROWS, round(rows * scale))) for name, rows in shape.tables.items()}


def generate(name: str, options: SyntheticClickOptions) -> ClickLog:
    """A log in the shape of ``"criteo"`` or ``"avazu"``; the same options give the same log."""
    shape = SHAPES[name]
    random = np.random.Generator(np.random.Philox(options.seed))
    rows = table_rows(shape, options.scale)
    ranks, logit, directions = [], np.zeros(options.samples), []
    for size in rows.values():
        exponent = options.exponent + random.uniform(-0.2, 0.2)
        cumulative = np.cumsum(np.arange(1, size + 1) ** -exponent)
        rank = np.searchsorted(cumulative[:-1], random.random(options.samples) * cumulative[-1])
        logit += random.standard_normal(size)[rank]
        directions.append(random.standard_normal((size, 2))[rank])
        ranks.append(rank)
    for pair in random.permutation(len(rows))[: 2 * NUM_CROSSED].reshape(-1, 2):
        logit += (directions[pair[0]] * directions[pair[1]]).sum(1)
    if name == "avazu":
        hour = np.arange(options.samples) * 24 * DAYS // options.samples % 24
        dense = (hour / 24)[:, None]
    else:
        scales = random.uniform(0.5, 2.5, shape.dense)
        dense = np.log1p(np.floor(np.exp(scales * random.standard_normal((options.samples, shape.dense)))))
    logit += ((dense - dense.mean(0)) / np.maximum(dense.std(0), 1e-9)) @ random.standard_normal(shape.dense)
    logit *= SIGNAL / (float(logit.std()) or 1.0)
    logit += _constant(logit, shape.rate)
    labels = random.random(options.samples) < 1 / (1 + np.exp(-logit))
    ids = (np.stack(ranks, 1).astype(np.uint64) * _SPREAD) & np.uint64(0xFFFFFFFF)
    return ClickLog(
        dense.astype(np.float32),
        ids.astype(np.int64),
        labels.astype(np.int64),
        tuple(rows),
        num_training_rows(options.samples),
    )


def _constant(logit: np.ndarray, rate: float) -> float:
    """The constant to add to the logits (n,) so that the mean probability is `rate`."""
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        if (1 / (1 + np.exp(-logit - middle))).mean() < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
