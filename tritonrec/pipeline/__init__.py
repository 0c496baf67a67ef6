"""The scheduler: schedules as tables, their check, one executor, and the trainer in front of them."""

from .check import ScheduleError, check
from .executor import Executor, StageFailedError
from .modes import MODES, PIPELINED, Mode, schedule_of
from .program import WindowProgram
from .schedule import (
    DBP,
    FWP,
    IN_TURN,
    NESTPIPE,
    SCHEDULES,
    Access,
    Edge,
    Schedule,
    Stage,
    Task,
    keep_rows,
    with_replicas,
)
from .synchronous import Synchronous, run_in_turn
from .trainer import StepResult, Trainer
from .window import Consistency, Dedup, LookupCounts, Model, Window, WindowConfig

__all__ = [
    "DBP",
    "FWP",
    "IN_TURN",
    "MODES",
    "NESTPIPE",
    "PIPELINED",
    "SCHEDULES",
    "Access",
    "Consistency",
    "Dedup",
    "Edge",
    "Executor",
    "LookupCounts",
    "Mode",
    "Model",
    "Schedule",
    "ScheduleError",
    "Stage",
    "StageFailedError",
    "StepResult",
    "Synchronous",
    "Task",
    "Trainer",
    "Window",
    "WindowConfig",
    "WindowProgram",
    "check",
    "keep_rows",
    "run_in_turn",
    "schedule_of",
    "with_replicas",
]
