"""The section ``sft``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agent_rl.config.base import Section


class SftSource(Section):
    """A source of rows; see docs/how-to/sft.md."""

    path: Path = Field(
        ...,
        description="Directory of a run, rollout or evaluation; file of chat rows (.jsonl, .json, .parquet); or id of "
        "a data set on the Hugging Face hub.",
    )
    split: str | None = Field(None, description="Split of a data set. null: its only one.")
    min_reward: float | None = Field(
        1.0, description="Smallest reward of a row that is used. A chat row without a reward is used. null: all rows."
    )
    best_of: int | None = Field(
        None, gt=0, description="Rows of a task that are used, those with the highest rewards. null: all."
    )
    weight: float = Field(1.0, gt=0, description="Weight of the rows' tokens in the loss.")


class SftConfig(Section):
    """Supervised fine-tuning with `agent-rl sft`. Learning rate, layout, LoRA and checkpoints are those of `train`;
    `train.steps` follows from the rows."""

    data: tuple[SftSource, ...] = Field(..., min_length=1, description="Sources of rows.")
    epochs: int = Field(1, gt=0, description="Passes over the rows.")
    batch_rows: int = Field(32, gt=0, description="Largest number of rows of an update.")
    batch_tokens: int | None = Field(
        None, gt=0, description="Largest number of tokens of an update of several rows. null: no limit."
    )
    validation_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the tasks whose rows are held out. A row without a task is one.",
    )
    validation_every: int = Field(
        0, ge=0, description="Steps between measurements of the loss on held-out rows. 0: only after the last step."
    )
    eval_every: int = Field(
        0,
        ge=0,
        description="Epochs between evaluations by Pass@1, as the section `eval` describes them; also before the first "
        "step and after the last. Engines run during an evaluation only. 0: none.",
    )
