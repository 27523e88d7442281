"""Impossible parallel layouts are refused with the reason, wherever a config is read."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.model_sizes import DENSE_SIZES, EXPERT_SIZES
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec
from agent_rl.train import parallel_checks as checks
from agent_rl.train.parallel_checks import check_layout, layout_problems, lora_problems

MODEL = {**DENSE_SIZES, **EXPERT_SIZES, "moe_intermediate_size": 12, "mlp_only_layers": [0], "decoder_sparse_step": 1}
DENSE = {key: value for key, value in MODEL.items() if key != "num_experts"}
SHARED = MODEL | {"shared_expert_intermediate_size": 6}

TENSOR2, TENSOR3 = {"world_size": 2, "tensor": 2}, {"world_size": 3, "tensor": 3}

# Refused layouts: train.parallel, the model (None: not known), the beginning of the line after "train.parallel".
REFUSED: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({"world_size": 3, "tensor": 2, "expert": 2}, None, ": world_size 3 is not a multiple of tensor"),
    ({"world_size": 4, "expert": 3}, None, ": expert 3 does not divide the 4 ranks of a pipeline stage"),
    ({"world_size": 4, "pipeline": 2, "expert": 4}, None, ": expert 4 does not divide the 2 ranks"),
    ({"virtual_pipeline": 2}, None, ": virtual_pipeline 2 needs pipeline stages"),
    ({"world_size": 2, "pipeline": 2, "dispatcher": "allgather"}, None, ": dispatcher allgather"),
    ({"world_size": 2, "dispatcher": "flex"}, None, ": dispatcher flex"),
    ({"world_size": 8, "pipeline": 2, "virtual_pipeline": 4}, MODEL, ": pipeline x virtual_pipeline"),
    (TENSOR3, MODEL, ".tensor=3 does not divide the model's num_attention_heads=4"),
    ({"world_size": 4, "tensor": 4}, MODEL, ".tensor=4 does not divide the model's num_key_value_heads"),
    (TENSOR2, MODEL | {"vocab_size": 97}, ".tensor=2 does not divide the model's vocab_size"),
    (TENSOR2, MODEL | {"intermediate_size": 47}, ".tensor=2 does not divide the model's intermediate_size"),
    (TENSOR2, MODEL | {"shared_expert_intermediate_size": 5}, ".tensor=2 does not divide the model's shared_expert"),
    ({"world_size": 3, "expert": 3}, MODEL, ".expert=3 does not divide the model's num_experts=8"),
    ({"world_size": 2, "expert": 2}, DENSE, ".expert=2: this model has no experts"),
]

# Options of train that a layout refuses: train.parallel, the options, the same without the refused one, the line.
BALANCE, LORA, EP2 = {"balance": {"enabled": True}}, {"lora": {"rank": 16}}, {"world_size": 2, "expert": 2}
REFUSED_OPTIONS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, BALANCE, "balance", "train.balance: train.parallel.expert is 1"),
    (EP2, BALANCE | {"replay": "off"}, "balance", "train.balance: train.replay is off"),
    (EP2 | {"dispatcher": "allgather"}, BALANCE, "balance", "train.balance: train.parallel.dispatcher allgather"),
    ({"world_size": 4, "expert": 4}, {"balance": {"enabled": True, "ranks_per_node": 3}}, "balance",
     "train.balance: ranks_per_node 3 does not divide train.parallel.expert=4"),
    (EP2, {"balance": {"enabled": True, "slots": 5}}, "balance", "train.balance: slots 5: other ranks have 4 experts"),
    (TENSOR2, LORA, "lora", "train.lora: train.parallel.tensor is 2"),
    ({"world_size": 2, "pipeline": 2}, LORA, "lora", "train.lora: train.parallel.pipeline is 2"),
    (EP2, LORA | BALANCE, "lora", "train.lora: train.balance"),
    ({}, LORA | {"offload_optimizer": True}, "lora", "train.lora: train.offload_optimizer"),
]  # fmt: skip


def model_spec(model: dict[str, Any]) -> ModelSpec:
    return ModelSpec.of({"model_type": "qwen3_moe" if "num_experts" in model else "qwen3", **model})


def config(parallel: dict[str, Any], model: Path = Path("none"), **train: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "test", "model": model, "train": {"parallel": parallel, **train}})


@pytest.mark.parametrize(("parallel", "model", "line"), REFUSED)
def test_each_refusal_is_a_line_with_the_reason(
    parallel: dict[str, Any], model: dict[str, Any] | None, line: str
) -> None:
    problems = layout_problems(config(parallel), model_spec(model) if model else None)
    assert any(problem.startswith(f"train.parallel{line}") for problem in problems)
    assert not any("\n" in problem for problem in problems)


@pytest.mark.parametrize(
    ("modules", "model", "line"),
    [
        (["moe"], DENSE, "train.recompute_modules: moe "),
        (["core_attn", "mlp"], MODEL | {"mlp_only_layers": []}, "train.recompute_modules: mlp "),
    ],
)
def test_recomputing_missing_modules_is_refused(modules: list[str], model: dict[str, Any], line: str) -> None:
    (problem,) = layout_problems(config({}, recompute="selective", recompute_modules=modules), model_spec(model))
    assert problem.startswith(line)
    assert layout_problems(config({}, recompute="full", recompute_modules=modules), model_spec(model)) == []


def test_a_router_of_one_expert_whose_weight_is_always_1_is_refused() -> None:
    one = MODEL | {"num_experts_per_tok": 1}
    (line,) = layout_problems(config({}), model_spec(one | {"norm_topk_prob": True}))
    assert line.startswith("model: num_experts_per_tok=1 and norm_topk_prob=true: ")
    assert layout_problems(config({}), model_spec(one | {"norm_topk_prob": False})) == []
    assert layout_problems(config({}), model_spec(MODEL | {"norm_topk_prob": True})) == []


def test_an_expert_width_without_a_kernel_is_refused() -> None:
    assert layout_problems(config({}, dtype="float32"), model_spec(MODEL)) == []
    (line,) = layout_problems(config({}, dtype="bfloat16"), model_spec(MODEL))
    assert line.startswith("model: moe_intermediate_size=12 must be a multiple of 8 with train.dtype bfloat16")
    assert layout_problems(config({}, dtype="bfloat16"), model_spec(DENSE)) == []


@pytest.mark.parametrize(("parallel", "train", "option", "line"), REFUSED_OPTIONS)
def test_unsupported_options_of_a_layout_are_refused(
    parallel: dict[str, Any], train: dict[str, Any], option: str, line: str
) -> None:
    (problem,) = layout_problems(config(parallel, **train), model_spec(MODEL))
    assert problem.startswith(line)
    without = {key: value for key, value in train.items() if key != option}
    assert layout_problems(config(parallel, **without), model_spec(MODEL)) == []


@pytest.mark.parametrize("option", ["balance", "lora"])
def test_options_without_expert_biases_are_refused(option: str) -> None:
    train = {"balance": {"enabled": True}} if option == "balance" else {"lora": {}}
    spec = replace(model_spec(MODEL), expert_form="clamped")
    (problem,) = layout_problems(config({"world_size": 2, "expert": 2}, **train), spec)
    assert problem == (f"train.{option}: the experts of qwen3_moe have biases, which it does not support: turn it off")


def test_adapters_in_bfloat16_need_an_engine_in_bfloat16() -> None:
    train = config({}, lora={}, dtype="bfloat16").train
    assert lora_problems(train, "bfloat16") == []
    assert lora_problems(train, "float32")[0].startswith("train.lora: engine.dtype float32")


def test_possible_layouts_are_not_refused() -> None:
    layouts = [
        {"tensor": 2},  # wrong with Megatron's own experts, correct with ours
        {"tensor": 2, "expert": 2},
        {"context": 2, "expert": 2, "dispatcher": "allgather"},
        {"pipeline": 2, "virtual_pipeline": 2},
        {"expert": 2, "distributed_optimizer": False},
    ]
    for layout, model in itertools.product(layouts, (MODEL, SHARED)):
        assert layout_problems(config({"world_size": 2, **layout}), model_spec(model)) == []
    every_layer = MODEL | {"mlp_only_layers": [], "intermediate_size": 47}  # no layer uses the width 47
    assert layout_problems(config(TENSOR2), model_spec(every_layer)) == []


def test_all_problems_are_reported() -> None:
    wrong = {"world_size": 3, "tensor": 2, "virtual_pipeline": 5}
    assert len(layout_problems(config(wrong), model_spec(MODEL))) == 3


def test_the_models_own_config_is_checked(tiny_moe: Path) -> None:
    model = json.loads((tiny_moe / "config.json").read_text())
    layers = model["num_hidden_layers"]
    refused = config({"world_size": layers + 1, "pipeline": layers + 1}, tiny_moe)
    with pytest.raises(ConfigError, match="is more than the model's num_hidden_layers"):
        check_layout(refused)
    check_layout(refused.model_copy(update={"model": Path("none")}))


def test_config_show_reports_a_refused_layout(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: test\nmodel: none\ntrain: {parallel: {virtual_pipeline: 2}}\n")
    shown = CliRunner().invoke(app, ["config", "show", str(path)])
    assert "virtual_pipeline: 2" in shown.output
    assert isinstance(shown.exception, ConfigError)
    assert "virtual_pipeline 2 needs pipeline stages" in str(shown.exception)


def test_a_trainer_is_refused_before_it_starts_anything() -> None:
    from agent_rl.train.ray_trainer import RayTrainer

    with pytest.raises(ConfigError, match="world_size 3 is not a multiple"):
        RayTrainer(config({"world_size": 3, "pipeline": 2}))


def test_number_of_replicas_of_weights_and_experts() -> None:
    sizes = (1, 2, 4)
    for tensor, pipeline, context, data, expert in itertools.product(sizes, repeat=5):
        layout = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
        parallel = ParallelConfig(world_size=tensor * pipeline * context * data, **layout)
        if checks.parallel_problems(parallel):
            continue
        assert checks.dense_replicas(parallel) == context * data
        assert checks.expert_replicas(parallel) == tensor * context * data / expert
        shared = context * data > 1 or checks.expert_replicas(parallel) > 1
        assert checks.uses_distributed_optimizer(parallel) == shared
        assert not checks.uses_distributed_optimizer(parallel.model_copy(update={"distributed_optimizer": False}))
