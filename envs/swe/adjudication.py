"""Decides whether to trust a run of the hidden tests, and who caused a run without results: the patch or the machine.

A success is trusted if the patch also passes the negative control: a run of a random line-up of the hidden tests
(:mod:`envs.swe.mutants`). Where the patch deviates there, the *gold patch* (or, if the record has none, no change) runs
with the same line-up, and what deviates there too belongs to the task.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from random import Random, SystemRandom

from envs.context import EnvContext
from envs.swe.hidden_tests import HiddenTests, read_hidden_tests
from envs.swe.mutants import WRONG_PASSED, LineUp, Place, draw_line_up
from envs.swe.pytest_log import TestVerdict, judge_pytest_log, parse_summary
from envs.swe.records import SweRecord, Verifiability
from envs.swe.sandboxes import TestRun, run_tests, sandbox_spec
from envs.swe.swebench import judge_swebench_log, swebench_statuses
from envs.swe.test_side import Trace
from envs.types import GradingError, UndecidableError
from sandbox import SandboxSpec

_log = logging.getLogger(__name__)
_MAX_DOUBTS = 10
_MAX_LINE_UPS = 2
"""Line-ups per control: a test whose line-up fails with the gold patch is left out of the next one."""
SILENT_EXIT = "the test run ended with exit code 0 and no results"
MUTANTS_PASS = "mutants_pass"


@dataclass(frozen=True, slots=True)
class Adjudication:
    """A verdict, the doubts about the patch (one sentence each, at most 10), and the log of the patch's run."""

    verdict: TestVerdict
    doubts: Sequence[str] = ()
    log: str = ""


@dataclass
class Control:
    """What the gradings of one task share: its hidden tests and what its gold patch's runs have shown.

    ``excluded`` are places where a line-up fails with the gold patch. ``absent`` are expected tests that the log of the
    gold patch's run lacks. ``test_side`` are the files that only the tests use. ``seed`` chooses the tests of line-ups.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    hidden: HiddenTests | None = None
    excluded: set[Place] = field(default_factory=set)
    absent: frozenset[str] | None = None
    test_side: frozenset[str] | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(32))


Controls = dict[str, Control]
"""The controls of the tasks of an environment, by the task's id."""


def open_case(context: EnvContext, record: SweRecord, site_root: Path | None, controls: Controls | None = None) -> Case:
    """The case of a record. ``controls`` keeps what later gradings of the task use again."""
    control = Control() if controls is None else controls.setdefault(record.id, Control())
    return Case(context, record, site_root, control)


def judge_run(record: SweRecord, run: TestRun) -> TestVerdict | None:
    """The verdict on a run, or None if it has none. A run that timed out has none, whatever it printed."""
    if not run.started or run.result.timed_out:
        return None
    if record.swebench is not None:
        return judge_swebench_log(record, run.log)
    return judge_pytest_log(run.log, record.expected, record.key_mode)


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs that all runs of one adjudication share."""

    context: EnvContext
    record: SweRecord
    site_root: Path | None
    control: Control

    async def adjudicate(self, patch: str) -> Adjudication:
        """Run the hidden tests with ``patch`` and decide what their result is worth.

        A run without a verdict gets a run with the gold patch, which must show that the machine can run the tests now.
        :meth:`verify_success` decides whether a success is one.

        Raises ``GradingError`` if the gold patch's run has no verdict either or the gold patch does not resolve the
        task, and ``UndecidableError`` if the row itself is the cause.
        """
        run, verdict = await self.run(patch)
        if verdict is not None:
            return Adjudication(verdict, log=run.log)
        if patch == self.record.gold:
            raise _no_verdict_error(run, f"{self._name}: no verdict ({run.outcome}) in the run {self._control_name}")
        await self.run_gold(f"no verdict ({run.outcome})")
        is_silent = run.started and run.result.exit_code == 0 and not run.result.timed_out
        return Adjudication(TestVerdict(False, {}, run.outcome), (SILENT_EXIT,) * is_silent, run.log or run.outcome)

    async def verify_success(self, success: Adjudication, patch: str) -> Adjudication:
        """Run the negative control of a success. Raises as :meth:`adjudicate`."""
        verdict = success.verdict
        doubts = [*await self.absent_tests(verdict), *await self.negative_control(patch)][:_MAX_DOUBTS]
        return Adjudication(TestVerdict(False, verdict.tests, doubts[0]) if doubts else verdict, doubts, success.log)

    @property
    def _name(self) -> str:
        return f"task {self.record.id}"

    @property
    def _control_name(self) -> str:
        """The patch of the control run, in words."""
        return "with the gold patch" if self.record.gold else "without a change"

    @property
    def _spec(self) -> SandboxSpec:
        return sandbox_spec(self.context, self.record, self.site_root)

    async def run(self, patch: str) -> tuple[TestRun, TestVerdict | None]:
        """Run the tests and return the run and its verdict. A thread reads the log, which is long."""
        run = await run_tests(self.context, self.record, self._spec, patch)
        return run, await asyncio.to_thread(judge_run, self.record, run)

    async def run_gold(self, finding: str) -> TestVerdict:
        """The verdict on the gold patch's run. ``finding`` is the reason for the run, for error messages."""
        run, verdict = await self.run(self.record.gold)
        if verdict is not None and (verdict.resolved or not self.record.gold):
            return verdict
        outcome = verdict.difference if verdict else run.outcome
        message = f"{self._name}: {finding}; the control run {self._control_name} failed ({outcome})"
        raise GradingError(message) if verdict else _no_verdict_error(run, message)

    async def test_side(self) -> frozenset[str]:
        """The files that only the tests use, as far as a run with the gold patch shows them."""
        if self.record.calls:
            return frozenset()
        async with self.control.lock:
            if self.control.test_side is None:
                run = await run_tests(self.context, self.record, self._spec, self.record.gold, trace=Trace())
                if run.result.timed_out or run.result.oom_killed:
                    raise GradingError(f"{self._name}: the traced run {self._control_name}: {run.outcome}")
                self.control.test_side = run.test_side
        return self.control.test_side

    async def absent_tests(self, verdict: TestVerdict) -> list[str]:
        """Doubts about expected tests that are missing in the log. Only SWE-smith's rules count them as passed."""
        absent = [test for test in self.record.expected if self.record.swebench and test not in verdict.tests]
        if not absent:
            return []
        async with self.control.lock:
            if self.control.absent is None:
                gold = await self.run_gold("a success without all tests")
                self.control.absent = frozenset(self.record.expected) - frozenset(gold.tests)
        return [f"{test}: not in the log" for test in absent if test not in self.control.absent]

    async def negative_control(self, patch: str) -> list[str]:
        """What a patch does in a line-up of the hidden tests that a correct one does not, one line per test."""
        for _ in range(0 if self.record.verifiable == "no" else _MAX_LINE_UPS):
            line_up = await self.draw_line_up(SystemRandom())
            if line_up is None:
                break
            deviations = await self._deviations(line_up, patch)
            if not deviations and line_up.fixed:
                return []
            gold = await self.gold_deviations(line_up, deviations)
            if own := [f"{MUTANTS_PASS}: {test}: {deviations[test]}" for test in deviations if test not in gold]:
                return own
            if line_up.fixed - gold:
                return []
        if not self.record.verifiable:
            _log.warning("%s: a success that no line-up of its tests can verify", self._name)
        return []

    async def verifiability(self) -> tuple[Verifiability, str]:
        """Whether the negative control can verify a success, and why: on the gold patch, no wrong variant passes."""
        if self.record.calls:
            return "yes", "the tests are calls"
        for seed in range(_MAX_LINE_UPS if self.record.gold else 0):
            line_up = await self.draw_line_up(Random(seed))
            if line_up and (fixed := line_up.fixed - await self.gold_deviations(line_up, {})):
                strong = fixed & line_up.strong
                chance = prod(len(line_up.wrong[test]) + 1 for test in strong)
                detail = f"{len(fixed)} of {len(line_up.fixed)} tests that fail before the fix are usable, "
                detail += f"{len(fixed - strong)} of them by a truth value only; a guess wins 1 of {chance}"
                return "yes" if strong else "weak", detail
        return "no", "no usable assertion in the hidden tests" if self.record.gold else "no gold patch"

    async def draw_line_up(self, random: Random) -> LineUp | None:
        """A random line-up of the hidden tests, or None if none of them can be verified."""
        if self.record.calls:  # the expected values never enter a sandbox
            return None
        async with self.control.lock:
            if self.control.hidden is None:
                self.control.hidden = await read_hidden_tests(self.context, self.record, self.site_root)
        hidden, tests = self.control.hidden, (self.record.expected, self.record.failing, self.control.hidden.visible)
        chosen = random, frozenset(self.control.excluded), self.control.seed
        return await asyncio.to_thread(draw_line_up, hidden.files, *tests, *chosen)

    async def gold_deviations(self, line_up: LineUp, deviations: Mapping[str, str]) -> frozenset[str]:
        """The tests of a line-up that deviate with the gold patch too. They are left out from now on.

        A record without a gold patch only shows a patch that passes wrong variants of every test.
        """
        if not self.record.gold:
            every = all(deviations.get(test) == WRONG_PASSED for test in line_up.right)
            return frozenset() if every else frozenset(line_up.right)
        gold = await self._deviations(line_up, self.record.gold)
        self.control.excluded |= line_up.unusable(gold)
        return frozenset(gold)

    async def _deviations(self, line_up: LineUp, patch: str) -> dict[str, str]:
        """Run a line-up with ``patch`` in a fresh sandbox and return what differs from a correct patch's run.

        Every test deviates in a run without results. Raises ``GradingError`` if a limit ended the gold patch's run.
        """
        assert self.control.hidden is not None
        record, files = self.control.hidden.replaced(self.record, line_up.files)
        run = await run_tests(self.context, record, self._spec, patch, files)
        statuses = await asyncio.to_thread(_statuses, record, run)
        if statuses is None and patch == self.record.gold and not run.ended_normally:
            raise GradingError(f"{self._name}: no result ({run.outcome}) in the gold patch's negative control")
        if statuses is None:
            return dict.fromkeys(line_up.right, f"no result ({run.outcome}) in the negative control")
        return line_up.deviations(statuses)


def _statuses(record: SweRecord, run: TestRun) -> Mapping[str, str] | None:
    """Status by test as the log has it, or None if the run has no results."""
    if not run.started or run.result.timed_out:
        return None
    return swebench_statuses(record, run.log) if record.swebench else parse_summary(run.log)


def _no_verdict_error(control: TestRun, message: str) -> GradingError:
    """The error for a control run without a verdict. The row is the cause if the run ended without being cut off."""
    return UndecidableError(message) if control.ended_normally else GradingError(message)
