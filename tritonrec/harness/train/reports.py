"""What rank 0 shows and logs of a run, step by step."""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType

from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from ...callbacks import Throughput
from ...data import DynamicStream, Stream
from ...data.splits import Part
from ...files.places import Place, place_of
from ...loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from ...pipeline import StepResult
from ..job import Loader
from ..progress import LINE_SECONDS, CommandProgress, Pace
from ..shown import say
from .evaluate import Metrics
from .run import Run
from .summary import in_words

METRICS_FILE = "metrics.csv"


class Reports:
    """A progress bar, printed lines and loggers; a context manager. Quiet where the console is.

    Steps are numbered by how many are done, as those of evaluations and checkpoints.

    Args:
        start: steps that are done already. loader: of the run. writes: this is rank 0, which logs.
    """

    def __init__(self, run: Run, console: Console, start: int, loader: Loader, writes: bool):
        self.run, self.console, self._loader = run, console, loader
        self.pace, self._throughput = Pace(run.window.accumulate), Throughput()
        self._loggers = loggers_of(run, start) if writes else []
        self._progress = progress_bar(console, float("inf") if run.log_every else LINE_SECONDS)
        self._bar = self._progress.add_task("training", total=run.steps, completed=start, loss="")
        self.steps_run = 0

    def __enter__(self) -> Reports:
        self.pace.__enter__()
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        self.pace.__exit__()
        for logger in self._loggers:
            logger.close()

    def on_step_end(self, result: StepResult, seconds: float, metrics: Metrics | None = None) -> None:
        """`seconds` since the result before, or since the pipeline was empty; `metrics` of training."""
        step = result.step + 1
        self.steps_run += 1
        steady = self.pace.on_step_end(result.step, seconds, step == self.run.steps)
        every = 0 if self.console.quiet else self.run.log_every
        if self._loggers or every:
            if steady is not None:
                self._throughput.on_step_end(steady, *self._size_of(result))
            values = {**result.values(), **self._throughput.compute(), **(metrics or {})}
            for logger in self._loggers:
                logger.log(step, values)
            if every and (step % every == 0 or step == self.run.steps):
                say(self.console, line_of(step, self.run.steps, values))
        self._progress.update(self._bar, completed=step, loss=f"loss {result.loss:.4f}")

    def _size_of(self, result: StepResult) -> tuple[int, int]:
        """Samples and tokens of a step over all ranks.

        A stream has a token for each term of the loss, and cut by tokens about as many samples on each rank.
        """
        if not isinstance(self._loader, (Stream, DynamicStream)):
            return self._loader.global_size(result.step)
        tokens = result.loss_terms // self.run.window.accumulate
        if isinstance(self._loader, DynamicStream):
            return len(result.sample_ids) * self._loader.world_size, tokens
        return self._loader.plan.num_samples(result.step), tokens

    def on_evaluation_end(
        self, step: int, loss: float | None, metrics: Metrics, logged: bool, part: Part = "test"
    ) -> None:
        """Log and print; names of validation's metrics are ``validation/HR@10`` and so on.

        Args:
            loss: of the step, None where none was trained since the run went on.
            logged: these metrics were logged before the run went on.
        """
        if part == "validation":
            metrics = {f"{part}/{name}": value for name, value in metrics.items()}
        for logger in [] if logged else self._loggers:
            logger.log(step, metrics)
        shown = "" if loss is None else f"loss {loss:.4f}, "
        say(self.console, f"step {step}: {shown}{in_words(metrics)}")


def line_of(step: int, steps: int, values: dict[str, float]) -> str:
    """``step 20 of 100: loss 4.3210, lr 0.003, 1,234 samples/s``, in one line."""
    words = [f"loss {values['loss']:.4f}"]
    if "grad_norm" in values:
        words.append(f"gradient norm {values['grad_norm']:.4g}")
    if "loss_scale" in values:
        words.append(f"loss scale {values['loss_scale']:g}")
    words += [f"{name} {rate:.4g}" for name, rate in values.items() if name.partition("/")[0] == "lr"]
    words += [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("window_")]
    if "samples_per_second" in values:
        words.append(f"{values['samples_per_second']:,.0f} samples/s")
    return f"step {step} of {steps}: {', '.join(words)}"


def loggers_of(run: Run, start: int) -> list[Logger]:
    """Those that the run names; after a restart they go on behind step `start`."""
    purge_step = start + 1 if run.resume else None
    loggers: list[Logger] = []
    if run.json_lines:
        loggers.append(JSONLinesLogger(run.json_lines, purge_step))
    if run.log_dir:
        loggers.append(CSVLogger(place_of(run.log_dir) / METRICS_FILE, purge_step))
        if find_spec("tensorboard"):
            loggers.append(TensorBoardLogger(run.log_dir, purge_step))
    return loggers


def log_files(run: Run) -> list[Place]:
    """The files of `loggers_of` that a run begins, or goes on with."""
    tables = [place_of(run.log_dir) / METRICS_FILE] if run.log_dir else []
    return [*tables, *([place_of(run.json_lines)] if run.json_lines and str(run.json_lines) != "-" else [])]


def progress_bar(console: Console, line_seconds: float = LINE_SECONDS) -> CommandProgress:
    """With the loss of the last step."""
    loss = TextColumn("{task.fields[loss]}")
    return CommandProgress(console, loss, TimeRemainingColumn(), line_seconds=line_seconds)
