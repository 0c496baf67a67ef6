"""Promise: a predictor's vectors have the bits of the export's program, whatever computes them."""

import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from tritonrec.data.jagged import offsets_of
from tritonrec.kernels import workers
from tritonrec.kernels.linear import numba_linear
from tritonrec.nn import DLRM, HSTU, DLRMConfig, FuXi, FuXiConfig, HSTUConfig, SASRec, SASRecConfig
from tritonrec.serving import Predictor, whole
from tritonrec.serving.encoder import give_weights
from tritonrec.serving.numba_layers import CHUNK
from tritonrec.serving.programs import InPrecision, scorer_of
from tritonrec.serving.whole import program_or_whole

LONGEST, DIM = CHUNK + 9, 20
SIZES = {"dim": DIM, "layers": 3, "heads": 3, "qk_dim": 8, "v_dim": 12, "max_seq_len": LONGEST}
MODELS = {
    "hstu": lambda: HSTU(HSTUConfig(**SIZES)),
    "timed": lambda: HSTU(HSTUConfig(**SIZES, relative_bias=True, time_buckets=9)),
    "sasrec": lambda: SASRec(SASRecConfig(**SIZES, ffn_dim=28)),
}
BATCHES = {
    "one_event": [1],
    "one_user": [35],
    "longest": [LONGEST],
    "ragged": [3, 1, 17, 1, 64, 65, 2],
    "over_a_chunk": [200, 55, 1, 1, 255, LONGEST, 2],
    "many": [1 + 7 * n % 11 for n in range(80)],
    "none": [],
}


class Counted(InPrecision):
    """A program that counts its calls."""

    calls = 0

    def forward(self, *arguments):
        self.calls += 1
        return super().forward(*arguments)


@pytest.fixture(scope="module")
def made():
    """The manifest's part and the program of each model, and what computes its vectors."""
    found = {}
    for number, (name, model) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        scorer = scorer_of(model().eval().requires_grad_(False), DIM)
        for each in scorer.module.parameters():  # as after a long training
            each.mul_(1.5).add_(torch.randn(each.shape) * 0.1)
        program = Counted(scorer.module, "float32")
        with warnings.catch_warnings(action="error"):
            found[name] = scorer.described, program, program_or_whole(scorer.described, program)
    return found


def arguments(lengths, seed=0):
    draw, count = torch.Generator().manual_seed(seed), sum(lengths)
    rows = torch.randn(count, DIM, generator=draw) * 2
    times = torch.randint(2**24, (count,), generator=draw).sort().values
    return rows, offsets_of(torch.tensor(lengths, dtype=torch.int64)), times


def same(got, want):
    return got.dtype == want.dtype and torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("threads", [1, 3])
def test_all_bits_of_any_batch_on_any_threads(made, monkeypatch, name, batch, threads):
    monkeypatch.setattr(workers, "THREAD_COST", 1)  # however small, users are shared among threads
    monkeypatch.setattr(whole, "THREAD_COST", 10**18)  # and no user is left to the program
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    _, program, vectors = made[name]
    given = arguments(BATCHES[batch])
    before = program.calls
    got = vectors(*given)
    assert program.calls == before
    assert got.shape == (len(BATCHES[batch]), DIM) and same(got, program(*given))


@pytest.mark.parametrize("name", MODELS)
def test_views_and_calls_from_several_threads(made, name):
    _, program, vectors = made[name]
    rows, offsets, times = arguments([5, 30, 1])
    strided = [each.repeat_interleave(2, 0)[::2] for each in (rows, offsets, times)]
    assert same(vectors(*strided), program(rows, offsets, times))
    given = [arguments([1 + seed, 40 - seed], seed) for seed in range(30)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: vectors(*each), given))
    assert all(same(got, program(*each)) for got, each in zip(found, given, strict=True))


@pytest.mark.parametrize("lengths", [[LONGEST], [LONGEST, 9, 9], [1, LONGEST]])
def test_one_user_for_many_threads_is_left_to_the_program(made, monkeypatch, lengths):
    _, program, vectors = made["hstu"]
    before = program.calls
    vectors(*arguments(lengths))
    monkeypatch.setattr(whole, "THREAD_COST", 1)
    for threads, called in ((1, 0), (2, 0), (8, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        vectors(*arguments(lengths))
        assert program.calls == before + called


@pytest.mark.parametrize("name", MODELS)
def test_values_that_are_not_finite_are_the_program_s(made, name):
    _, program, vectors = made[name]
    rows, offsets, times = arguments([3, 40, 2])
    rows[10, 4] = torch.inf
    got, want = vectors(rows, offsets, times), program(rows, offsets, times)
    assert same(got, want) and not bool(want.isfinite().all())


def test_rows_of_another_width_are_read_by_the_program_alone(made):
    _, program, vectors = made["hstu"]
    rows, *rest = arguments([3, 4])
    before = program.calls
    with pytest.raises(RuntimeError, match=str(DIM)):
        vectors(rows[:, :-1], *rest)
    assert program.calls == before + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2, "qk_dim": 12, "v_dim": 18}, "other bits"),
        ({"layers": 2}, "missing"),
        ({"dim": 2**16, "layers": 1}, r"\(265, 20\) in the export and \(265, 65536\)"),
        ({"dim": 2**40}, "65536"),
        ({"heads": "3"}, "heads"),
        ({"qk_dim": 0}, "zero"),
        ({"max_seq_len": LONGEST - 1}, "264, 20"),
        ({"strange": 1}, "strange"),
    ],
)
def test_layers_that_a_program_does_not_have_are_told_and_not_run(made, change, message):
    described, program, _ = made["hstu"]
    layers = described["layers"]
    wrong = {**described, "layers": {**layers, "config": {**layers["config"], **change}}}
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=message):
        assert program_or_whole(wrong, program) is program
    assert torch.equal(torch.get_rng_state(), before)


def test_a_name_and_a_length_that_do_not_fit_are_told(made):
    described, program, _ = made["hstu"]
    for wrong in (
        {**described, "layers": {**described["layers"], "model": "GRU"}},
        {**described, "max_seq_len": LONGEST + 1},
    ):
        with pytest.warns(UserWarning, match="its program is run"):
            assert program_or_whole(wrong, program) is program


def test_a_program_without_layers_is_run_whatever_its_export_says():
    config = HSTUConfig(**{**SIZES, "layers": 0})
    scorer = scorer_of(HSTU(config).eval().requires_grad_(False), DIM)
    program = scorer.program()
    described = {**scorer.described, "layers": {"model": "HSTU", "config": asdict(config)}}
    with pytest.warns(UserWarning, match="its program is run"):
        assert program_or_whole(described, program) is program


FEATURES = ("a", "b", "c")
CLICKS = {
    "wide": DLRMConfig(FEATURES, 5, 12, (70, 9), (80, 7)),
    "one_layer": DLRMConfig(FEATURES, 65, 16, (), ()),
    "no_dense": DLRMConfig(FEATURES, 0, 12, (9,), (33,)),
    "one_feature": DLRMConfig(("a",), 3, 4, (5,), (6,)),
}


def clicks_of(config, seed=3):
    """The manifest's part, the program, and what computes its logits."""
    torch.manual_seed(seed)
    scorer = scorer_of(DLRM(config).eval().requires_grad_(False), config.dim)
    for each in scorer.module.parameters():
        each.mul_(1.5).add_(torch.randn(each.shape) * 0.1)
    program = Counted(scorer.module, "float32")
    with warnings.catch_warnings(action="error"):
        return scorer.described, program, program_or_whole(scorer.described, program)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CLICKS)
def test_all_bits_of_clicks_on_any_threads(monkeypatch, name, threads):
    monkeypatch.setattr(workers, "THREAD_COST", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    config = CLICKS[name]
    _, program, logits = clicks_of(config)
    for count in (1, 2, 31, 33, 70, 0):
        draw = torch.Generator().manual_seed(count)
        dense = torch.randn(count, config.dense, generator=draw) * 3
        rows = torch.randn(count, len(config.features), config.dim, generator=draw)
        before = program.calls
        got = logits(dense, rows)
        assert program.calls == before and same(got, program(dense, rows)), count
        strided = dense.t().contiguous().t(), rows.repeat_interleave(2, 1)[:, ::2]
        assert same(logits(*strided), got)
    dense, rows = torch.randn(2, config.dense), torch.randn(2, len(config.features), config.dim)
    rows[1, 0, 2] = torch.inf
    assert same(logits(dense, rows), program(dense, rows))


def test_rows_and_dense_features_of_another_width_are_read_by_the_program_alone():
    _, program, logits = clicks_of(CLICKS["wide"])
    dense, rows = torch.randn(2, 5), torch.randn(2, 3, 12)
    for given in ((dense[:, 1:], rows), (dense, rows[:, 1:]), (dense, rows[..., 1:]), (dense, rows[1:])):
        before = program.calls
        with pytest.raises((RuntimeError, ValueError)):
            logits(*given)
        assert program.calls == before + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": ["a", "b"]}, r"top.0.weight is \(80, 18\) in the export and \(80, 15\)"),
        ({"features": ["a", "c", "b"]}, r"features is \['a', 'b', 'c'\] beside it"),
        ({"top": [80]}, "top.1.weight"),
        ({"dense": 6}, "bottom.0.weight"),
        ({"dim": 0}, "dim"),
    ],
)
def test_clicks_that_a_program_does_not_have_are_told_and_not_run(change, message):
    described, program, _ = clicks_of(CLICKS["wide"])
    layers = described["layers"]
    wrong = {**described, "layers": {**layers, "config": {**layers["config"], **change}}}
    with pytest.warns(UserWarning, match=message):
        assert program_or_whole(wrong, program) is program


def test_clicks_of_ones_own_layers_are_not_described():
    model = DLRM(CLICKS["wide"])
    model.top[1] = type("Own", (type(model.top[1]),), {})(80, 7)
    own = type("Own", (DLRM,), {})(CLICKS["wide"])
    assert "layers" not in scorer_of(model, 12).described and "layers" not in scorer_of(own, 12).described


def test_other_models_and_precisions_have_their_program_alone(made):
    described, program, _ = made["sasrec"]
    fuxi = scorer_of(FuXi(FuXiConfig(**SIZES)), DIM)
    assert "layers" not in fuxi.described
    with warnings.catch_warnings(action="error"):
        assert program_or_whole({**described, "precision": "bf16"}, program) is program
        assert program_or_whole(fuxi.described, fuxi.program()) not in (None, program)
        compiled = lambda *given: program(*given)  # noqa: E731
        assert program_or_whole(described, compiled) is compiled


def test_layers_of_ones_own_are_not_described():
    model = SASRec(SASRecConfig(**SIZES))
    model.layers[1] = type("Own", (type(model.layers[1]),), {})(model.config)
    assert "layers" not in scorer_of(model, DIM).described
    assert "layers" not in scorer_of(HSTU(HSTUConfig(**{**SIZES, "layers": 0})), DIM).described


def test_weights_of_a_program_are_laid_out_once_and_anew_where_they_change(monkeypatch):
    torch.manual_seed(3)
    scorer = scorer_of(FuXi(FuXiConfig(**SIZES)).eval().requires_grad_(False), DIM)
    program, made = scorer.program(), []
    lay_out = numba_linear._lay_out
    monkeypatch.setattr(numba_linear, "_lay_out", lambda weight: made.append(weight) or lay_out(weight))
    given = arguments([4, 9])
    want = program(*given)
    each_call = len(made)
    Predictor({"step": 0, "dense": scorer.described}, {}, program)
    assert same(program(*given), want) and len(made) == 2 * each_call
    assert same(program(*given), want) and len(made) == 2 * each_call
    weight = next(each for each in program.parameters() if each.dim() == 2 and len(each) > DIM)
    weight.mul_(1.5)
    fresh = scorer_of(FuXi(FuXiConfig(**SIZES)).eval().requires_grad_(False), DIM).program()
    fresh.load_state_dict(program.state_dict())
    assert same(program(*given), fresh(*given))
    watched = [weakref.ref(each) for each in program.parameters()]
    del program, scorer, weight, want, made[:]
    gc.collect()
    assert not any(each() is not None for each in watched)


def test_weights_that_are_changed_are_those_of_the_next_vectors():
    torch.manual_seed(4)
    scorer = scorer_of(HSTU(HSTUConfig(**SIZES)).eval().requires_grad_(False), DIM)
    program, given = scorer.program(), arguments([4, 9])
    predictor = Predictor({"step": 0, "dense": scorer.described}, {}, program)
    predictor.rows = lambda feature, ids: given[0]
    seen = []

    def compare():
        got = predictor.vectors(torch.arange(len(given[0])), *given[1:])
        assert predictor._encoder is not program and same(got, program(*given))
        assert not any(same(got, each) for each in seen)
        seen.append(got)

    compare()
    made = predictor._encoder
    assert predictor._encoder is made
    values = {name: each * 1.5 for name, each in program.state_dict().items()}
    program.load_state_dict(values)
    compare()
    program.load_state_dict({name: each * 0.5 for name, each in values.items()}, assign=True)
    compare()
    next(program.parameters()).add_(1.0)
    compare()


def test_a_model_that_is_given_weights_has_its_own():
    program = scorer_of(SASRec(SASRecConfig(**SIZES)).eval().requires_grad_(False), DIM).program()
    model = SASRec(SASRecConfig(**SIZES)).requires_grad_(False)
    give_weights(model, program)
    before = model.norm.weight.clone()
    for each in program.parameters():
        each.add_(1.0)
    assert torch.equal(model.norm.weight, before)
