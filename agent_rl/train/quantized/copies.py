"""bfloat16 copies of the quantized checkpoints that a run names, made once and kept in ``runs_dir``.

Engines cannot take bfloat16 updates for float8 or mxfp4 weights. So trainer, engines and exports all start from the
copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_rl.config import RunConfig
from agent_rl.models.families import parse_config
from agent_rl.models.files import read_object
from agent_rl.models.hub import fetch_models

DIRECTORY = "converted"
"""Where the copies are in ``runs_dir``, which every node of a cluster sees."""


def local_models(config: RunConfig, print_line: Callable[[str], None]) -> RunConfig:
    """``config`` with local directories of its models, in bfloat16 or wider: see
    :func:`agent_rl.models.hub.fetch_models`. Quantized ones are converted unless their copy exists; an interrupted
    conversion goes on. Blocks. ``print_line`` receives the progress. Raises UserError or ConfigError, one line."""
    config = fetch_models(config)
    base, kl = config.runs_dir.absolute() / DIRECTORY, config.train.kl
    config = config.model_copy(update={"model": bfloat16_copy(config.model, base, print_line)})
    if kl.reference is None:
        return config
    kl = kl.model_copy(update={"reference": bfloat16_copy(kl.reference, base, print_line)})
    return config.model_copy(update={"train": config.train.model_copy(update={"kl": kl})})


def bfloat16_copy(model: Path, base: Path, print_line: Callable[[str], None]) -> Path:
    """``model``, or the directory in ``base`` with its bfloat16 copy if its ``config.json`` says that it is quantized.
    Raises ConfigError for a model that could not be used, before anything is written."""
    if (config := config_of_copy(model)) is None:
        return model
    parse_config(config, model / "config.json")
    copy = base / f"{model.resolve().name}-{_fingerprint(model)}"
    if not copy.exists():
        from agent_rl.train.quantized.convert import Conversion, Reporter  # they need torch

        conversion, reporter = Conversion.plan(model, copy), Reporter(print_line)
        print_line(f"{model} is quantized: converting it to bfloat16, once, in {copy}")
        conversion.run(reporter.progress, reporter.report)
        print_line(reporter.line())
    return copy


def config_of_copy(model: Path) -> dict[str, Any] | None:
    """The content of ``config.json`` in the bfloat16 copy of ``model``; None if ``model`` is not quantized, or cannot
    be read: its reader reports that."""
    try:
        config = read_object(model / "config.json")
    except (OSError, ValueError):
        return None
    return None if config.pop("quantization_config", None) is None else config


def _fingerprint(model: Path) -> str:
    """Of the files of ``model``: their names, sizes and times."""
    stats = [(path.name, path.stat()) for path in sorted((model / "config.json", *model.glob("*.safetensors")))]
    text = str([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
