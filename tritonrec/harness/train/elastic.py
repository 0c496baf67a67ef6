"""What a rank of an elastic run remembers from one call of `train` to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...distributed import Communicators
from ...resilience import PeerCopies
from .run import Run


@dataclass
class Memory:
    """Of this process; ranks that were lost have ended, and those that are left are called again.

    Args:
        copies: of the state. called: whether `train` has been called.
        evaluated: the step of the last evaluation that this rank has finished.
    """

    copies: PeerCopies = field(default_factory=PeerCopies)
    called: bool = False
    evaluated: int = 0

    def evaluated_by_all(self, communicators: Communicators) -> int:
        """The step of the last evaluation that all ranks have finished. Collective."""
        return min(int(each) for each in communicators.control.all_gather_texts(str(self.evaluated)))


def lacks_evaluation(run: Run, step: int, evaluated: int) -> bool:
    """Whether a run that goes on after `step` evaluates first; `evaluated` is the last evaluation's step.

    That is where ranks were lost in the middle of it, and after the last step, whose metrics are the run's.
    """
    between = bool(run.evaluate_every) and step % run.evaluate_every == 0 and evaluated < step
    return step > 0 and (step == run.steps or between)
