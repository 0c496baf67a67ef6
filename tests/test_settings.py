"""Promise: settings of a dataclass, and of those inside it, are read and replaced by the names of options."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from tritonrec import (
    FeatureConfig,
    HashEmbedding,
    HashEmbeddingBag,
    HashTableCollection,
    RowOptimizer,
    TablePolicy,
    nn,
)
from tritonrec.callbacks import EarlyStopping
from tritonrec.data import (
    KeyedJaggedTensor,
    LogFormat,
    NextItemLoader,
    clicks_from_ratings,
    hashed_ids,
    load,
)
from tritonrec.data.parquet_rows import ParquetRows
from tritonrec.embedding import DynamicTable, WarmupCosine, WarmupLinear
from tritonrec.embedding.learning_rate import Scaled
from tritonrec.metrics import ClickMetrics
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import ExchangeConfig, LossScaling, WindowConfig
from tritonrec.resilience import Replay
from tritonrec.serving import Predictor, top_k
from tritonrec.serving.server.settings import ServerConfig
from tritonrec.settings import values_by_option, with_values
from tritonrec.slipstream import SlipstreamConfig
from tritonrec.torchrec import EmbeddingBagConfig

NAN, INF = float("nan"), float("inf")
HASHED = {"eps": (NAN, INF, -1.0), "lr": (NAN, INF, -1.0), "weight_decay": (NAN, INF, -1.0)}
BETAS = {"beta1": (NAN, 1.0, -0.1), "beta2": (NAN, 1.0, -0.1)}
SHARES = {"dropout": (NAN, INF, -0.1, 1.0), "input_dropout": (NAN, INF, -0.1, 1.0)}
TEMPERATURE = {"temperature": (NAN, INF, 0.0, -1.0)}
EPS = {"eps": (NAN, INF, -1.0)}
WIDE = {"scale": (NAN, INF, -1.0)}
NUMBERS = [
    (partial(RowOptimizer, "adam"), HASHED | BETAS),
    (partial(RowOptimizer, "momentum_sgd"), {"momentum": (NAN, 1.0, -0.1)}),
    (partial(RowOptimizer, "ftrl"), HASHED | {"l1": (NAN, INF, -1.0)}),
    (partial(RowOptimizer, "lars_sgd"), {"eta": (NAN, INF, -1.0)}),
    (partial(HashEmbedding, 4), WIDE | {"divisor": (NAN, INF, 0.0, -1.0)}),
    (partial(HashEmbeddingBag, 4), WIDE),
    (partial(FeatureConfig, "a", 4), WIDE),
    (partial(DynamicTable, 4), WIDE), (partial(Scaled, 0.1), {"factor": (NAN, INF, -1.0)}),
    (partial(WarmupLinear, warmup=1, steps=2, lr=0.1), {"lr": (NAN, INF, -1.0), "floor": (NAN, INF)}),
    (HSTUConfig, SHARES | TEMPERATURE), (nn.FuXiConfig, SHARES | TEMPERATURE), (nn.GRMConfig, SHARES),
    (nn.LayerConfig, SHARES), (nn.TokenDropout, {"p": (NAN, INF, -0.1, 1.0)}),
    (partial(nn.GatedNorm, 4), EPS | {"dropout": (NAN, INF, -0.1, 1.0)}), (partial(nn.LayerNorm, 4), EPS),
    (partial(nn.RMSNorm, 4), EPS), (partial(nn.MultiheadAttention, 4, 1), {"dropout": (NAN, -0.1, 1.0)}),
    (partial(nn.GRU, 4, 4), {"dropout": (NAN, INF, -0.1)}), (partial(nn.Dropout), {"p": (NAN, INF, -0.1)}),
    (partial(EarlyStopping, "loss"), {"min_delta": (NAN, INF, -1.0)}),
    (ServerConfig, dict.fromkeys(["latency", "timeout", "max_lag"], (NAN, INF, -1.0))),
    (WindowConfig, dict.fromkeys(["max_grad_norm", "max_grad_value"], (NAN, -1.0))),
    (LogFormat, {"label_threshold": (NAN, INF)}), (Replay, {"share": (NAN, INF, -0.1)}),
    (SlipstreamConfig, dict.fromkeys(["hot_share", "drop", "sample", "confidence"], (NAN, INF, -0.1))),
    (LossScaling, dict.fromkeys(["init_scale", "growth_factor", "backoff_factor"], (NAN, INF, -1.0))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name", "number"),
    [(make, name, number) for make, given in NUMBERS for name, all_ in given.items() for number in all_],
)
def test_a_number_outside_its_range_is_refused_where_it_is_given(make, name, number):
    """NaN is outside of all; a first step would train with it, and say nothing."""
    given = make.keywords if isinstance(make, partial) else {}
    if isinstance(make, partial):
        make = partial(make.func, *make.args)
    with pytest.raises(ValueError, match=f"({name}|{'betas' if 'beta' in name else 'p'}) .*{number}"):
        make(**{**given, name: number})


def test_options_name_the_settings_of_all_records():
    window = WindowConfig(
        3, exchange=ExchangeConfig(sums="packed", sharing="each", precision="bf16", taper=0.5)
    )
    found = values_by_option(window)
    assert (found["exchange_sums"], found["exchanges"], found["exchange_precision"]) == (
        "packed",
        "each",
        "bf16",
    )
    assert (found["taper"], found["micro_batches"], found["precision"]) == (0.5, 3, "float32")
    assert (
        found["init_scale"] == 2.0**16 and not {"exchange", "loss_scaling", "sums", "sharing"} & found.keys()
    )
    assert with_values(WindowConfig(), found) == window


def test_other_values_stay():
    window = WindowConfig(3, "window", exchange=ExchangeConfig(first_use=True), seed=5)
    got = with_values(window, {"exchanges": "once", "micro_batches": 2})
    assert got == WindowConfig(2, "window", exchange=ExchangeConfig(first_use=True, sharing="once"), seed=5)
    assert window.micro_batches == 3
    scaling = LossScaling(2.0**4)
    assert with_values(window, {"loss_scaling": scaling, "taper": 0.5}).loss_scaling == scaling


@pytest.mark.parametrize("name", ["sharing", "sums", "first"])
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(TypeError, match=f"WindowConfig has no {name}"):
        with_values(WindowConfig(), {name: 1, "taper": 0.5})


def test_ranges_are_checked_together():
    with pytest.raises(ValueError, match="first_use sends a key once"):
        with_values(WindowConfig(exchange=ExchangeConfig(first_use=True)), {"dedup": "lookup"})
    got = with_values(
        WindowConfig(exchange=ExchangeConfig(first_use=True)), {"dedup": "lookup", "first_use": False}
    )
    assert got.exchange == ExchangeConfig("lookup")


LOG = load("zipf:users=40,items=60,seed=3")
WRONG = {
    "half a micro-batch": (lambda: WindowConfig(4.5), "WindowConfig: micro_batches must be of type int"),
    "text": (lambda: WindowConfig(depth="2"), "depth must be of type int, got '2'"),
    "truth as a number": (lambda: FeatureConfig("item", True), "dim must be of type int, got True"),
    "a number as truth": (lambda: WindowConfig(clustering=1), "clustering must be of type bool, got 1"),
    "no by text": (lambda: WindowConfig(skip_nonfinite="no"), "skip_nonfinite must be of type bool"),
    "a tensor": (lambda: FeatureConfig("item", torch.tensor(4)), "dim must be of type int, got tensor"),
    "nothing": (lambda: WindowConfig(seed=None), "seed must be of type int, got None"),
    "a name": (lambda: FeatureConfig(7, 4), "FeatureConfig: name must be of type str, got 7"),
    "a record": (lambda: WindowConfig(exchange="once"), "exchange must be of type ExchangeConfig"),
    "a rule by name": (
        lambda: HashTableCollection([FeatureConfig("item", 4)], "adam"),
        "optimizer must be of type RowOptimizer or None, got 'adam'",
    ),
    "a size as of nn.Embedding": (lambda: HashEmbedding(100, 4), "HashEmbedding: optimizer must be of type"),
    "features by name": (lambda: HashTableCollection(["item"]), "FeatureConfig(name, dim), got 'item'"),
    "a rate": (lambda: RowOptimizer("adam", eps="x"), "eps must be of type float, got 'x'"),
    "a policy": (lambda: FeatureConfig("item", 4, policy="lru"), "policy must be of type TablePolicy"),
    "a model's size": (lambda: HSTUConfig(dim=8.0), "HSTUConfig: dim must be of type int, got 8.0"),
    "a seed": (lambda: NextItemLoader(LOG, 4, 4, 1, seed=0.5), "seed must be of type int, got 0.5"),
    "a path for a log": (lambda: NextItemLoader("log.csv", 4, 4, 1, 0), "must be of type Interactions"),
    "a step": (lambda: NextItemLoader(LOG, 4, 4, 1, 0).batch(1.0), "step must be of type int, got 1.0"),
    "a field for fields": (lambda: LogFormat(missing="NA"), "several names, got the text 'NA': write ['NA']"),
    "columns in one": (lambda: LogFormat(columns="user,item"), "write ['user', 'item']"),
    "a column for columns": (lambda: ParquetRows("there", "user"), "ParquetRows: columns must be several"),
    "a key for keys": (
        lambda: KeyedJaggedTensor.from_matrix("ab", torch.ones(1, 2, dtype=torch.int64)), "keys must be",
    ),
    "a feature for features": (
        lambda: EmbeddingBagConfig(9, 4, "t", "ab"), "EmbeddingBagConfig: feature_names must be several",
    ),
    "operators by name": (lambda: Predictor.load("there", namespaces="mine"), "namespaces must be several"),
    "patience": (lambda: EarlyStopping("HR@10", patience=math.nan), "patience must be of type int, got nan"),
    "a threshold": (lambda: clicks_from_ratings(LOG, "3"), "label_threshold must be of type float or None"),
    "a window of metrics": (lambda: ClickMetrics(window=2.5), "window must be of type int, got 2.5"),
    "best items": (lambda: top_k(torch.ones(1, 2), "2"), "k must be of type int, got '2'"),
    "steps of a schedule": (lambda: WarmupCosine(0.1, 2, "9"), "steps must be of type int, got '9'"),
    "bits": (lambda: hashed_ids(["a"], bits="32"), "bits must be of type int, got '32'"),
    "header": (lambda: LogFormat(multiline="no"), "multiline must be of type bool, got 'no'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_argument_of_another_type_is_refused_by_name(what):
    make, message = WRONG[what]
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batches": 65_537}, r"micro_batches must be in \[0, 65536\]"),
        ({"seed": 2**63}, "seed must be in"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WindowConfig(**settings)
    assert WindowConfig(65_536, max_grad_norm=math.inf, seed=2**63 - 1)


def test_a_list_where_a_tuple_is_kept_becomes_one():
    assert LogFormat(label=["bought"]) == LogFormat(label=("bought",))


def test_numbers_of_numpy_are_those_of_python():
    made = FeatureConfig("item", np.int16(4), scale=np.float32(0.5), merge=np.bool_(False))
    assert [type(each) for each in (made.dim, made.scale, made.merge)] == [int, float, bool]
    assert made == FeatureConfig("item", 4, scale=0.5, merge=False) and made.policy == TablePolicy()
    assert torch.equal(
        *(NextItemLoader(LOG, 4, 4, 1, 0).batch(step).features.values for step in (np.int8(3), 3))
    )
