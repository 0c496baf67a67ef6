"""The exchange of keys between ranks that are all here, for tests of plans."""

import torch

from tritonrec.pipeline.dist_plan import InputDist


def micro_batches(parts):
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


def exchange(asked: list[InputDist]):
    """What each owner gets in the key exchange: keys, last uses, and the sizes of what follows, both ways."""
    world = len(asked)
    for owner in range(world):
        parts = [one.keys.split(one.input_splits)[owner] for one in asked]
        uses = [one.last_use.split(one.input_splits)[owner] for one in asked if one.last_use is not None]
        receive, back = (
            [[splits[i][owner] for splits in each] for i in range(len(asked[0].splits))]
            for each in ([one.splits for one in asked], [one.gradients.splits for one in asked])
        )
        yield torch.cat(parts), torch.cat(uses) if uses else None, receive, back
