"""What gives a task's reward: a fresh sandbox, the screened patch, the hidden tests, and the verdict on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from envs.context import EnvContext
from envs.swe.adjudication import Controls, read_run, rule
from envs.swe.diff.git_diff import MAX_FILES, FilePatch, screen, split_patch
from envs.swe.records import SweRecord
from envs.swe.sandboxes import run_tests, sandbox_spec
from envs.types import Grade, GradingError

MAX_LOG = 1 << 16
"""Characters of the tests' output that a grade keeps."""


async def grade_patch(context: EnvContext, record: SweRecord, patch: str, *, site_root: Path | None = None) -> Grade:
    """Grade a git diff in a fresh sandbox; docs/environments.md tells the rules.

    The reward is 1 if every expected test has its expected status, and the run's own report bears that out, else 0. A
    run without a verdict (the patch does not apply, no summary, out of time or memory), or with a success that is in
    doubt, is compared with the gold patch's; ``GradingError`` where that is not resolved, ``UndecidableError`` where it
    ends without a verdict of itself. A sandbox that breaks raises ``SandboxError``.
    """
    parts = await asyncio.to_thread(lambda: list(islice(split_patch(patch), MAX_FILES + 1)))
    return replace(await grade_changes(context, record, parts, site_root=site_root), patch=patch)


async def grade_changes(
    context: EnvContext,
    record: SweRecord,
    changes: Sequence[FilePatch],
    *,
    site_root: Path | None = None,
    controls: Controls | None = None,
) -> Grade:
    """The same for changes that were made here from an agent's files, so that no text of it is read as a diff.

    ``controls`` remembers the gold patch's runs from one grading to the next.
    """
    began = time.perf_counter()
    patch = "".join(part.text for part in changes)
    screened = await asyncio.to_thread(screen, changes, hidden=record.hidden, gold=record.gold)
    if not screened.text and record.verified:
        return Grade(reward=0.0, resolved=False, patch=patch, suspected_hack=screened.undone)
    ruling = await rule(context, record, screened.text, site_root, controls)
    return Grade(
        reward=float(ruling.verdict.resolved),
        resolved=ruling.verdict.resolved,
        patch=patch,
        tests=ruling.verdict.tests,
        log=ruling.log[-MAX_LOG:],
        suspected_hack=(*screened.undone, *ruling.doubts),
        seconds=time.perf_counter() - began,
    )


async def verify_record(context: EnvContext, record: SweRecord, *, site_root: Path | None = None) -> SweRecord:
    """The record marked ``verified``: its gold patch resolves it, the empty patch does not. Else ``GradingError``."""
    unverified = record.model_copy(update={"verified": False})
    gold = (await rule(context, unverified, record.gold, site_root)).verdict
    if not gold.resolved:
        raise GradingError(f"task {record.id}: its gold patch does not resolve it: {gold.difference}")
    nothing = read_run(unverified, await run_tests(context, unverified, sandbox_spec(context, record, site_root), ""))
    if nothing is not None and nothing.resolved:
        raise GradingError(f"task {record.id}: it is resolved without a change")
    return record.model_copy(update={"verified": True})
