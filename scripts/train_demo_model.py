"""Train a demo model from scratch: tokenizer, structured weights, recorded demonstrations, supervised warm-up.

    python -m scripts.train_demo_model OUT [--shape tiny|paper|glm|dense] [--seed 0]

The demonstrations are scripted and run with the real tools in real sandboxes. The demonstrator knows the reference fix.
It is imperfect on purpose: a fixed share of its demonstrations submits without an edit, and another share writes a
wrong line. A model that imitates it can fix bugs but often does not, which leaves something for reinforcement learning.
The kind of a demonstration is drawn at random, independently of the task.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.errors import AgentRlError
from agent_rl.render.chat import ChatRenderer
from agent_rl.utils.directory_lock import LOCK, lock_directory
from agent_rl.utils.run_files import read_json, write_json
from envs import EnvContext, Message
from envs.mini import MiniTask, initial_messages, stream, to_record
from sandbox import Sandbox, SandboxBackend, open_backend
from scripts.tiny_moe import (
    EOS,
    PAD,
    SHAPES,
    TinyMoe,
    initial_weights,
    save_checkpoint,
    save_tokenizer,
    train_tokenizer,
)
from tools import ParseFailure, ToolCall, ToolSet, swe_tools, tool_format

Dialogue = tuple[Message, ...]
Progress = Callable[[str], None]

_DEMOS_PER_SANDBOX = 100
_SANDBOXES = 2
_WORKDIR = "/testbed"
_FORMAT = tool_format("xml")
_OBSERVED_WEIGHT = 0.2
_TASK_SEED = 1_000_003  # of the warm-up's tasks; a run draws its tasks with its own env seed


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """``unedited``: the share that submits without an edit; ``careless``: the share that writes a wrong line."""

    unedited: float = 0.40
    careless: float = 0.15

    def turns(self, task: MiniTask, rng: random.Random) -> list[str]:
        """The text of each turn."""
        draw = rng.random()
        view = _FORMAT.render(ToolCall("file_editor", {"command": "view", "path": task.path}))
        submit = _FORMAT.render(ToolCall("finish", {}))
        if draw < self.unedited:
            return [view, submit]
        careless = draw < self.unedited + self.careless and task.decoys
        new = rng.choice(task.decoys) if careless else task.new
        edit = {"command": "str_replace", "path": task.path, "old_str": task.old, "new_str": new}
        return [view, _FORMAT.render(ToolCall("file_editor", edit)), submit]


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """``demonstrations`` dialogues, ``steps`` updates of ``batch`` dialogues each; ``seed`` for all random draws."""

    sizes: TinyMoe = SHAPES["tiny"]
    demonstrations: int = 12800
    steps: int = 2000
    batch: int = 16
    lr: float = 3e-3
    seed: int = 0
    demonstrator: Demonstrator = field(default_factory=Demonstrator)


WARMUPS: Mapping[str, WarmupSettings] = {
    "tiny": WarmupSettings(),
    **{
        shape: WarmupSettings(sizes=SHAPES[shape], demonstrations=6400, steps=800)
        for shape in ("paper", "glm", "dense")
    },
}
"""The warm-up of each shape. A step of the paper's shape takes three times as long."""


async def make_model(out: Path, settings: WarmupSettings, backend: SandboxBackend, progress: Progress) -> None:
    """Train a model and move it to ``out`` when it is complete.

    A stopped warm-up continues from the files that it keeps beside ``out``. ``progress`` receives a line for each
    stage. Raises UserError if another process trains the same ``out``.
    """
    work = out.parent / f".{out.name}-warmup"
    blank, trained = work / "blank", work / "trained"
    with lock_directory(work):
        _keep_only(work, settings)
        tasks = list(islice(stream("train", _TASK_SEED + settings.seed), settings.demonstrations))
        dialogues = await _demonstrations(work / "demonstrations.json", tasks, settings, backend, progress)
        if not (blank / "generation_config.json").exists():  # written last
            make_blank(blank, dialogues, tasks, settings)
        await _train(blank, trained, encode(dialogues, blank), settings, progress, work / "checkpoints")
        _to_bfloat16(trained)
        shutil.rmtree(out, ignore_errors=True)
        trained.rename(out)
        shutil.rmtree(work)


def _keep_only(work: Path, settings: WarmupSettings) -> None:
    """Empty ``work`` unless it belongs to a warm-up with the same settings."""
    stored = work / "settings.json"
    if stored.exists() and read_json(stored) == asdict(settings):
        return
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    write_json(stored, asdict(settings))


async def _demonstrations(
    path: Path, tasks: Sequence[MiniTask], settings: WarmupSettings, backend: SandboxBackend, progress: Progress
) -> list[Dialogue]:
    """A demonstration of each task, from the file ``path`` or else recorded and written to it."""
    if (stored := _recorded(path)) is not None:
        return stored
    progress(f"{len(tasks)} tasks generated; recording a demonstration of each in {backend.name} sandboxes")
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if done % 1000 < more:
            progress(f"demonstrations: {done} of {len(tasks)}")

    dialogues = await record_demonstrations(
        EnvContext(backend), tasks, settings.demonstrator, seed=settings.seed, progress=count
    )
    write_json(path, dialogues)
    return dialogues


def _recorded(path: Path) -> list[Dialogue] | None:
    return [tuple(dialogue) for dialogue in read_json(path)] if path.exists() else None


def make_blank(
    directory: Path, dialogues: Sequence[Dialogue], tasks: Sequence[MiniTask], settings: WarmupSettings
) -> None:
    """An untrained model with its tokenizer, in ``directory``."""
    tokenizer = train_tokenizer(_corpus(dialogues, tasks))
    save_tokenizer(tokenizer, directory)
    weights = initial_weights(settings.sizes, settings.seed)
    ids = tokenizer.get_vocab()
    save_checkpoint(directory, weights, settings.sizes, eos=ids[EOS], pad=ids[PAD])


def _corpus(dialogues: Sequence[Dialogue], tasks: Sequence[MiniTask]) -> Iterable[str]:
    for dialogue, task in zip(dialogues, tasks, strict=True):
        yield from (message["content"] for message in dialogue)
        yield f"{task.old}\n{task.new}"


def encode(dialogues: Sequence[Dialogue], directory: Path) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Each dialogue's tokens, as in an episode, and their loss weights.

    The demonstrator's tokens have weight 1 and all others 0.2, because reading code teaches what correct code looks
    like.
    """
    renderer = ChatRenderer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [_encode(dialogue, renderer, tokenizer) for dialogue in dialogues]


def _encode(
    dialogue: Dialogue, renderer: ChatRenderer, tokenizer: Tokenizer
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    tokens = renderer.initial_prompt(dialogue[:2])
    weights = [_OBSERVED_WEIGHT] * len(tokens)
    for message in dialogue[2:]:
        if message["role"] == "assistant":
            more = [*tokenizer.encode(message["content"], add_special_tokens=False).ids, renderer.end_of_turn_id]
            weights += [1.0] * len(more)
        else:
            more = renderer.observation(message["content"], stop=renderer.end_of_turn_id)
            weights += [_OBSERVED_WEIGHT] * len(more)
        tokens += more
    return np.array(tokens, np.int32), np.array(weights, np.float32)


async def _train(
    blank: Path,
    out: Path,
    sequences: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]],
    settings: WarmupSettings,
    progress: Progress,
    checkpoints: Path,
) -> None:
    from agent_rl.train.ray_trainer import RayTrainer
    from scripts.sft import SftConfig, SftProgress, sft

    def report(state: SftProgress) -> None:
        if state.step % 50 == 0:
            progress(f"warm-up step {state.step} of {settings.steps}: loss {state.loss:.3f}, {state.seconds:.0f} s")

    config = SftConfig(steps=settings.steps, batch=settings.batch, lr=settings.lr, seed=settings.seed)
    run = RunConfig(name="warmup", model=blank, train=TrainConfig(microbatch_tokens=4096, replay="off"))
    async with RayTrainer(run, optimizer=config.optimizer()) as trainer:
        await sft(trainer, sequences, config, report, checkpoints)
        await trainer.export(out)


def _to_bfloat16(directory: Path) -> None:
    """Round the weights to bfloat16, the engine's precision, so that engine and trainer start from the same numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}  # includes the tied lm_head.weight, because SGLang's Qwen3-MoE never ties it
    for shard in sorted(directory.glob("*.safetensors")):
        weights |= {name: tensor.to(torch.bfloat16) for name, tensor in load_file(shard).items()}
        shard.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


async def record_demonstrations(
    context: EnvContext,
    tasks: Sequence[MiniTask],
    demonstrator: Demonstrator,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[Dialogue]:
    """One demonstration for each task, in order. ``progress`` receives the number of demonstrations of each chunk.

    Demonstrations use a sandbox one after another; none shows files of an earlier task.
    """
    semaphore = asyncio.Semaphore(_SANDBOXES)

    async def record(start: int) -> list[Dialogue]:
        async with semaphore:
            chunk = tasks[start : start + _DEMOS_PER_SANDBOX]
            dialogues = await _record_chunk(context, chunk, demonstrator, random.Random(f"{seed}/{start}"))
        if progress is not None:
            progress(len(dialogues))
        return dialogues

    async with asyncio.TaskGroup() as group:
        parts = [group.create_task(record(start)) for start in range(0, len(tasks), _DEMOS_PER_SANDBOX)]
    return [dialogue for part in parts for dialogue in part.result()]


async def _record_chunk(
    context: EnvContext, tasks: Sequence[MiniTask], demonstrator: Demonstrator, rng: random.Random
) -> list[Dialogue]:
    async with context.sandbox(replace(context.limits, workdir=_WORKDIR)) as sandbox:
        return [await _record(sandbox, task, demonstrator.turns(task, rng)) for task in tasks]


async def _record(sandbox: Sandbox, task: MiniTask, turns: Sequence[str]) -> Dialogue:
    await sandbox.write_files({f"{_WORKDIR}/{path}": text.encode() for path, text in task.files.items()})
    tools = swe_tools(sandbox, style="concise")
    messages: list[Message] = list(initial_messages(to_record(task).problem_statement))
    for turn in turns:
        messages.append({"role": "assistant", "content": turn})
        observation = await _observe(tools, turn, task)
        if observation is not None:
            messages.append({"role": "tool", "content": observation})
    return tuple(messages)


async def _observe(tools: ToolSet, turn: str, task: MiniTask) -> str | None:
    """The tool's result, None after a submit. Raises ``AgentRlError`` if a call of the script fails."""
    call = _FORMAT.parse(turn)
    if isinstance(call, ParseFailure):
        raise AgentRlError(f"task {task.id}: the demonstrator's call does not parse: {call.reason}")
    result = await tools.call(call)
    if result.failed:
        raise AgentRlError(f"task {task.id}: the demonstrator's call failed: {result.text}")
    return None if result.submitted else result.text


async def _main(out: Path, settings: WarmupSettings) -> None:
    backend = open_backend("auto", run_id=f"warmup-{os.getpid()}")
    try:
        await make_model(out, settings, backend, print)
    finally:
        await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a demo model from scratch. A stopped training continues.")
    parser.add_argument("out", type=Path, help="Directory to create.")
    parser.add_argument("--shape", choices=WARMUPS, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    asyncio.run(_main(options.out, replace(WARMUPS[options.shape], seed=options.seed)))
