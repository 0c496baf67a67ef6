"""Dense gradients that backward completes first: which they are, and when they are complete.

Backward goes through a model from its end to its beginning. The gradients of the last layers are complete
while those of the first are still computed, and their sums can travel meanwhile (`with_early_dense`)::

    compute    forward | backward of layer 2 | of layer 1 | of layer 0 |
    reduce                                   | sums of 2  | of 1       | of 0 |

Only the last backward of a window completes them. The order of the parameters in the model, and their sizes,
tell which come first, as in torch's DDP: all ranks, which compare both, send the same messages in one order.
Autograd tells when. A model of another order, or one that leaves parameters out, has all gradients at the end
of its backward: that costs time and no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..distributed import Communicators
from ..kernels.gradients import Accumulator, current
from .dense import DenseModel
from .window import WindowConfig

MOST = 4
"""Messages at most: each waits for all ranks, and more have not been measured (docs/lab.md)."""

LEAST = 4096
"""Values of a message, on average, where there are more than two."""


class EarlyDense:
    """Watches the backward passes of a flight.

    Args:
        dense: whose parameters are told apart; None: none is.
        buckets: into so many, and the others.

    Attributes:
        buckets: names of the parameters whose gradients are complete first, those of the model's end before
            all; empty: none is told apart.
        others: of the other parameters, which precede them in the model's order.
        shares: of all elements, by bucket, those of the parameters that precede it.
        completed: called, in the last backward of a window, as often as gradients of a bucket, and of those
            before it, are complete.
        waits: it is not, since somebody reads all sums after that backward.

    Raises ValueError for a model that cannot be cut so, and for sharded parameters.
    """

    def __init__(self, dense: DenseModel | None = None, buckets: int = 0):
        self.others: list[str] = []
        self.buckets: list[list[str]] = []
        self.shares: list[float] = []
        if dense is not None:
            self._cut(dense, buckets)
        self.completed: Callable[[], None] = lambda: None
        self.waits = False
        self._accumulator: Accumulator | None = None  # that the gradients watched go to
        self._trained: dict[str, torch.nn.Parameter] = {}  # of the buckets, by name
        self._named: dict[int, str] = {}  # the same by id
        self._bucket = {name: j for j, names in enumerate(self.buckets) for name in names}
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        self._reached: set[str] = set()  # of these, in this backward
        self._left: list[int] = []  # by bucket, those that are not
        self._done = 0  # buckets that are complete
        self._last = self._again = False

    def _cut(self, dense: DenseModel, buckets: int) -> None:
        cuts = _cuts(dense, buckets + 1)
        if not cuts:
            raise ValueError(
                f"a schedule that reduces {buckets} buckets of dense gradients early needs a model of as "
                "many parts and one, none much smaller than the others, of which none is sharded"
            )
        named = list(dense.model.named_parameters())
        names, sizes = [name for name, _ in named], [each.numel() for _, each in named]
        self.others = names[: cuts[0]]
        self.buckets = [names[begin:end] for begin, end in pairwise([*cuts, len(names)])][::-1]
        self.shares = [sum(sizes[:begin]) / sum(sizes) for begin in reversed(cuts)]

    @property
    def words(self) -> str:
        """The messages of dense gradients, in their order."""
        messages = [*self.buckets, self.others]
        return f"{len(messages)} messages, " + ", ".join(f"{each[0]} to {each[-1]}" for each in messages)

    def watch(self, model: torch.nn.Module, accumulator: Accumulator) -> None:
        """Watch from the next `begin` to `end`."""
        self._accumulator = accumulator
        self._trained = {
            name: each
            for name, each in model.named_parameters()
            if name in self._bucket and each.requires_grad
        }
        self._named = {id(parameter): name for name, parameter in self._trained.items()}
        accumulator.complete = self._complete if self._trained else None

    def begin(self, last: bool) -> None:
        """The forward and backward of a micro-batch come next, on this thread and its stream."""
        self._reached.clear()
        self._last, self._done = last, 0
        self._left = [sum(name in self._trained for name in names) for names in self.buckets]
        if self._nodes:
            return
        # The nodes to which all uses of a parameter lead: one runs when the last of them has been through
        # backward, with a gradient or, where the accumulator has taken the terms, with none. Autograd keeps
        # a node, and its hooks, only as long as somebody does. It runs a node on the stream on which that
        # was made: were it another than the lane's, no event of the lane would stand for the gradient.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._trained.values()]
        self._handles = [
            node.register_hook(partial(self._after_node, name))
            for name, node in zip(self._trained, self._nodes, strict=True)
        ]

    def end(self) -> None:
        """Watch no longer; nodes go, which another trainer may make on a stream of its own."""
        for handle in self._handles:
            handle.remove()
        self._trained, self._named, self._nodes, self._handles = {}, {}, [], []
        self._accumulator = None

    def _after_node(self, name: str, *gradients: object) -> None:
        if current() is self._accumulator:  # else a call that leaves no trace
            self._reach(name)

    def _complete(self, parameters: Iterable[torch.Tensor | None]) -> None:
        for parameter in parameters:
            if (name := self._named.get(id(parameter))) is not None:
                self._reach(name)

    def _reach(self, name: str) -> None:
        if self._bucket[name] < self._done:
            raise RuntimeError(
                f"backward has come to parameter {name} again, whose gradient was complete and is with the "
                "other ranks: a model whose micro-batches take different ways through reentrant checkpoints "
                "needs WindowConfig(exchanges='once')"
            )
        # Reentrant checkpoints have backward passes of their own inside, one for each use of a parameter.
        self._again |= name in self._reached
        if name not in self._reached:
            self._reached.add(name)
            self._left[self._bucket[name]] -= 1
        if self._last and not (self._again or self.waits):
            # In one order: that in which all ranks send them.
            while self._done < len(self._left) and not self._left[self._done]:
                self._done += 1
                self.completed()


def early_buckets(
    dense: DenseModel, communicators: Communicators, config: WindowConfig, device: torch.device
) -> int:
    """How many buckets of dense gradients travel beside a backward: some where exchanges of the window do."""
    if communicators.world_size == 1 or config.exchange.once(communicators.copies_messages(device)):
        return 0
    total = sum(each.numel() for each in dense.model.parameters())
    messages = min(max(total // LEAST, 2), MOST)
    return next((count - 1 for count in range(messages, 1, -1) if _cuts(dense, count)), 0)


def _cuts(dense: DenseModel, messages: int) -> list[int]:
    """The parameters with which all messages but the first in the model's order begin; [] for a model that
    has no parts of about one size for so many.
    """
    if dense.shards is not None:  # each has its messages
        return []
    names = [name for name, _ in dense.model.named_parameters()]
    sizes = [each.numel() for each in dense.model.parameters()]
    total, ends, cuts = sum(sizes), list(accumulate(sizes, initial=0)), [0]
    begins = [at for at in range(1, len(names)) if _part(names[at - 1]) != _part(names[at])]
    # Of equal size: early sums travel while the next are computed, and what is left is short.
    for number in range(1, messages):
        cuts.append(min(begins, key=lambda at: abs(messages * ends[at] - number * total), default=0))
    least = min(ends[end] - ends[begin] for begin, end in pairwise([*cuts, len(names)]))
    return cuts[1:] if least and 2 * messages * least >= total else []


def _part(name: str) -> str:
    """The part of a model that a parameter is in: a layer of a list, ``layers.0``, or a module."""
    path = name.split(".")
    number = next((at for at, each in enumerate(path) if each.isdigit()), 0)
    return ".".join(path[: number + 1][: len(path) - 1])
