"""The groups of one global step: which tasks are drawn, which groups are kept, and what is measured of them.

::

    task_at(position) ── tasks ──▶ episodes ──▶ group ─┬─ teaches something ──▶ kept (rescored while others still run)
        ▲                                              └─ rewards all equal ──▶ discarded ─┐
        └────────────── one further task (dynamic sampling, up to max_draws) ◀─────────────┘

A task that proves undecidable is left out from then on, and one further task is drawn for it.

Without dynamic sampling every group is kept. With it a step draws the shortest stretch of the data that holds
``tasks_per_step`` groups which teach something: since exactly one task is drawn for each group thrown away, which
stretch that is depends on how the groups end, and not on when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from agent_rl.config import RunConfig
from agent_rl.controller.schedule import task_at
from agent_rl.engine.types import Scorer
from agent_rl.errors import RolloutFailed
from agent_rl.rollout.filters import filter_metrics, masked_stops, teaches
from agent_rl.rollout.group import DroppedGroup, EpisodeRunner, GroupSettings, Rollout, RolloutEvent, collect_groups
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.rescore import Rescorer, rescore_metrics
from agent_rl.rollout.stats import rollout_metrics
from agent_rl.types import Fate, Group, Verdict
from envs import Task


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's groups, in the order of the data: ``groups`` to train on, and those ``discarded``.

    ``position``: the first position of the data that was not drawn, where the next step begins. ``values``:
    ``reward/*``, ``rollout/*``, ``filter/*`` and ``old_logprob/*``; the first two are those of all episodes, discarded
    ones included.
    """

    groups: tuple[Group, ...]
    discarded: tuple[Group, ...]
    position: int
    values: dict[str, float]

    @property
    def sampled(self) -> tuple[Group, ...]:
        """All groups, those to train on first."""
        return self.groups + self.discarded

    @property
    def verdicts_of_discarded(self) -> tuple[Verdict, ...]:
        """One for each trajectory of the discarded groups."""
        return tuple(Verdict(Fate.DISCARDED) for group in self.discarded for _ in group.trajectories)


class Collector:
    """Collects the batches of a run. ``engine`` rescores, where ``train.old_logprob.source`` says so; tasks whose id is
    in ``left_out`` by the time are not drawn."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        *,
        limiter: Limiter,
        engine: Scorer,
        left_out: Container[str] = (),
    ) -> None:
        self._config, self._tasks, self._limiter, self._engine = config, tasks, limiter, engine
        self._left_out = left_out
        self._masked = masked_stops(config.train.filter)

    async def collect(self, position: int, run: EpisodeRunner, on_event: Callable[[RolloutEvent], None]) -> Batch:
        """The batch that begins at ``position`` of the data, its episodes run by ``run``.

        Raises RolloutFailed where the infrastructure failed too often, or where ``max_draws`` was not enough and
        ``when_short`` is stop.
        """
        draws = Draws(self._tasks, position, self._config, self.keeps, self._left_out)
        rescorer, ended = self._rescorer(), _LastEpisode(on_event)
        rollout = await collect_groups(
            draws.first(),
            run,
            self._settings(),
            limiter=self._limiter,
            on_event=ended,
            rescore=rescorer,
            refill=draws.refill,
        )
        tail = time.perf_counter() - ended.at
        draws.check()
        return self._batch(draws, rollout, {} if rescorer is None else _rescore_values(rollout, rescorer, tail))

    def keeps(self, group: Group) -> bool:
        """Whether ``group`` is trained on."""
        return not self._config.rollout.dynamic_sampling.enabled or teaches(group, self._masked)

    def _batch(self, draws: Draws, rollout: Rollout, rescored: dict[str, float]) -> Batch:
        ordered = sorted(map(_in_order, rollout.groups), key=draws.position_of)
        kept = tuple(group for group in ordered if self.keeps(group))
        discarded = tuple(group for group in ordered if not self.keeps(group))
        values = rollout_metrics(rollout) | filter_metrics(kept, discarded, self._masked) | rescored
        return Batch(kept, discarded, draws.position, values)

    def _settings(self) -> GroupSettings:
        rollout = self._config.rollout
        uniform = self._config.train.baseline == "batch"
        return GroupSettings(rollout.group_size, retries=rollout.sandbox_retries, rescore_uniform=uniform)

    def _rescorer(self) -> Rescorer | None:
        old = self._config.train.old_logprob
        if old.source != "rescore":
            return None
        limiter = Limiter(old.rescore.concurrency)
        return Rescorer(self._engine, n=old.rescore.n, limiter=limiter, skipped=self._masked)


def _in_order(group: Group) -> Group:
    """``group`` with its trajectories in an order that does not depend on when they finished: sums are then the same
    bits in a step that is done again."""
    members = sorted(group.trajectories, key=lambda t: (t.tokens.tobytes(), t.logprobs.tobytes()))
    return replace(group, trajectories=tuple(members))


class Draws:
    """The tasks that a step draws from ``position`` of the data on; ``position`` moves as they are drawn."""

    def __init__(
        self,
        tasks: Sequence[Task],
        position: int,
        config: RunConfig,
        keeps: Callable[[Group], bool],
        left_out: Container[str] = (),
    ) -> None:
        self.position, self.drawn = position, 0
        self._tasks, self._seed, self._keeps, self._left_out = tasks, config.seed, keeps, left_out
        self._settings, self._wanted = config.rollout.dynamic_sampling, config.rollout.tasks_per_step
        self._kept = 0
        self._positions: dict[str, int] = {}

    def first(self) -> list[Task]:
        return [self._draw() for _ in range(self._wanted)]

    def refill(self, ended: Group | DroppedGroup) -> Task | None:
        """A further task for one that is undecidable, and for a group that is not kept, while any may be drawn."""
        if isinstance(ended, DroppedGroup) and ended.undecidable:
            return self._draw()
        if isinstance(ended, Group) and self._keeps(ended):
            self._kept += 1
            return None
        if not self._settings.enabled or self.drawn >= self._settings.max_draws * self._wanted:
            return None
        return self._draw()

    def check(self) -> None:
        """Raises RolloutFailed for a step that lacks groups, where that is to end the run."""
        if self._settings.enabled and self._settings.when_short == "stop" and self._kept < self._wanted:
            raise RolloutFailed(
                f"{self._kept} of {self._wanted} groups have some but not all solved, after {self.drawn} tasks: raise "
                f"rollout.dynamic_sampling.max_draws (now {self._settings.max_draws}), take tasks nearer to what the "
                "model can do, or set rollout.dynamic_sampling.when_short to train"
            )

    def position_of(self, group: Group) -> int:
        """Where the data has the group's task: the order of a batch, however its groups finished."""
        return self._positions[group.task_id]

    def _draw(self) -> Task:
        epochs = range(self.position, self.position + 2 * len(self._tasks))  # two hold all tasks, wherever they begin
        drawn = ((at, task_at(self._tasks, at, self._seed)) for at in epochs)
        at, task = next(((at, task) for at, task in drawn if task.id not in self._left_out), (0, None))
        if task is None:
            raise RolloutFailed("none of the tasks can be graded: the run's quarantine.json has the reasons")
        self._positions.setdefault(task.id, at)
        self.position, self.drawn = at + 1, self.drawn + 1
        return task


class _LastEpisode:
    """Passes events on, and notes when the last episode ended."""

    def __init__(self, on_event: Callable[[RolloutEvent], None]) -> None:
        self._on_event, self.at = on_event, time.perf_counter()

    def __call__(self, event: RolloutEvent) -> None:
        if event.trajectory is not None:
            self.at = time.perf_counter()
        self._on_event(event)


def _rescore_values(rollout: Rollout, rescorer: Rescorer, tail: float) -> dict[str, float]:
    """``old_logprob/*``, and ``time/rescore_tail``: how long the step waited for rescoring alone."""
    trajectories = [trajectory for group in rollout.groups for trajectory in group.trajectories]
    failed = {"old_logprob/rescore_failed": float(rescorer.failed), "time/rescore_tail": tail}
    return rescore_metrics(trajectories) | failed
