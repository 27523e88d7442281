"""A run's evaluations, each of exactly one version of the weights: no update is published while one goes on.

Where sampling runs ahead of training, an evaluation does not stop either: its episodes take their turns at the run's
limiter with those of the rollout, the trainer makes its next step, and only the publishing of that waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

from agent_rl.config import RunConfig
from agent_rl.controller.engine_admission import EngineAdmission
from agent_rl.controller.rollout_runtime import RolloutRuntime
from agent_rl.controller.state import RunState
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.quarantine import Quarantine
from agent_rl.evaluation.report import EvalReport
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import RolloutEvent
from agent_rl.rollout.records import evaluation_stem, write_records
from agent_rl.types import Group


class Evaluations:
    """Evaluates before, after, and every ``eval.every`` steps, what is not recorded yet; ``on_event`` is called as
    episodes end."""

    def __init__(
        self,
        config: RunConfig,
        state: RunState,
        display: Display,
        runtime: RolloutRuntime,
        newcomers: EngineAdmission,
        left_out: Quarantine,
        on_event: Callable[[RolloutEvent], None],
    ) -> None:
        self._config, self._state, self._display, self._runtime = config, state, display, runtime
        self._newcomers, self._left_out, self._on_event = newcomers, left_out, on_event
        self._beside = config.async_rollout.depth > 0
        self._lane = "evaluation" if self._beside else ""
        self._going_on: asyncio.Task[None] | None = None

    async def begin(self, step: int) -> None:
        """Evaluate the weights of ``step`` where that is due: beside what follows, or before it at depth 0."""
        settings, ends = self._config.eval, step in (0, self._config.train.steps)
        if not settings.tasks or not (ends or (settings.every and step % settings.every == 0)):
            return
        kinds = ("sampled", "greedy") if settings.greedy and ends else ("sampled",)
        due = [kind for kind in kinds if f"step-{step}/{kind}" not in self._state.evaluations]
        self._going_on = asyncio.create_task(self._evaluate(step, due), name=f"evaluation-{step}")
        if not self._beside:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the end of the evaluation that goes on, if any. Raises what it failed with."""
        if self._going_on is not None:
            await self._going_on
            self._going_on = None

    async def close(self) -> None:
        """Give up the evaluation that goes on, if any. Idempotent."""
        if self._going_on is not None:
            self._going_on.cancel()
            await asyncio.gather(self._going_on, return_exceptions=True)

    async def _evaluate(self, step: int, kinds: list[str]) -> None:
        for kind in kinds:
            key = f"step-{step}/{kind}"
            report = await self._once(key, f"Pass@1 at step {step}, {kind}", greedy=kind == "greedy")
            self._state.record_evaluation(key, report)
            self._display.end(self._lane)

    async def _once(self, key: str, what: str, *, greedy: bool) -> EvalReport:
        chosen = self._runtime.task_runtime.tasks(self._config.eval.split)[: self._config.eval.tasks]
        tasks = [task for task in chosen if task.id not in self._left_out]
        self._display.stage(what, total=len(tasks), lane=self._lane)
        ended: dict[str, Group] = {}

        def on_event(event: RolloutEvent) -> None:
            if event.group is not None:
                ended[event.group.task_id] = event.group
            self._on_event(event)

        # Beside training the trainer's weights are not those that a newcomer would have to get.
        async with nullcontext() if self._beside else self._newcomers.admit():
            report = await evaluate(
                tasks,
                self._runtime.runner(EpisodeRules.of(self._config).for_evaluation(greedy=greedy)),
                policy="engine",
                limiter=self._runtime.limiter,
                on_event=on_event,
            )
        groups = [ended[task.id] for task in tasks if task.id in ended]
        await asyncio.to_thread(write_records, evaluation_stem(self._state.dir, key), groups)
        if not report.graded:
            self._display.fact(what, f"not known: none of {report.tasks} tasks could be graded")
            return report
        low, high = report.interval
        self._display.fact(what, f"{100 * report.pass_at_1:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
        return report
