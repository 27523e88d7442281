"""Runs of made-up values in the form of agent_rl.viewer.api, of any size, for tests and benchmarks of the page."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from agent_rl.viewer.api import Resources
from agent_rl.viewer.server import listen, web_server

WORDS = ["the", "agent", "looks", "at", "def", "return", ";", ":", "=", "(", ")", "error", "0", "1", "2", "self"]
LAYERS, EXPERTS, GROUP = 4, 32, 4
RUN = json.loads("""
{"model": "tiny-moe", "format": 3, "summary": null,
 "guard": [{"step": 2, "event": "warn", "text": "the mismatch grew"}],
 "facts": {"moe_layers": 4, "num_experts": 32, "top_k": 4, "group_size": 4}}
""")
EVALUATION = json.loads("""
{"n": null, "decoding": "sampled", "graded": 256, "tasks": 256, "ungraded": 0, "infrastructure_failures": 0,
 "seconds": 21.5, "stops": {"submitted": 256}}
""")
TRAJECTORY = json.loads("""
{"env": "mini", "error": "", "training_status": "trained", "advantage": 0.5, "hacks": [], "notes": [],
 "parts": {"right": 0.25}, "metrics": {"words": 41},
 "model_calls": [{"client": "Judge", "model": "j", "messages": [{"role": "user", "content": "Is it good?"}],
   "response": "It is fine.", "seconds": 0.3, "cached": false}],
 "times": {"began": 1.7e9, "queue": 0.3, "start": 0.4, "grade_began": 3.2, "grade": 0.4, "total": 3.8}}
""")
TURN = json.loads("""
{"branch": 0, "message": null, "observation_message": null, "tool": "execute_bash", "parse_failure": null,
 "text": "I look.", "cached_tokens": 0, "retractions": 0, "weight_version": "6", "generate_seconds": 0.6,
 "tool_seconds": 0.2, "thinking_tokens": 0, "thinking_chars": 0, "thoughts": ""}
""")
BRANCH = json.loads('{"parent": null, "shared": 0, "cause": "start"}')
"""The constant values of resources."""


@dataclass(frozen=True)
class SampleRun:
    """``steps`` of ``groups`` of four trajectories each; ``metrics`` beside the usual ones; ``turns`` of ``tokens``."""

    name: str = "quickstart"
    steps: int = 6
    groups: int = 2
    metrics: int = 4
    turns: int = 3
    turn_tokens: int = 40
    hostile: str = ""
    config: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "quickstart", "model": "tiny-moe", "train": {"lr": 1e-4}}
    )
    resumes: Sequence[int] = (3,)

    @property
    def trajectories(self) -> int:
        return self.steps * self.groups * GROUP

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """The index. The trajectory with the largest gap without replay is not the first one."""
        rng = np.random.default_rng(0)
        rows = np.arange(self.trajectories)
        within = rows % (self.groups * GROUP)
        step, resolved = rows // (self.groups * GROUP) + 1, rng.random(len(rows)) < 0.6
        values: dict[str, Any] = {
            "id": [f"{n}-{k}" for n, k in zip(step.tolist(), within.tolist(), strict=True)],
            "n": [str(n) for n in step.tolist()],
            "step": step,
            "group": within // GROUP,
            "task": [f"mini-train-0-{group:05d}{self.hostile}" for group in (rows // GROUP).tolist()],
            "reward": resolved.astype(float),
            "resolved": resolved,
            "stop": np.where(rng.random(len(rows)) < 0.9, "submitted", "max_turns"),
            "turns": np.full(len(rows), self.turns),
            "tokens": np.full(len(rows), self.length),
            "sampled": np.full(len(rows), self.length // 2),
            "hacks": (rng.random(len(rows)) < 0.05).astype(int),
            "training_status": np.where(rng.random(len(rows)) < 0.8, "trained", "uniform"),
            "advantage": np.where(resolved, 0.5, -0.5),
            "branches": np.ones(len(rows), int),
            "versions": np.ones(len(rows), int),
            "seconds": rng.random(len(rows)) * 4 + 1,
            "began": 1.7e9 + rows,
            "worst_gap": rng.random(len(rows)) * 0.01,
            "worst_gap_without_replay": rng.random(len(rows)),
        }
        return {name: np.asarray(column).tolist() for name, column in values.items()}

    @property
    def length(self) -> int:
        return self.turn_tokens * (1 + 2 * self.turns)

    def summary(self) -> dict[str, Any]:
        named = {"name": self.name, "directory": f"runs/{self.name}", "kind": "train", "state": "finished"}
        return named | {"steps": self.steps, "total": self.steps}

    def run(self) -> dict[str, Any]:
        steps = [str(step + 1) for step in range(self.steps)]
        evaluations = [evaluation(0, 0.52), evaluation(self.steps, 0.79)]
        notes = [f"A note{self.hostile}."] if self.hostile else []
        changing = {"config": self.config, "evaluations": evaluations, "resumes": list(self.resumes), "notes": notes}
        return self.summary() | RUN | changing | {"filed": steps, "detail": steps}

    def metrics_of(self) -> dict[str, Any]:
        rng = np.random.default_rng(hash_of(self.name))
        steps = np.arange(1, self.steps + 1)
        names = ["reward/mean", "reward/pass_rate", "mismatch/k3_kl", "mismatch_without_replay/k3_kl"]
        names += [f"extra_{i // 12}/metric_{i}" for i in range(max(0, self.metrics - len(names)))]
        columns = {name: (rng.random(len(steps)) * 0.2 + 0.4 + 0.3 * steps / len(steps)).tolist() for name in names}
        columns["mismatch/k3_kl"][0] = None
        return {
            "steps": steps.tolist(),
            "time": (1.7e9 + 13.0 * steps).tolist(),
            "sampled_tokens": (steps * 5000).tolist(),
            "columns": {**columns, "rollout/trajectories": [float(self.groups * GROUP)] * self.steps},
            "help": {"reward/mean": "The mean reward of the step's trajectories."},
            "units": {"reward/mean": "reward"},
            "notes": [],
        }

    def step(self, n: str) -> dict[str, Any]:
        rows = [row for row, filed in enumerate(self.columns["n"]) if filed == n]
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        groups = []
        for group in range(self.groups):
            first = group * GROUP
            members = columns["id"][first : first + GROUP]
            one = {"group": group, "task": columns["task"][first], "members": members}
            groups.append({**one, "infrastructure_failures": 0, "trained": True})
        return {"n": n, "step": int(n), "columns": columns, "groups": groups, "notes": []}

    def loads(self, n: str) -> dict[str, Any]:
        loads = np.random.default_rng(int(n)).gamma(2.0, 50.0, (LAYERS, EXPERTS)).astype(int)
        return {"n": n, "layers": LAYERS, "num_experts": EXPERTS, "loads": loads.tolist(), "notes": []}

    def trajectory(self, name: str) -> dict[str, Any]:
        row = self.columns["id"].index(name)
        value = {key: self.columns[key][row] for key in ("n", "step", "group", "task", "reward", "resolved", "stop")}
        first = row - row % GROUP
        return {
            **TRAJECTORY,
            **value,
            "id": name,
            "siblings": self.columns["id"][first : first + GROUP],
            "patch": f"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2{self.hostile}\n",
            "tests": {"test_one": "PASSED", f"test_two{self.hostile}": "FAILED"},
            "test_log": f"1 failed, 1 passed{self.hostile}",
            "messages": [{"role": "system", "content": f"You repair code.{self.hostile}"}],
            "turns": [self._turn(turn) for turn in range(self.turns)],
            "branches": [self._branch(name)],
        }

    def _span(self, turn: int) -> list[int]:
        start = self.turn_tokens * (1 + 2 * turn)
        return [start, start + self.turn_tokens]

    def _turn(self, turn: int) -> dict[str, Any]:
        span, tokens = self._span(turn), self.turn_tokens
        said = {"arguments": {"command": f"ls{self.hostile}"}, "observation": f"a.py{self.hostile}", "span": span}
        said |= {"said": f"I look.{self.hostile}", "calls": [{"name": "execute_bash", "arguments": said["arguments"]}]}
        counts = {"prompt_tokens": span[0], "completion_tokens": tokens, "observation_tokens": tokens}
        return TURN | said | counts | {"began": 0.4 + 0.9 * turn}

    def _branch(self, name: str) -> dict[str, Any]:
        rng = np.random.default_rng(abs(hash_of(name)))
        spans = [self._span(turn) for turn in range(self.turns)]
        n, count = self.turn_tokens * self.turns, self.length
        pieces = [" " + WORDS[word] for word in rng.integers(0, len(WORDS), count).tolist()]
        if self.hostile:
            pieces[1], pieces[self.turn_tokens + 1] = self.hostile, self.hostile
        native = np.round(rng.normal(0, 0.02, n), 5)
        native[n // 2] = 0.75
        rows = self.mismatch(name)
        return {
            **BRANCH,
            "tokens": rng.integers(0, 1000, count).tolist(),
            "pieces": pieces,
            "sampled": spans,
            "versions": [[start, stop, "6"] for start, stop in spans],
            "logprobs": np.round(-rng.gamma(0.5, 1.0, n), 5).tolist(),
            "detail": {
                "gap": np.round(rng.normal(0, 1e-4, n), 7).tolist(),
                "gap_without_replay": native.tolist(),
                "entropy": np.round(rng.gamma(1.0, 0.5, n), 4).tolist(),
                "flags": (rng.random(n) < 0.02).astype(int).tolist(),
                "differs": [0] * count,
                "differs_without_replay": np.bincount([row for row, _ in rows], minlength=count).tolist(),
            },
        }

    def worst_token(self) -> int:
        """The token with the largest gap without replay: the middle one of those that were sampled."""
        turn, within = divmod(self.turn_tokens * self.turns // 2, self.turn_tokens)
        return self._span(turn)[0] + within

    def mismatch(self, name: str) -> list[list[int]]:
        """Pairs of row and layer; the row that made the worst token differs in layer 2."""
        rng = np.random.default_rng(abs(hash_of(name)) + 1)
        rows = rng.choice(self.length - 1, max(1, self.length // 60), replace=False)
        pairs = {(int(row), int(rng.integers(LAYERS))) for row in rows if row != self.worst_token() - 1}
        return sorted(map(list, pairs | {(self.worst_token() - 1, 2)}))


def evaluation(step: int, rate: float) -> dict[str, Any]:
    interval = [rate - 0.06, rate + 0.05]
    return EVALUATION | {"key": f"step-{step}/sampled", "step": step, "pass_at_1": rate, "interval": interval}


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % 2**31


class SampleSource:
    """Some runs. ``revisions`` can be raised by a test, to make a resource look changed."""

    def __init__(self, *runs: SampleRun) -> None:
        self.runs = list(runs)
        self.revisions: dict[str, str] = {}

    def read(self, path: str, query: Mapping[str, str] = {}) -> dict[str, Any]:
        if path == "runs":
            shown = {"pass_at_1": [0.79, 0.74, 0.84], "guard": 1}
            return {"runs": [{"run": n, **run.summary(), **shown} for n, run in enumerate(self.runs)], "notes": []}
        number, _, rest = path.partition("/")
        run = self.runs[int(number)]
        kind, _, name = rest.partition("/")
        total = run.trajectories
        found: Callable[[], dict[str, Any]] | None = {
            "run": run.run,
            "metrics": run.metrics_of,
            "trajectories": lambda: {"total": total, "found": total, "columns": run.columns, "notes": []},
            "steps": lambda: run.step(name),
            "loads": lambda: run.loads(name),
            "t": lambda: run.trajectory(name),
            "routes": lambda: self._routes(run, name),
            "live": lambda: {"step": None, "episodes": [], "expected": 8, "notes": []},
        }.get(kind)
        if found is None:
            return {"error": {"kind": "unknown", "text": f"{path}: no such page"}, "notes": []}
        return found()

    def _routes(self, run: SampleRun, name: str) -> dict[str, Any]:
        if not name.endswith("/map"):
            experts = [[[1, 5, 9, 30]] * LAYERS]
            return {"from": 0, "to": 1, "rows": run.length, "layers": LAYERS, "experts": experts, "notes": []}
        pairs = run.mismatch(name.removesuffix("/map"))
        shape = {"id": name, "layers": LAYERS, "rows": run.length}
        return {**shape, "differs": [], "differs_without_replay": pairs, "notes": []}

    def body(self, path: str, query: Mapping[str, str] = {}) -> bytes:
        return json.dumps(self.read(path, query)).encode()  # not orjson: it refuses lone surrogates

    def stamps(self) -> dict[str, str]:
        return dict(self.revisions)

    def pages(self) -> Iterator[str]:
        yield "runs"
        for number, run in enumerate(self.runs):
            yield from (f"{number}/{kind}" for kind in ("run", "metrics", "trajectories"))
            yield from (f"{number}/{kind}/{step + 1}" for step in range(run.steps) for kind in ("steps", "loads"))


class Served:
    """A server of ``source`` in a thread."""

    def __init__(self, source: Resources | SampleSource, port: int = 0) -> None:
        self._socket = listen(port)
        self._server = web_server(source)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        self.port = int(self._socket.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
