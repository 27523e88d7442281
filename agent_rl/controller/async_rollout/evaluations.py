"""A run's evaluations, each of exactly one weight version: no update is published during an evaluation.

With asynchronous training an evaluation does not stop the rollout: its episodes share the run's limiter with it, and
the trainer computes its next step. Only the publish of that step waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace

from agent_rl.config import EvalSettings
from agent_rl.controller.engine_admission import EngineAdmission
from agent_rl.controller.rollout_runtime import RolloutRuntime
from agent_rl.controller.run_state import RunState
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.quarantine import Quarantine
from agent_rl.evaluation.report import EvalReport
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import OnEvent, RolloutEvent
from agent_rl.rollout.records import evaluation_stem, write_records
from agent_rl.types import Group


class Evaluations:
    """Runs the evaluations that are due and not recorded yet: before, after, and every ``every`` steps of ``steps``.

    ``settings`` are those of each source; "" is the environment of the section ``env``. ``admission`` None: the engines
    serve the weights since their start. ``on_event`` is called as episodes end. ``concurrent``: rollout and training go
    on meanwhile.
    """

    def __init__(
        self,
        settings: Mapping[str, EvalSettings],
        rules: EpisodeRules,
        state: RunState,
        display: Display,
        runtime: RolloutRuntime,
        admission: EngineAdmission | None,
        left_out: Quarantine,
        on_event: OnEvent,
        *,
        steps: int,
        concurrent: bool,
    ) -> None:
        self._settings, self._rules, self._state, self._display = settings, rules, state, display
        self._runtime, self._admission, self._left_out, self._on_event = runtime, admission, left_out, on_event
        self._steps, self._concurrent, self._lane = steps, concurrent, "evaluation" if concurrent else ""
        self._running: asyncio.Task[None] | None = None

    async def begin(self, step: int) -> None:
        """Start to evaluate the weights of ``step`` if that is due. At depth 0, wait for the result."""
        due = due_evaluations(self._settings, self._state.evaluations, step, self._steps)
        if not due:
            return
        self._running = asyncio.create_task(self._evaluate(step, due), name=f"evaluation-{step}")
        if not self._concurrent:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the running evaluation, if any. Raises its error."""
        if self._running is not None:
            await self._running
            self._running = None

    async def close(self) -> None:
        """Cancel the running evaluation, if any. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _evaluate(self, step: int, due: list[tuple[str, str]]) -> None:
        for source, kind in due:
            key, title = _key(step, source, kind), f"Pass@1 at step {step}, {f'{source}, ' if source else ''}{kind}"
            report = await self._run_kind(key, title, source, greedy=kind == "greedy")
            self._state.record_evaluation(key, report)
            self._display.end(self._lane)

    async def _run_kind(self, key: str, title: str, source: str, *, greedy: bool) -> EvalReport:
        settings = self._settings[source]
        chosen = self._runtime.task_runtime.tasks(source or settings.split)[: settings.tasks]
        tasks = [task for task in chosen if task.id not in self._left_out]
        samples = 1 if greedy else settings.samples
        self._display.stage(title, total=len(tasks) * samples, lane=self._lane)
        ended: dict[str, Group] = {}

        def on_event(event: RolloutEvent) -> None:
            if (group := event.group) is not None:
                earlier = ended.get(group.task_id)
                further = () if earlier is None else earlier.trajectories
                ended[group.task_id] = replace(group, trajectories=further + group.trajectories)
            self._on_event(event)

        # During concurrent training the trainer's weights are not those that a new engine would need.
        async with nullcontext() if self._concurrent or self._admission is None else self._admission.admit():
            report = await evaluate(
                tasks,
                self._runtime.runner(self._rules.for_evaluation(greedy=greedy, temperature=settings.temperature)),
                policy="engine",
                limiter=self._runtime.limiter,
                samples=samples,
                on_event=on_event,
            )
        groups = [ended[task.id] for task in tasks if task.id in ended]
        await asyncio.to_thread(write_records, evaluation_stem(self._state.dir, key), groups)
        if not report.graded:
            self._display.fact(title, f"unknown: none of {report.tasks} tasks could be graded")
            return report
        low, high = report.interval
        self._display.fact(title, f"{100 * report.pass_at_1:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
        return report


def due_evaluations(
    settings: Mapping[str, EvalSettings], recorded: Collection[str], step: int, steps: int
) -> list[tuple[str, str]]:
    """Source and kind (sampled, greedy) of the evaluations due after ``step`` of ``steps``, without those ``recorded``
    by key."""
    return [
        (source, kind)
        for source, each in settings.items()
        for kind in _kinds_due(each, step, ends=step in (0, steps))
        if _key(step, source, kind) not in recorded
    ]


def _kinds_due(settings: EvalSettings, step: int, *, ends: bool) -> tuple[str, ...]:
    if not settings.tasks or not (ends or (settings.every and step % settings.every == 0)):
        return ()
    return ("sampled", "greedy") if settings.greedy and ends else ("sampled",)


def _key(step: int, source: str, kind: str) -> str:
    """The key of an evaluation in the run's state: ``step-20/sampled``, or ``step-20/SOURCE/sampled``."""
    return f"step-{step}/{f'{source}/' if source else ''}{kind}"
