"""Computes a task's reward: a fresh sandbox, the screened patch, the hidden tests, and the adjudicated verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from envs.context import EnvContext
from envs.swe.adjudication import Controls, judge_run, open_case
from envs.swe.diff.git_diff import MAX_FILES, FilePatch, patched_paths, screen, split_patch
from envs.swe.records import SweRecord
from envs.swe.sandboxes import run_tests, sandbox_spec
from envs.types import Grade, GradingError

MAX_LOG = 1 << 16
"""Characters of the tests' output that a grade keeps."""


async def grade_patch(context: EnvContext, record: SweRecord, patch: str, *, site_root: Path | None = None) -> Grade:
    """Grade a git diff in a fresh sandbox. docs/reference/environments.md lists the rules.

    The reward is 1 if every expected test has its expected status and the patch passes the negative control, else 0. A
    run without a verdict (the patch does not apply, no summary, timeout, out of memory) is compared with a run of the
    gold patch.

    Raises ``GradingError`` if the gold patch does not resolve the task, ``UndecidableError`` if its run ends normally
    without a verdict, and ``SandboxError`` if a sandbox breaks.
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
    """Grade file patches that :mod:`envs.swe.diff` made from the agent's files; raises as :func:`grade_patch`.

    ``controls`` keeps the hidden tests and what the gold patch's runs have shown between gradings.
    """
    started_at = time.perf_counter()
    patch = "".join(part.text for part in changes)
    screened = await asyncio.to_thread(screen, changes, hidden=record.hidden, gold=record.gold)
    if not screened.text and record.verified:
        return Grade(reward=0.0, resolved=False, patch=patch, suspected_hack=screened.rejected)
    case = open_case(context, record, site_root, controls)
    adjudication = await case.adjudicate(screened.text)
    others = screened.paths - patched_paths(record.gold) if adjudication.verdict.resolved else frozenset()
    if others and (side := others & await case.test_side()):  # the success may be owed to them
        kept = [part for part in changes if not part.paths & side]
        grade = await grade_changes(context, record, kept, site_root=site_root, controls=controls)
        undone = tuple(f"{path}: used by the tests, undone" for path in sorted(side))
        return replace(grade, patch=patch, suspected_hack=(*undone, *grade.suspected_hack))
    verified_at, mutant_seconds = time.perf_counter(), 0.0
    if adjudication.verdict.resolved and screened.text != record.gold:
        adjudication = await case.verify_success(adjudication, screened.text)
        mutant_seconds = time.perf_counter() - verified_at
    return Grade(
        reward=float(adjudication.verdict.resolved),
        resolved=adjudication.verdict.resolved,
        patch=patch,
        tests=adjudication.verdict.tests,
        log=adjudication.log[-MAX_LOG:],
        suspected_hack=(*screened.rejected, *adjudication.doubts),
        seconds=time.perf_counter() - started_at,
        mutant_seconds=mutant_seconds,
    )


async def verify_record(context: EnvContext, record: SweRecord, *, site_root: Path | None = None) -> SweRecord:
    """Return the record marked ``verified`` if its gold patch resolves it and the empty patch does not.

    ``verifiable`` is marked too. Raises ``GradingError`` otherwise.
    """
    unverified = record.model_copy(update={"verified": False})
    gold = (await open_case(context, unverified, site_root).adjudicate(record.gold)).verdict
    if not gold.resolved:
        raise GradingError(f"task {record.id}: its gold patch does not resolve it: {gold.difference}")
    empty = judge_run(unverified, await run_tests(context, unverified, sandbox_spec(context, record, site_root), ""))
    if empty is not None and empty.resolved:
        raise GradingError(f"task {record.id}: it is resolved without a change")
    return await with_verifiability(context, record.model_copy(update={"verified": True}), site_root)


async def with_verifiability(context: EnvContext, record: SweRecord, site_root: Path | None) -> SweRecord:
    """The record with the mark ``verifiable``. Raises ``GradingError`` or ``SandboxError``."""
    verifiable, _ = await open_case(context, record, site_root).verifiability()
    return record.model_copy(update={"verifiable": verifiable})
