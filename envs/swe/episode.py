"""One started task, and how any patch is graded."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from envs.context import EnvContext
from envs.swe.boxes import WORKDIR, PatchError, TestRun, agent_box, box_spec, run_tests, take_patch
from envs.swe.grading import Verdict, judge
from envs.swe.patches import patched_paths, screen
from envs.swe.prompts import opening
from envs.swe.records import SweRecord
from envs.types import Grade, GradingError, Message
from sandbox import Sandbox
from tools import ToolSet, swe_tools


@dataclass(frozen=True)
class SweEpisode:
    """A started task: the agent's box with its repository and without the hidden tests."""

    context: EnvContext
    record: SweRecord
    sandbox: Sandbox
    base: str
    messages: Sequence[Message]
    tools: ToolSet
    site_root: Path | None = None

    async def patch(self) -> str:
        """What the agent changed so far, as a git diff. Raises ``PatchError`` if it broke its repository."""
        return await take_patch(self.sandbox, self.base)

    async def grade(self) -> Grade:
        """Grade the agent's patch; the box may go on being used."""
        try:
            patch = await self.patch()
        except PatchError as error:
            return Grade(reward=0.0, resolved=False, suspected_hack=(str(error),))
        return await grade_patch(self.context, self.record, patch, site_root=self.site_root)


@asynccontextmanager
async def start_episode(
    context: EnvContext, record: SweRecord, *, site_root: Path | None = None
) -> AsyncIterator[SweEpisode]:
    """Start the record's task; leaving closes its box. ``site_root`` is where its ``site_packages`` are found."""
    async with agent_box(context, record, box_spec(context, record, site_root)) as (sandbox, base):
        tools = swe_tools(sandbox, style=context.tool_style, timeout=context.tool_timeout)
        messages = opening(record.problem_statement, WORKDIR, context.tool_style)
        yield SweEpisode(context, record, sandbox, base, messages, tools, site_root)


async def grade_patch(context: EnvContext, record: SweRecord, patch: str, *, site_root: Path | None = None) -> Grade:
    """Grade a git diff in a fresh box; docs/environments.md tells the rules.

    The reward is 1 if every expected test has its expected status, else 0. A run without a verdict (the patch does not
    apply, no summary, out of time or memory) is the patch's fault only if the gold patch, run the same way right after,
    is resolved; else ``GradingError``. A box that breaks raises ``SandboxError``.
    """
    began = time.perf_counter()
    screened = screen(patch, hidden=record.tests, allowed=patched_paths(record.gold))
    if not screened.text and record.verified:
        return Grade(reward=0.0, resolved=False, patch=patch, suspected_hack=screened.undone)
    verdict = await _verdict(context, record, screened.text, site_root)
    return Grade(
        reward=float(verdict.resolved),
        resolved=verdict.resolved,
        patch=patch,
        tests=verdict.tests,
        suspected_hack=screened.undone,
        seconds=time.perf_counter() - began,
    )


async def verify_record(context: EnvContext, record: SweRecord, *, site_root: Path | None = None) -> SweRecord:
    """The record marked ``verified``: its gold patch resolves it, the empty patch does not. Else ``GradingError``."""
    unverified = record.model_copy(update={"verified": False})
    gold = await _verdict(context, unverified, record.gold, site_root)
    if not gold.resolved:
        raise GradingError(f"task {record.id}: its gold patch does not resolve it: {gold.difference}")
    run = await run_tests(context, unverified, box_spec(context, record, site_root), "")
    nothing = _read(unverified, run)
    if nothing is not None and nothing.resolved:
        raise GradingError(f"task {record.id}: it is resolved without a change")
    return record.model_copy(update={"verified": True})


async def _verdict(context: EnvContext, record: SweRecord, patch: str, site_root: Path | None) -> Verdict:
    spec = box_spec(context, record, site_root)
    run = await run_tests(context, record, spec, patch)
    verdict = _read(record, run)
    if verdict is not None:
        return verdict
    await _blame_the_patch(context, record, patch, site_root, run)
    return Verdict(resolved=False, tests={}, difference=run.account)


def _read(record: SweRecord, run: TestRun) -> Verdict | None:
    """The verdict on a run, or None where it says nothing. A run that was cut off says nothing, whatever it printed."""
    if not run.began or run.result.timed_out:
        return None
    return judge(run.log, record.expected, "node" if record.is_local else "name")


async def _blame_the_patch(
    context: EnvContext, record: SweRecord, patch: str, site_root: Path | None, run: TestRun
) -> None:
    """Return if a run without a verdict was the patch's fault; raise ``GradingError`` if it may have been ours."""
    if not record.gold or patch == record.gold:
        reason = "it is the gold patch" if record.gold else "the record has no gold patch to compare with"
        raise GradingError(f"task {record.id}: no verdict ({run.account}), and {reason}")
    control = await run_tests(context, record, box_spec(context, record, site_root), record.gold)
    verdict = _read(record, control)
    if verdict is None or not verdict.resolved:
        why = control.account if verdict is None else verdict.difference
        raise GradingError(f"task {record.id}: no verdict ({run.account}), nor with the gold patch ({why})")
