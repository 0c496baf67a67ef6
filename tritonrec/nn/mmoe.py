"""Multi-gate mixture of experts, the head for several tasks (MTGRBoost, section 2, equation 4).

    w_t = softmax(gate_t(h))                        (E,) for each task t
    y_t = sum over the k largest w_t,i of  w_t,i * expert_i(h),   added from the lowest expert to the highest
    z_t = tower_t(y_t)                              the task's logit

An expert sees the rows that a task chose it for, and no others. Each row of the output and of its gradient
depends on its own row alone, bit for bit: rows are moved to their experts and back, never summed together.

Dimensions: L rows, B samples, D columns, E experts, k chosen ones, T tasks, P pairs of a row and an expert.
"""

from __future__ import annotations

import torch

from .. import ops
from ..kernels.autocast import widen, without_autocast
from ..kernels.dispatch import is_compiling
from .modules import MLP, Linear

Choices = list[tuple[torch.Tensor, torch.Tensor]]
"""For each task what `MMoE.choose` gives."""


class MMoE(torch.nn.Module):
    """(L, dim) -> one logit for each of `tasks`.

    Args:
        dim: D. experts, top_k: E and k, 1 <= k <= E. hidden: inner width of experts and towers, D unless
            given.
    """

    def __init__(
        self,
        dim: int,
        tasks: int,
        experts: int = 4,
        top_k: int = 2,
        hidden: int | None = None,
    ):
        super().__init__()
        if tasks < 1:
            raise ValueError(f"tasks must be at least 1, got {tasks}")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must lie in [1, {experts}], the number of experts, got {top_k}")
        hidden = dim if hidden is None else hidden
        self.top_k = top_k
        self.experts = torch.nn.ModuleList(MLP(dim, hidden, dim) for _ in range(experts))
        self.gates = torch.nn.ModuleList(Linear(dim, experts, bias=False) for _ in range(tasks))
        self.towers = torch.nn.ModuleList(MLP(dim, hidden, 1) for _ in range(tasks))

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts (L, k) int64, ascending, and their weights (L, k), from scores (L, E).

        Of equal scores the lower expert wins: a stable sort keeps their order, `torch.topk` may not.
        """
        scores = widen(scores)
        ranked = torch.sort(scores.detach(), dim=1, descending=True, stable=True).indices
        chosen = ranked[:, : self.top_k].sort(dim=1).values
        return chosen, torch.softmax(scores, 1).gather(1, chosen)

    def forward(self, x: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
        """(L, D) -> logits (L, T); `seq_offsets` (B + 1,) tell which rows are one sample's."""
        if is_compiling() and not torch.compiler.is_exporting():
            # How many rows an expert gets depends on values. torch would cut its graph there, between gates
            # and experts, and add their gradients of `x` in another order.
            return torch.compiler.disable(self._logits)(x, seq_offsets)
        return self._logits(x, seq_offsets)

    def _logits(self, x: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
        choices = [self.choose(gate(x, seq_offsets)) for gate in self.gates]
        outputs, place = (self._all if torch.compiler.is_exporting() else self._chosen)(
            x, seq_offsets, choices
        )
        logits = []
        for (chosen, weights), tower in zip(choices, self.towers, strict=True):
            at = place.gather(1, chosen)
            terms = [
                _ScaleRows.apply(ops.gather_rows(outputs, at[:, i]), weights[:, i]) for i in range(self.top_k)
            ]
            mixed = terms[0]
            for term in terms[1:]:
                mixed = mixed + term
            logits.append(tower(mixed, seq_offsets))
        return torch.cat(logits, 1)

    def _chosen(
        self, x: torch.Tensor, seq_offsets: torch.Tensor, choices: Choices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' rows (P, D) for the rows that chose them, and which is whose: (L, E) int64."""
        used = torch.zeros(len(x), len(self.experts), dtype=torch.bool, device=x.device)
        for chosen, _ in choices:
            used.scatter_(1, chosen, True)
        experts, rows = used.t().nonzero(as_tuple=True)  # (P,) by expert, then by row
        place = torch.zeros(used.shape, dtype=torch.int64, device=x.device)
        place[rows, experts] = torch.arange(len(rows), device=x.device)
        # Which of an expert's rows are one sample's: how many it has before each sample, (B + 1, E).
        offsets = torch.nn.functional.pad(used.cumsum(0), (0, 0, 1, 0))[seq_offsets]
        inputs = ops.gather_rows(x, rows).split(offsets[-1].tolist())
        outputs = torch.cat(
            [
                expert(mine, offsets[:, e])
                for e, (expert, mine) in enumerate(zip(self.experts, inputs, strict=True))
            ]
        )
        return outputs, place

    def _all(
        self, x: torch.Tensor, seq_offsets: torch.Tensor, choices: Choices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_chosen`, of all rows (E * L, D): in an exported graph no size may depend on values.

        A row's bits are the same in any batch, so those that are used are those of `_chosen`.
        """
        outputs = torch.cat([expert(x, seq_offsets) for expert in self.experts])
        places = torch.arange(len(self.experts) * x.shape[0], device=x.device)
        return outputs, places.view(len(self.experts), x.shape[0]).t()


class _ScaleRows(torch.autograd.Function):
    """Rows (L, D) times factors (L,)."""

    @staticmethod
    def forward(ctx, x, factors):
        ctx.save_for_backward(x, factors)
        return x * factors[:, None]

    @staticmethod
    def backward(ctx, dy):
        x, factors = ctx.saved_tensors
        # Sums along rows by the invariant product: a torch reduction may regroup them by the number of rows.
        with without_autocast(dy.device):
            along = ops.linear(dy * x, dy.new_ones(1, x.shape[1])).squeeze(1)
        return dy * factors[:, None], along
