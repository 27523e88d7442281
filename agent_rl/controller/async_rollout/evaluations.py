"""A run's evaluations, each of exactly one weight version: no update is published during an evaluation.

With asynchronous training an evaluation does not stop the rollout: its episodes share the run's limiter with it, and
the trainer computes its next step. Only the publish of that step waits.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from agent_rl.config import EvalConfig
from agent_rl.controller.engine_admission import EngineAdmission
from agent_rl.controller.rollout_runtime import RolloutRuntime
from agent_rl.controller.state import RunState
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.quarantine import Quarantine
from agent_rl.evaluation.report import EvalReport
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import OnEvent, RolloutEvent
from agent_rl.rollout.records import evaluation_stem, write_records
from agent_rl.types import Group


class Evaluations:
    """Runs the evaluations that are due and not recorded yet: before, after, and every ``eval.every`` steps
    of ``steps``. ``on_event`` is called as episodes end. ``concurrent``: rollout and training go on meanwhile."""

    def __init__(
        self,
        settings: EvalConfig,
        rules: EpisodeRules,
        state: RunState,
        display: Display,
        runtime: RolloutRuntime,
        admission: EngineAdmission,
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
        settings, ends = self._settings, step in (0, self._steps)
        if not settings.tasks or not (ends or (settings.every and step % settings.every == 0)):
            return
        kinds = ("sampled", "greedy") if settings.greedy and ends else ("sampled",)
        due = [kind for kind in kinds if f"step-{step}/{kind}" not in self._state.evaluations]
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

    async def _evaluate(self, step: int, kinds: list[str]) -> None:
        for kind in kinds:
            key = f"step-{step}/{kind}"
            report = await self._run_kind(key, f"Pass@1 at step {step}, {kind}", greedy=kind == "greedy")
            self._state.record_evaluation(key, report)
            self._display.end(self._lane)

    async def _run_kind(self, key: str, title: str, *, greedy: bool) -> EvalReport:
        chosen = self._runtime.task_runtime.tasks(self._settings.split)[: self._settings.tasks]
        tasks = [task for task in chosen if task.id not in self._left_out]
        self._display.stage(title, total=len(tasks), lane=self._lane)
        ended: dict[str, Group] = {}

        def on_event(event: RolloutEvent) -> None:
            if event.group is not None:
                ended[event.group.task_id] = event.group
            self._on_event(event)

        # During concurrent training the trainer's weights are not those that a new engine would need.
        async with nullcontext() if self._concurrent else self._admission.admit():
            report = await evaluate(
                tasks,
                self._runtime.runner(self._rules.for_evaluation(greedy=greedy)),
                policy="engine",
                limiter=self._runtime.limiter,
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
