"""Promise: hash embeddings over a process group have the bits of one rank, whoever owns a row."""

import copy

import pytest
import torch
from speeds import slow_except
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tritonrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    HashEmbedding,
    HashEmbeddingCollection,
    HashOptimizer,
    KeyedJaggedTensor,
)
from tritonrec.embedding import Eviction, FeatureConfig, RowOptimizer, TablePolicy

pytestmark = pytest.mark.multi_rank
PLAIN = TablePolicy()
POLICY = TablePolicy(eviction=Eviction("lru", capacity=12, every=2), admission=2)
STEPS = 4


def features(policy):
    return [
        FeatureConfig("item", 4, policy=policy),
        FeatureConfig("bag", 4, pooling="mean", policy=policy),  # merged with item
        FeatureConfig("user", 3, policy=policy),
    ]


def samples(step):
    """Ids of item and user (12,), and bags (12, 2)."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 30, (12, 4), generator=generator)
    return ids[:, 0], ids[:, 1], ids[:, 2:]


def bags(ids):
    return ids.reshape(-1), torch.arange(len(ids) + 1) * 2


def train(group, policy, cuts=(), passes=1, consistency="batch", rule="adam"):
    """A module after training on this rank's part of every step's samples."""
    module = HashEmbeddingCollection(
        features(policy), RowOptimizer(rule, lr=0.1), seed=3, process_group=group, divisor=12.0,
        consistency=consistency,
    )  # fmt: skip
    optimizer, rank = HashOptimizer(module), 0 if group is None else group.rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            own = [values.tensor_split(cuts)[rank].tensor_split(passes)[part] for values in samples(step)]
            found = module({"item": own[0], "user": own[1], "bag": bags(own[2])})
            loss = (found["item"] * found["bag"]).sum(1).tanh() * found["user"].sum(1)
            loss.sum().backward()
        optimizer.clip_grad_norm_([], 0.05)
        optimizer.step()
    return module


def trained_rows(communicators, *args):
    return train(communicators.control.group, *args).tables.export()


def trained_state(communicators, *args):
    return train(communicators.control.group, *args).state_dict()


def joined(parts):
    """The union of the ranks' rows by table, ids ascending."""
    found = {}
    for name in parts[0]:
        ids, rows = (torch.cat([part[name][at] for part in parts]) for at in (0, 1))
        order = ids.argsort()
        found[name] = ids[order], rows[order]
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True)), name


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("world", "policy", "cuts", "passes"),
    slow_except(
        [(2, PLAIN, (5,), 1), (3, POLICY, (0, 9), 1)],
        [
            (2, PLAIN, (5,), 1), (3, POLICY, (0, 9), 1), (2, PLAIN, (12,), 2), (3, PLAIN, (4, 8), 3),
            (4, POLICY, (1, 1, 2), 1), (1, PLAIN, (), 2),
        ],
    ),
)  # fmt: skip
def test_ranks_have_the_rows_of_one_rank(pool, world, policy, cuts, passes):
    module = train(None, policy)
    expected = module.tables.export()
    parts = pool.run(trained_rows, world, policy, cuts, passes)
    assert_same(joined(parts), expected)
    assert all(len(part["item"][0]) for part in parts)  # every rank owns rows
    ids, rows = expected["item"]
    assert not torch.equal(rows, module.tables.initial_rows("item", ids))


def test_sums_of_float32_are_close_and_the_same_in_every_run(pool):
    options = PLAIN, (5,), 1, "window", "adagrad"
    expected = train(None, PLAIN, consistency="window", rule="adagrad").tables.export()
    runs = [joined(pool.run(trained_rows, 2, *options)) for _ in range(2)]
    assert_same(*runs)
    for name in expected:
        torch.testing.assert_close(runs[0][name], expected[name], rtol=1e-4, atol=1e-5)


def changes(communicators):
    module = HashEmbedding(2, RowOptimizer("sgd", lr=1.0), seed=1, process_group=communicators.control.group)
    ids = torch.tensor([1, 2]) + 10 * communicators.rank
    before = module(ids)
    (before.sum() * (1 + communicators.rank)).backward()
    HashOptimizer(module).step()
    return (before - module.eval()(ids)).detach()


def test_by_default_gradients_are_those_of_the_mean_of_the_ranks_losses(pool):
    first, second = pool.run(changes, 2)
    torch.testing.assert_close(first, torch.full((2, 2), 0.5))
    torch.testing.assert_close(second, torch.full((2, 2), 1.0))


def load(communicators, states):
    """Weights and lookups after loading the union of other ranks' states."""
    group = communicators.control.group
    module = HashEmbeddingCollection(features(POLICY), RowOptimizer("adam"), seed=9, process_group=group)
    entries = {name: [each[name] for each in states] for name in states[0]}
    module.load_state_dict(
        {name: torch.cat(each) if each[0].dim() else each[0] for name, each in entries.items()}
    )
    copied = copy.deepcopy(module)
    ids = torch.arange(30) if communicators.rank else torch.arange(0)
    lookups = {"item": ids, "user": ids, "bag": (ids, torch.tensor([0, len(ids)]))}
    found = module.eval()(lookups)
    assert all(torch.equal(found[name], rows) for name, rows in copied.eval()(lookups).items())
    return module.tables.weights(), found


@pytest.mark.parametrize("before", slow_except([3], [1, 2, 3]))
def test_states_of_all_ranks_together_load_at_another_world_size(pool, before):
    cuts = tuple(range(4, 4 * before, 4))
    states = pool.run(trained_state, before, POLICY, cuts)
    assert int(states[0]["seed"]) == 3 and int(states[0]["lookups"]) == STEPS
    expected = train(None, POLICY)
    parts = pool.run(load, 2, states)
    assert_same(joined([weights for weights, _ in parts]), expected.tables.weights())
    ids = torch.arange(30)
    found = expected.eval()({"item": ids, "user": ids, "bag": (ids, torch.tensor([0, 30]))})
    assert all(torch.equal(parts[1][1][name], found[name]) for name in found)


def filled(communicators):
    """Rows that init_fn made, and a weighted bag of them on rank 1 alone."""
    config = EmbeddingBagConfig(20, 3, "t", ["f"], init_fn=torch.nn.init.normal_)
    options = {"seed": 5, "process_group": communicators.control.group, "divisor": 1.0}
    module = EmbeddingBagCollection([config], is_weighted=True, **options)
    made = module.embeddings.tables.weights()
    ids = torch.arange(20) if communicators.rank == communicators.world_size - 1 else torch.arange(0)
    lengths, weights = torch.tensor([len(ids)]), torch.linspace(-1.0, 2.0, 20)[: len(ids)]
    pooled = module(KeyedJaggedTensor.from_lengths_sync(["f"], ids, lengths, weights))["f"]
    pooled.square().sum().backward()
    return made, pooled.detach(), module.embeddings.tables.weights()


def test_ranks_fill_their_own_rows_and_weight_their_own_bags(pool):
    ((made, pooled, trained),) = pool.run(filled, 1)
    ranks = pool.run(filled, 2)
    assert len(made["t"][0]) == 20
    assert_same(joined([each for each, _, _ in ranks]), made)
    assert torch.equal(ranks[1][1], pooled) and not ranks[0][1].any()
    assert_same(joined([each for _, _, each in ranks]), trained)
    assert not torch.equal(trained["t"][1], made["t"][1])


def scaled(communicators):
    """Rank 0 has a gradient that is not finite, and rank 1 no ids."""
    module = HashEmbedding(2, seed=1, process_group=communicators.control.group)
    optimizer, scaler = HashOptimizer(module), torch.amp.GradScaler("cpu")
    ids = torch.tensor([7] if communicators.rank == 0 else [], dtype=torch.int64)
    scaler.scale(module(ids).sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(FloatingPointError):
        optimizer.step()
    return scaler.get_scale()


def test_a_gradient_that_is_not_finite_stops_all_ranks(pool):
    assert pool.run(scaled, 2) == [2.0**15, 2.0**15]


def seed_of(communicators):
    torch.manual_seed(communicators.rank)
    return HashEmbedding(2, process_group=communicators.control.group).tables.seed


def test_ranks_draw_the_seed_of_the_first(pool):
    assert len(set(pool.run(seed_of, 2))) == 1


class Tower(torch.nn.Module):
    """Scores of items."""

    def __init__(self, group):
        super().__init__()
        self.items = HashEmbedding(4, RowOptimizer("adam", lr=0.1), seed=1, process_group=group)
        torch.manual_seed(0)
        self.dense = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, ids):
        return self.dense(self.items(ids)).squeeze(-1)


def wrapped(communicators, wrapper):
    """Losses, rows and the first weights of training under DDP or FSDP2; the wrapper "" is neither."""
    group = communicators.control.group
    model = Tower(group)
    if wrapper == "ddp":
        trained = DistributedDataParallel(model, process_group=group)
    elif wrapper == "fsdp":
        mesh = DeviceMesh.from_group(group, "cpu")
        trained = fully_shard(model, mesh=mesh)
    else:
        trained = model
    rows = HashOptimizer(trained)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    for step in range(3):
        ids = torch.arange(8 * step, 8 * step + 8).view(-1, 2) % 11
        own = ids.tensor_split(communicators.world_size)[communicators.rank]
        for each in (rows, optimizer):
            each.zero_grad()
        trained(own).square().mean().backward()
        for each in (rows, optimizer):
            each.step()
    weight = model.dense[0].weight
    return model.items.tables.weights(), getattr(weight, "full_tensor", lambda: weight)().detach()


@pytest.mark.parametrize("wrapper", slow_except(["ddp"], ["ddp", "fsdp"]))
def test_rows_train_beside_a_wrapped_model(pool, wrapper):
    alone, weight = pool.run(wrapped, 1, "")[0]
    (first, dense), (second, same) = pool.run(wrapped, 2, wrapper)
    assert torch.equal(dense, same)
    torch.testing.assert_close(dense, weight, rtol=1e-4, atol=1e-5)
    both = joined([first, second])
    assert torch.equal(both["embedding"][0], alone["embedding"][0])
    torch.testing.assert_close(both["embedding"][1], alone["embedding"][1], rtol=1e-4, atol=1e-5)
    assert not set(first["embedding"][0].tolist()) & set(second["embedding"][0].tolist())
