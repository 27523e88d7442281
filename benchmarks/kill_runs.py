"""Random kills: short real runs are killed with SIGKILL at random moments and started again, until they are done.

    python benchmarks/kill_runs.py [--kills 50] [--steps 40] [--seed 0] [--depth S] [--staleness K] [--directory DIR]

Controller, journal, checkpoints, Ray and Megatron are the real ones; episodes are recordings (see
``tests/integration/recorded_run.py``). After each kill, and after the start that follows: every checkpoint on the disk
is whole, the metrics of all steps are those of a run that was never killed, bit for bit (figures of the clock apart),
and of the killed one no process and no temporary directory is left; at the end its ledger has no fault. Prints a line a
kill, and a summary.

``--depth``: sampling runs ahead (``async_rollout.depth``). Metrics by token age depend on timing, so they are not
compared. With a larger ``--staleness`` the groups of a batch depend on timing too. A repeated step is then compared
with its result before the kill.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import checkout
from support.moe_checkpoint import write_moe

from agent_rl.controller.async_rollout.task_ledger import faults as ledger_faults
from agent_rl.controller.async_rollout.task_ledger import gaps, read_ledger
from agent_rl.monitoring.metrics_log import read_metrics

sys.path.insert(0, str(checkout.ROOT / "tests" / "integration"))
from killed_run import Life, broken, episodes, exact, settled, step_reached, step_saved, write_config

IN_START = 0.1
"""The share of kills in the first seconds, most of them before the steps begin."""


@dataclass
class Tally:
    """Over all runs."""

    kills: int = 0
    faults: int = 0
    finished: int = 0
    again: int = 0
    redone: int = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=None, help="by default the depth")
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    if options.staleness is None:
        options.staleness = options.depth
    directory = options.directory or Path(tempfile.mkdtemp(prefix="kills-"))
    model = directory / "model"
    if not model.exists():
        write_moe(model, layers=2, hidden=64, heads=4, kv=2, head_dim=16, experts=4, inter=32, vocab=64)
    reference, seconds = unkilled(directory / "reference", model, options)
    print(f"unkilled: {options.steps} steps in {seconds:.1f} s")
    print("kill  moment                    step  checkpoint  steps again  episodes again  steps begin after  faults")
    draw, tally, number = random.Random(options.seed), Tally(), 0
    while tally.kills < options.kills:
        run = KilledRun(directory / f"run-{number:02d}", model, reference, seconds, options, draw, tally)
        run.live()
        number += 1
    print(
        f"{tally.kills} kills in {number} runs, {tally.finished} of them finished; {tally.faults} faults; episodes "
        f"sampled again {tally.again}, steps done again from the journal {tally.redone}"
    )
    sys.exit(1 if tally.faults else 0)


def overrides(options: argparse.Namespace) -> list[str]:
    """What lets sampling run ahead."""
    if not options.depth:
        return []
    ahead = f"async_rollout.depth={options.depth}", f"async_rollout.max_staleness={options.staleness}"
    return [*ahead, "train.old_logprob.source=rollout"]


def unkilled(directory: Path, model: Path, options: argparse.Namespace) -> tuple[dict[int, dict[str, float]], float]:
    """The metrics by step of a run that nobody kills, and the seconds its steps took."""
    if not (directory / "rec" / "summary.json").exists():
        write_config(directory, model, steps=options.steps)
        for _ in range(5):  # on a busy machine Ray does not start within its 30 s
            life = Life(directory, *overrides(options))
            life.finish()
            if "timed out during startup" not in life.text:
                break
        assert life.process.returncode == 0, life.text
    rows = read_metrics(directory / "rec")
    return {int(row["step"]): exact(row) for row in rows}, sum(row["time/step"] for row in rows)


@dataclass
class KilledRun:
    """One run, killed until it is done or enough kills were made."""

    directory: Path
    model: Path
    reference: dict[int, dict[str, float]]
    seconds: float
    options: argparse.Namespace
    draw: random.Random
    tally: Tally
    again: int = 0
    saved: int = 0
    dead: list[Life] = field(default_factory=list)
    own: dict[int, dict[str, float]] = field(default_factory=dict)
    """The metrics of each step when it was first made, where those of another run are not to be compared."""

    def live(self) -> None:
        write_config(self.directory, self.model, steps=self.options.steps)
        while self._life():
            pass

    def _life(self) -> bool:
        """One start; False where the run went on to its end."""
        life, reached = Life(self.directory, *overrides(self.options)), step_reached(self.directory / "rec")
        kills = self.tally.kills < self.options.kills
        if kills and self.draw.random() < IN_START:
            wait, begin = self.draw.uniform(0, 10), None
        else:
            life.until(life.begun)
            begin = time.time() - life.started
            wait = self.draw.uniform(0, 10 * self.seconds / self.options.steps)
            self._tell(life, self._left_of_the_dead())
        if kills:
            sleep_until_ended(life, wait)
        else:
            life.finish()
        if life.ended and "timed out during startup" in life.text:
            print("      Ray did not start within its 30 s: the machine is too busy; started again", flush=True)
            self.dead.append(life)
            return True
        if life.ended:
            return self._finished(life)
        life.kill()
        self.dead.append(life)
        self._killed(life, f"{wait:5.1f} s after {'the start' if begin is None else 'steps began'}", begin, reached)
        return True

    def _killed(self, life: Life, moment: str, begin: float | None, reached: int) -> None:
        saved, done, given = step_saved(life.run), step_reached(life.run), episodes(life.run)
        again, self.again = len(given) - len(set(given)) - self.again, len(given) - len(set(given))
        redone = 0 if begin is None else max(0, min(done, reached) - self.saved)
        faults = self._broken(life.run)
        self.tally.kills += 1
        self.tally.again += again
        self.tally.redone += redone
        print(
            f"{self.tally.kills:4d}  {moment:24s}  {done:4d}  {saved:10d}  {redone:11d}  {again:14d}  "
            f"{'-' if begin is None else f'{begin:.1f} s':>17}  {len(faults)}",
            flush=True,
        )
        self.saved = saved
        self._tell(life, faults)

    def _finished(self, life: Life) -> bool:
        rows = read_ledger(life.run)
        faults = self._broken(life.run) + rests(life.run) + ledger_faults(life.run, rows)
        faults += [f"position {position} has not ended" for position in gaps(rows)]
        if life.process.returncode or step_reached(life.run) != self.options.steps:
            faults.append(f"ended with {life.process.returncode} at step {step_reached(life.run)}: {life.text[-2000:]}")
        self.tally.finished += life.process.returncode == 0
        print(f"      run finished at step {step_reached(life.run)}, {len(faults)} faults", flush=True)
        self.dead.append(life)
        self._tell(life, faults + self._left_of_the_dead())
        return False

    def _broken(self, run: Path) -> list[str]:
        if self.options.depth < self.options.staleness:
            self.own = {int(row["step"]): exact(row) for row in read_metrics(run)} | self.own
        return broken(run, self.own or self.reference, settled if self.options.depth else exact)

    def _left_of_the_dead(self) -> list[str]:
        """What the killed ones have left, once the next start has had its time to remove it."""
        deadline = time.monotonic() + 20
        while (left := [rest for life in self.dead for rest in life.left()]) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.dead.clear()
        return left

    def _tell(self, life: Life, faults: list[str]) -> None:
        self.tally.faults += len(faults)
        for fault in faults:
            print(f"      {life.output}: {fault}", flush=True)


def rests(run: Path) -> list[str]:
    """Files that a finished run should not have."""
    return [f"left: {path}" for path in run.rglob("*") if path.name.endswith((".tmp", ".partial", ".old", ".journal"))]


def sleep_until_ended(life: Life, seconds: float) -> None:
    """Let it live for so long, or until it ends by itself."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not life.ended:
        time.sleep(0.002)


if __name__ == "__main__":
    main()
