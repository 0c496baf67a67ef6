"""Every form of a schedule that a trainer may run: a mode, and what its settings add to it."""

from tritonrec.pipeline import (
    DBP,
    NESTPIPE,
    SCHEDULES,
    keep_rows,
    over_nodes,
    with_norm,
    with_replicas,
    with_window_loss,
)
from tritonrec.pipeline.schedule import with_early_dense

KEPT = {"kept dbp": keep_rows(DBP), "kept nestpipe": keep_rows(NESTPIPE)}
OVERLAPPING = [name for name, schedule in SCHEDULES.items() if schedule.overlaps_window]


def each(what, change, of=SCHEDULES):
    return {f"{what} {name}": change(schedule) for name, schedule in of.items()}


REPLICAS = each("replicas", with_replicas, SCHEDULES | KEPT)
NORM = each("norm", with_norm, SCHEDULES | each("replicas", with_replicas))
BOTH = {"norm and replicas": NORM["norm replicas nestpipe"]}
WINDOW_LOSS = each("window loss", with_window_loss, SCHEDULES | BOTH)
NODES = each("nodes", over_nodes)
FORMS = SCHEDULES | KEPT | REPLICAS | NORM | WINDOW_LOSS | NODES
EARLY = {
    f"{count} early {name}": with_early_dense(FORMS[name], count)
    for name in [*OVERLAPPING, "kept nestpipe", "replicas nestpipe", "norm fwp", "nodes nestpipe"]
    for count in (1, 3)
}
FORMS |= EARLY
