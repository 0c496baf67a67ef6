"""What each task costs on a cluster, from first principles.

    W workers   R replicas   S = W / R workers share a table   U(.) distinct keys (`keys.KeyModel`)

==================  ==============================================================================
lookup              ``lookup_seconds * W ** contention`` in all, in equal parts for prefetch, h2d,
                    route, retrieve and write_back
all-to-all          ``(S - 1) * message_seconds + bytes * (S - 1) / S * S ** contention / bandwidth``
replica all-reduce  ``2 (R - 1) / R * bytes`` of the owner's row gradients over the node's links, after
                    the last micro-batch, or with first_use after each row's last one
dual-buffer copy    rows kept, read and written at the memory's bandwidth
compute             ``compute_seconds``, shared out by samples
==================  ==============================================================================

The all-to-all's growth is that of a network whose bandwidth through the middle grows as W ** (1 -
contention): 0 is full bisection, 1 one shared bus. Lookup reads samples from shared storage and waits for
keys over the same network, and is given the same exponent; it does not depend on the table's sharding.
The reduction of dense gradients hides behind the backward pass and is part of ``compute_seconds``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tritonrec.pipeline.schedule import Task

from ...settings import setting
from .engine import Cost, Workers, simulate
from .keys import KeyModel
from .measure import Outcome, measure
from .plan import TABLES, Plan

LOOKUP_STAGES = ("prefetch", "h2d", "route", "retrieve", "write_back")


@dataclass(frozen=True)
class Workload:
    """One worker's batch. `samples` sequences of `tokens` ids each; rows of `dim` float32 values; `layers` of
    the dense model.

    `items`, `exponent`, `communities` and `affinity` as in `KeyModel`.
    """

    samples: int = 512
    tokens: int = 1024
    dim: int = 512
    layers: int = 4
    items: int = 32_038_725
    exponent: float = setting(1.05, "Zipf's, of the assumed keys.", 0, 5)
    communities: int = 64
    affinity: float = setting(0.8, "Share of keys that a user's community has to itself.", 0, 1)

    @property
    def keys(self) -> KeyModel:
        """Which keys a batch has."""
        return KeyModel(
            self.samples * self.tokens, self.items, self.exponent, self.communities, self.affinity
        )

    @property
    def products(self) -> float:
        """Multiplications of the dense layers up to a factor, by which computation grows.

        Attention's own part, by tokens ** 2 * dim, is left out: NestPipe has 4.00 times the
        computation of 512 tokens at 2,048 (Fig. 10e).
        """
        return float(self.samples * self.tokens * self.layers * self.dim**2)

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding or gradient row."""
        return 4 * self.dim


@dataclass(frozen=True)
class Cluster:
    """Workers and links. Seconds are of one step on one worker, bandwidths bytes per second of one worker.

    `compute_seconds`, `lookup_seconds`, `bandwidth` and `contention` are fitted; the others are nominal
    figures of current accelerators.
    """

    workers: int
    compute_seconds: float
    lookup_seconds: float
    bandwidth: float
    contention: float
    message_seconds: float = 1e-6
    node_size: int = 8
    node_bandwidth: float = 100e9
    memory_bandwidth: float = 1.2e12

    def all_to_all(self, sent: float, members: int) -> float:
        """Seconds for each of `members` workers to send `sent` bytes, its own share among them."""
        if members == 1:
            return 0.0
        away = sent * (members - 1) / members
        return (members - 1) * self.message_seconds + away * members**self.contention / self.bandwidth

    def all_reduce(self, size: float, members: int) -> float:
        """Seconds to sum `size` bytes over neighbours; across nodes at the network's bandwidth."""
        moved = 2 * (members - 1) / members * size
        if members <= self.node_size:
            return moved / self.node_bandwidth
        return moved * members**self.contention / self.bandwidth

    @property
    def lookup(self) -> float:
        """Seconds of one batch's lookup from start to end."""
        return self.lookup_seconds * self.workers**self.contention


def costs(cluster: Cluster, workload: Workload, plan: Plan) -> Callable[[Task], Cost]:
    """The cost of every task of `plan`."""
    if cluster.workers % plan.replicas:
        raise ValueError(f"{cluster.workers} workers do not divide into {plan.replicas} replicas")
    keys, row, fractions = workload.keys, workload.row_bytes, plan.fractions
    members = cluster.workers // plan.replicas
    if plan.first_use:
        forward = keys.first_use(fractions, plan.clustered)
        backward = keys.first_use(fractions[::-1], plan.clustered)[::-1]
    else:
        forward = backward = keys.payload(fractions, plan.clustered)
    owned = keys.batch(members) / members * row  # bytes of the rows that one owner holds of a batch
    kept = keys.kept(members) if TABLES[plan.pipeline].dual_buffer else 0.0
    part = cluster.lookup / len(LOOKUP_STAGES)
    away = (members - 1) / members
    fixed = {name: Cost(part) for name in LOOKUP_STAGES}
    if plan.skip_fetch:
        fixed |= {name: Cost(part * (1 - kept)) for name in ("retrieve", "write_back")}
    fixed |= {
        "copy_kept_rows": Cost(2 * kept * owned / cluster.memory_bandwidth),
        "sparse_update": Cost(3 * owned / cluster.memory_bandwidth),
        "dense_reduce": Cost(),
        "dense_update": Cost(),
    }
    complete = [0.0] * (plan.micro_batches - 1) + [1.0]
    if plan.first_use:  # a row's sums are complete once no worker's later micro-batch uses it
        everyone = replace(keys, draws=keys.draws * cluster.workers)
        last_use = everyone.first_use(fractions[::-1], plan.clustered)[::-1]
        complete = [rows / sum(last_use) for rows in last_use]

    def cost(task: Task) -> Cost:
        if task.micro_batch is None:
            return fixed[task.stage]
        if task.stage == "compute":
            return Cost(cluster.compute_seconds * fractions[task.micro_batch])
        if task.stage == "replica_reduce":
            reduced = owned * complete[task.micro_batch]
            return Cost(transfer=cluster.all_reduce(reduced, plan.replicas), sent=reduced)
        sent = row * (forward if task.stage == "exchange" else backward)[task.micro_batch]
        return Cost(transfer=cluster.all_to_all(sent, members), sent=sent * away)

    return cost


def predict(
    cluster: Cluster, workload: Workload, plan: Plan, workers: Workers | None = None, batches: int = 12
) -> Outcome:
    """Simulate `plan`. Identical workers (`workers` None) are simulated once."""
    workers = workers or Workers()
    if workers.count not in (1, cluster.workers):
        raise ValueError(f"{workers.count} workers simulated of a cluster of {cluster.workers}")
    cost = costs(cluster, workload, plan)
    groups = plan.groups() if workers.count > 1 else {}
    return measure(simulate(plan.schedule(), cost, plan.micro_batches, batches, workers, groups))
