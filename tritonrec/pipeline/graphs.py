"""Forward and backward of a micro-batch as one recorded graph, which a device replays for every micro-batch.

A graph has fixed addresses, shapes and constants. So each micro-batch is copied to the beginning of fixed
tensors of S samples and T tokens, and what is left of T are tokens of samples that nobody has: their losses
have gradient 0. A sample's loss depends on no other sample, and sums of gradients are integers, to which the
padding adds 0. Dropout draws from (seed, sample, position), and the seed is a tensor too, which is written
before each replay (`kernels.philox.device_seed`). No bit changes.

    samples = 2, tokens = 8, sequences of at most 4, and a micro-batch of 3 tokens in 2 samples

    offsets    0 2 3 | 7 8        two samples of padding, 4 = 2 + 8 / 4 samples in all
    loss's gradient  1 1 | 0 0
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..data import Batch, JaggedBatch
from ..kernels.compilation import say_once
from ..kernels.deferred import DeferredErrors
from ..kernels.philox.device_seed import DeviceSeeds
from ..nn import GRU, Dropout, GradientAccumulator
from ..nn.context import has_hooks, recording
from ..nn.modules import GatedNorm, TokenDropout
from ..nn.next_item import NextItemModel
from .compiled import is_compiled
from .model_call import CallerSettings, sees_window, train_micro_batch
from .window import WindowConfig

Result = TypeVar("Result")
DRAWS_BY_SEED = GatedNorm, TokenDropout, Dropout, GRU
"""Modules that drop by the seed of the step, which their kernels load."""
MOST_SEEDS = 4096
"""That a graph may derive: one for each layer, and for each call of a `Dropout`."""


class CudaRecorder:
    """Records the work that a function queues on a device, and queues it again.

    `torch.cuda.graph`; run on an H100 (docs/platforms.md), where no test of ours runs.
    """

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], Result]) -> Result:
        """Record `work`, which may run here any number of times; its result has the tensors of `replay`."""
        # Once without a graph, on a stream of its own, as `torch.cuda.graph` asks for.
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            work()  # kernels are compiled before a graph is recorded
        torch.cuda.current_stream().wait_stream(beside)
        # other lanes go on meanwhile, and may allocate
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        """Queue the recorded work: the same kernels with the same constants on the same addresses."""
        self._graph.replay()


class MicroBatchGraphs:
    """Runs forward and backward of a `NextItemModel` by one graph, for ``Trainer(..., graphs=...)``.

    The graph is recorded at the first micro-batch of each run of the pipeline, and at one that is larger than
    all before.

    Args:
        samples, tokens: of a micro-batch at most; None: an eighth more than the largest so far. Padding costs
            time as tokens do.
        recorder: makes what records a graph.

    Attributes:
        recorded, replayed: how often.

    Raises ValueError for a size below 1.
    """

    def __init__(
        self,
        samples: int | None = None,
        tokens: int | None = None,
        recorder: Callable[[], CudaRecorder] = CudaRecorder,
    ):
        if any(each is not None and each < 1 for each in (samples, tokens)):
            raise ValueError(f"samples and tokens of a graph must be at least 1, got {samples} and {tokens}")
        self._grows = samples is None, tokens is None
        self.samples, self.tokens = samples or 0, tokens or 0
        self.recorded = self.replayed = 0
        self._recorder = recorder
        self._graph: _Graph | None = None
        self._after: int | None = None  # calls that go without one, where no caller asked for graphs

    @classmethod
    def by_default(
        cls, model: torch.nn.Module, config: WindowConfig, device: torch.device
    ) -> MicroBatchGraphs | None:
        """Those of a trainer whose caller asked for nothing.

        None where a graph cannot have the bits, or a part of the model is neither of `tritonrec.nn` nor of
        torch, and may wait for the device.

        The first window of a run goes without, so a step alone never records. A call that no graph can take
        goes without too, and so do all after a recording has failed, of which a warning tells.
        """
        if not torch.cuda.is_available() or not _is_known(model):
            return None
        made = cls(recorder=CudaRecorder)
        made._after = config.window_micro_batches
        try:
            made.validate(model, config, device)
        except ValueError:
            return None
        return made

    def takes(
        self,
        model: torch.nn.Module,
        accumulator: GradientAccumulator,
        batch: Batch,
        rows: dict[str, torch.Tensor],
        settings: CallerSettings,
        calls: int,
    ) -> bool:
        """Whether `train` is to be called: always, unless they are those `by_default`.

        Args:
            calls: of the model in this run, this one included.
        """
        if self._after is None:
            return True
        if type(batch) is not JaggedBatch or settings.autocast or not batch.num_samples:
            return False
        self._grow(batch)
        # A caller may change the model between runs: each condition is looked at for every call.
        if calls <= self._after or not _is_known(model) or _reason_against(model):
            return False
        assert isinstance(model, NextItemModel)
        try:
            self._prepare(model, accumulator, batch, rows["item"], settings)
        except (RuntimeError, ValueError) as error:  # CUDA's, say, of what cannot be recorded
            # Never again in this trainer: a failed recording would fail, and cost, at each micro-batch.
            self._after = sys.maxsize
            warnings.warn(
                f"micro-batches run without a CUDA graph, whose recording failed ({error}): graphs=None of "
                "Trainer leaves it out",
                stacklevel=2,
            )
            return False
        say_once(
            "micro-batches run as one CUDA graph; Trainer(graphs=None) launches their kernels one by one, "
            "with the same bits (docs/launches.md)"
        )
        return True

    def validate(self, model: torch.nn.Module, config: WindowConfig, device: torch.device) -> None:
        """Raise ValueError, with the reason, where a graph cannot have the bits of the model's calls."""
        if not isinstance(model, NextItemModel):
            raise _refusal(f"it pads batches of a tritonrec.nn next-item model, got {type(model).__name__}")
        if config.consistency != "batch" or config.precision != "float32":
            raise _refusal(
                "padding changes no bit with consistency 'batch' and precision 'float32', got "
                f"{config.consistency!r} and {config.precision!r}"
            )
        if reason := _reason_against(model):
            raise _refusal(reason)
        if device.type != "cuda" and self._recorder is CudaRecorder:
            raise _refusal(f"torch.cuda.graph records on CUDA, and the trainer works on {device}")

    def train(
        self,
        model: torch.nn.Module,
        accumulator: GradientAccumulator,
        batch: Batch,
        rows: dict[str, torch.Tensor],
        seed: int,
        settings: CallerSettings,
    ) -> torch.Tensor:
        """`train_micro_batch` by the graph.

        Raises ValueError for a batch of another kind, or with more samples or tokens than were given, and
        where the model has become one that `validate` refuses.
        """
        if reason := _reason_against(model):
            raise _refusal(reason)
        if type(batch) is not JaggedBatch:
            raise _refusal(f"it pads a JaggedBatch, got {type(batch).__name__}")
        self._grow(batch)
        if batch.num_samples > self.samples or batch.num_tokens > self.tokens:
            raise _refusal(
                f"it has {self.samples} samples and {self.tokens} tokens, and a micro-batch has "
                f"{batch.num_samples} and {batch.num_tokens}"
            )
        assert isinstance(model, NextItemModel)
        if settings.autocast:
            raise _refusal("a batch was read under torch.autocast: read it outside")
        if not batch.num_samples:
            return train_micro_batch(model, batch, rows, seed, settings)
        self.replayed += 1
        return self._prepare(model, accumulator, batch, rows["item"], settings).replay(
            batch, rows["item"], seed
        )

    def release(self) -> None:
        """Let the graph and its memory go: none fits another run."""
        self._graph = None

    def _grow(self, batch: JaggedBatch) -> None:
        """Make room for the batch where no size was given."""
        samples, tokens = self._grows
        if samples and batch.num_samples > self.samples:
            self.samples, self._graph = _more(batch.num_samples), None
        if tokens and batch.num_tokens > self.tokens:
            self.tokens, self._graph = _more(batch.num_tokens), None

    def _prepare(
        self,
        model: NextItemModel,
        accumulator: GradientAccumulator,
        batch: JaggedBatch,
        rows: torch.Tensor,
        settings: CallerSettings,
    ) -> _Graph:
        """The graph that takes this batch, recorded if need be."""
        if self._graph is None or not self._graph.fits(model, accumulator, batch, rows):
            self._graph = None  # its memory is free before the next one takes as much
            graph = _Graph(self, model, accumulator, batch, rows)
            with recording() as outputs:
                graph.record(self._recorder(), settings)
            if outputs:
                raise _refusal(f"the model records {', '.join(outputs)}, which a graph would give but once")
            self._graph = graph
            self.recorded += 1
        return self._graph


def _is_known(model: torch.nn.Module) -> bool:
    """Whether all parts are of `tritonrec.nn` or torch, as they wrote them, and nothing is compiled."""
    return not is_compiled(model) and all(
        type(each).__module__.startswith(("tritonrec.nn.", "torch.nn.")) and "forward" not in vars(each)
        for each in model.modules()
    )


def _reason_against(model: torch.nn.Module) -> str:
    """Why a graph would leave out, or repeat, what the model's call does; empty where it would not."""
    if sees_window(model):
        return "its losses are of the whole global batch"
    for name, module in model.named_modules():
        if share_of(module) and not isinstance(module, DRAWS_BY_SEED):
            return (
                f"{name} is a {type(module).__name__}, whose draws a graph would repeat: take "
                "tritonrec.nn.Dropout, or set its probability to 0"
            )
        if has_hooks(module):
            return f"{name or 'the model'} has hooks, which a graph would not call"
    return ""


def _more(size: int) -> int:
    """An eighth more, in 64s."""
    return -(-9 * size // 512) * 64


class _Graph:
    """A graph and the tensors that it reads and writes."""

    def __init__(
        self,
        sizes: MicroBatchGraphs,
        model: NextItemModel,
        accumulator: GradientAccumulator,
        like: JaggedBatch,
        rows: torch.Tensor,
    ):
        self._model, self._accumulator = model, accumulator
        self._longest: int = model.config.max_seq_len
        # Room for samples of padding: T unused tokens are ceil(T / longest) samples of full length at most.
        self._samples, self._tokens = sizes.samples + -(-sizes.tokens // self._longest), sizes.tokens
        self._negatives, device = like.negatives.shape[1], rows.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._batch = JaggedBatch.from_sequences(
            0,
            sample_ids=zeros(self._samples),
            offsets=zeros(self._samples + 1),
            ids=zeros(self._tokens),
            timestamps=zeros(self._tokens),
            labels=zeros(self._tokens),
            negatives=zeros(self._tokens, self._negatives),
        )
        self._rows = rows.new_zeros(self._tokens * (2 + self._negatives), rows.shape[1])
        self._dlosses = rows.new_zeros(self._samples)
        self._pad_offsets(zeros(1))
        self._errors: DeferredErrors
        self._dropped = _shares(model)
        self._seeds = DeviceSeeds(device, MOST_SEEDS)

    def fits(
        self, model: torch.nn.Module, accumulator: GradientAccumulator, batch: JaggedBatch, rows: torch.Tensor
    ) -> bool:
        """Whether the graph is of this model's dropout, adds to this accumulator, and takes the batch."""
        return (
            self._accumulator is accumulator
            # Probabilities are constants of the recorded kernels.
            and self._dropped == _shares(model)
            and self._negatives == batch.negatives.shape[1]
            and self._rows.shape[1] == rows.shape[1]
        )

    def record(self, recorder: CudaRecorder, settings: CallerSettings) -> None:
        """Record the call for a batch of padding alone, which adds 0 to every sum."""

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            self._errors = DeferredErrors()
            # Recorded once: the leaf reads the fixed memory of the rows, and its gradient gets an address of
            # the graph's own, which every replay writes (`self._drows`).
            leaf = self._rows.detach().requires_grad_()
            with self._errors.active(), self._accumulator.active(), _RefusedDraws():
                seed = self._seeds.root()
                losses = train_micro_batch(
                    self._model, self._batch, {"item": leaf}, seed, settings, dlosses=self._dlosses
                )
            assert leaf.grad is not None
            return losses, leaf.grad

        self._recorder = recorder
        self._losses, self._drows = recorder.record(call)

    def replay(self, batch: JaggedBatch, rows: torch.Tensor, seed: int) -> torch.Tensor:
        """Losses (B,) of the batch; ``rows.grad`` is set. `seed`: of dropout."""
        samples, tokens = batch.num_samples, batch.num_tokens
        fixed = self._batch
        for name in ("sample_ids", "timestamps", "labels", "negatives"):
            values = getattr(batch, name)  # behind them may stand any: rows of padding are 0
            getattr(fixed, name)[: len(values)].copy_(values)
        self._pad_offsets(batch.offsets)
        for given, target in zip(self._parts(rows.detach(), tokens), self._parts(self._rows), strict=True):
            target[:tokens].copy_(given)
            target[tokens:].zero_()
        # Losses of padding get no gradient, so whatever their tokens are adds 0 to every sum.
        self._dlosses[:samples].fill_(1.0)
        self._dlosses[samples:].zero_()
        self._seeds.write(seed)
        self._recorder.replay()
        # A replay runs no Python: the status words that kernels
        # wrote are read as if they had been noted again.
        self._errors.repeat()
        # The layout of `rows` again: items, labels, negatives, without the padding of each.
        rows.grad = torch.cat([each[:tokens].flatten(0, -2) for each in self._parts(self._drows)])
        return self._losses[:samples].clone()

    def _parts(self, rows: torch.Tensor, tokens: int | None = None) -> tuple[torch.Tensor, ...]:
        """Rows of items and labels (tokens, d), and of negatives (tokens, K, d)."""
        tokens = self._tokens if tokens is None else tokens
        items, labels, negatives = rows.split([tokens, tokens, tokens * self._negatives])
        return items, labels, negatives.view(tokens, self._negatives, -1)

    def _pad_offsets(self, offsets: torch.Tensor) -> None:
        """Put `offsets` (B + 1,) first, and samples of padding up to the last token behind them."""
        fixed, size = self._batch.offsets, len(offsets)
        fixed[:size].copy_(offsets)
        more = torch.arange(1, len(fixed) - size + 1, device=fixed.device) * self._longest
        # Full sequences of padding up to T, then empty ones that end at T.
        torch.clamp(offsets[-1:] + more, max=self._tokens, out=fixed[size:])


class _RefusedDraws(TorchDispatchMode):
    """Inside, on this thread, an op that draws from a generator of torch's is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refusal(
                f"aten::{func.overloadpacket.__name__} draws from torch's generator, which a graph would "
                "repeat: take tritonrec.nn.Dropout"
            )
        return func(*args, **(kwargs or {}))


def share_of(module: torch.nn.Module) -> float:
    """The probability with which a module of torch's or ours drops, or draws slopes, as it stands."""
    if not module.training:
        return 0.0
    if isinstance(module, (torch.nn.modules.dropout._DropoutNd, Dropout, TokenDropout)):
        return module.p
    if isinstance(module, torch.nn.RReLU):
        return 1.0
    share = getattr(module, "dropout", 0.0)
    return float(share) if isinstance(share, (int, float)) else 0.0


def _shares(model: torch.nn.Module) -> list[float]:
    return [share_of(module) for module in model.modules()]


def _refusal(reason: str) -> ValueError:
    return ValueError(f"a graph of micro-batches: {reason}")
