"""Real tasks in real sandboxes: the gold and no-op solvers, a sandbox lost midway, and a run that is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.scripted_engine import ScriptedEngine

from agent_rl.config import CompactionConfig, RolloutConfig
from agent_rl.controller.journal import Journal
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import GroupSettings, Limiter, RolloutEvent, collect_groups
from agent_rl.rollout.scripted_policies import PATCH_CHUNK, ByteRenderer, gold, solver_runner
from agent_rl.types import Completion, StopReason, Trajectory
from envs import EnvContext, Task
from envs.mini import MiniEnvironment, generate
from envs.mini.generator import MiniTask
from sandbox import Sandbox, SandboxBackend, SandboxSpec
from sandbox.bubblewrap.backend import BubblewrapBackend
from tools import ToolCall
from tools.formats import tool_format

pytestmark = pytest.mark.bubblewrap
T = TypeVar("T", bound=BubblewrapBackend)


@asynccontextmanager
async def opened(kind: type[T]) -> AsyncIterator[T]:
    backend = kind(run_id="rollout-tests")
    yield backend
    await backend.close()


@pytest.fixture
async def backend() -> AsyncIterator[BubblewrapBackend]:
    async with opened(BubblewrapBackend) as backend:
        yield backend


@pytest.fixture(scope="session")
def task_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


def mini(backend: SandboxBackend, cache: Path, tasks: int = 4) -> MiniEnvironment:
    return MiniEnvironment(EnvContext(backend=backend), train_tasks=tasks, heldout_tasks=tasks, cache_dir=cache)


@pytest.mark.parametrize(("policy", "rate", "turns"), [("gold", 1.0, 3.0), ("noop", 0.0, 1.0)])
async def test_gold_passes_and_noop_fails(backend: Any, task_cache: Path, policy: str, rate: Any, turns: Any) -> None:
    env = mini(backend, task_cache)
    await env.prepare("heldout")
    run = solver_runner(env, policy, EpisodeRules())
    report = await evaluate(env.tasks("heldout"), run, policy=policy, limiter=Limiter(2))
    assert (report.pass_at_1, report.graded, report.infrastructure_failures) == (rate, 4, 0)
    assert report.turns_mean == turns
    assert report.stops == {"submitted": 4}


async def test_a_task_that_exceeds_the_context_is_solved_with_compactions(backend: Any, tmp_path: Path) -> None:
    env = MiniEnvironment(EnvContext(backend=backend), train_tasks=1, heldout_tasks=1, issues=3, cache_dir=tmp_path)
    await env.prepare("train")
    bugs: list[MiniTask] = []
    for bug in generate("train", 12, seed=0):
        if not any(bug.files.keys() & other.files.keys() for other in bugs):
            bugs.append(bug)
    renderer, fmt, finish = ByteRenderer(), tool_format("hermes"), ToolCall("finish", {"command": "submit"})
    written = list[str]()
    for bug in bugs[:3]:
        fix = {"command": "str_replace", "path": bug.path, "old_str": bug.old, "new_str": bug.new}
        written += [fmt.render(ToolCall("file_editor", fix)), fmt.render(finish)]

    async def play(compaction: CompactionConfig | None) -> Trajectory:
        turns = deque(written)

        def speak(session: str, number: int, tokens: Sequence[int]) -> Sequence[int]:
            asked = bytes(token for token in tokens[-12:] if token < 256).endswith(b"Sum up.")
            return renderer.encode("A bug is fixed." if asked else turns.popleft())

        limits = RolloutConfig(max_tokens=1000, max_new_tokens=250, describe_tools=False, compaction=compaction)
        parts = env, env.tasks("train")[0], ScriptedEngine(speak), renderer, fmt, EpisodeRules(limits, routes=None)
        return await run_episode(*parts)

    full = await play(None)
    assert (full.stop, full.resolved) == (StopReason.CONTEXT_FULL, False)
    solved = await play(CompactionConfig(at_tokens=490, keep_turns=1, prompt="Sum up."))
    assert (solved.stop, solved.resolved, solved.reward) == (StopReason.SUBMITTED, True, 1.0)
    assert len(solved.branches) >= 3


async def test_a_patch_of_many_chunks_arrives_whole(backend: SandboxBackend, task_cache: Path) -> None:
    env = mini(backend, task_cache)
    await env.prepare("heldout")
    lines = "".join(f"+{index} 'quoted' \"too\" $HOME `x` \\\n" for index in range(8000))
    header = "diff --git a/big.txt b/big.txt\nnew file mode 100644\n--- /dev/null\n+++ b/big.txt\n@@ -0,0 +1,8000 @@\n"

    class Bigger:
        """The environment, with a true fix that also adds a file of 300 kB."""

        name, start = env.name, env.start

        def gold(self, task: Task) -> str:
            return env.gold(task) + header + lines

    task = env.tasks("heldout")[0]
    trajectory = await solver_runner(Bigger(), "gold", EpisodeRules())(task)
    assert len(trajectory.turns) > 3
    assert trajectory.resolved
    assert lines in trajectory.patch
    assert max(len(call.arguments.get("cmd", "")) for call in gold(Bigger(), task)) < PATCH_CHUNK + 99


class LosingBackend(BubblewrapBackend):
    """Its ``lose``-th sandbox is removed under its user, as by a crashed node."""

    lose = started = 0

    async def start(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().start(spec)
        self.started += 1
        if self.started == self.lose:
            await sandbox.close()
        return sandbox


@pytest.mark.parametrize("lose", [1, 2])  # the agent's sandbox, the grading's
async def test_a_lost_sandbox_is_run_again_and_never_a_reward_of_zero(task_cache: Path, lose: int) -> None:
    endings: list[StopReason] = []

    def note(event: RolloutEvent) -> None:
        endings.extend([event.trajectory.stop] if event.trajectory else [])

    async with opened(LosingBackend) as backend:
        env = mini(backend, task_cache)
        await env.prepare("heldout")
        backend.lose = backend.started + lose
        run, settings = solver_runner(env, "gold", EpisodeRules()), GroupSettings(size=3, retries=1)
        rollout = await collect_groups(env.tasks("heldout")[:1], run, settings, limiter=Limiter(1), on_event=note)
    (group,) = rollout.groups
    assert [t.reward for t in group.trajectories] == [1.0, 1.0, 1.0]
    assert endings == [StopReason.SANDBOX_FAILURE, *[StopReason.SUBMITTED] * 3]


class WatchedBackend(BubblewrapBackend):
    """Sets ``busy`` once four sandboxes are running a command that holds ``marker``."""

    marker, calls = "sleep 617.25", 0

    async def start(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().start(spec)
        run = sandbox.exec

        async def counting(command: Any, **options: Any) -> Any:
            self.calls += self.marker in str(command)
            if self.calls == 4:
                self.busy.set()
            return await run(command, **options)

        sandbox.exec = counting
        return sandbox


async def test_stopping_a_run_ends_its_commands_and_leaves_no_sandbox(task_cache: Path) -> None:
    async with opened(WatchedBackend) as watched:
        watched.busy, env = asyncio.Event(), mini(watched, task_cache)
        await env.prepare("heldout")
        call = ToolCall("execute_bash", {"cmd": watched.marker})
        run, group = solver_runner(env, lambda env, task: [call], EpisodeRules()), GroupSettings(size=1, min_size=1)
        running = asyncio.create_task(collect_groups(env.tasks("heldout"), run, group, limiter=Limiter(4)))
        busy = asyncio.create_task(watched.busy.wait())
        await asyncio.wait({busy, running}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.result()
        running.cancel()
        async with asyncio.timeout(20):
            with pytest.raises(asyncio.CancelledError):
                await running
        assert watched._sandboxes == {}  # the backend's own register of what is not closed
        assert not [line for line in command_lines() if watched.marker in line]


def command_lines() -> list[str]:
    """The command line of every process of this machine."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


async def test_a_killed_episode_continues_in_a_new_sandbox(backend: Any, task_cache: Path, tmp_path: Path) -> None:
    """The run is killed when the fix is applied, with the fix in no sandbox that is left; then the same, but the
    shell's answer is another every time: that one starts over."""
    env = mini(backend, task_cache)
    await env.prepare("heldout")
    task, fmt, renderer = env.tasks("heldout")[0], tool_format("xml"), ByteRenderer()
    *applying, submit = gold(env, task)
    rules = EpisodeRules(RolloutConfig(describe_tools=False), routes=None)

    async def go_on(calls: Sequence[Any], *, kill_after: int | None) -> Trajectory | None:
        journal, reached = Journal(tmp_path, "run", turns=True), asyncio.Event()
        journal.recover(0, {}, lambda position: True)
        await journal.begin(1, "start")

        class Stopping(ScriptedEngine):
            async def generate(self, *args: Any, **how: Any) -> Completion:
                if self.calls == kill_after:
                    reached.set()
                    await asyncio.Event().wait()
                return await super().generate(*args, **how)

        engine = Stopping(lambda session, turn, tokens: renderer.encode(fmt.render(calls[turn])), weight_version="0")
        run = journal.runner(0, lambda task, log=None: run_episode(env, task, engine, renderer, fmt, rules, log=log))
        running = asyncio.ensure_future(run(task))
        ended, _ = await asyncio.wait({running, asyncio.create_task(reached.wait())}, return_when="FIRST_COMPLETED")
        running.cancel()
        journal.close()
        return running.result() if running in ended else None

    assert await go_on([*applying, submit], kill_after=len(applying)) is None
    resumed = await go_on([submit], kill_after=None)
    assert (resumed.resolved, resumed.replayed_turns, len(resumed.turns)) == (True, len(applying), len(applying) + 1)

    shutil.rmtree(tmp_path)
    clock = ToolCall("execute_bash", {"cmd": "date +%N"})
    assert await go_on([clock, submit], kill_after=1) is None
    anew = await go_on([*applying, submit], kill_after=None)
    assert (anew.resolved, anew.replayed_turns, len(anew.turns)) == (True, 0, len(applying) + 1)
