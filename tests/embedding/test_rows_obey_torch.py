"""Promise: torch's idioms do to rows what they do to `nn.Embedding`, or are refused with the way to do it."""

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tritonrec.embedding import (
    FeatureConfig,
    HashEmbedding,
    HashEmbeddingBag,
    HashEmbeddingCollection,
    HashOptimizer,
    HashTableCollection,
    RowOptimizer,
    RowsParameter,
)

DIM = 5
IDS = torch.tensor([3, -7, 3, 2**62, 11])


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Net(torch.nn.Module):
    """Hash embeddings beside a layer of torch."""

    def __init__(self, rule=None):
        super().__init__()
        torch.manual_seed(1)
        self.items = HashEmbedding(DIM, rule or RowOptimizer("adam", lr=0.1), seed=4)
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.head(self.items(ids)).square().sum()


def stepped(net, rows=None, count=1, ids=IDS):
    """Steps of rows and layer; the rows after them."""
    rows = rows or HashOptimizer(net)
    dense = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(count):
        for each in (dense, rows):
            each.zero_grad()
        loss = net(ids)
        if loss.requires_grad:
            loss.backward()
        for each in (dense, rows):
            each.step()
    return weights(net)


def weights(net):
    return [part.clone() for part in net.items.tables.weights()["embedding"]]


FREEZES = {
    "the model": lambda net, flag: net.requires_grad_(flag),
    "the module": lambda net, flag: net.items.requires_grad_(flag),
    "its parameters": lambda net, flag: [each.requires_grad_(flag) for each in net.items.parameters()],
    "their attribute": lambda net, flag: [
        setattr(each, "requires_grad", flag) for each in net.items.parameters()
    ],
    "the tables": lambda net, flag: net.items.tables.requires_grad_(flag),
    "one table": lambda net, flag: net.items.tables.requires_grad_(flag, "embedding"),
}  # fmt: skip


@pytest.mark.parametrize("what", FREEZES)
def test_frozen_rows_stay_and_train_again_when_they_are_freed(what):
    net = Net()
    before = stepped(net)
    rows = HashOptimizer(net)
    head = net.head.weight.clone()
    FREEZES[what](net, False)
    if what in ("the model", "the module", "its parameters", "their attribute"):
        assert same(stepped(net, rows), before)
        assert net.items(torch.tensor([99])).requires_grad is False and len(weights(net)[0]) == 4
    else:
        net.head.requires_grad_(True)
        with pytest.raises(RuntimeError, match="without gradients of rows"):
            stepped(net, rows)
        assert same(weights(net), before)
    if what != "the model":
        assert not torch.equal(net.head.weight, head)
    FREEZES[what](net, True)
    rows.zero_grad()
    assert not same(stepped(net, rows), before)


def test_a_frozen_module_beside_one_that_trains():
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.frozen = HashEmbedding(DIM, RowOptimizer("sgd", lr=0.1), name="other", seed=5)

        def forward(self, ids):
            return self.head(self.items(ids) + self.frozen(ids)).square().sum()

    net = Two()
    stepped(net)
    before = net.frozen.tables.weights()["other"][1].clone()
    net.frozen.requires_grad_(False)
    first = weights(net)
    assert not same(stepped(net), first)
    assert torch.equal(net.frozen.tables.weights()["other"][1], before)


def test_tables_that_are_merged_freeze_together():
    features = [FeatureConfig("a", 4), FeatureConfig("b", 4), FeatureConfig("c", 4, merge=False)]
    tables = HashTableCollection(features)
    with pytest.raises(ValueError, match=r"table a is merged with b: name these too, or .*merge=False"):
        tables.requires_grad_(False, "a")
    assert all(group.table.requires_grad for group in tables.groups)
    with pytest.raises(ValueError, match="there is no table 'd'"):
        tables.requires_grad_(False, "d")
    tables.requires_grad_(False, "c")
    assert [group.table.requires_grad for group in tables.groups] == [True, False]
    again = copy.deepcopy(tables)
    assert [group.table.requires_grad for group in again.groups] == [True, False]
    lazy = HashTableCollection(features, RowOptimizer("sgd", weight_decay=0.1, lazy_weight_decay=True))
    with pytest.raises(ValueError, match="lazy weight decay"):
        lazy.requires_grad_(False)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
def test_an_average_of_parameters_is_refused_and_one_of_rows_is_that_of_torch(average):
    net = Net()
    stepped(net)
    averaged = AveragedModel(net, multi_avg_fn=average)
    with pytest.raises(TypeError, match=r"average rows with module.lerp_rows_\(trained, weight\)"):
        averaged.update_parameters(net)
    mine = copy.deepcopy(net)
    with torch.no_grad(), pytest.raises(TypeError, match="lerp_rows_"):
        for own, other in zip(mine.parameters(), net.parameters(), strict=True):
            own.mul_(0.9).add_(other, alpha=0.1)
    theirs = torch.nn.Embedding.from_pretrained(weights(net)[1].clone())
    ours = copy.deepcopy(net.items)
    rows, ids = HashOptimizer(net), torch.cat([IDS, torch.tensor([42])])
    for step in range(3):
        _, now = stepped(net, rows, ids=IDS if step < 2 else ids)
        ours.lerp_rows_(net.items, 0.1)
        known = torch.isin(weights(net)[0], IDS)
        theirs.weight.data.lerp_(now[known], 0.1)
    found, averages = ours.tables.weights()["embedding"]
    assert torch.equal(averages[torch.isin(found, IDS)], theirs.weight)
    assert torch.equal(averages[found == 42], net.items.tables.weights()["embedding"][1][found == 42])


def assigned(own, other):
    own.data = 0.9 * own.data + 0.1 * other.data


def a_shadow_assigned(own, other):
    shadow = own.data.clone()
    own.data = shadow * 0.9 + other.detach() * 0.1


OWN_AVERAGES = {
    "through data": lambda own, other: own.data.mul_(0.9).add_(other.data, alpha=0.1),
    "lerp of data": lambda own, other: own.data.lerp_(other.data, 0.1),
    "all at once": lambda own, other: torch._foreach_lerp_([own.data], [other.data], 0.1),
    "assigned": assigned,
    "a shadow": a_shadow_assigned,
    "lerp": lambda own, other: setattr(own, "data", torch.lerp(own.data, other.data, 0.1)),
    "data zeroed": lambda own, other: own.data.zero_(),
    "data drawn": lambda own, other: own.data.normal_(0, 0.02),
    "drawn": lambda own, other: torch.nn.init.normal_(own),
}


@pytest.mark.parametrize("what", OWN_AVERAGES)
def test_averages_and_initialisations_of_ones_own_are_refused(what):
    net, other = Net(), Net()
    with torch.no_grad(), pytest.raises((TypeError, RuntimeError), match=r"lerp_rows_|load_weights"):
        OWN_AVERAGES[what](net.items.rows, other.items.rows)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_rows_are_refused(hook):
    with pytest.raises(TypeError, match="would see no gradient: hook the module's output"):
        getattr(Net().items.rows, hook)(lambda *given: None)


def test_rows_that_nothing_updates_are_said_once():
    net = Net()
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            made.zero_grad()
            net.items(IDS).sum().backward()
            made.step()
        stepped(Net(), count=3)
    assert [str(each.message) for each in said] == [str(said[0].message)]
    assert "nothing updates its rows: make a tritonrec.embedding.HashOptimizer(model)" in str(said[0].message)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])
def test_optimizers_of_torch_take_the_parameter_and_pass_it_over(kind, options):
    net = Net()
    made = kind(net.parameters(), lr=0.1, weight_decay=0.1, **options)
    before = weights(net)
    for _ in range(2):
        for each in net.parameters():
            each.grad = torch.ones_like(each) if each.numel() else torch.zeros(0)
        made.step()
    assert same(weights(net), before)


WRONG_NUMBERS = {
    "a fraction": ("seed", torch.tensor(1.5)),
    "two": ("seed", torch.tensor([1, 2])),
    "words": ("seed", "x"),
    "on meta": ("seed", torch.tensor(1, device="meta")),
    "below zero": ("lookups", torch.tensor(-4)),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("what", WRONG_NUMBERS)
def test_numbers_of_a_state_are_checked(what, strict):
    net, other = Net(), Net()
    stepped(net)
    name, value = WRONG_NUMBERS[what]
    before = weights(other)
    with pytest.raises(RuntimeError, match=f"{name} must be one int64"):
        other.load_state_dict(net.state_dict() | {f"items.{name}": value}, strict=strict)
    assert same(weights(other), before)


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
@pytest.mark.parametrize("whole", [False, True])
def test_other_dtypes_are_refused(convert, whole):
    net = Net()
    with pytest.raises(TypeError, match=r"rows of HashEmbedding are float32, .* torch.autocast"):
        getattr(net if whole else net.items, convert)()
    with pytest.raises(TypeError, match="are float32"):
        net.items.to(torch.bfloat16)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device to move to")
def test_a_device_that_is_not_here_is_named():
    with pytest.raises(RuntimeError, match=r"cannot be moved .*: torch .* finds no accelerator"):
        Net().items.to("cuda")


def test_what_changes_nothing_is_taken():
    net = Net()
    before = stepped(net)
    assert net.float().to("cpu").to(torch.float32).cpu().train() is net
    assert same(weights(net), before)
    with pytest.raises(TypeError, match="memory that processes share"):
        net.share_memory()


def test_a_learning_rate_of_zero_moves_nothing():
    net = Net(RowOptimizer("adam", lr=0.0))
    before = stepped(net, count=3)
    assert torch.equal(before[1], net.items.tables.initial_rows("embedding", before[0])[:, :DIM])
    for wrong in (-1e-3, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lr must be finite and >= 0"):
            RowOptimizer("sgd", lr=wrong)


def test_gradients_that_nobody_cleared_are_named():
    net = Net()
    rows = HashOptimizer(net)
    net(IDS).backward()
    rows.step()
    net.zero_grad()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) of the HashOptimizer"):
        net(IDS).backward()
    rows.zero_grad(set_to_none=False)
    for _ in range(2):  # of one step
        net(IDS).backward()
    rows.step()


@pytest.mark.parametrize("name", ["weight_decay", "betas", "momentum", "eps"])
def test_settings_of_groups_that_only_a_rule_has_are_refused(name):
    net = Net()
    rows = HashOptimizer(net)
    rows.param_groups[0][name] = 0.1
    net(IDS).backward()
    with pytest.raises(ValueError, match=f"{name} of table embedding .* RowOptimizer"):
        rows.step()
    del rows.param_groups[0][name]
    rows.param_groups[0]["lr"] = 0.02
    rows.step()


def test_a_shallow_copy_shares_rows_and_gradients_and_a_deep_one_neither():
    net = Net()
    rows = HashOptimizer(net)
    shallow, deep = copy.copy(net.items), copy.deepcopy(net.items)
    assert shallow.tables is net.items.tables and deep.tables is not net.items.tables
    shallow(IDS).sum().backward()
    rows.step()
    assert not torch.equal(net.items(IDS), deep(IDS))
    deep.requires_grad_(False)
    again = pickle.loads(pickle.dumps(deep))
    assert (
        not again.rows.requires_grad and net.items.rows.requires_grad and type(again.rows) is type(deep.rows)
    )


def test_a_state_has_no_entry_for_the_parameter():
    for module in (HashEmbedding(3), HashEmbeddingBag(3), HashEmbeddingCollection([FeatureConfig("a", 3)])):
        parent = torch.nn.ModuleDict({"x": module})
        assert not [name for name in parent.state_dict() if name.endswith(".rows")]
        assert [name for name, _ in parent.named_parameters()] == ["x.rows"]
        parent.load_state_dict(parent.state_dict())
        other = torch.nn.ModuleDict({"x": copy.deepcopy(module)})
        other.load_state_dict(parent.state_dict(), strict=True)


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_clipping_that_leaves_rows_out_is_refused(clip):
    net = Net()
    dense = [each for each in net.parameters() if not isinstance(each, RowsParameter)]
    for each in dense:
        each.grad = torch.full_like(each, 3.0)
    for parameters in (net.parameters(), list(net.parameters())):
        with pytest.raises(TypeError, match=r"leave out the gradients of rows .*HashOptimizer\.clip"):
            clip(parameters, 0.5)
    assert all(bool((each.grad == 3).all()) for each in dense)
    clip(dense, 0.5)
    assert all(bool((each.grad <= 0.5).all()) for each in dense)
    for each in net.parameters():
        each.requires_grad_(not isinstance(each, RowsParameter))
    clip(net.parameters(), 0.25)  # frozen rows have no gradients to leave out
    assert all(bool((each.grad <= 0.25).all()) for each in dense)


def test_tables_that_do_not_fit_are_not_averaged():
    own, other = (HashTableCollection([FeatureConfig("a", dim)]) for dim in (3, 4))
    with pytest.raises(ValueError, match="table 'a' has rows of 3 weights, the other 4"):
        own.lerp_(other, 0.5)
    with pytest.raises(ValueError, match=r"weight must lie in \[0, 1\], got 2"):
        own.lerp_(own, 2)
    with pytest.raises(ValueError, match="there is no table 'b'"):
        own.lerp_(HashTableCollection([FeatureConfig("b", 3)]), 0.5)


def test_a_gradient_of_the_rows_is_returned_to_nobody_and_kept_by_nobody():
    net = Net()
    rows, before = HashOptimizer(net), net.items(IDS).detach()
    with pytest.raises(
        TypeError, match=r"torch.autograd.grad of a parameter .* take it of the module's output"
    ):
        torch.autograd.grad(net(IDS), list(net.parameters()), allow_unused=True)
    assert not any(each.pending for each in rows.gradients)
    net(IDS).backward(inputs=[net.items.rows])
    assert all(each.pending for each in rows.gradients) and net.head.weight.grad is None
    rows.step()
    assert not torch.equal(net.items(IDS), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda items: torch.func.vmap(items)(IDS.view(5, 1)),
        lambda items: torch.func.grad(lambda x: (items(IDS) * x).sum())(torch.ones(5, DIM)),
        lambda items: torch.jit.trace(items, IDS),
        lambda items: torch.export.export(items.eval(), (IDS,)),
    ],
    ids=["vmap", "grad", "trace", "export"],
)
def test_transforms_and_traces_are_refused_by_name(call):
    with pytest.raises(
        TypeError, match=r"look them up outside|TorchScript has no type|tritonrec.serving.export"
    ):
        call(HashEmbedding(DIM))


@pytest.mark.parametrize("layout", ["sparse_coo", "jagged"])
def test_ids_that_are_no_dense_tensor_are_refused(layout):
    sparse = layout == "sparse_coo"
    ids = IDS.to_sparse() if sparse else torch.nested.nested_tensor([IDS, IDS[:2]], layout=torch.jagged)
    with pytest.raises(TypeError, match=f"must be a dense tensor, got torch.{layout}"):
        HashEmbedding(DIM)(ids)


def test_the_meta_device_has_no_rows_and_as_default_device_it_moves_none():
    with pytest.raises(TypeError, match="rows of HashEmbedding cannot be on the meta device"):
        HashEmbedding(DIM).to("meta")
    losses = []
    for device in ("cpu", "meta"):
        net = Net()
        with torch.device(device):
            net.items = HashEmbedding(DIM, RowOptimizer("adam", lr=0.1), seed=4)
            rows, weights = HashOptimizer(net), torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                losses.append(net(IDS))
                losses[-1].backward()
                rows.step()
                rows.zero_grad()
            rows.load_state_dict(rows.state_dict())
            net.items.load_state_dict(net.items.state_dict())
            losses.append(net(IDS))
        del weights
    assert losses[:3] == losses[3:] and losses[0] != losses[2]


def test_rows_of_inference_mode_are_refused_before_they_are_trained():
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"made or loaded under torch.inference_mode"),
    ):
        HashEmbedding(DIM)


def test_a_rate_in_words_is_refused():
    net = Net()
    rows = HashOptimizer(net)
    net(IDS).backward()
    rows.param_groups[0]["lr"] = "0.1"
    with pytest.raises(TypeError, match=r"lr of table embedding must be a number, got '0.1'"):
        rows.step()
