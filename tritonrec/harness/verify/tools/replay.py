"""A share of the work computed again by other ranks, and bits that flip, which must be named."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from ....data import Batch
from ....pipeline import Program, Window
from ....pipeline.places import Context, Gradients, OwnedRows, Routes
from ....pipeline.stage import Read, Update
from ....resilience import Replay
from .. import kept_state
from ..faults import case, fault
from ..variants import MADE, POLICIES, SMALL, Run, Variant, add_variants


def replayed(share: float, run: Run) -> Iterable[Iterable[Batch]]:
    """Train with `Replay` of a share of the work, which raises where bits differ."""
    replay = Replay(share)
    run.stack.callback(lambda: run.counts.update(replay.counts))  # at its end
    run.stack.enter_context(replay)
    replay.attach(run.trainer)
    return [run.batches]


add_variants(
    {
        "replay": Variant(
            "a quarter of the work computed again by other ranks, rows and messages with checksums",
            {**SMALL, "data": MADE, "policy": POLICIES},
            shows=("replayed_micro_batches", "replayed_rows", "rows_checked"),
            tool=partial(replayed, 0.25),
        ),
    },
    before="restart",
)


@fault(case(variant="replay", steps=8), says="on rank 1 has other bits than when it was written")
def bit_of_a_row_at_rest(program: Program) -> None:
    """A bit of one of rank 1's rows flips in its table."""

    def flipped(owned: Read[OwnedRows]) -> None:
        table, handles = program.tables.groups[0].table, owned.tables[0].handles
        handles = handles[handles >= 0][:1]
        if program.context.rank == 1 and len(handles):
            storage: Any = table._rows
            values = storage._storage.gather(handles)
            values.view(torch.int32)[0, 1] ^= 1 << 12
            storage._storage.update(handles, values)

    program.after("write_back", flipped)


@fault(
    case(world_size=4, variant="replay", steps=8, nodes=2),
    name="bit-of-a-message-between-nodes",
    what="a bit of the rows that rank 1 sends to rank 3, of another node, flips on the way",
    says="a message from rank 1 has other bits at rank 3",
)
@fault(case(variant="replay", steps=12), says="a message from rank 0 has other bits at rank 1")
def bit_of_a_message(program: Program) -> None:
    """A bit of the rows that rank 0 sends to rank 1 flips on the way, again and again."""
    groups = program.communicators
    over = groups.rail if groups.nodes > 1 else groups.communication
    exchange, rows = over.exchange, list[int]()

    def flipped(values, send, receive, out=None):
        received = exchange(values, send, receive, out)
        if values.dtype == torch.float32 and groups.rank == groups.world_size - 1 and receive[0]:
            rows.append(receive[0])
            if len(rows) > 4:
                received.view(torch.int32)[0, 1] ^= 1 << 12  # of those from the first one
        return received

    over.exchange = flipped  # type: ignore[method-assign]


@fault(case(world_size=3, variant="replay", steps=8), says="rank 1 has other bits of the gradient of")
def bit_of_a_gradient(program: Program) -> None:
    """Rank 1 computes a bit of its gradients wrongly."""

    def flipped(
        micro_batch: int,
        window: Window,
        context: Context,
        routes: Read[Routes],
        gradients: Update[Gradients],
    ) -> None:
        used = routes.tables[0].inverse[micro_batch]
        if context.rank == 1 and window.step >= 2 and len(used):
            gradients[0][used[0], 1] ^= 1 << 12

    program.after("compute", flipped)


fault(
    case(variant="replay", storage="disk", steps=8),
    name="disk-torn-write-at-rest",
    what="as above, with checksums of rows",
    says="has other bits than when it was written",
)(kept_state.disk_torn_write)
