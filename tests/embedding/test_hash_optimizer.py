"""Promise: what torch offers around an optimizer works on rows: scaling, clipping, schedules, state."""

import copy
import io
import math
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

from tritonrec import HashEmbedding, HashEmbeddingCollection, HashOptimizer
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer, StepDecay, hash_optimizer
from tritonrec.embedding.row_gradients import RowGradients

IDS = torch.tensor([4, -9, 4, 2**63 - 1])


def made(name="adam", lr=0.1, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        HashEmbedding(3, RowOptimizer(name, lr=lr, **options), seed=1), torch.nn.Linear(3, 2)
    )
    return model, HashOptimizer(model)


def step(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    loss = model(IDS).square().sum() * factor
    loss.backward()
    return loss


def rows(model):
    return model[0].tables.export()["embedding"][1]


def gradient(optimizer):
    return optimizer.param_groups[0]["params"][0].grad


def test_a_step_without_a_backward_pass_is_refused():
    model, optimizer = made()
    with pytest.raises(RuntimeError, match=r"step\(\) without gradients of rows: call loss.backward"):
        optimizer.step()
    step(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="without gradients"):
        optimizer.step()
    assert optimizer.updates == 1


def test_a_model_without_hash_embeddings_is_refused():
    with pytest.raises(ValueError, match="Linear has no hash embeddings"):
        HashOptimizer(torch.nn.Linear(2, 2))


def test_parameters_that_nothing_would_update_are_refused():
    rows = HashOptimizer(HashEmbedding(4))
    with pytest.raises(
        ValueError, match="rows of the model's hash embeddings alone: give parameters to an opt"
    ):
        rows.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(rows.param_groups) == 1


def test_gradients_stay_until_zero_grad_as_in_torch():
    model, optimizer = made("sgd", lr=1.0)
    before = model[0].tables.initial_rows("embedding", torch.tensor([4]))
    step(model, optimizer)
    one = gradient(optimizer).clone()
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(model[0].eval()(torch.tensor([4])), before - 2 * one[:1])
    optimizer.zero_grad()
    assert gradient(optimizer) is None


def test_the_next_step_takes_a_gradient_that_was_set():
    model, optimizer = made("sgd", lr=1.0)
    step(model, optimizer)
    parameter, before = optimizer.param_groups[0]["params"][0], rows(model)
    parameter.grad = torch.ones_like(parameter.grad)
    optimizer.step()
    assert torch.equal(rows(model), before - 1)
    for wrong in (torch.ones(3, 3, dtype=torch.float64), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"table embedding is float32 \(3, 3\), got"):
            parameter.grad = wrong


def test_a_closure_is_called():
    model, optimizer = made()
    assert optimizer.step(lambda: step(model, optimizer)) > 0 and optimizer.updates == 1


def test_the_grad_scaler_scales_back_and_skips_what_is_not_finite():
    (plain, expected), (model, optimizer) = made(), made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step(plain, expected)
    expected.step()
    optimizer.zero_grad()
    scaler.scale(model(IDS).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(rows(model), rows(plain), rtol=1e-5, atol=1e-7)
    before = rows(model)
    for factor in (math.inf, math.nan, 1e20):  # the last one is too large for fixed point
        step(model, optimizer, factor)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(rows(model), before) and scaler.get_scale() == scale / 2
    assert optimizer.updates == 1


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e20])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_an_error(factor):
    model, optimizer = made()
    step(model, optimizer)
    before = rows(model)
    step(model, optimizer, factor)
    with pytest.raises(FloatingPointError, match="a gradient of table embedding is not finite"):
        optimizer.step()
    assert torch.equal(rows(model), before) and optimizer.updates == 0


@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 1e20, -1e20])
def test_one_value_of_a_gradient_is_enough(wrong, consistency):
    model = HashEmbedding(4, RowOptimizer("sgd", lr=0.1), consistency=consistency)
    optimizer, ids, cotangent = HashOptimizer(model), torch.arange(5), torch.ones(5, 4)
    cotangent[3, 1] = wrong
    model(ids).backward(cotangent)
    if abs(wrong) == 1e20 and consistency == "window":
        return optimizer.step()  # no fixed point: it is a number as others
    with pytest.raises(FloatingPointError, match="a gradient of table embedding is not finite"):
        optimizer.step()


@pytest.mark.parametrize("largest", [1e-3, 0.7, 1e6])
def test_torchs_clipping_and_ours_scale_rows_with_parameters(largest):
    (model, optimizer), (other, exact) = made("sgd", lr=1.0), made("sgd", lr=1.0)
    step(model, optimizer)
    step(other, exact)
    together = [*model.parameters(), optimizer.param_groups[0]["params"][0]]
    norm = torch.nn.utils.clip_grad_norm_(together, largest)
    same = exact.clip_grad_norm_(other.parameters(), largest)
    torch.testing.assert_close(norm, same, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient(optimizer), gradient(exact), rtol=1e-5, atol=1e-7)
    left = torch.cat([each.grad.flatten() for each in together if each.grad is not None]).norm()
    torch.testing.assert_close(left, norm.clamp(max=largest), rtol=1e-4, atol=0)
    optimizer.step()
    exact.step()
    torch.testing.assert_close(rows(model), rows(other), rtol=1e-5, atol=1e-6)


def test_clipping_refuses_a_norm_that_is_not_finite():
    model, optimizer = made()
    step(model, optimizer, math.nan)
    with pytest.raises(FloatingPointError, match="norm of the gradients is not finite"):
        optimizer.clip_grad_norm_(model.parameters(), 1.0)


def test_a_scheduler_of_torch_sets_the_rate():
    (model, optimizer), (own, scheduled) = made("adam", 0.4), made("adam", StepDecay(0.4, 2, 0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number in range(5):
        assert optimizer.rates == scheduled.rates == [0.4 * 0.5 ** (number // 2)]
        step(model, optimizer)
        step(own, scheduled)
        optimizer.step()
        scheduled.step()
        scheduler.step()
    assert torch.equal(rows(model), rows(own))


def test_a_warm_up_may_begin_at_zero():
    model, optimizer = made("sgd")
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: number / 4)
    step(model, optimizer)
    before = rows(model)
    optimizer.step()
    assert torch.equal(rows(model), before)


def test_a_rate_beside_a_schedule_or_lazy_decay_is_refused():
    for rule, message in (
        ({"lr": StepDecay(0.4, 2)}, "has the schedule StepDecay"),
        ({"lazy_weight_decay": True, "weight_decay": 0.1}, "lazy weight decay makes up for updates"),
    ):
        model, optimizer = made(**rule)
        optimizer.param_groups[0]["lr"] = 0.01
        step(model, optimizer)
        with pytest.raises(ValueError, match=f"the rate of table embedding was set to 0.01.*{message}"):
            optimizer.step()
        assert optimizer.updates == 0


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_run_goes_on_from_its_state_bit_for_bit(order, fresh):
    model, optimizer = made()
    for _ in range(2):
        step(model, optimizer)
        optimizer.step()
    file = io.BytesIO()
    optimizer.param_groups[0]["lr"] = 0.3
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    again, resumed = made(lr=0.2)
    if not fresh:  # other rows, whose state has to go
        again[0](torch.tensor([1, 4, 5])).sum().backward()
        resumed.step()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    loads = [
        lambda: again.load_state_dict(saved["model"]),
        lambda: resumed.load_state_dict(saved["optimizer"]),
    ]
    for load in loads if order == "model first" else loads[::-1]:
        load()
    assert torch.equal(rows(again), rows(model)) and resumed.rates == [0.3] and resumed.updates == 2
    for one, other in ((model, optimizer), (again, resumed)):
        step(one, other)
        other.step()
    assert torch.equal(rows(again), rows(model))


def test_a_state_of_another_rule_is_refused():
    state = made("adam")[1].state_dict()
    with pytest.raises(ValueError, match="updated by the rule 'adam', and here by 'rowwise_adagrad'"):
        made("rowwise_adagrad")[1].load_state_dict(state)


@pytest.mark.parametrize("option", ["eps", "beta1", "beta2", "weight_decay"])
def test_a_state_of_other_settings_is_refused_or_loaded_by_choice(option):
    there, here = made(), made(**{option: 0.5})
    step(*there)
    there[1].step()
    state = there[1].state_dict()
    with pytest.raises(ValueError, match=rf"was updated with .*{option}=.*, and here with .*{option}=0.5"):
        here[1].load_state_dict(state)
    assert here[1].updates == 0
    del state["param_groups"][0]["settings"]
    here[1].load_state_dict(state)
    assert here[1].updates == 1


def test_a_copy_trains_on_alone():
    model, optimizer = made()
    step(model, optimizer)
    optimizer.step()
    twin = copy.deepcopy(model)
    assert torch.equal(rows(twin), rows(model))
    step(model, optimizer)
    optimizer.step()
    assert not torch.equal(rows(twin), rows(model))
    own = HashOptimizer(twin)
    own.load_state_dict({**optimizer.state_dict(), "state": own.state_dict()["state"], "updates": 1})
    step(twin, own)
    own.step()
    assert torch.equal(rows(twin), rows(model))


def test_optimizers_are_not_copied_or_pickled():
    _, optimizer = made()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a HashOptimizer has no"):
            copied(optimizer.param_groups)
    with pytest.raises(TypeError, match="a HashOptimizer has no copy"):
        copy.copy(optimizer)


def test_one_table_in_two_modules_is_refused():
    tables = HashTableCollection([FeatureConfig("item", 3)])
    with pytest.raises(ValueError, match="two hash embeddings of ModuleList have the same table"):
        HashOptimizer(torch.nn.ModuleList([HashEmbeddingCollection(tables) for _ in range(2)]))


def test_a_module_is_pickled_with_its_rows():
    model, optimizer = made()
    step(model, optimizer)
    optimizer.step()
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(rows(again), rows(model))


def test_what_a_state_lacks_is_named():
    model, _ = made()
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"0.embedding.weight\"\. $"):
        model.load_state_dict({name: each for name, each in state.items() if name != "0.embedding.weight"})
    with pytest.raises(
        RuntimeError, match=r"0.embedding.weight has shape .*, the table has rows of 3 float32"
    ):
        model.load_state_dict({**state, "0.embedding.weight": torch.zeros(0, 4)})
    model.load_state_dict({}, strict=False)


def test_weights_alone_leave_the_optimizers_state():
    model, optimizer = made()
    step(model, optimizer)
    optimizer.step()
    tables, before = model[0].tables, rows(model)
    ids, weights = tables.weights()["embedding"]
    tables.load_weights("embedding", torch.cat([ids, torch.tensor([77])]), torch.ones(4, 3))
    after = rows(model)
    assert torch.equal(weights, before[:, :3]) and torch.equal(after[:, :3], torch.ones(4, 3))
    assert torch.equal(after[[0, 1, 3], 3:], before[:, 3:]) and not after[2, 3:].any()
    with pytest.raises(ValueError, match=r"takes weights \(1, 3\) float32 for 1 ids, got \(1, 4\)"):
        tables.load_weights("embedding", ids[:1], torch.ones(1, 4))


def test_a_row_without_a_state_in_the_state_begins_anew():
    model, optimizer = made()
    empty = optimizer.state_dict()
    step(model, optimizer)
    optimizer.step()
    weights = rows(model)[:, :3]
    optimizer.load_state_dict(empty)
    assert torch.equal(rows(model)[:, :3], weights) and not rows(model)[:, 3:].any()
    assert optimizer.updates == 0


def test_time_of_policies_goes_on():
    model, _ = made()
    model(IDS)
    again, _ = made()
    again.load_state_dict(model.state_dict())
    assert again[0].lookups == model[0].lookups == 1


def test_a_sum_of_squares_ends_at_two_to_the_fiftieth_and_counts_the_small_ones():
    over, largest = Communicators.local().control, 2.0**25 - 2
    for value in (2.0**-30, 2.0**-20, 2.0**-10, 1.0, largest, 2.0**25):
        found = float(hash_optimizer._sum_of_squares([torch.tensor([[value]])], over))
        assert found == (value**2 if value <= largest else torch.inf)


def test_a_gradient_that_was_not_finite_is_remembered_whatever_comes_after():
    for flags in ((True, False), (False, True), (True, True), (False, False)):
        gradients = object.__new__(RowGradients)
        gradients.has_optimizer = True
        gradients.group = SimpleNamespace(table=SimpleNamespace(device="cpu", requires_grad=True))
        gradients.clear()
        for flag in flags:
            gradients.add(torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int64), torch.tensor(flag))
        assert bool(gradients._bad) == any(flags)


def test_tables_that_begin_with_equal_rows_are_named():
    user, item = HashEmbedding(4, seed=1), HashEmbedding(4, seed=1)
    assert torch.equal(user(torch.tensor([5])), item(torch.tensor([5])))
    with pytest.warns(UserWarning, match="'embedding' of user and item in ModuleDict .* its own name="):
        HashOptimizer(torch.nn.ModuleDict({"user": user, "item": item}))
    for other in (HashEmbedding(4, seed=1, name="item"), HashEmbedding(4, seed=2), HashEmbedding(8, seed=1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            HashOptimizer(torch.nn.ModuleDict({"user": user, "item": other}))


def test_tables_of_one_dimension_take_any_id_where_they_are_kept_apart():
    ids = torch.tensor([2**63 - 1, -(2**63), 0])
    features = [FeatureConfig("user", 4), FeatureConfig("item", 4)]
    with pytest.raises(ValueError, match=r"does not fit into a table merged of 2.* merge=False"):
        HashEmbeddingCollection(features)({"user": ids, "item": ids})
    found = HashEmbeddingCollection(features, merge=False)({"user": ids, "item": ids})
    assert not torch.equal(found["user"], found["item"])


def test_the_state_of_many_tables_walks_their_rows_once(monkeypatch):
    walked, export = [], HashTableCollection.export
    monkeypatch.setattr(HashTableCollection, "export", lambda self: walked.append(1) or export(self))
    module = HashEmbeddingCollection([FeatureConfig(f"f{at}", 3 + 5 * at) for at in range(4)], seed=1)
    optimizer = HashOptimizer(module)
    sum(
        rows.square().sum() for rows in module({f"f{at}": torch.arange(at + 2) for at in range(4)}).values()
    ).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert len(walked) == 1
    optimizer.load_state_dict(saved)
    assert len(walked) == 2
    for name, before in saved["state"].items():
        assert before["state"].any() and torch.equal(
            optimizer.state_dict()["state"][name]["state"], before["state"]
        )
