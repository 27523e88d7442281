"""``agent-rl eval``: Pass@1 of a policy on some tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agent_rl.commands.policy import Policy, PolicyChoice, advance, open_policy, pick_tasks
from agent_rl.config import OWN_SCAFFOLD, RunConfig
from agent_rl.controller import preflight
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.report import EpisodeResult, EvalReport
from agent_rl.evaluation.tables import breakdown, table
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.limiter import Limiter
from agent_rl.utils.directory_lock import lock_directory
from envs import Task

_BOUNDS = {"start_timeout", "grade_timeout"}


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to evaluate. ``tasks`` and ``split`` are the config's where None; of a recording, ``split`` is train."""

    policy: PolicyChoice = field(default_factory=PolicyChoice)
    tasks: int | None = None
    samples: int = 1
    split: str | None = None
    out: Path | None = None

    def tasks_of(self, config: RunConfig) -> int | None:
        """How many tasks at most; all of the split where the config has its evaluations turned off."""
        return self.tasks or config.eval.tasks or None

    def split_of(self, config: RunConfig) -> str:
        return self.split or ("train" if self.policy.is_recording else config.eval.split)

    def directory(self, config: RunConfig) -> Path:
        model = "" if self.policy.model is None else f"-{quote(self.policy.model, safe='')}"
        policy = f"{quote(self.policy.name, safe='')}{model}"
        name = f"{policy}-{self.split_of(config)}{'-greedy' if self.policy.greedy else ''}"
        return self.out or config.run_dir / "eval" / name


async def run_evaluation(config: RunConfig, options: EvalOptions) -> str | None:
    """Evaluate and print Pass@1 with its interval; what was there of an earlier start in the directory is kept.

    Returns why nothing could be graded, or None where something was.
    """
    options.policy.check()
    preflight.check_room(config.runs_dir)
    path, display = options.directory(config), Display(f"eval {config.name}")
    with lock_directory(path):
        directory = EvaluationDirectory(path, _facts(config, options), defaults=_settings(EpisodeRules()))
        with display:
            async with open_policy(config, options.policy, path, display) as policy:
                picked = await pick_tasks(policy, options.split_of(config), options.tasks_of(config))
                report = await _evaluate(config, options, policy, picked, directory, display)
        directory.finish(report, picked, options.policy.model or options.policy.name)
    return _tell(display, report, path)


async def _evaluate(
    config: RunConfig,
    options: EvalOptions,
    policy: Policy,
    tasks: Sequence[Task],
    directory: EvaluationDirectory,
    display: Display,
) -> EvalReport:
    """Run the samples of ``tasks`` that ``directory`` does not hold yet."""
    known = {task.id for task in tasks}
    done = [result for result in directory.results() if result.task_id in known and result.sample < options.samples]
    if done:
        display.note(f"{directory.path}: {len(done)} of {len(tasks) * options.samples} episodes are there already")
    display.stage(f"Pass@1 of {options.policy.name}", total=len(tasks) * options.samples - _graded(done))
    return await evaluate(
        tasks,
        policy.run,
        policy=options.policy.name,
        limiter=Limiter(config.rollout.concurrency),
        samples=options.samples,
        retries=config.rollout.sandbox_retries,
        done=done,
        on_result=directory.record,
        on_event=lambda event: advance(display, event),
    )


def _tell(display: Display, report: EvalReport, path: Path) -> str | None:
    """Print the report. Where nothing was graded there is none to print: why not is returned."""
    if not report.graded:
        reasons = Counter(outcome.error.partition("\n")[0] for outcome in report.outcomes)
        (reason, count), *_ = reasons.most_common(1)
        return f"none of {report.tasks} tasks could be graded; {count} of them: {reason}"
    display.table(table([report]))
    if report.by_repo:
        display.table(breakdown(report.by_repo))
    display.note(f"report: {path / 'report.json'}")
    unresolved = next((o.task_id for o in report.outcomes if o.graded and not o.resolved), None)
    display.next("show", path, *(["--task", unresolved] if unresolved else []))
    return None


def _settings(rules: EpisodeRules) -> dict[str, object]:
    """What of the rules an evaluation's figures depend on."""
    limits = {"max_turns", "max_tokens", "max_new_tokens", "temperature", "top_p", "time_limit"}
    rollout = rules.rollout.model_dump(include=limits | {"max_parse_failures", "describe_tools"})
    bounds = {f"env.{key}": value for key, value in rules.env.model_dump(include=_BOUNDS).items()}
    return rollout | bounds


def _graded(results: Sequence[EpisodeResult]) -> int:
    return len({(result.task_id, result.sample) for result in results if result.resolved is not None})


def _facts(config: RunConfig, options: EvalOptions) -> dict[str, Any]:
    """What the figures depend on; an evaluation that differs in any of it gets a directory of its own."""
    policy = options.policy
    endpoint = {"native_tools": policy.native_tools, "request": dict(policy.request)} if policy.model else {}
    return {
        "policy": policy.name,
        "model": policy.model or _model_mark(config, policy.name),
        "split": options.split_of(config),
        "env": config.env.name,
        "env_options": config.env.model_dump(mode="json")["options"],
        "tool_format": config.rollout.tool_format,
        **({} if config.env.scaffold == OWN_SCAFFOLD else {"scaffold": config.env.scaffold}),
        **({} if (harness := config.rollout.harness) is None else {"harness": harness.model_dump(mode="json")}),
        **endpoint,
        **_settings(policy.rules(config)),
    }


def _model_mark(config: RunConfig, policy: str) -> str:
    """What tells one model in a directory from the next one written there."""
    if policy != "engine":
        return ""
    files = sorted(config.model.glob("*.safetensors"))
    return f"{config.model} " + " ".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)
