"""GRM, the generative recommendation model of MTGRBoost (section 2, Figure 3): click and conversion of what
a user is shown, from the user's features and history.

A sample is one sequence of tokens, T = [T_con, T_hst, T_exp]. One with two contextual features, three
actions in its history and two exposed items::

    tokens     user  city | h0  h1  h2 | e0  e1        mask    1 . . . . . .
    row of     context    | item       | item                  1 1 . . . . .
    each       features   | + action   | + genres              1 1 1 . . . .
                          | + genres   |                       1 1 1 1 . . .
    + position  0     1   | 2   3   4  | 5   6                 1 1 1 1 1 . .
                                                               1 1 1 1 1 1 .     an exposed item sees what
    logits of                            e0  e1                1 1 1 1 1 . 1     comes before and itself

HSTU layers, a norm, and MMoE on the exposed tokens, one logit for each task. Tokens are put in order and
taken out again by exact moves, so each sample's losses and gradients depend on that sample alone.

Dimensions: B samples, C contextual features, Lh history and Le exposed tokens, T tasks, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch

from .. import ops
from ..settings import typed
from .context import record
from .hstu import HSTUConfig, HSTULayer
from .losses import binary_cross_entropy, sigmoid
from .mmoe import MMoE
from .modules import LayerNorm, Linear, PositionalEmbedding, TokenDropout
from .next_item import LayerConfig
from .tokens import Tokens, sum_by_sample

OLDEST = -(2**63)  # the time of contextual tokens, which have none

GRM_SIZES = {
    "GRM-4G": {"dim": 512, "layers": 3, "heads": 2, "qk_dim": 256, "v_dim": 256},
    "GRM-110G": {"dim": 1024, "layers": 22, "heads": 4, "qk_dim": 256, "v_dim": 256},
}
"""MTGRBoost, Table 1: dimension, HSTU blocks and heads; a head has an equal part of the dimension."""


@typed
@dataclass(frozen=True)
class GRMConfig(LayerConfig):
    """Sizes of a GRM, beside those of `LayerConfig`; `max_seq_len` counts context and exposed items too.

    Args:
        dim: of item, action and genre rows and of the residual stream. context_dim: of contextual rows.
        context, tasks: names, in the batch's order. experts, top_k: of MMoE. genres: whether items have
            pooled genres. relative_bias: as `HSTUConfig`'s; contextual tokens are older than all others.
        norm_product: layers norm the product of attention and gate, norm(O * U) as equation 3 has it, not
            norm(O) * U as the HSTU that the paper builds upon (Zhai et al., equation 3).
    """

    max_seq_len: int = 200
    context_dim: int = 16
    context: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("click", "conversion")
    experts: int = 4
    top_k: int = 2
    genres: bool = False
    relative_bias: bool = False
    norm_product: bool = False


class ImpressionInput(Protocol):
    """The parts of a batch that GRM reads; `tritonrec.data.ImpressionBatch` has them. All int64."""

    @property
    def sample_ids(self) -> torch.Tensor: ...  # (B,)

    @property
    def history_offsets(self) -> torch.Tensor: ...  # (B + 1,)

    @property
    def exposed_offsets(self) -> torch.Tensor: ...  # (B + 1,)

    @property
    def timestamps(self) -> torch.Tensor: ...  # (Lh + Le,), history first

    @property
    def labels(self) -> torch.Tensor: ...  # (Le, T), 0 or 1

    @property
    def tasks(self) -> tuple[str, ...]: ...  # Names of the T tasks


class GRM(torch.nn.Module):
    """Called as ``model(batch, rows, seed)`` by the trainer; see `tritonrec.pipeline.Model`."""

    def __init__(self, config: GRMConfig):
        super().__init__()
        taken = {"item", "action", "genre"}.intersection(config.context)
        if taken:
            raise ValueError(f"context may not be named like a feature of tokens: {sorted(taken)}")
        self.config = config
        shared = {field.name: getattr(config, field.name) for field in fields(LayerConfig)}
        layer = HSTUConfig(**shared, relative_bias=config.relative_bias)
        self.context = torch.nn.ModuleList(Linear(config.context_dim, config.dim) for _ in config.context)
        self.positions = PositionalEmbedding(config.max_seq_len, config.dim)
        self.drop = TokenDropout(config.input_dropout)
        self.layers = torch.nn.ModuleList(HSTULayer(layer, config.norm_product) for _ in range(config.layers))
        self.norm = LayerNorm(config.dim)
        self.head = MMoE(config.dim, len(config.tasks), config.experts, config.top_k)

    def forward(self, batch: ImpressionInput, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        """Losses (B,): cross entropies of a sample, summed over its exposed items and tasks.

        Args:
            rows: by feature, as `tritonrec.data.ImpressionBatch.lookups` names them: ``item`` (Lh + Le, d),
                ``action`` (Lh, d), ``genre`` (Lh + Le, d) where there are genres, contextual ones
                (B, context_dim).
            seed: of dropout.

        Logits and labels (Le, T) are recorded, with the sample of each row as groups (Le,).
        """
        if tuple(batch.tasks) != tuple(self.config.tasks):
            raise ValueError(f"the batch has tasks {batch.tasks}, the model {self.config.tasks}")
        logits = self.logits(batch, rows, seed)
        lengths, exposed = batch.exposed_offsets.diff(), batch.labels.shape[0]
        groups = torch.repeat_interleave(batch.sample_ids, lengths, output_size=exposed)
        record(logits=logits, labels=batch.labels, groups=groups)
        losses = binary_cross_entropy(logits, batch.labels)
        return sum_by_sample(losses, batch.exposed_offsets)

    @torch.no_grad()
    def predict(self, batch: ImpressionInput, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Probabilities (Le, T) of each task, without dropout."""
        training = self.training
        try:
            return sigmoid(self.eval().logits(batch, rows, 0))
        finally:
            self.train(training)

    def logits(self, batch: ImpressionInput, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        """(Le, T)."""
        to, exposed_to, tokens = self.place(batch)
        x = self.embed(batch, rows)
        x = ops.gather_rows(x, torch.argsort(to)) * self.config.dim**0.5 + self.positions(tokens.positions)
        x = self.drop(x, ops.derive_seed(seed, len(self.layers), 0), tokens.sample_ids, tokens.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, tokens, ops.derive_seed(seed, index, 0))
        return self.head(self.norm(ops.gather_rows(x, exposed_to)), batch.exposed_offsets)

    def embed(self, batch: ImpressionInput, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Rows (C*B + Lh + Le, d) of all tokens, feature by feature: context, history, exposed."""
        context = [
            project(rows[name]) for name, project in zip(self.config.context, self.context, strict=True)
        ]
        items = rows["item"] + rows["genre"] if self.config.genres else rows["item"]
        history, exposed = items.split(
            [batch.timestamps.shape[0] - batch.labels.shape[0], batch.labels.shape[0]]
        )
        return torch.cat([*context, history + rows["action"], exposed])

    def place(self, batch: ImpressionInput) -> tuple[torch.Tensor, torch.Tensor, Tokens]:
        """Where in the sequences each row of `embed` goes, (C*B + Lh + Le,), the exposed ones' part of it
        (Le,), and the sequences.
        """
        history, exposed = batch.history_offsets, batch.exposed_offsets
        context = len(self.config.context)
        one_each = torch.arange(history.shape[0], device=history.device)
        seq_offsets, sample = one_each * context + history + exposed, one_each[:-1]
        # Before a history token stand all context up to its own sample's, and earlier samples' exposed ones.
        before_history = (sample + 1) * context + exposed[:-1]
        before_exposed = (sample + 1) * context + history[1:]
        own = torch.arange(batch.timestamps.shape[0] - batch.labels.shape[0], device=history.device)
        history_to = own + torch.repeat_interleave(before_history, history.diff(), output_size=own.shape[0])
        own = torch.arange(batch.labels.shape[0], device=history.device)
        exposed_to = own + torch.repeat_interleave(before_exposed, exposed.diff(), output_size=own.shape[0])
        context_to = [seq_offsets[:-1] + feature for feature in range(context)]
        to = torch.cat([*context_to, history_to, exposed_to])
        tokens = Tokens.place(
            seq_offsets, batch.sample_ids, self.config.max_seq_len, num_targets=exposed.diff(),
            num_tokens=to.shape[0],
        )  # fmt: skip
        if self.config.relative_bias:
            ages = torch.full_like(sample, OLDEST).repeat(context)
            times = torch.cat([ages, batch.timestamps])
            tokens = tokens._replace(timestamps=times[torch.argsort(to)])
        return to, exposed_to, tokens
