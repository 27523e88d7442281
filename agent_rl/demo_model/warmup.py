"""The starting model made from nothing: tokenizer, structured weights, demonstrations, supervised warm-up."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.demo_model.demos import Demonstrator, Dialogue, record_demonstrations
from agent_rl.demo_model.init import SHAPES, TinyMoe, initial_weights, save_checkpoint
from agent_rl.demo_model.tokenizer import EOS, PAD, save_tokenizer, train_tokenizer
from agent_rl.render.chat import ChatRenderer
from agent_rl.utils.directory_lock import LOCK, lock_directory
from agent_rl.utils.run_files import read_json, write_json
from envs import EnvContext
from envs.mini import MiniTask, stream
from sandbox import SandboxBackend

Progress = Callable[[str], None]

_OBSERVED_WEIGHT = 0.2
_TASK_SEED = 1_000_003  # tasks of the warm-up; a run's own tasks come from its env seed


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """``demonstrations`` dialogues, trained on for ``steps`` updates of ``batch``; ``seed`` draws all of it."""

    sizes: TinyMoe = SHAPES["tiny"]
    demonstrations: int = 12800
    steps: int = 2000
    batch: int = 16
    lr: float = 3e-3
    seed: int = 0
    demonstrator: Demonstrator = field(default_factory=Demonstrator)


WARMUPS: Mapping[str, WarmupSettings] = {
    "tiny": WarmupSettings(),
    "paper": WarmupSettings(sizes=SHAPES["paper"], demonstrations=6400, steps=800),
}
"""How the model of each shape is warmed up. A step of the paper's shape takes three times as long."""


async def make_model(out: Path, settings: WarmupSettings, backend: SandboxBackend, progress: Progress) -> None:
    """Make a starting model in ``out``, which appears whole or not at all.

    A warm-up that was stopped goes on where it was, from what it keeps in a directory beside ``out``. ``progress`` is
    called with a line for each stage. Raises UserError where another process is at work on ``out``.
    """
    work = out.parent / f".{out.name}-warmup"
    blank, trained = work / "blank", work / "trained"
    with lock_directory(work):
        _keep_only(work, settings)
        tasks = list(islice(stream("train", _TASK_SEED + settings.seed), settings.demonstrations))
        dialogues = await _demonstrations(work / "demonstrations.json", tasks, settings, backend, progress)
        if not (blank / "generation_config.json").exists():  # the last file that is written
            make_blank(blank, dialogues, tasks, settings)
        await _train(blank, trained, encode(dialogues, blank), settings, progress, work / "checkpoints")
        _to_bfloat16(trained)
        shutil.rmtree(out, ignore_errors=True)
        trained.rename(out)
        shutil.rmtree(work)


def _keep_only(work: Path, settings: WarmupSettings) -> None:
    """Empty ``work`` unless it is of a warm-up with the same settings."""
    held = work / "settings.json"
    if held.exists() and read_json(held) == asdict(settings):
        return
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    write_json(held, asdict(settings))


async def _demonstrations(
    path: Path, tasks: Sequence[MiniTask], settings: WarmupSettings, backend: SandboxBackend, progress: Progress
) -> list[Dialogue]:
    """A demonstration of each task: those in the file ``path``, or recorded now and kept there."""
    if (held := _recorded(path)) is not None:
        return held
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
    eos, pad = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    save_checkpoint(directory, weights, settings.sizes, eos=eos, pad=pad)


def _corpus(dialogues: Sequence[Dialogue], tasks: Sequence[MiniTask]) -> Iterable[str]:
    for dialogue, task in zip(dialogues, tasks, strict=True):
        yield from (message["content"] for message in dialogue)
        yield f"{task.old}\n{task.new}"


def encode(dialogues: Sequence[Dialogue], directory: Path) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Each dialogue's tokens, exactly as an episode would have them, and their loss weights.

    The demonstrator's own tokens weigh 1, all others 0.2: reading code teaches the model what correct code looks like.
    """
    renderer = ChatRenderer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [_encode(dialogue, renderer, tokenizer) for dialogue in dialogues]


def _encode(
    dialogue: Dialogue, renderer: ChatRenderer, tokenizer: Tokenizer
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    tokens = renderer.opening(dialogue[:2])
    weights = [_OBSERVED_WEIGHT] * len(tokens)
    for message in dialogue[2:]:
        if message["role"] == "assistant":
            more = [*tokenizer.encode(message["content"], add_special_tokens=False).ids, renderer.end_of_turn_id]
            weights += [1.0] * len(more)
        else:
            more = renderer.observation(message["content"], stop_included=True)
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
    from agent_rl.train.sft import SftConfig, SftProgress, sft

    def tell(state: SftProgress) -> None:
        if state.step % 50 == 0:
            progress(f"warm-up step {state.step} of {state.steps}: loss {state.loss:.3f}, {state.seconds:.0f} s")

    config = SftConfig(steps=settings.steps, batch=settings.batch, lr=settings.lr, seed=settings.seed)
    run = RunConfig(name="warmup", model=blank, train=TrainConfig(microbatch_tokens=4096))
    async with RayTrainer(run, optimizer=config.optimizer()) as trainer:
        await sft(trainer, sequences, config, tell, checkpoints)
        await trainer.export(out)


def _to_bfloat16(directory: Path) -> None:
    """Round the weights to bfloat16, the engine's precision: engine and trainer then start from the same numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}  # with lm_head.weight, tied as it is: SGLang's Qwen3-MoE never ties
    for shard in sorted(directory.glob("*.safetensors")):
        weights |= {name: tensor.to(torch.bfloat16) for name, tensor in load_file(shard).items()}
        shard.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
