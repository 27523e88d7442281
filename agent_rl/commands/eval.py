"""``agent-rl eval``: Pass@1 of a policy on some tasks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from agent_rl.commands.policy import Policy, PolicyChoice, advance, open_policy, pick_tasks
from agent_rl.config import DEFAULT_SCAFFOLD, EvalConfig, RolloutConfig, RunConfig
from agent_rl.controller import preflight
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.prices import read_price, with_costs
from agent_rl.evaluation.report import EpisodeResult, EvalReport, PassAtK, RepoOutcome
from agent_rl.monitoring.console import Display, cell
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import Limiter
from agent_rl.utils.directory_lock import lock_directory
from envs import Task

_TIMEOUTS = {"start_timeout", "grade_timeout"}


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to evaluate. ``tasks`` and ``split`` are the config's where None; the split of a recording is train."""

    policy: PolicyChoice = field(default_factory=PolicyChoice)
    tasks: int | None = None
    samples: int = 1
    split: str | None = None
    out: Path | None = None
    prices: Path | None = None

    def max_tasks(self, config: EvalConfig) -> int | None:
        """The largest number of tasks; None for all of the split, where the config turns its evaluations off."""
        return self.tasks or config.tasks or None

    def split_name(self, config: EvalConfig) -> str:
        return self.split or ("train" if self.policy.is_recording else config.split)

    def model(self, config: RunConfig) -> str:
        """The model's name; the policy's, if it has no model."""
        return self.policy.model or (config.model.name if self.policy.name == "engine" else self.policy.name)

    def directory(self, config: RunConfig) -> Path:
        parts = (self.policy.name.removesuffix("/v1").rpartition("://")[2], self.policy.model or "")
        policy = "-".join(re.sub(r"[^\w.-]+", "-", part) for part in parts if part)
        name = f"{policy}-{self.split_name(config.eval)}{'-greedy' if self.policy.greedy else ''}"
        return self.out or config.run_dir / "eval" / name


async def run_evaluation(config: RunConfig, options: EvalOptions) -> str | None:
    """Evaluate and print Pass@1 with its interval. Results of an earlier start in the directory are kept.

    Returns why nothing could be graded; None where something was.
    """
    options.policy.check()
    model = options.model(config)
    price = None if options.prices is None else read_price(options.prices, model)
    preflight.check_disk_space(config.runs_dir)
    path, display = options.directory(config), Display(f"eval {config.name}")
    with lock_directory(path):
        directory = EvaluationDirectory(path, _identity(config, options), defaults=_settings(EpisodeRules()))
        with display:
            split = options.split_name(config.eval)
            async with open_policy(config, options.policy, path, display, split) as policy:
                available = await pick_tasks(policy, split, None)
                requested = options.max_tasks(config.eval)
                picked = available[:requested]
                if requested is not None and len(picked) < requested:
                    left_out = len(policy.task_runtime.quarantined)
                    quarantine = f" without the {left_out} in env.quarantine" if left_out else ""
                    display.note(f"{requested:,} tasks asked for; the split has {len(picked)}{quarantine}")
                report = await _evaluate(config.rollout, options, policy, picked, directory, display)
        report = replace(report, model=model, available=len(available), requested=requested)
        report = report if price is None else with_costs(report, price)
        directory.finish(report, picked, model)
    return _print_report(display, report, path)


async def _evaluate(
    rollout: RolloutConfig,
    options: EvalOptions,
    policy: Policy,
    tasks: Sequence[Task],
    directory: EvaluationDirectory,
    display: Display,
) -> EvalReport:
    """Run the samples of ``tasks`` that ``directory`` does not have yet."""
    known = {task.id for task in tasks}
    done = [result for result in directory.results() if result.task_id in known and result.sample < options.samples]
    if done:
        display.note(f"{directory.path}: {len(done)} of {len(tasks) * options.samples} episodes are there already")
    display.stage(
        f"Pass@1 of {options.policy.model or options.policy.name}", total=len(tasks) * options.samples - _graded(done)
    )
    return await evaluate(
        tasks,
        policy.run,
        policy=options.policy.name,
        limiter=Limiter(rollout.concurrency),
        samples=options.samples,
        retries=rollout.sandbox_retries,
        done=done,
        on_result=directory.record,
        on_event=lambda event: advance(display, event),
    )


def _print_report(display: Display, report: EvalReport, path: Path) -> str | None:
    """Print the report. Where nothing was graded, print nothing and return why."""
    if not report.graded:
        reasons = Counter(outcome.error.partition("\n")[0] for outcome in report.outcomes)
        (reason, count), *_ = reasons.most_common(1)
        return f"none of {report.tasks} tasks could be graded; {count} of them: {reason}"
    display.table(table([report]))
    if report.by_repo:
        display.table(breakdown(report.by_repo))
    for name, value in report.grades.items():
        display.note(f"{name:<24} {value:.4g}")
    display.note(f"report: {path / 'report.json'}")
    unresolved = next((o.task_id for o in report.outcomes if o.graded and not o.resolved), None)
    display.next("show", path, *(["--task", unresolved] if unresolved else []))
    return None


def _settings(rules: EpisodeRules) -> dict[str, object]:
    """The settings of ``rules`` that an evaluation's results depend on."""
    limits = {"max_turns", "max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "time_limit"}
    rollout = rules.rollout.model_dump(include=limits | {"max_parse_failures", "describe_tools"})
    timeouts = {f"env.{key}": value for key, value in rules.env.model_dump(include=_TIMEOUTS).items()}
    return rollout | timeouts


def _graded(results: Sequence[EpisodeResult]) -> int:
    return len({(result.task_id, result.sample) for result in results if result.resolved is not None})


def _identity(config: RunConfig, options: EvalOptions) -> dict[str, Any]:
    """Everything the results depend on; an evaluation that differs in any of it needs a directory of its own."""
    policy = options.policy
    endpoint = {"native_tools": policy.native_tools, "request": dict(policy.request)} if policy.model else {}
    return {
        "policy": policy.name,
        "model": policy.model or _checkpoint_identity(config.model, policy.name),
        "split": options.split_name(config.eval),
        "env": config.env.name,
        "env_options": config.env.model_dump(mode="json")["options"],
        "tool_format": config.rollout.tool_format,
        **({} if list(config.environments) == [""] else {"sources": _sources(config)}),
        **({} if config.env.scaffold == DEFAULT_SCAFFOLD else {"scaffold": config.env.scaffold}),
        **({} if (harness := config.rollout.harness) is None else {"harness": harness.model_dump(mode="json")}),
        **endpoint,
        **_settings(policy.rules(config)),
    }


def _sources(config: RunConfig) -> dict[str, Any]:
    return {name: source.model_dump(mode="json") for name, source in config.environments.items()}


def _checkpoint_identity(model: Path, policy: str) -> str:
    """Distinguishes a checkpoint from the next one written to the same directory: sizes and times of its weights."""
    if policy != "engine":
        return ""
    files = sorted(model.glob("*.safetensors"))
    return f"{model} " + " ".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)


def table(reports: Sequence[EvalReport]) -> Table:
    """The reports side by side, one column each."""
    result = Table("", *(Column(cell(f"{item.model or item.policy} on {item.env}")) for item in reports))
    rows: dict[str, Callable[[EvalReport], str]] = {
        "Pass@1": lambda item: f"{item.pass_at_1:.1%}",
        "95 % interval": lambda item: f"{item.interval[0]:.1%} to {item.interval[1]:.1%}",
        "tasks graded": _graded_tasks,
        "tasks not graded": lambda item: str(item.ungraded),
        "samples graded": lambda item: (
            f"{sum(one.graded for one in item.outcomes):,} of {item.tasks * item.samples:,} ({item.samples} a task)"
        ),
        "infrastructure failures": lambda item: str(item.infrastructure_failures),
        "suspected hacks": lambda item: str(item.suspected_hacks),
        "turns, mean": lambda item: f"{item.turns_mean:.1f}",
        "seconds, mean": lambda item: f"{item.seconds_mean:.1f}",
        "tokens": _tokens,
    }
    if any(item.price for item in reports):
        rows["cost"] = lambda item: "unknown" if item.cost is None else f"{item.cost:.4f} USD"
    for name, value in rows.items():
        result.add_row(name, *map(value, reports))
    for k in list(reports[0].pass_at_k)[1:] if reports else ():
        result.add_row(f"Pass@{k}", *(pass_at_k_text(item.pass_at_k.get(k), item.graded) for item in reports))
    return result


def pass_at_k_text(value: PassAtK | None, graded: int) -> str:
    """Pass@k with its interval, and its number of tasks where that is not ``graded``."""
    if value is None or not value.tasks:
        return "-"
    low, high = value.interval
    share = "" if value.tasks == graded else f" ({value.tasks:,} of {graded:,} tasks)"
    return f"{value.rate:.1%} [{low:.1%}, {high:.1%}]{share}"


def _graded_tasks(report: EvalReport) -> str:
    counts = f"{report.graded:,} of {report.tasks:,}"
    available = "" if report.available is None else f"; {report.available:,} available"
    requested = "" if report.requested is None else f"; {report.requested:,} asked for"
    return f"{counts}{available}{requested}"


def _tokens(report: EvalReport) -> str:
    if (usage := report.usage) is None:
        return "unknown"
    share = "" if report.usage_tasks == report.tasks else f"; {report.usage_tasks:,} of {report.tasks:,} tasks"
    sampled = f"{usage.completion:,} out ({usage.reasoning:,} reasoning)"
    return f"{usage.prompt:,} in ({usage.cached:,} cached), {sampled}{share}"


def breakdown(by_repo: Mapping[str, RepoOutcome]) -> Table:
    """Pass@1 by repository."""
    result = Table("repository", "Pass@1", "tasks", "ungraded")
    for repo, outcome in by_repo.items():
        result.add_row(cell(repo), f"{outcome.pass_at_1:.1%}", str(outcome.graded), str(outcome.ungraded))
    return result
