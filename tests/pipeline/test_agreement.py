"""Promise: ranks that differ in model, settings or batches get one error on every rank that says in what."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from speeds import slow_except
from trainer_parts import JOB

from tritonrec.distributed import Communicators, RanksDisagreeError, check_ranks_agree
from tritonrec.embedding import Eviction, HashTableCollection, RowOptimizer, TablePolicy
from tritonrec.pipeline import Trainer, WindowConfig, agreement
from tritonrec.settings import with_values

pytestmark = pytest.mark.multi_rank

MANY = JOB.__class__(**{**vars(JOB), "slots": 256, "chunk_rows": 128})


def change_values(model, *rest):
    model.layers[0].output.weight.data[1, 2] += 1e-6


def change_state(model, tables, optimizer):
    model.layers[0].output.weight.grad = torch.ones_like(model.layers[0].output.weight)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()  # the state moves, the weight does not
    optimizer.param_groups[0]["lr"] = 0.05


def reorder(model, *rest):
    first = next(iter(model._modules))
    model._modules[first] = model._modules.pop(first)


def freeze(model, *rest):
    model.layers[0].output.weight.requires_grad_(False)


def freeze_rows(model, tables, optimizer):
    tables.requires_grad_(False)


def evaluate(model, *rest):
    model.eval()


def dense_rule(model, tables, optimizer):
    optimizer.param_groups[0]["betas"] = 0.9, 0.99


def other_optimizer(model, tables, optimizer):
    return model, tables, torch.optim.RAdam(model.parameters(), lr=0.05)


def squared(update):
    return 0.05 / update**2


def of_rule(tables, rule):
    return HashTableCollection(list(tables.features.values()), rule)


def rate_by_function(model, tables, optimizer):
    return model, of_rule(tables, RowOptimizer("adam", squared)), optimizer


def signed(weight, state, gradient, step, lr):
    return weight - lr * gradient.sign(), state


def own_rule(model, tables, optimizer):
    return model, of_rule(tables, RowOptimizer.custom(signed, 0, lr=0.05)), optimizer


def config(**options):
    return {"window": with_values(WindowConfig(), {"micro_batches": 2, **options})}


def job(**options):
    return {"job": replace(JOB, **options)}


def sizes(**options):
    return job(sizes=replace(JOB.sizes, **options))


# What the last rank does otherwise, and how the error names it.
DIFFERENCES = {
    "lr": (job(lr=0.01), "lr=0.01", "lr=0.05"),
    "optimizer": ({"optimizer": "sgd"}, "name='sgd'", "name='adam'"),
    "schedule": (job(lr_schedule="cosine"), "lr=WarmupCosine(lr=0.05, warmup=0", "lr=0.05"),
    "function for a rate": ({"parts": rate_by_function}, "squared', rates=(0.05, 0.0005", "lr=0.05"),
    "rule of a user's own": ({"parts": own_rule}, "signed', widths=(0, 0, 0)", "custom_update=None"),
    "weight decay": (job(weight_decay=0.1), "weight_decay=0.1", "weight_decay=0.0"),
    "settings of the dense optimizer": ({"parts": dense_rule}, "0.99)", "0.999)"),
    "optimizer of the dense model alone": ({"parts": other_optimizer}, "optimizer=RAdam", "optimizer=Adam"),
    "seed of model and tables": (job(seed=5), "seed of the tables=5", "seed of the tables=0"),
    "policy": (
        job(policy=TablePolicy(Eviction("lru", capacity=9))), "Eviction(policy='lru'", "eviction=None"
    ),
    "dropout": (sizes(dropout=0.3), "dropout=0.3", "dropout=0.2"),
    "width": (sizes(v_dim=5), "v_dim=5", "v_dim=4"),
    "depth": (sizes(layers=2), "layers=2", "layers=1"),
    "temperature, which no parameter shows": (sizes(temperature=0.5), "temperature=0.5", "temperature=1.0"),
    "values": (
        {"parts": change_values}, "parameter layers.0.output.weight=", "parameter layers.0.output.weight="
    ),
    "order of parameters": ({"parts": reorder}, "=number 0, ", "=number 0, "),
    "optimizer state": (
        {"parts": change_state},
        "optimizer state layers.0.output.weight/step=",
        "rank 0 has no optimizer state layers.0.output.weight/step",
    ),
    "a frozen parameter": ({"parts": freeze}, "frozen", "parameter layers.0.output.weight="),
    "frozen rows": ({"parts": freeze_rows}, "rows of table item=frozen", "rows of table item=trained"),
    "evaluation": ({"parts": evaluate}, "training=False", "training=True"),
    "dropout's seed": (config(seed=3), "seed=3", "seed=0"),
    "grid": (config(fraction_bits=30), "fraction_bits=30", "fraction_bits=36"),
    "N": (config(micro_batches=3), "micro_batches=3", "micro_batches=2"),
    "consistency": (config(consistency="window"), "consistency=window", "consistency=batch"),
    "first use": (config(first_use=True), "first_use=True", "first_use=False"),
    "taper": (config(taper=0.5), "taper=0.5", "taper=1.0"),
    "skip fetch": (config(skip_fetch=True), "skip_fetch=True", "skip_fetch=False"),
    "dedup": (config(dedup="lookup"), "dedup=lookup", "dedup=both"),
    "clustering": (config(clustering=True), "clustering=True", "clustering=False"),
    "depth of the pipeline": (config(depth=2), "depth=2", "depth=0"),
    "accumulation": (config(accumulate=2), "accumulate=2", "accumulate=1"),
    "mode": ({"mode": "fwp"}, "mode=fwp", "mode=nestpipe"),
    "implementation of the ops": ({"impl": "reference"}, "impl=reference", "impl=auto"),
    "version": ({"version": "0.0.1"}, "tritonrec=0.0.1", "tritonrec="),
}  # fmt: skip


def message_of(communicators, others=None, job=JOB):
    """The error of a trainer, which the last rank makes otherwise; the rank's lanes end with it."""
    options = {"job": job, "optimizer": "adam", "mode": "nestpipe", **config(), "version": None}
    if others is not None and communicators.rank == communicators.world_size - 1:
        options.update(others)
    parts = options["job"].build(options["optimizer"])
    if "parts" in options:
        parts = options["parts"](*parts) or parts
    version = options["version"] or agreement.__version__
    with mock.patch.object(agreement, "__version__", version):
        try:
            mode, impl = options["mode"], options.get("impl", "auto")
            with Trainer(*parts, communicators, mode, options["window"], impl=impl):
                return ""
        except RanksDisagreeError as error:
            return str(error)


QUICK = [name for number, name in enumerate(DIFFERENCES) if number % 3 == 0]


@pytest.mark.parametrize("name", slow_except(QUICK, DIFFERENCES))
def test_a_setting_that_differs_is_named_on_every_rank(pool, name):
    others, there, here = DIFFERENCES[name]
    first, *rest = pool.run(message_of, 2, others)
    assert rest == [first]
    assert "rank 1 has " in first and " and rank 0 has " in first and "give every rank the same" in first
    assert there in first and here in first


@pytest.mark.slow
def test_the_rank_is_named_among_replicas_too(pool):
    messages = pool.run(message_of, 4, DIFFERENCES["lr"][0], replicas=2)
    assert len(set(messages)) == 1
    assert "rank 3 has " in messages[0] and "rank 0 has " in messages[0]


def test_equal_ranks_and_those_whose_bits_cannot_differ_pass(pool):
    assert pool.run(message_of, 2, None) == ["", ""]
    assert pool.run(message_of, 2, {"job": MANY}) == ["", ""]
    assert pool.run(message_of, 4, None, replicas=2) == [""] * 4


def other_buffer_at_first(communicators):
    model, tables, optimizer = JOB.build("adam")
    model.register_buffer("shift", torch.arange(4.0) + communicators.rank)
    try:
        Trainer(model, tables, optimizer, communicators, "nestpipe", WindowConfig(2)).close()
    except RanksDisagreeError as error:
        return str(error)


def test_buffers_that_differ_from_the_start_are_named(pool):
    for message in pool.run(other_buffer_at_first, 2):
        assert "rank 1 has buffer shift=float32 (4,) with SHA-256 " in message


def other_groups(communicators, name, values):
    try:
        Communicators.over([0, 1], **{name: values[communicators.rank]})
    except RanksDisagreeError as error:
        return str(error)


GROUPS = {"replicas": (1, 2), "nodes": (1, 2), "backend": ("gloo", "cpu:gloo")}


@pytest.mark.parametrize("name", GROUPS)
def test_ranks_that_make_other_groups_are_named_before_they_wait(pool, name):
    first, second = GROUPS[name]
    for message in pool.run(other_groups, 2, name, (first, second)):
        assert f"rank 1 has {name}={second} and rank 0 has {name}={first}" in message


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("ranks", [[1, 0], [1, 1], [0, 1, 3, 2]])
def test_ranks_that_groups_would_count_otherwise_are_refused(ranks, replicas):
    with pytest.raises(ValueError, match="ranks must ascend along 'shard' and along 'replicate'"):
        Communicators.over(ranks, replicas=replicas)


def test_processors_of_another_kind_are_an_error_at_batch_and_a_warning_at_window(pool):
    for message in pool.run(other_processor, 2, "batch"):
        assert "rank 1 has torch.backends.cpu.get_cpu_capability()=AVX9 and rank 0 has " in message
    for message in pool.run(other_processor, 2, "window"):
        assert message.startswith("warned") and "AVX9" in message


def other_processor(communicators, consistency):
    own = torch.backends.cpu.get_cpu_capability()
    found = "AVX9" if communicators.rank == 1 else own
    window = WindowConfig(2, consistency=consistency)
    with mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: found):
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                Trainer(*JOB.build("adam"), communicators, "nestpipe", window).close()
        except RanksDisagreeError as error:
            return str(error)
    return f"warned {[str(each.message) for each in warned]}"


def test_one_rank_compares_nothing():
    with mock.patch.object(agreement, "_of", side_effect=AssertionError("hashed")):
        assert message_of(Communicators.local()) == ""


class Texts:
    """Ranks whose texts are there already."""

    world_size = 3

    def __init__(self, *texts):
        self.texts = list(texts)

    def all_gather_texts(self, text):
        return self.texts


def test_an_error_lists_a_few_settings_and_counts_the_others():
    texts = Texts("{}", "{}", '{"a": "1", "b": "2", "c": "3", "d": "4", "e": "5", "f": "6", "g": "7"}')
    with pytest.raises(RanksDisagreeError) as caught:
        check_ranks_agree(texts, {})
    assert str(caught.value).startswith("rank 2 has a=1 and rank 0 has no a; rank 2 has b=2")
    assert str(caught.value).endswith("; 2 more settings differ: give every rank the same")


def test_settings_are_compared_in_words_that_no_process_changes(monkeypatch):
    found = []
    monkeypatch.setattr(agreement, "check_ranks_agree", lambda group, settings: found.append(settings))
    model, tables, optimizer = JOB.build("adam")
    with Trainer(model, tables, optimizer, Communicators.local(), "nestpipe") as trainer:
        two, device = SimpleNamespace(world_size=2, control=None), torch.device("cpu")
        rest = "nestpipe", trainer.config, trainer._schedule, device, "auto"
        agreement.validate_same_training(two, tables, trainer.dense, *rest)
    assert found[0]["schedule"].startswith("nestpipe ")
