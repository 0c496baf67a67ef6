"""Which keys a query sees: the definition that every implementation is held to.

A sequence is contextual tokens, then history, then targets. `row` is the query's place, `column` the key's::

    max_attn_len = 2, two contextual tokens (c), four of history, two targets (t), target_group_size = 1

             c c . . . . t t
        c    1 1 1 1 1 1 . .      contextual tokens see contextual tokens and history
        c    1 1 1 1 1 1 . .
        .    1 1 1 . . . . .      history sees what comes before it, at most max_attn_len back
        .    1 1 1 1 . . . .      (all contextual tokens count as the one place before history)
        .    . . 1 1 1 . . .
        .    . . . 1 1 1 . .
        t    . . . . 1 1 1 .      a target stands right after history, and sees itself;
        t    . . . . 1 1 . 1      in groups of target_group_size, also earlier targets of its group

Two options lift the window: rows among the last `min_full_attn_seq_len` of history, and then targets too, see
everything before them, and with `attn_prefix_len` every row sees so many first tokens of the sequence, as far
as they come before it. Prefix and window together are the semi-local attention of ULTRA-HSTU.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.hstu_attention.call import HSTUMask


def visible(length: int, targets: int, contexts: int, mask: HSTUMask) -> torch.Tensor:
    """(length, length) bool for one sequence: the query of a row sees the key of a column."""
    place = torch.arange(length)
    row, column = place[:, None], place[None, :]
    history = length - targets  # where targets begin
    shift = max(contexts - 1, 0)
    end = history - shift
    rank = (place - shift).clamp(0, end)  # contextual tokens are 0, targets stand right after history
    ahead = rank[:, None] - rank[None, :]
    seen = ahead > 0
    if mask.max_attn_len:
        near = (ahead <= mask.max_attn_len) | (column < mask.attn_prefix_len)
        if mask.min_full_attn_seq_len:
            near |= rank[:, None] >= end - mask.min_full_attn_seq_len
        seen &= near
    group = torch.div(place - history, mask.target_group_size, rounding_mode="floor")
    mates = (column >= history) & (column <= row) & (group[:, None] == group[None, :])
    return seen | (row == column) | mates | ((row < contexts) & (column < history))
