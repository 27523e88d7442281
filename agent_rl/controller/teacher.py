"""The teacher of on-policy distillation: an engine that gives the log-probs of the policy's own sampled tokens.

Thinking Machines, "On-Policy Distillation" (2025). The teacher needs the policy's tokenizer and nothing else of its
architecture. Every finished trajectory is evaluated once, before its group is complete.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.controller.preflight import Checked, check_model
from agent_rl.controller.run_models import resolve_run
from agent_rl.engine.factory import open_engine
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineError, RolloutFailed, UserError
from agent_rl.models.spec import read_model_spec
from agent_rl.rollout.filters import masked_stops
from agent_rl.rollout.group import EpisodeRunner, Limiter
from agent_rl.types import Branch, StopReason, TopTokens, Trajectory
from agent_rl.utils.http import AsyncHttp
from envs import Task

KEY = "train.distill.teacher"
_TOKENIZER = "tokenizer.json"


class Teacher:
    """Adds ``teacher_logprobs``, and ``teacher_top`` with ``top_k``, to trajectories, at most ``concurrency`` at once;
    not to those without sampled tokens or with a stop reason in ``skipped``, which are not trained."""

    def __init__(
        self,
        engine: SGLangEngine,
        *,
        concurrency: int,
        top_k: int | None = None,
        skipped: Collection[StopReason] = (),
    ) -> None:
        self._engine, self._limiter, self._skipped = engine, Limiter(concurrency), frozenset(skipped)
        self._top = top_k or 0
        self._seconds: list[float] = []

    def scored(self, run: EpisodeRunner) -> EpisodeRunner:
        """Wraps ``run`` to :meth:`score` its trajectories."""

        async def run_and_score(task: Task) -> Trajectory:
            return await self.score(await run(task))

        return run_and_score

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """Raises RolloutFailed, one line, if the teacher fails past the retries of ``engine.retries``: a trajectory is
        never trained without its teacher, and the run can go on when the teacher is back."""
        if trajectory.stop.infrastructure or trajectory.stop in self._skipped or not trajectory.sampled_tokens:
            return trajectory
        started, session = time.perf_counter(), f"teacher-{trajectory.task_id}"
        try:
            parts = [await self._score(branch, session) for branch in trajectory.branches if branch.sampled_tokens]
        except EngineError as error:
            raise RolloutFailed(
                f"{KEY}: the teacher did not evaluate a trajectory of {trajectory.task_id}: {error}; start it again, "
                "then run the same command, which keeps the finished episodes"
            ) from error
        self._seconds.append(time.perf_counter() - started)
        top = [top for _, top in parts if top is not None]
        return replace(
            trajectory,
            teacher_logprobs=np.concatenate([logprobs for logprobs, _ in parts]),
            teacher_top=TopTokens.join(top) if top else None,
        )

    async def _score(self, branch: Branch, session: str) -> tuple[NDArray[np.float32], TopTokens | None]:
        """The teacher's log-probs and most likely tokens at the sampled tokens of ``branch``."""
        async with self._limiter:
            scores = await self._engine.rescore(branch.tokens.tolist(), session=session, top=self._top)
        sampled = branch.loss_mask
        top = scores.top and TopTokens(scores.top.ids[sampled[1:]], scores.top.logprobs[sampled[1:]])
        return np.asarray(scores.logprobs, np.float32)[sampled], top

    def metrics(self) -> dict[str, float]:
        """``distill/score_seconds_mean`` of the trajectories since the last call."""
        seconds, self._seconds = self._seconds, []
        return {"distill/score_seconds_mean": float(np.mean(seconds))} if seconds else {}


@asynccontextmanager
async def open_teacher(checked: Checked, logs: Path, note: Callable[[str], None]) -> AsyncIterator[Teacher | None]:
    """The teacher of the config, whose tokenizer is the model's; None without ``train.distill``. A teacher that is not
    a URL is served here, and stopped on the way out. Raises UserError, one line, for one that cannot be used."""
    config, distill = checked.config, checked.config.train.distill
    if distill is None:
        yield None
        return
    teacher = partial(
        Teacher, concurrency=distill.concurrency, top_k=distill.top_k, skipped=masked_stops(config.train.filter)
    )
    if not distill.served:
        url = distill.teacher.rstrip("/")
        settings = config.engine.model_copy(update={"urls": (url,), "urls_file": None})
        await check_tokenizer(url, config.model, settings.headers)
        engine = SGLangEngine(url, checked.model_spec, settings, routes=False)
        try:
            yield teacher(engine)
        finally:
            await engine.close()
        return
    model = resolve_run(Path(distill.teacher), KEY)
    check_model(model, KEY)
    _refuse_other(_vocabulary(model), _vocabulary(config.model), str(model))
    async with open_engine(_own_engine(config), model, read_model_spec(model), logs, note, routes=False) as engine:
        yield teacher(engine)


def _own_engine(config: RunConfig) -> EngineConfig:
    if config.engine.local_device != "cpu":
        raise UserError(f"{KEY}: only a teacher on CPUs is started here: serve it with SGLang and give its URL")
    return config.engine.model_copy(
        update={"urls": (), "urls_file": None, "count": 1, "port": 0, "placement": "local", "colocate": False}
    )


async def check_tokenizer(url: str, model: Path, headers: dict[str, str] | None = None) -> None:
    """Raises UserError, one line, if the server at ``url`` does not respond or has another tokenizer than ``model``,
    compared token by token: by its files where they are on this machine, else by what it decodes."""
    try:
        async with AsyncHttp(60.0, headers=headers) as http:
            info = await http.get_json(f"{url}/model_info")
            directory = Path(str(info.get("tokenizer_path") or ""))
            if (directory / _TOKENIZER).is_file():
                _refuse_other(_vocabulary(directory), _vocabulary(model), url)
                return
            own = Tokenizer.from_file(str(model / _TOKENIZER))
            ids = sorted(own.get_vocab(with_added_tokens=True).values())
            request = {"tokens": [[token] for token in ids], "skip_special_tokens": False}
            texts = orjson.loads(await http.post(f"{url}/detokenize", request))["text"]
    except EngineError as error:
        raise UserError(
            f"{KEY}: {error}; a teacher is an SGLang server that has its tokenizer, or whose files are on this machine"
        ) from None
    decoded = own.decode_batch([[token] for token in ids], skip_special_tokens=False)
    _refuse_other(dict(zip(ids, texts, strict=True)), dict(zip(ids, decoded, strict=True)), url)


def _vocabulary(directory: Path) -> dict[int, str]:
    tokenizer = Tokenizer.from_file(str(directory / _TOKENIZER))
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def _refuse_other(teacher: dict[int, str], own: dict[int, str], name: str) -> None:
    if (other := next(_differing(teacher, own), None)) is not None:
        raise UserError(
            f"{KEY}: {name} has another tokenizer than the model: id {other} is {teacher.get(other)!r} there and "
            f"{own.get(other)!r} here; a teacher must have the same one"
        )


def _differing(teacher: dict[int, str], own: dict[int, str]) -> Iterator[int]:
    return (number for number in sorted(teacher.keys() | own.keys()) if teacher.get(number) != own.get(number))
