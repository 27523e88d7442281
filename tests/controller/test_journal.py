"""What finished is used again, once, if it was sampled with the same weights; whatever a kill tore off."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.controller.journal import Journal, StepJournal, lineage
from agent_rl.rollout.group import EpisodeRunner
from agent_rl.types import StopReason, Trajectory, Turn, VersionSpan
from envs import Task
from r3.routing import Routing, Span, SpanKind


def trajectory(task: str, seed: int, stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    """Five tokens, routed to two of four experts in two layers, in no order within a row."""
    generator = np.random.default_rng(seed)
    experts = generator.random((5, 2, 4)).argsort(axis=-1)[..., :2].astype(np.uint8)
    experts[-1] = 0
    spans = (Span(0, 4, "3", "http://e", SpanKind.SAMPLED), Span(4, 5, "3", "http://e", SpanKind.MISSING))
    routing = Routing(experts, np.arange(5) < 4, spans, 4)
    turn = Turn("hi", "bash", {"cmd": "ls"}, None, "a", 3, 2, 0, 0, "3", 0.5, 0.25)
    return Trajectory(
        task, "mini", np.arange(5, dtype=np.int32) + seed, np.arange(5) > 2,
        np.where(np.arange(5) > 2, generator.standard_normal(5), 0).astype(np.float32), routing, stop,
        None if stop.infrastructure else 1.0,
        resolved=True, turns=(turn,), messages=({"role": "user", "content": "x"},), versions=(VersionSpan(3, 5, "3"),),
    )  # fmt: skip


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether they are the same but for which start ran them."""
    assert a.routing is not None
    assert b.routing is not None
    arrays = [(a.tokens, b.tokens), (a.loss_mask, b.loss_mask), (a.logprobs, b.logprobs)]
    arrays += [(a.routing.experts, b.routing.experts), (a.routing.present, b.routing.present)]
    plain = [replace(t, tokens=None, loss_mask=None, logprobs=None, routing=None, recovered=False) for t in (a, b)]  # type: ignore[arg-type]
    return (
        all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in arrays)
        and [str(plain[0])] == [str(plain[1])]
        and a.routing.spans == b.routing.spans
    )


def task(name: str) -> Task:
    return Task(name, "mini", {})


def told(*trajectories: Trajectory) -> tuple[EpisodeRunner, list[str]]:
    """An episode runner that gives these, one after the other, and the tasks it was asked for."""
    waiting, asked = list(trajectories), []

    async def run(task: Task) -> Trajectory:
        asked.append(task.id)
        return waiting.pop(0)

    return run, asked


async def finish(journal: StepJournal, *trajectories: Trajectory) -> None:
    """Episodes that end while the journal is open."""
    run, _ = told(*trajectories)
    for each in trajectories:
        await journal.runner(run)(task(each.task_id))
    journal.close()


FIRST, SECOND, OTHER = trajectory("a", 1), trajectory("a", 2), trajectory("b", 3)


async def test_what_finished_is_given_again_bit_for_bit_and_once(tmp_path: Path) -> None:
    await finish(Journal(tmp_path, "run").open(8, "w7"), FIRST, OTHER, SECOND)
    journal = Journal(tmp_path, "run").open(8, "w7")
    assert journal.found == 3
    fresh = trajectory("a", 9)
    run, asked = told(fresh)
    found = [await journal.runner(run)(task(name)) for name in ("a", "b", "a", "a")]
    assert all(map(same, found, (FIRST, OTHER, SECOND, fresh)))
    assert asked == ["a"], "only the fourth was sampled"
    assert [trajectory.recovered for trajectory in found] == [True, True, True, False]
    journal.close()
    again = Journal(tmp_path, "run").open(8, "w7")
    assert again.found == 4, "and written down too"
    again.close()


@pytest.mark.parametrize(("run_id", "step", "weights"), [("other", 8, "w7"), ("run", 8, "w7b")])
async def test_other_weights_or_another_run_start_anew(tmp_path: Path, run_id: str, step: int, weights: str) -> None:
    await finish(Journal(tmp_path, "run").open(8, "w7"), FIRST)
    journal = Journal(tmp_path, run_id).open(step, weights)
    assert journal.found == 0
    await finish(journal, OTHER)
    kept = Journal(tmp_path, run_id).open(step, weights)
    assert kept.found == 1
    kept.close()
    assert Journal(tmp_path, "run").open(8, "w7").found == 0


async def test_infrastructure_failures_are_not_kept(tmp_path: Path) -> None:
    await finish(Journal(tmp_path, "run").open(1, "w"), trajectory("a", 1, StopReason.SANDBOX_FAILURE), FIRST)
    assert Journal(tmp_path, "run").open(1, "w").found == 1


@given(keep=st.floats(0, 1), noise=st.binary(max_size=40))
def test_whatever_a_kill_tears_off_the_whole_frames_are_kept(
    tmp_path_factory: pytest.TempPathFactory, keep: float, noise: bytes
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    journal = Journal(folder, "run").open(2, "w")
    asyncio.run(finish(journal, FIRST, SECOND, OTHER))
    data = journal.path.read_bytes()
    ends = frame_ends(data)
    cut = int(keep * len(data))
    journal.path.write_bytes(data[:cut] + noise)
    torn = Journal(folder, "run").open(2, "w")
    assert torn.found == max(0, sum(end <= cut for end in ends) - 1)
    asyncio.run(finish(torn, trajectory("c", 5)))
    after = Journal(folder, "run").open(2, "w")
    assert after.found == torn.found + 1, "what is written after a tear can be read"
    after.close()


def frame_ends(data: bytes) -> list[int]:
    ends, at = [], 0
    while at < len(data):
        at += 8 + int.from_bytes(data[at : at + 4], "little")
        ends.append(at)
    return ends


async def test_a_flipped_bit_ends_what_is_believed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "run").open(2, "w")
    await finish(journal, FIRST, SECOND, OTHER)
    data = bytearray(journal.path.read_bytes())
    data[frame_ends(bytes(data))[1] + 100] ^= 1  # in the second trajectory
    journal.path.write_bytes(bytes(data))
    again = Journal(tmp_path, "run").open(2, "w")
    assert again.found == 1
    run, _ = told(SECOND)  # just as long as the damaged one: what came after that must not be believed again
    for _ in range(2):
        await again.runner(run)(task("a"))
    again.close()
    assert Journal(tmp_path, "run").open(2, "w").found == 2


async def test_many_episodes_may_end_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "run").open(2, "w")

    async def run(task: Task) -> Trajectory:
        return trajectory(task.id, int(task.id))

    runner = journal.runner(run)
    await asyncio.gather(*(runner(task(str(number))) for number in range(40)))
    journal.close()
    assert Journal(tmp_path, "run").open(2, "w").found == 40


def test_steps_that_a_checkpoint_covers_are_forgotten(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        Journal(tmp_path, "run").open(step, "w").close()
    Journal(tmp_path, "run").forget_through(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003.journal"]


def test_a_lineage_tells_updates_apart_by_their_last_bit() -> None:
    metrics = {"train/loss": 0.1, "train/grad_norm": 2.0, "train/updates": 1.0, "time/step": 3.0}
    assert lineage("a", metrics) == lineage("a", {**metrics, "time/step": 4.0})
    others = [("b", metrics), ("a", {**metrics, "train/loss": float(np.nextafter(0.1, 1))}), ("a", {})]
    assert lineage("a", metrics) not in [lineage(*other) for other in others]
