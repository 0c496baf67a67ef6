"""The tasks of a run: those that its lanes are given, in which order, and what each waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .schedule import Schedule, Task

Template = tuple[str, int | None]
"""A task of any batch: its stage and micro-batch."""


class Tasks:
    """The tasks of a schedule in windows of N micro-batches, some of which share a task.

    A merged task inherits the dependencies and dependents of every micro-batch it covers.

    Args:
        schedule: the stages.
        micro_batches: N.
        doers: by stage, [i] the micro-batch whose task does the work of i too. In stages that are not named
            each micro-batch has a task of its own.

    Raises:
        ValueError: a number below one; doers of a stage that runs once per batch, of another number of
            micro-batches, or of which one leaves its own work to another.
    """

    def __init__(
        self, schedule: Schedule, micro_batches: int, doers: Mapping[str, Sequence[int]] | None = None
    ):
        if micro_batches < 1:
            raise ValueError(f"a window needs at least one micro-batch, got {micro_batches}")
        self.schedule, self.micro_batches = schedule, micro_batches
        self.doers = {stage: tuple(each) for stage, each in (doers or {}).items()}
        for stage, each in self.doers.items():
            own = schedule[stage].per_micro_batch and len(each) == micro_batches
            # A doer does its own work (each[i] == i): one step
            # leads from any micro-batch to the task that runs.
            if not own or any(not 0 <= i < micro_batches or each[i] != i for i in each):
                raise ValueError(f"{stage}: {each} are no doers of {micro_batches} micro-batches")
        self._waits = {(task.stage, task.micro_batch): self._waits_of(task) for task in self._every()}
        self._order = self._in_order()

    @property
    def shared(self) -> bool:
        """Whether any task does the work of several micro-batches."""
        return any(doer != i for each in self.doers.values() for i, doer in enumerate(each))

    def done_by(self, task: Task) -> Task:
        """The task of the same batch and stage that does the work of this one, as a rule itself."""
        doers = self.doers.get(task.stage)
        return task if doers is None else task._replace(micro_batch=doers[task.micro_batch or 0])

    def does(self, task: Task) -> list[Task]:
        """The tasks whose work this one does, in their order; itself among them."""
        doers = self.doers.get(task.stage)
        if doers is None:
            return [task]
        return [task._replace(micro_batch=i) for i, doer in enumerate(doers) if doer == task.micro_batch]

    def of(self, batch: int) -> list[Task]:
        """Those of a batch that run, in the order in which they are given to their lanes.

        That of `Schedule.tasks`, except that each is behind all of its batch that it waits for. So what waits
        for a shared task may come later. Tasks of one lane keep their order.
        """
        return [Task(stage, batch, micro_batch) for stage, micro_batch in self._order]

    def waits_for(self, task: Task) -> list[Task]:
        """Those that the schedule orders before `task`, as far as they exist."""
        waits = self._waits[task.stage, task.micro_batch]
        return [Task(stage, task.batch - back, i) for (stage, i), back in waits if back <= task.batch]

    def launch_order(self, batches: int) -> list[Task]:
        """Those of so many batches that launch collectives, in the one order of all ranks."""
        tasks = [task for batch in range(batches) for task in self.of(batch)]
        launching = (task for task in tasks if self.schedule[task.stage].launches_collectives)
        return sorted(launching, key=self.schedule.launch_turn)

    def _every(self) -> list[Task]:
        return [task for task in self.schedule.tasks(0, self.micro_batches) if self.done_by(task) == task]

    def _waits_of(self, task: Task) -> list[tuple[Template, int]]:
        """(a task, the batches it is back) of all that `task` waits for, whatever its batch."""
        # A batch so late that no edge leads before batch 0;
        # `waits_for` drops those that do for an early batch.
        late = task._replace(batch=self.schedule.reach)
        waits_for = dict.fromkeys(map(self.done_by, self.schedule.waits_for(late, self.micro_batches)))
        return [((other.stage, other.micro_batch), late.batch - other.batch) for other in waits_for]

    def _in_order(self) -> list[Template]:
        lanes = {stage.name: stage.lane for stage in self.schedule.stages}
        # The first task that can run is taken, again and again. A task that has
        # to wait holds its lane: those behind it stay behind it. Tasks of earlier
        # batches were all given before, so edges to them (back > 0) hold nothing.
        left, order = [*self._waits], dict[Template, None]()
        while left:
            held = set[str]()
            for at, each in enumerate(left):
                lane = lanes[each[0]]
                if lane not in held and all(back or other in order for other, back in self._waits[each]):
                    order[left.pop(at)] = None
                    break
                held.add(lane)
            else:  # they wait for each other, as the check of the schedule says
                return [*order, *left]
        return [*order]
