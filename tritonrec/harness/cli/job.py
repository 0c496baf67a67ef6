"""What `train` and `profile` make of their options before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import typer

from ...nn import HSTUConfig
from ..job import Job
from ..profile.run import Profile
from ..train.run import Run

Plan = TypeVar("Plan", Run, Profile)


def load_job(job: Job) -> Job:
    """`job`, after its data has been found and read once."""
    try:
        job.loader()
    except ValueError as error:
        raise ValueError(f"{error} (--data {job.data})") from error
    return job


def with_head_width(sizes: HSTUConfig) -> HSTUConfig:
    """`sizes` with heads that share the dimension; BadParameter where they do not divide it."""
    dim, heads = sizes.dim, sizes.heads
    if dim % heads:
        raise typer.BadParameter(f"--heads {heads} does not divide --dim {dim}: choose numbers where it does")
    return replace(sizes, qk_dim=dim // heads, v_dim=dim // heads)


def ready(plan: Plan) -> Plan:
    """`plan` with its data loaded, the width of its heads, and whole batches in mode ``reference``."""
    job = plan.job
    if job.model != "dlrm":
        job = replace(job, sizes=with_head_width(job.sizes))
    window = replace(plan.window, micro_batches=1) if plan.mode == "reference" else plan.window
    return replace(plan, job=load_job(job), window=window)
