"""On-policy distillation: the teacher's scores, its tokenizer and its failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from support.trajectories import trajectory
from tokenizers import Tokenizer

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.config import DistillConfig, RunConfig  # noqa: E402
from agent_rl.config.loader import install_model  # noqa: E402
from agent_rl.controller.advantages import build_samples  # noqa: E402
from agent_rl.controller.teacher import Teacher, check_tokenizer  # noqa: E402
from agent_rl.engine.types import Scores  # noqa: E402
from agent_rl.errors import EngineUnreachable, RolloutFailed, TrainerError, UserError  # noqa: E402
from agent_rl.train.batching.packing import pack  # noqa: E402
from agent_rl.train.step import _distilled, _training_input  # noqa: E402
from agent_rl.types import Branch, Group, StopReason, TokenIds, TopTokens, Trajectory  # noqa: E402
from envs import Task  # noqa: E402

TASK = Task("task", "memory", {})


class Scorer:
    """An engine whose log-prob of token i is -i / 10; the first ``failing`` requests raise."""

    def __init__(self, failing: int = 0) -> None:
        self.failing, self.requests = failing, list[Sequence[int]]()

    async def rescore(self, tokens: TokenIds, *, session: str, top: int = 0) -> Scores:
        self.requests.append(tokens)
        if len(self.requests) <= self.failing:
            raise EngineUnreachable("http://teacher:1: connection refused")
        ids = np.array([[token, token + 1] for token in tokens[1:]], np.int32)
        likely = TopTokens(ids, ids.astype(np.float32) * np.float32(-0.1)) if top else None
        return Scores(tuple(-token / 10 for token in tokens), "7", top=likely)


def branched() -> Trajectory:
    """Five tokens with two sampled, and a branch of six tokens with three sampled."""
    first, second = trajectory(1.0, sampled=2), trajectory(1.0, sampled=3)
    return replace(first, further=(Branch(second.tokens, second.loss_mask, second.logprobs, None, second.versions),))


async def test_every_branch_has_the_teachers_log_probs_at_its_sampled_tokens() -> None:
    teacher = Teacher(Scorer(), concurrency=2)
    scored = await teacher.score(branched())
    assert scored.teacher_logprobs == pytest.approx([-0.3, -0.4, -0.3, -0.4, -0.5])
    first, second = build_samples([Group("t", (scored,))], equal_rewards=True).samples
    assert first.teacher_logprobs == pytest.approx([0, 0, 0, -0.3, -0.4])
    assert second.teacher_logprobs == pytest.approx([0, 0, 0, -0.3, -0.4, -0.5])
    assert teacher.metrics().keys() == {"distill/score_seconds_mean"}
    assert teacher.metrics() == {}


async def test_every_sampled_token_has_the_teachers_most_likely_tokens() -> None:
    scored = await Teacher(Scorer(), concurrency=2, top_k=2).score(branched())
    samples = build_samples([Group("t", (scored,))], equal_rewards=True).samples
    batch = pack(samples, [1, 0])
    assert batch.teacher_top_T is not None
    drawn = batch.mask_T
    assert batch.teacher_top_T.ids[drawn].tolist() == [[3, 4], [4, 5], [5, 6], [3, 4], [4, 5]]
    assert batch.teacher_top_T.logprobs[drawn][0] == pytest.approx([-0.3, -0.4])
    assert not batch.teacher_top_T.ids[~drawn].any()
    broken = replace(samples[0], teacher_top=samples[1].teacher_top)
    with pytest.raises(TrainerError, match="sample 0 has 2 sampled tokens and 3 rows of the teacher"):
        pack([broken, samples[1]], [0, 1])
    with pytest.raises(TrainerError, match="and no rows"):
        pack([replace(samples[0], teacher_top=None), samples[1]], [0, 1])


async def test_a_teacher_that_fails_ends_the_run_with_its_reason() -> None:
    async def run(task: Task) -> Trajectory:
        return trajectory(1.0)

    scored = Teacher(Scorer(failing=1), concurrency=1).scored(run)
    with pytest.raises(RolloutFailed, match=r"did not evaluate a trajectory of .*teacher:1: connection refused; start"):
        await scored(TASK)
    assert (await scored(TASK)).teacher_logprobs is not None


async def test_what_is_not_trained_is_not_scored() -> None:
    engine = Scorer()
    teacher = Teacher(engine, concurrency=1, skipped={StopReason.MAX_TURNS})
    for stop in (StopReason.MAX_TURNS, StopReason.SANDBOX_FAILURE):
        assert (await teacher.score(trajectory(0.0, stop=stop))).teacher_logprobs is None
    assert not engine.requests


async def test_groups_of_equal_rewards_are_trained() -> None:
    teacher = Teacher(Scorer(), concurrency=1)
    group = Group("t", (await teacher.score(trajectory(1.0)), await teacher.score(trajectory(1.0))))
    assert not build_samples([group]).samples
    made = build_samples([group], equal_rewards=True)
    assert (len(made.samples), made.zero_variance_groups) == (2, 0)


@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_advantages_equal_the_float_loop(reward: float) -> None:
    """A_t = reward A - coefficient (log pi_old - log teacher), which slime's and prime-rl's functions give too."""
    rng, mask = np.random.default_rng(0), np.arange(8) >= 3
    made = trajectory(1.0, sampled=5)
    values = rng.normal(-1, 0.5, 5).astype(np.float32)
    (sample,) = build_samples([Group("t", (replace(made, teacher_logprobs=values),))], equal_rewards=True).samples
    sample, student = replace(sample, advantage=0.7), torch.from_numpy(rng.normal(-1, 0.5, 8))
    batch = pack([sample], [0])
    item = _training_input(batch, student, "recompute")
    settings = DistillConfig(teacher="t", coefficient=0.3, reward=reward)
    found = _distilled(item, batch, student, settings).extras["advantages"]
    teacher = iter(values.tolist())
    for at in np.flatnonzero(mask):
        expected = reward * 0.7 - 0.3 * (student[at].item() - next(teacher))
        assert found[at].item() == pytest.approx(expected, abs=1e-6)
    whole = DistillConfig(teacher="t", coefficient=0.3, reward=reward, top_k=2)
    top = replace(batch, teacher_top_T=TopTokens(np.zeros((8, 2), np.int32), np.full((8, 2), -1, np.float32)))
    in_loss = _distilled(item, top, student, whole)
    assert in_loss.extras["advantages"].tolist() == pytest.approx([reward * 0.7] * 8)
    assert in_loss.candidates is not None
    with pytest.raises(TrainerError, match=r"top_k is set and sample 0 has no tokens of the teacher"):
        _distilled(item, batch, student, whole)
    with pytest.raises(TrainerError, match="the teacher did not evaluate sample 0"):
        _distilled(item, replace(batch, teacher_T=None), student, settings)


def test_a_micro_batch_has_a_teacher_for_all_samples_or_for_none() -> None:
    one, other = (trajectory(1.0), trajectory(0.0))
    scored = replace(one, teacher_logprobs=np.zeros(2, np.float32))
    samples = build_samples([Group("t", (scored, other))]).samples
    with pytest.raises(TrainerError, match="sample 1 has no log-probs of the teacher"):
        pack(samples, [0, 1])


async def serve(routes: dict[str, Any]) -> tuple[web.AppRunner, str]:
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


def swapped(directory: Path, first: str, second: str) -> Path:
    """A copy of the tokenizer in ``directory`` in which two tokens have each other's number."""
    data = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    out = directory.with_name("swapped")
    out.mkdir()
    (out / "tokenizer.json").write_text(json.dumps(data))
    return out


@pytest.mark.parametrize("how", ["files", "decoding"])
async def test_another_tokenizer_is_refused_with_its_first_token(tmp_path: Path, how: str) -> None:
    install_model(tmp_path / "model")
    other = swapped(tmp_path / "model", "d", "e")
    number = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).token_to_id("d")
    decoded = list[int]()

    async def model_info(request: web.Request) -> web.Response:
        return web.json_response({"tokenizer_path": str(other) if how == "files" else "/not/here"})

    async def detokenize(request: web.Request) -> web.Response:
        tokens = orjson.loads(await request.read())["tokens"]
        decoded.append(len(tokens))
        tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
        return web.json_response({"text": tokenizer.decode_batch(tokens, skip_special_tokens=False)})

    runner, url = await serve({"/model_info": model_info, "/detokenize": detokenize})
    try:
        with pytest.raises(
            UserError, match=rf"another tokenizer than the model: id {number} is 'e' there and 'd' here"
        ):
            await check_tokenizer(url, tmp_path / "model")
        await check_tokenizer(url, other)
    finally:
        await runner.cleanup()
    assert decoded == ([] if how == "files" else [decoded[0]] * 2)


async def test_a_teacher_that_does_not_respond_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.distill\.teacher: http://127\.0\.0\.1:9") as caught:
        await check_tokenizer("http://127.0.0.1:9", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_teacher_needs_no_contrast_and_temperature_one() -> None:
    data = {"name": "test", "model": ".", "train": {"distill": {"teacher": "http://t"}}}
    assert RunConfig.model_validate({**data, "rollout": {"group_size": 1}}).train.learns_from_equal_rewards
    with pytest.raises(ValueError, match=r"train\.distill requires rollout\.temperature 1"):
        RunConfig.model_validate({**data, "rollout": {"temperature": 0.8}})
    with pytest.raises(ValueError, match=r"dynamic_sampling conflicts with train\.distill"):
        RunConfig.model_validate({**data, "rollout": {"dynamic_sampling": {"enabled": True}}})
