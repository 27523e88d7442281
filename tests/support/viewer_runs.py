"""Runs written by the product's own writers, of two steps and an evaluation, for tests of the viewer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from agent_rl.config.loader import MODELS
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.evaluation.saved import report_path
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.rollout.records import evaluation_stem, write_records, write_trajectories
from agent_rl.types import (
    Branch,
    BranchCause,
    Group,
    TokenDetail,
    TrainingDecision,
    TrainingStatus,
    Trajectory,
    Turn,
    VersionSpan,
)
from r3.routing import Routing, Span, SpanKind
from support.evaluations import eval_report
from support.trajectories import trajectory

LAYERS, EXPERTS, GROUPS = 7, 8, 3
VERSIONS = VersionSpan(5, 9, "6"), VersionSpan(11, 14, "7")


def episode(number: int, *, routes: bool = True) -> Trajectory:
    """Two turns of 4 and 3 sampled tokens after a prompt of 5, an observation of 2 between them."""
    random = np.random.default_rng(number)
    mask = np.array([0] * 5 + [1] * 4 + [0] * 2 + [1] * 3, bool)
    experts = np.argsort(random.random((14, LAYERS, EXPERTS)), axis=2)[:, :, :2].astype(np.uint8)
    spans = (Span(0, 13, "6", "http://e", SpanKind.SAMPLED), Span(13, 14, "", "", SpanKind.MISSING))
    turns = (
        Turn("look", "bash", {"cmd": "ls"}, None, "a.py", 5, 4, 2, 0, "6", 0.5, 0.25, 0, 0.5),
        Turn("done", "submit", {}, None, "", 11, 3, 0, 8, "7", 0.25, 0.0, 0, 1.25),
    )
    spoken = [("user", "fix it"), ("assistant", "look"), ("tool", "a.py\n[1 turn left]"), ("assistant", "done")]
    return replace(
        trajectory(float(number % 2), sampled=11, task_id=f"task-{number // 2}"),
        tokens=random.integers(0, 50, 14).astype(np.int32), loss_mask=mask,
        logprobs=np.where(mask, random.normal(-1, 0.5, 14), 0).astype(np.float32), turns=turns,
        messages=tuple({"role": role, "content": text} for role, text in spoken), versions=VERSIONS,
        routing=Routing(experts, np.arange(14) < 13, spans, EXPERTS) if routes else None, tests={"t": "PASSED"},
        test_log="log\n", began=1.8e9, start_seconds=0.5, grade_began=1.5, grade_seconds=0.5, seconds=2.0,
    )  # fmt: skip


def detail(seed: int, *, routes: bool = True) -> TokenDetail:
    """Of an episode's 14 tokens; gaps grow with ``seed``. Without routes nobody knows what layers differ in."""
    random = np.random.default_rng(100 + seed)
    bits = np.packbits(random.random((14, LAYERS)) < 0.1, axis=1)
    gaps = random.normal(0, 0.1 + seed, (2, 7)).astype(np.float32)
    entropy, flags = random.random(7).astype(np.float16), random.integers(0, 8, 7).astype(np.uint8)
    if not routes:
        return TokenDetail(gaps[0], gaps[1], entropy, flags, 0, None, None)
    return TokenDetail(gaps[0], gaps[1], entropy, flags, LAYERS, np.zeros_like(bits), bits)


def write_step(directory: Path, step: int, *, routes: bool = True, details: bool = True) -> None:
    """Three groups of two: one trained on, one uniform, one discarded."""
    groups = [Group(f"task-{at}", tuple(episode(2 * at + n, routes=routes) for n in (0, 1))) for at in range(GROUPS)]
    statuses = [TrainingStatus.TRAINED, TrainingStatus.UNIFORM, TrainingStatus.DISCARDED]
    advantages = [0.5, None, None]
    decided = [TrainingDecision(status, value) for status, value in zip(statuses, advantages, strict=True)]
    kept = {(number, 0): detail(number, routes=routes) for number in (0, 1)} if details else None
    write_trajectories(directory, step, groups, decisions=[one for one in decided for _ in (0, 1)], details=kept)


def write_run(directory: Path) -> Path:
    """A run of two steps, with an evaluation after the second."""
    directory.mkdir()
    config = {"name": "demo", "model": "m", "train": {"steps": 4}, "rollout": {"group_size": 2, "tasks_per_step": 3}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    log = MetricsLog(directory)
    for step in (1, 2):
        write_step(directory, step)
        log.append(step, {"reward/mean": step / 4, "rollout/trajectories": 6, "rollout/sampled_tokens_mean": 7})
    log.close()
    report = {"pass_at_1": 0.5, "interval": [0.1, 0.9], "graded": 2, "tasks": 2, "stops": {"submitted": 2}}
    state = {"run_id": "x", "resumes": [1], "evaluations": {"step-2/sampled": report}}
    (directory / "state.json").write_text(json.dumps(state))
    stem = evaluation_stem(directory, "step-2/sampled")
    write_records(stem, [Group("a", (trajectory(1.0, task_id="a"),))])
    eval_report(0.5).write(report_path(directory, "step-2/sampled"))
    return directory


def damage(path: Path) -> None:
    """Truncate a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 9])


def branched(directory: Path) -> Path:
    """``directory`` with a step 1 of one trajectory of two branches, as an agent program leaves one that rewrote
    what it had said. The second has the largest gap."""
    first, mask = episode(0), np.arange(14) // 7 == 1
    routing = replace(first.routing, experts=first.routing.experts[::-1].copy())
    logprobs, spans = np.where(mask, -1, 0).astype(np.float32), (VersionSpan(7, 14, "7"),)
    other = Branch(first.tokens + 1, mask, logprobs, routing, spans, 0, 5, BranchCause.REWRITE)
    turns = (*first.turns, replace(first.turns[0], text="again", prompt_tokens=7, completion_tokens=7))
    group = Group("t", (replace(first, further=(other,), turns=turns),))
    details = {(0, 0): detail(0), (0, 1): detail(9)}
    shutil.copy(MODELS["tiny-moe"] / "tokenizer.json", directory)
    trained = [TrainingDecision(TrainingStatus.TRAINED, 0.5)]
    write_trajectories(directory, 1, [group], decisions=trained, details=details)
    return directory


def evaluation(directory: Path) -> Path:
    results = EvaluationDirectory(directory, {"env": "mini"})
    solved = EpisodeResult("a/b", 0, True, "submitted", 2, 1.0, patch="diff", suspected_hack=("x",))
    results.record(solved, episode(1))
    results.record(EpisodeResult("c", 0, None, "", 0, 0.0, failures=3, error="SandboxError: gone"), None)
    return directory
