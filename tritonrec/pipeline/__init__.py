"""The scheduler: schedules as tables, their check, one executor, and the trainer in front of them."""

from .check import ScheduleError, check
from .dense import DenseModel
from .diagnosis import NotBatchInvariantError
from .evaluation import RowsOfRanks, next_item_scores, rank_held_out
from .executor import Executor, StageFailedError
from .graphs import MicroBatchGraphs
from .modes import MODES, PIPELINED, STAGED, TWO_BUFFERS, Mode, base_schedule, schedule_of
from .places import WindowPlaces
from .position import SupportsState
from .precision import LossScaling, Precision, autocast
from .program import Program
from .reference import ReferenceTrainer, run_sequentially
from .results import StepResult
from .saver import TrainingSaver, restore, saved_vocabularies
from .schedule import (
    DBP,
    FWP,
    NESTPIPE,
    SCHEDULES,
    SEQUENTIAL,
    Access,
    Edge,
    Schedule,
    Stage,
    Task,
    keep_rows,
    over_nodes,
    with_norm,
    with_replicas,
    with_window_loss,
)
from .tasks import Tasks
from .trainer import Trainer
from .window import Consistency, Dedup, ExchangeConfig, LookupCounts, Model, Window, WindowConfig
from .window_loss import WindowLossModel

__all__ = [
    "DBP",
    "FWP",
    "MODES",
    "NESTPIPE",
    "PIPELINED",
    "SCHEDULES",
    "SEQUENTIAL",
    "STAGED",
    "TWO_BUFFERS",
    "Access",
    "Consistency",
    "Dedup",
    "DenseModel",
    "Edge",
    "ExchangeConfig",
    "Executor",
    "LookupCounts",
    "LossScaling",
    "MicroBatchGraphs",
    "Mode",
    "Model",
    "NotBatchInvariantError",
    "Precision",
    "Program",
    "ReferenceTrainer",
    "RowsOfRanks",
    "Schedule",
    "ScheduleError",
    "Stage",
    "StageFailedError",
    "StepResult",
    "SupportsState",
    "Task",
    "Tasks",
    "Trainer",
    "TrainingSaver",
    "Window",
    "WindowConfig",
    "WindowLossModel",
    "WindowPlaces",
    "autocast",
    "base_schedule",
    "check",
    "keep_rows",
    "next_item_scores",
    "over_nodes",
    "rank_held_out",
    "restore",
    "run_sequentially",
    "saved_vocabularies",
    "schedule_of",
    "with_norm",
    "with_replicas",
    "with_window_loss",
]
