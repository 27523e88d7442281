"""Whether to believe a run of the hidden tests, and who is to blame for one that says nothing: patch or machine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.context import EnvContext
from envs.swe.integrity import NO_REPORT
from envs.swe.pytest_log import Verdict, as_summary, count_summaries, judge
from envs.swe.records import SweRecord
from envs.swe.sandboxes import TestRun, run_apart, run_tests, sandbox_spec
from envs.swe.swebench import as_log, read_log
from envs.types import GradingError, UndecidableError

_SHOWN = 10
"""Doubts that a ruling names."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict, what speaks against the patch's honesty (one sentence a doubt), and the log of the patch's run."""

    verdict: Verdict
    doubts: Sequence[str] = ()
    log: str = ""


class Controls:
    """The doubts that each task's control run raised, so that one run serves all successes in doubt.

    A control run is one with the gold patch or, where the record has none, without a change.
    """

    def __init__(self) -> None:
        self._doubts: dict[tuple[str, bool], tuple[str, ...]] = {}
        self._running: defaultdict[tuple[str, bool], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def doubts(self, case: _Case, run: Callable[[], Coroutine[None, None, tuple[str, ...]]]) -> tuple[str, ...]:
        """Those of ``run``, which is made once for all cases of a record. Raises what it raises, and forgets it."""
        key = (case.record.id, case.apart)
        async with self._running[key]:
            if key not in self._doubts:
                self._doubts[key] = await run()
            return self._doubts[key]


async def rule(
    context: EnvContext, record: SweRecord, patch: str, site_root: Path | None, controls: Controls | None = None
) -> Ruling:
    """Run the hidden tests with ``patch`` and rule on what they say.

    A failure is believed as it stands. A success in doubt, and a run without a verdict, are measured against the gold
    patch's run, or, where the record has none, against a run without a change: doubts that it raises too are the
    task's own manner, the others are the patch's. ``controls`` remembers that run for further successes in doubt; for a
    run without a verdict it is made anew, as it has to show that the machine was able to. A success of a record with
    ``isolated`` tests must hold for these where they run apart from the code. Raises ``GradingError`` where the control
    run has no verdict either, or the gold patch is not resolved; ``UndecidableError`` where that is the row's doing.
    """
    controls = controls or Controls()
    ruling = await _rule(_Case(context, record, site_root, controls), patch)
    if not (record.isolated and ruling.verdict.resolved):
        return ruling
    apart = await _rule(_Case(context, record.alone(), site_root, controls, apart=True), patch)
    if apart.verdict.resolved:
        return ruling
    doubt = f"{apart.verdict.difference}, where the tests run apart from the code"
    return Ruling(Verdict(False, ruling.verdict.tests, doubt), (*ruling.doubts, *apart.doubts, doubt), apart.log)


@dataclass(frozen=True, slots=True)
class _Case:
    """What is the same in all runs that a patch is ruled on by."""

    context: EnvContext
    record: SweRecord
    site_root: Path | None
    controls: Controls
    apart: bool = False

    @property
    def control(self) -> str:
        """What a control run is made with."""
        return "with the gold patch" if self.record.gold else "without a change"

    async def run(self, patch: str) -> tuple[TestRun, Verdict | None, tuple[str, ...]]:
        """A run, its verdict, and the doubts that it raises. Logs are long: they are read in a thread."""
        run_in = run_apart if self.apart else run_tests
        run = await run_in(self.context, self.record, sandbox_spec(self.context, self.record, self.site_root), patch)
        verdict = await asyncio.to_thread(read_run, self.record, run)
        return run, verdict, await asyncio.to_thread(_doubts, self.record, run, verdict)


async def _rule(case: _Case, patch: str) -> Ruling:
    run, verdict, doubts = await case.run(patch)
    if verdict is not None and not (verdict.resolved and doubts):
        return Ruling(verdict, doubts[:_SHOWN], run.log)
    if patch == case.record.gold:
        if verdict is None:
            raise _mute(run, f"task {case.record.id}: no verdict ({run.account}), and it is the run {case.control}")
        return Ruling(verdict, log=run.log)
    if verdict is None:
        own = _without(doubts, await _control(case, run, None))
        return Ruling(Verdict(resolved=False, tests={}, difference=run.account), own, run.log or run.account)
    own = _without(doubts, await case.controls.doubts(case, lambda: _control(case, run, verdict)))
    return Ruling(Verdict(False, verdict.tests, own[0]) if own else verdict, own, run.log)


def _without(doubts: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    return tuple(doubt for doubt in doubts if doubt not in known)[:_SHOWN]


def read_run(record: SweRecord, run: TestRun) -> Verdict | None:
    """The verdict on a run, or None where it says nothing. A run that was cut off says nothing, whatever it printed."""
    if not run.began or run.result.timed_out:
        return None
    return _read(record, run.log)


def _read(record: SweRecord, log: str) -> Verdict | None:
    if record.swebench is not None:
        return read_log(record, log)
    return judge(log, record.expected, record.key_mode)


def _doubts(record: SweRecord, run: TestRun, verdict: Verdict | None) -> tuple[str, ...]:
    """What about a run an honest patch does not bring about, as far as its report tells.

    Doubts are compared with another run's, so that they hold no number that differs from run to run.
    """
    if verdict is None:
        quiet = run.began and run.result.exit_code == 0 and not run.result.timed_out
        return ("the test run ended with exit code 0 and no results",) if quiet else ()
    # Only by SWE-smith's rules can a success lack tests: they count as passed there.
    absent = [f"{test}: not in the log" for test in record.expected if record.swebench and test not in verdict.tests]
    if not run.witnessed:
        return tuple(absent)
    if run.report is None:
        return (NO_REPORT, *absent)
    several = ("the log holds several test summaries",) if count_summaries(run.log) > 1 else ()
    # The report goes the way of the log, so that names are cut and grouped the same way.
    lines = [f"{status} {test}" for test, status in run.report.statuses.items()]
    seen = _read(record, as_log(lines) if record.swebench else as_summary(lines))
    differing = [test for test in record.expected if seen is None or seen.tests.get(test) != verdict.tests.get(test)]
    differences = [f"{test}: the summary and the test run's own report differ" for test in differing]
    return (*run.report.tampering, *several, *absent, *differences)


async def _control(case: _Case, patched: TestRun, seen: Verdict | None) -> tuple[str, ...]:
    """The doubts that the run raises which a patch is compared with: the gold patch's, or that of no change.

    Raises ``GradingError`` where that says nothing; ``patched`` and ``seen`` are the patch's run and its verdict.
    """
    run, verdict, doubts = await case.run(case.record.gold)
    if verdict is not None and (verdict.resolved or not case.record.gold):
        return doubts
    what = f"task {case.record.id}: {'a success in doubt' if seen else 'no verdict'} ({patched.account})"
    message = f"{what}, nor {case.control} ({verdict.difference if verdict else run.account})"
    raise GradingError(message) if seen or verdict else _mute(run, message)


def _mute(control: TestRun, message: str) -> GradingError:
    """The error for a control run without a verdict: the row's own doing if nothing cut that run off."""
    return UndecidableError(message) if control.ended else GradingError(message)
