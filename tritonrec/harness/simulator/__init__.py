"""A discrete-event model of a training cluster that executes schedule tables, and a planner on top of it."""

from .cluster import Cluster, Workload, predict
from .cost_files import from_trace, load
from .engine import Cost, Timeline, Workers, simulate
from .keys import KeyModel
from .measure import Outcome, measure
from .plan import Plan
from .planner import search
from .stage_costs import Link, StageCosts

__all__ = [
    "Cluster",
    "Cost",
    "KeyModel",
    "Link",
    "Outcome",
    "Plan",
    "StageCosts",
    "Timeline",
    "Workers",
    "Workload",
    "from_trace",
    "load",
    "measure",
    "predict",
    "search",
    "simulate",
]
