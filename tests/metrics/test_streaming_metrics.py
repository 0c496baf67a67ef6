"""Promise: streaming metrics are those of sklearn, torchmetrics and RecMetrics, with the same bits at any
world size, number of micro-batches and order of samples.
"""

import json
import math

import numpy as np
import pytest
import torch

from tritonrec import nn
from tritonrec.data import (
    Batch,
    ClickLoader,
    ClickLog,
    KeyedJaggedTensor,
    Lookup,
    load_clicks,
    weighted_auc,
)
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.metrics import ClickMetrics, RankingMetrics
from tritonrec.nn import DLRM, DLRMConfig
from tritonrec.pipeline import StageFailedError, Trainer, WindowConfig

KINDS = "ne", "logloss", "calibration", "ctr"
STEPS, WINDOW = 13, 5
KS = (1, 3, 10)


def samples(steps=STEPS, seed=0, size=37):
    """By step predictions, labels, weights and groups; with ties, and predictions of 0 and 1."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        count = size + 11 * (step % 3)
        p = (torch.rand(count, generator=draw) ** 3 * 200).round() / 200
        y = (torch.rand(count, generator=draw) < 0.1 + 0.7 * p).long()
        w = (torch.rand(count, generator=draw) * 3).exp()
        found.append((p, y, w, torch.randint(5, (count,), generator=draw) - 2))
    return found


def computed(steps, weighted=True, grouped=True, window=WINDOW, metrics=None):
    metrics = metrics or ClickMetrics(window)
    for p, y, w, g in steps:
        metrics.update(p, y, w if weighted else None, g if grouped else None)
    return metrics.compute()


def naive(steps):
    """By the formulas, term by term."""
    terms = [
        (w, y, p, -w * (math.log2(max(p, 1e-12)) if y else math.log2(max(1 - p, 1e-12))))
        for ps, ys, ws, _ in steps
        for p, y, w in zip(ps.double().tolist(), ys.tolist(), ws.double().tolist(), strict=True)
    ]
    weight, positive, predicted, entropy = (
        math.fsum(each) for each in zip(*((w, w * y, w * p, e) for w, y, p, e in terms), strict=True)
    )
    ctr = positive / weight
    own = -positive * math.log2(ctr) - (weight - positive) * math.log2(1 - ctr)
    return {
        "ne": entropy / own, "logloss": entropy / weight, "calibration": predicted / positive, "ctr": ctr,
    }  # fmt: skip


def naive_auc(steps, weighted=True):
    p, y, w = (torch.cat([step[at] for step in steps]).double() for at in range(3))
    w = w if weighted else torch.ones_like(w)
    pairs = (w * y)[:, None] * (w * (1 - y))[None]
    won = (p[:, None] > p[None]).double() + (p[:, None] == p[None]).double() / 2
    return float((pairs * won).sum() / pairs.sum())


def test_values_are_those_of_the_formulas():
    steps = samples()
    found = computed(steps)
    for prefix, of in (("lifetime", steps), ("window", steps[-WINDOW:])):
        for kind, value in naive(of).items():
            assert found[f"{prefix}_{kind}"] == pytest.approx(value, rel=1e-13), (prefix, kind)
    assert found["window_auc"] == pytest.approx(naive_auc(steps[-WINDOW:]), rel=1e-6)  # weights of 2**-20
    assert computed(steps, weighted=False)["window_auc"] == pytest.approx(
        naive_auc(steps[-WINDOW:], weighted=False), rel=1e-14
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_bits_are_those_of_one_rank(world_size):
    steps = samples()

    def rank(communicators):
        draw = torch.Generator().manual_seed(9)
        own = []
        for step in steps:  # every rank has samples of its own, in any order; rank 0 has none in step 2
            order = torch.randperm(len(step[0]), generator=draw)
            part = order.tensor_split(world_size)[communicators.rank]
            own.append(tuple(each[part] for each in step))
        return computed(own, metrics=ClickMetrics(WINDOW, communicators=communicators))

    assert run_ranks(world_size, rank) == [computed(steps)] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_at_another_world_size(world_size):
    steps = samples()
    before = ClickMetrics(WINDOW)
    computed(steps[:9], metrics=before)
    state = json.loads(json.dumps(before.state_dict()))

    def rank(communicators):
        metrics = ClickMetrics(WINDOW, communicators=communicators)
        metrics.load_state_dict(state)
        values = []
        for step in steps[9:]:
            metrics.update(*(each[communicators.rank :: world_size] for each in step))
            values.append(metrics.compute())
        return values, metrics.state_dict()

    whole = ClickMetrics(WINDOW)
    computed(steps, metrics=whole)
    for values, after in run_ranks(world_size, rank):
        assert after == whole.state_dict()
        assert {f"{p}_{k}" for p in ("lifetime", "window") for k in KINDS} == set(values[-1])
        assert all(values[-1][name] == whole.compute()[name] for name in values[-1])


def test_auc_is_back_once_the_window_is_new():
    steps, metrics = samples(), ClickMetrics(WINDOW)
    metrics.load_state_dict(ClickMetrics(WINDOW).state_dict())
    assert computed(steps, metrics=metrics) == computed(steps)


@pytest.mark.parametrize(
    "wrong", [(torch.ones(2), torch.ones(3)), (torch.ones(2, 1), torch.ones(2, 1)), (torch.tensor(1.0),) * 2]
)
def test_another_shape_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be \(n,\)"):
        ClickMetrics().update(*wrong)


@pytest.mark.parametrize("column", ["weights", "groups"])
def test_weights_and_groups_are_given_in_every_step_or_in_none(column):
    sample = torch.full((2,), 0.5), torch.tensor([0, 1])
    for first, second in ([{column: torch.ones(2)}, {}], [{}, {column: torch.ones(2)}]):
        metrics = ClickMetrics()
        metrics.update(*sample, **first)
        with pytest.raises(ValueError, match="in every step or in none"):
            metrics.update(*sample, **second)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**20])
def test_a_weight_that_is_no_number_is_refused(bad):
    metrics = ClickMetrics()
    metrics.update(torch.full((2,), 0.5), torch.tensor([0, 1]), torch.tensor([1.0, bad]))
    with pytest.raises(ValueError, match="finite"):
        metrics.compute()


@pytest.mark.parametrize(
    ("counts", "columns", "said"),
    [
        ((2, 3), (4, 4), "2 times with weights with groups .*, 3 times"),
        ((2, 2), (2, 3), r"2 times \(.*\), 2 times with weights"),
    ],
)
def test_ranks_that_differ_in_their_updates_are_told(counts, columns, said):
    def rank(communicators):
        metrics = ClickMetrics(communicators=communicators)
        for step in samples()[: counts[communicators.rank]]:
            metrics.update(*step[: columns[communicators.rank]])
        metrics.compute()

    with pytest.raises(RuntimeError, match=said):
        run_ranks(2, rank)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda ranks: ClickMetrics(5 + ranks.rank, False, ranks), r"\(window=5, .*\(window=6, "),
        (lambda ranks: ClickMetrics(5, ranks.rank > 0, ranks), r"logits=False\), .*logits=True\)"),
        (lambda ranks: RankingMetrics((1, 2)[: 1 + ranks.rank], None, ranks), r"ks=\(1,\).*ks=\(1, 2\)"),
        (lambda ranks: RankingMetrics((1,), torch.arange(4) * (1 + ranks.rank), ranks), "popularity="),
    ],
)
def test_ranks_whose_metrics_have_other_settings_are_told(make, said):
    def rank(communicators):
        metrics = make(communicators)
        if isinstance(metrics, ClickMetrics):
            metrics.update(torch.full((2,), 0.5), torch.tensor([0, 1]))
        else:
            metrics.update(torch.tensor([[True, False]]), torch.tensor([1]), torch.tensor([[1, 2]]))
        metrics.compute()

    with pytest.raises(RuntimeError, match=f"ranks have updated their metrics .*{said}"):
        run_ranks(2, rank)


@pytest.mark.parametrize(
    "wrong", [{"predictions": 1.5}, {"predictions": -0.1}, {"labels": 2.0}, {"labels": 0.5}]
)
def test_samples_that_no_click_has_are_refused_each_time(wrong):
    metrics, given = ClickMetrics(), {"predictions": 0.5, "labels": 1.0} | wrong
    metrics.update(*(torch.tensor([0.0, each]) for each in given.values()))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"{next(iter(wrong))} must be .*got {next(iter(wrong.values())):g}"
        ):
            metrics.compute()


@pytest.mark.parametrize("logits", [False, True])
def test_a_prediction_that_is_no_number_is_named(logits):
    metrics = ClickMetrics(logits=logits)
    metrics.update(torch.tensor([0.5, math.nan]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"predictions must be .*got nan"):
        metrics.compute()


def test_samples_are_those_of_the_call_though_their_buffers_are_filled_anew():
    steps, metrics = samples(), ClickMetrics(WINDOW)
    for step in steps:
        given = [each.clone() for each in step]
        metrics.update(*given)
        for each in given:
            each.zero_()
    assert metrics.compute() == computed(steps)


@pytest.mark.parametrize(
    "change", [{"window": [[1, 2, 3, 4]]}, {"lifetime": [1, 2]}, {"steps": "x"}, {"lifetime": None}]
)
def test_a_state_of_something_else_loads_nothing(change):
    metrics, other = ClickMetrics(WINDOW), ClickMetrics(WINDOW)
    computed(samples(), metrics=metrics)
    computed(samples(9), metrics=other)
    before = metrics.state_dict()
    for state in ({**other.state_dict(), **change}, {"steps": 3}):
        with pytest.raises(ValueError, match="no state of ClickMetrics"):
            metrics.load_state_dict(state)
    assert metrics.state_dict() == before


def test_no_step_and_labels_that_are_alike():
    assert ClickMetrics().compute() == {}
    found = computed([(torch.full((3,), 0.5), torch.zeros(3).long(), None, None)])
    assert math.isnan(found["window_auc"]) and found["window_calibration"] == 0


def lists(users=60, items=40, seed=1):
    """hits (B, K), relevant (B,), items (B, K), and scores and relevance (B, I)."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(users, items, generator=draw)
    wanted = torch.rand(users, items, generator=draw) < 0.08
    wanted[3] = False
    top = scores.argsort(1, descending=True)[:, :12]
    return wanted.gather(1, top), wanted.sum(1), top, scores, wanted


def naive_ranking(hits, relevant, k):
    found = dict.fromkeys(("HR", "recall", "MRR", "NDCG"), 0.0)
    for row, count in zip(hits[:, :k].tolist(), relevant.tolist(), strict=True):
        places = [place for place, hit in enumerate(row, 1) if hit]
        best = sum(1 / math.log2(place + 1) for place in range(1, min(count, k) + 1))
        found["HR"] += bool(places) / len(hits)
        found["recall"] += len(places) / max(count, 1) / len(hits)
        found["MRR"] += 1 / places[0] / len(hits) if places else 0
        found["NDCG"] += sum(1 / math.log2(place + 1) for place in places) / (best or 1) / len(hits)
    return found


def test_ranked_lists_are_those_of_the_formulas():
    hits, relevant, items, *_ = lists()
    popularity = torch.arange(40)
    metrics = RankingMetrics(KS, popularity)
    for part in torch.arange(len(hits)).split(7):
        metrics.update(hits[part], relevant[part], items[part])
    found = metrics.compute()
    for k in KS:
        for kind, value in naive_ranking(hits, relevant, k).items():
            assert found[f"{kind}@{k}"] == pytest.approx(value, rel=1e-13), (kind, k)
        listed = items[:, :k].flatten().tolist()
        bits = [-math.log2(max(int(popularity[i]), 1) / (int(popularity.sum()) + 1)) for i in listed]
        assert found[f"coverage@{k}"] == len(set(listed)) / 40
        assert found[f"novelty@{k}"] == pytest.approx(sum(bits) / len(bits), rel=1e-13)


def test_ranked_lists_have_the_same_bits_at_any_world_size():
    hits, relevant, items, *_ = lists()

    def rank(communicators):
        own = torch.randperm(len(hits), generator=torch.Generator().manual_seed(4))
        own = own[communicators.rank :: communicators.world_size]
        metrics = RankingMetrics(KS, torch.arange(40), communicators)
        for some in own.tensor_split(2):
            for part in some.split(11):
                metrics.update(hits[part], relevant[part], items[part])
            found = metrics.compute()  # which leaves what it adds up as it is
        return found

    (alone,) = run_ranks(1, rank)
    assert run_ranks(2, rank) == [alone] * 2
    assert run_ranks(4, rank) == [alone] * 4


def test_lists_that_cannot_be_are_refused():
    hits, relevant, items, *_ = lists()
    with pytest.raises(ValueError, match="more hits"):
        RankingMetrics(KS).update(hits, relevant * 0)
    with pytest.raises(ValueError, match="10 or more"):
        RankingMetrics(KS).update(hits[:, :9], relevant)
    with pytest.raises(ValueError, match="bool"):
        RankingMetrics(KS).update(hits * 0.5, relevant)
    with pytest.raises(ValueError, match="catalogue"):
        RankingMetrics(KS, torch.arange(30)).update(hits, relevant, items)
    for wrong in (torch.rand(40), torch.ones(40, 2, dtype=torch.int64), torch.arange(40) - 1):
        with pytest.raises(ValueError, match=r"popularity must be \(I,\) int64 of at least 0"):
            RankingMetrics(KS, wrong)
    with pytest.raises(ValueError, match=r"items must be whole numbers.*float32"):
        RankingMetrics(KS, torch.arange(40)).update(hits, relevant, items.float())
    with pytest.raises(ValueError, match=r"relevant must be whole numbers.*float32"):
        RankingMetrics(KS).update(hits, relevant + 0.5)


def test_sklearn_says_the_same():
    import sklearn.metrics as sklearn

    steps = samples()
    found = computed(steps)
    p, y, w = (torch.cat([step[at] for step in steps]).double().numpy() for at in range(3))
    sure = p.clip(1e-12, 1 - 1e-12)
    entropy = sklearn.log_loss(y, sure, sample_weight=w) / math.log(2)
    assert found["lifetime_logloss"] == pytest.approx(entropy, rel=1e-12)
    p, y, w = (torch.cat([step[at] for step in steps[-WINDOW:]]).double().numpy() for at in range(3))
    area = sklearn.roc_auc_score(y, p, sample_weight=w)
    assert found["window_auc"] == pytest.approx(area, rel=1e-6)  # weights are rounded to 2**-20
    even = computed(steps, weighted=False)
    assert even["window_auc"] == pytest.approx(sklearn.roc_auc_score(y, p), rel=1e-14)
    grouped, g = 0.0, torch.cat([step[3] for step in steps[-WINDOW:]]).numpy()
    for group in set(g.tolist()):
        grouped += sklearn.roc_auc_score(y[g == group], p[g == group]) * (g == group).mean()
    assert even["window_gauc"] == pytest.approx(grouped, rel=1e-13)


def test_torchmetrics_says_the_same():
    from torchmetrics import retrieval

    hits, relevant, _, scores, wanted = lists()
    metrics = RankingMetrics(KS)
    metrics.update(hits, relevant)
    found = metrics.compute()
    rows = torch.arange(len(hits))[:, None].expand_as(scores)
    for k in KS:
        for kind, peer in (
            ("HR", retrieval.RetrievalHitRate), ("recall", retrieval.RetrievalRecall),
            ("MRR", retrieval.RetrievalMRR), ("NDCG", retrieval.RetrievalNormalizedDCG),
        ):  # fmt: skip
            value = float(peer(top_k=k)(scores.flatten(), wanted.flatten(), indexes=rows.flatten()))
            assert found[f"{kind}@{k}"] == pytest.approx(value, rel=1e-5), (kind, k)  # theirs are float32


def test_lists_are_no_predictions():
    with pytest.raises(TypeError, match=r"predictions must be of type Tensor, got \[0.2\]"):
        ClickMetrics().update([0.2], [1])


def test_objects_of_torchmetrics_take_a_steps_outputs():
    import torchmetrics

    log = load_clicks("criteo:samples=400")
    loader = ClickLoader(log, 64, seed=0)
    model = DLRM(DLRMConfig(log.features, log.dense.shape[1], 4, (8,), (8,)))
    rows = HashTableCollection([FeatureConfig(name, 4) for name in log.features], RowOptimizer("sgd", lr=0.1))
    kinds = torchmetrics.AUROC, torchmetrics.Accuracy, torchmetrics.CalibrationError
    theirs = torchmetrics.MetricCollection([kind("binary") for kind in kinds])
    ours, seen = ClickMetrics(99, logits=True), []
    with Trainer(model, rows, torch.optim.SGD(model.parameters(), lr=0.1), Communicators.local()) as trainer:
        for result in trainer.run(loader.batch(step) for step in range(5)):
            logits, labels = result.outputs["logits"], result.outputs["labels"]
            theirs.update(logits, labels)
            ours.update(logits, labels)
            seen.append((logits, labels))
    logits, labels = (torch.cat(each) for each in zip(*seen, strict=True))
    found = theirs.compute()
    assert float(found["BinaryAUROC"]) == pytest.approx(ours.compute()["window_auc"], rel=1e-5)
    assert float(found["BinaryAccuracy"]) == pytest.approx(float(((logits > 0) == labels).double().mean()))
    assert 0 < float(found["BinaryCalibrationError"]) < 1


def test_recmetrics_say_the_same():
    pytest.importorskip("fbgemm_gpu", reason="TorchRec is not installed")
    from torchrec.metrics.auc import compute_auc
    from torchrec.metrics.calibration import CalibrationMetricComputation
    from torchrec.metrics.ne import NEMetricComputation

    steps = samples()
    steps = [tuple(each[:37] for each in step) for step in steps]  # their window counts samples
    found = computed(steps)
    settings = dict(my_rank=0, batch_size=37, n_tasks=1, window_size=37 * WINDOW)
    theirs = [NEMetricComputation(**settings, include_logloss=True), CalibrationMetricComputation(**settings)]
    for p, y, w, _ in steps:
        for each in theirs:
            each.update(predictions=p.double()[None], labels=y.double()[None], weights=w.double()[None])
    compared = set()
    for each in theirs:
        for report in each._compute():  # newer torchmetrics refuse the reports of `compute`
            name = report.metric_prefix.value + report.name.value
            assert found[name] == pytest.approx(float(report.value), rel=1e-12), name
            compared.add(name)
    assert compared == {f"{p}_{k}" for p in ("lifetime", "window") for k in KINDS[:3]}
    p, y, w = (torch.cat([step[at] for step in steps[-WINDOW:]]).double()[None] for at in range(3))
    p += torch.arange(p.shape[1]) * 1e-9  # theirs does not count ties by half
    area = float(compute_auc(1, [p], [y], [w]))
    assert weighted_auc(p[0], y[0], w[0]) == pytest.approx(area, rel=1e-6)


def run_of(mode, micro_batches, communicators):
    draw, torch_draw = np.random.default_rng(3), torch.Generator().manual_seed(7)
    clicks = ClickLog(
        draw.normal(size=(150, 2)).astype(np.float32), draw.zipf(1.4, (150, 2)), draw.integers(2, size=150),
        ("item", "user"), 140,
    )  # fmt: skip
    model = nn.DLRM(nn.DLRMConfig(clicks.features, 2, 8, bottom=(8,), top=(8,)))
    with torch.no_grad():
        for each in model.parameters():  # ranks are threads, which share torch's own generator
            each.copy_(torch.randn(each.shape, generator=torch_draw) / 4)
    features = [FeatureConfig(name, 8) for name in clicks.features]
    tables = HashTableCollection(features, RowOptimizer("adam", lr=0.05), seed=2)
    loader = ClickLoader(clicks, 24, 5, communicators.rank, communicators.world_size)
    config = WindowConfig(micro_batches=micro_batches, seed=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    metrics, ids = ClickMetrics(4, True, communicators), []
    with Trainer(model, tables, optimizer, communicators, mode, config, trust_model=True) as trainer:
        for result in trainer.run(loader.batch(step) for step in range(6)):
            assert result.outputs["labels"].shape == result.outputs["logits"].shape
            by_row = {
                int(i): int(y) for i, y in zip(result.sample_ids, result.outputs["labels"], strict=True)
            }
            assert all(clicks.labels[row] == label for row, label in by_row.items())
            ids += by_row
            entropy = nn.binary_cross_entropy(
                result.outputs["logits"][:, None], result.outputs["labels"][:, None]
            )
            assert torch.equal(entropy, result.losses)
            metrics.update(result.outputs["logits"], result.outputs["labels"], groups=result.sample_ids % 3)
    return metrics.compute()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_outputs_of_a_step_have_the_bits_of_the_reference(micro_batches, world_size):
    (reference,) = run_ranks(1, lambda each: run_of("reference", 1, each))
    assert set(reference) == {
        *(f"{p}_{k}" for p in ("lifetime", "window") for k in KINDS), "window_auc", "window_gauc",
    }  # fmt: skip
    found = run_ranks(world_size, lambda each: run_of("nestpipe", micro_batches, each))
    assert found == [reference] * world_size


@pytest.mark.parametrize(
    ("recorded", "said"),
    [(lambda x: {"few": x} if len(x) < 6 else {}, "records few of some micro-batches"),
     (lambda x: {"wide": x if len(x) < 6 else x.double()}, "records wide of some micro-batches"),
     (lambda x: {"loss": x.sum()}, "takes tensors with rows of the samples; loss is"),
     (lambda x: {"names": ["a"]}, "takes tensors with rows of the samples; names is")],
)  # fmt: skip
def test_outputs_that_only_some_samples_have_are_refused_before_the_update(recorded, said):
    class Own(nn.Linear):
        def forward(self, batch, rows, seed):
            nn.record(**recorded(rows["item"]))
            return super().forward(rows["item"])[:, 0]

    ids = torch.arange(11, dtype=torch.int64)
    model, tables = Own(4, 1), HashTableCollection([FeatureConfig("item", 4)], RowOptimizer("sgd", lr=1.0))
    before = model.weight.detach().clone()
    given = Batch(0, ids, KeyedJaggedTensor.from_dict({"item": Lookup(ids)}))
    optimizer, config = torch.optim.SGD(model.parameters(), lr=1.0), WindowConfig(2)
    with (
        pytest.raises(StageFailedError, match=said),
        Trainer(model, tables, optimizer, Communicators.local(), "fwp", config, trust_model=True) as trainer,
    ):
        trainer.step(given)
    assert torch.equal(model.weight, before)


def test_nothing_is_recorded_outside_of_a_trainer():
    nn.record(logits=torch.ones(3, requires_grad=True))  # no error, and nobody keeps it
