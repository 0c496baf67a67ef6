"""The rules of rows as declared: states, decay and the numbers of one step; `op.py` has the formulas."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

LANES = 16
"""Of a sum over the columns of a row."""


class Rule(NamedTuple):
    """What a rule is, besides its formula: names of its states, each (R, D), and

    - row_wise: the last state is (R, 1);
    - corrected: its moments are, by the number of the step;
    - decay: ``"l2"`` adds to the gradient, ``"decoupled"`` scales the weight, ``"own"`` is in the formula.
    """

    states: tuple[str, ...] = ()
    row_wise: bool = False
    corrected: bool = False
    decay: Literal["l2", "decoupled", "own"] = "l2"


MOMENTS = ("exp_avg", "exp_avg_sq")
RULES = {
    "sgd": Rule(),
    "momentum_sgd": Rule(("momentum_buffer",)),
    "nesterov_sgd": Rule(("momentum_buffer",)),
    "lars_sgd": Rule(("momentum_buffer",), decay="own"),
    "adagrad": Rule(("state",)),
    "rowwise_adagrad": Rule(("state",), row_wise=True),
    "rowwise_adagradw": Rule(("state",), row_wise=True, decay="decoupled"),
    "adam": Rule(MOMENTS, corrected=True),
    "adamw": Rule(MOMENTS, corrected=True, decay="decoupled"),
    "rowwise_adam": Rule(MOMENTS, row_wise=True, corrected=True, decay="decoupled"),
    "lamb": Rule(MOMENTS, corrected=True, decay="own"),
    "rowwise_lamb": Rule(MOMENTS, row_wise=True, corrected=True, decay="own"),
    "ftrl": Rule(("linear", "state"), decay="own"),
}


class Scalars(NamedTuple):
    """Numbers of one step in float32.

    `rest1` is 1 - beta1. `l2` times w goes into g; where the decay is the rule's own, it is `weight_decay`.
    `decay` scales w, `scale` the moment of LAMB and the norm of LARS.
    """

    rate: np.float32
    eps: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    l2: np.float32
    decay: np.float32
    scale: np.float32


@lru_cache(maxsize=64)
def scalars(
    rule: str, lr: float, eps: float, beta1: float, beta2: float, weight_decay: float, step: int
) -> Scalars:
    """Computed in float64 and rounded once. Adam's rate has the bias correction. But for L2 decay, as in the
    sources, eps has it as well: sqrt(v / c) + eps is (sqrt(v) + eps * sqrt(c)) / sqrt(c).
    """
    declared, rate, scale = RULES[rule], lr, lr * beta2
    if declared.corrected:
        root = math.sqrt(1 - beta2**step)
        scale = root / (1 - beta1**step)
        rate = lr if declared.decay == "own" else lr * root / (1 - beta1**step)
        eps = eps if declared.decay == "l2" else eps * root
    decoupled = declared.decay == "decoupled"
    l2, decay = (0.0, decay_factor(lr, weight_decay)) if decoupled else (weight_decay, 1.0)
    values = rate, eps, beta1, 1 - beta1, beta2, 1 - beta2, l2, decay, scale
    return Scalars(*(np.float32(value) for value in values))


def decay_factor(lr: float, weight_decay: float) -> float:
    """What decoupled decay multiplies a weight with in one update; float32 when it is used."""
    return 1 - lr * weight_decay
