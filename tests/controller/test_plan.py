"""`agent-rl plan`: formulas against independent counts, refusals, advice; the shipped recipes fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config import LoraConfig, ParallelConfig, RunConfig, TrainConfig
from agent_rl.config.loader import load_config
from agent_rl.controller.cluster_resources import ClusterRequest
from agent_rl.controller.preflight import Checked
from agent_rl.errors import ConfigError, UserError
from agent_rl.planner.known_models import KNOWN, planned_model
from agent_rl.planner.memory_model import kv_bytes_per_token, layer_bytes, rank_bytes, rank_parameters, route_bytes
from agent_rl.planner.memory_model import parameters as parameters_of
from agent_rl.planner.plan import GIB, PlannedResource, RunPlan
from agent_rl.planner.planner import CUDA_BYTES
from agent_rl.planner.suggestions import check_expert_slots, make_plan
from agent_rl.train.parallel_checks import layout_problems

ROOT = Path(__file__).resolve().parents[2]
QWEN = KNOWN["Qwen3-30B-A3B"]


def recipe(name: str = "paper-swe", *overrides: str) -> RunConfig:
    return load_config(ROOT / "configs" / f"{name}.yaml", overrides)


def refusal_of(name: str, *overrides: str) -> str:
    refusal = make_plan(recipe(name, *overrides)).refusal()
    assert refusal is not None
    assert "\n" not in refusal
    return refusal


def check_hardware(config: RunConfig, line: str, *found: int) -> None:
    """The numbers in the head of the config are those of its plan."""
    head = re.search(rf"# Hardware: {line}", (ROOT / "configs" / f"{config.name}.yaml").read_text())
    assert head is not None, "a recipe states the hardware that it needs"
    assert (*found, config.hardware.gpu_memory_gb) == tuple(int(part) for part in head.groups())


def size_of(items: Iterable[Any], what: str) -> int:
    return next(item.size for item in items if what in item.what)


def resource(plan: RunPlan, name: str) -> PlannedResource:
    found = plan.resource(name)
    assert found is not None, [one.name for one in plan.resources]
    return found


@pytest.mark.parametrize(
    ("name", "parameters"), [("Qwen3-30B-A3B", 30_532_122_624), ("Qwen3-235B-A22B", 235_093_634_560)]
)
def test_known_models_have_the_parameters_of_their_cards(name: str, parameters: int) -> None:
    assert parameters_of(KNOWN[name]) == parameters


@pytest.mark.parametrize(
    "name",
    [
        *("paper-swe", "paper-math", "two-nodes", "minimax-m2"),
        *("glm-4.5-air", "gpt-oss-120b", "qwen3-next-80b-a3b"),
    ],
)
def test_a_recipe_fits_its_hardware(name: str) -> None:
    config = recipe(name)
    assert config.name == name
    assert layout_problems(config, planned_model(config.model)) == []
    plan = make_plan(config)
    assert plan.refusal() is None
    rank, engine = resource(plan, "GPU of a trainer rank"), resource(plan, "GPU of an engine")
    line = r"(\d+) trainer GPUs \((\d+) GiB each\) and (\d+) engine GPUs \((\d+) GiB each\) of (\d+)"
    check_hardware(config, line, rank.count, round(rank.total / GIB), engine.count, round(engine.total / GIB))


def test_a_shared_gpu_holds_the_larger_of_two_phases() -> None:
    """The engine's memory is free while the trainer works, and activations while the engine works."""
    config = recipe("paper-swe-8gpu")
    plan, apart = make_plan(config), make_plan(recipe("paper-swe-8gpu", "engine.colocate=false"))
    assert plan.refusal() is None
    asleep, awake = resource(plan, "shared GPU, the engine asleep"), resource(plan, "shared GPU, the engine awake")
    cuda = 2 * CUDA_BYTES
    assert asleep.total == plan.rank.total + cuda
    engine = resource(apart, "GPU of an engine").total - CUDA_BYTES
    assert awake.total == plan.rank.static + engine + size_of(awake.items, "weight sync") + cuda
    most = max(asleep, awake, key=lambda one: one.total)
    check_hardware(config, r"(\d+) GPUs \((\d+) GiB each\) of (\d+)", most.count, round(most.total / GIB))
    assert plan.resource("memory of the host"), "all is on one machine"


@pytest.mark.parametrize(
    ("name", "per_token", "per_request"),
    [("gpt-oss-20b", 12 * 2 * 2 * 64 * 2, 12 * 128 * 2 * 2 * 64 * 2)],  # 2 of 8 key-value heads on each of 4 GPUs
)
def test_models_with_windows_and_states_fit_one_machine(name: str, per_token: int, per_request: int) -> None:
    config = recipe(name)
    plan = make_plan(config)
    assert plan.refusal() is None
    awake = resource(plan, "shared GPU, the engine awake")
    check_hardware(config, r"(\d+) GPUs \((\d+) GiB each\) of (\d+)", awake.count, round(awake.total / GIB))
    assert size_of(awake.items, "KV cache") == config.engine.max_total_tokens * per_token
    assert size_of(awake.items, "states and windows") == config.engine.max_running_requests * per_request


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("hardware.gpus_per_node=4", "world_size=8 is more than hardware.gpus_per_node=4: take fewer ranks"),
        (
            "engine.max_total_tokens=2097152",
            "shared GPU, the engine awake: 94.3 GiB do not fit in 70.4 GiB; what helps",
        ),
        ("train.device=auto", "shares GPUs, and the plan is for CPUs"),
    ],
)
def test_an_overfull_shared_gpu_is_refused_in_one_line(override: str, line: str) -> None:
    overrides = [override, *(["hardware.gpu_memory_gb=null"] if "auto" in override else [])]
    assert line in refusal_of("paper-swe-8gpu", *overrides)


def test_eight_gpus_hold_the_optimizer_with_short_moments_and_inputs_on_the_host() -> None:
    """Qwen3-30B-A3B at 32,768 tokens without tensor ranks: neither is enough alone."""
    large = "train.parallel.tensor=1", "engine.colocate=false", "train.offload_optimizer=false"
    large = (*large, "hardware.host_memory_gb=2000", "hardware.disk_gb=9000")
    moments, inputs = "train.optimizer_moments=bfloat16", "train.offload_activations=true"
    refused = [refusal_of("paper-swe-8gpu", *large, *more) for more in ((), (moments,), (inputs,))]
    assert all(line.startswith("GPU of a trainer rank: ") for line in refused)
    assert inputs in refused[1], "it is named as what helps"
    plan = make_plan(recipe("paper-swe-8gpu", *large, moments, inputs))
    assert (plan.refusal(), plan.rank.inputs) == (None, 48 * 32768 * 2048 * 2)
    assert size_of(resource(plan, "memory of a trainer host").items, "activations") == 8 * plan.rank.inputs


def test_the_quickstart_fits_a_small_machine() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["hardware={host_memory_gb: 16, disk_gb: 20}"])
    if not (config.model / "config.json").is_file():
        pytest.skip("the starting model is not made (make prepare)")
    plan = make_plan(config)
    assert (plan.device, plan.refusal(), plan.notes) == ("cpu", None, ())


def test_a_refusal_suggests_changes() -> None:
    whole = "train.parallel.distributed_optimizer=false"
    plan = make_plan(recipe("paper-swe", whole))
    line = r"GPU of a trainer rank: [\d.]+ GiB do not fit in 76.0 GiB; what helps: train\."
    assert re.match(line, refusal_of("paper-swe", whole))
    rank = resource(plan, "GPU of a trainer rank")
    enough = [advice for advice in plan.advice if advice.resource == rank.name and advice.enough]
    assert enough
    for advice in enough:
        helped = resource(make_plan(recipe("paper-swe", whole, *advice.change.split())), rank.name)
        assert (helped.fits, helped.total) == (True, advice.total)


def test_several_changes_are_combined_if_none_is_enough() -> None:
    small = "train.parallel={world_size: 8, tensor: 4, expert: 2}"
    plan = make_plan(recipe("paper-swe", small))
    first = plan.advice[0]
    assert first.enough
    assert len(first.change.split()) > 1
    assert make_plan(recipe("paper-swe", small, *first.change.split())).refusal() is None
    assert not any(advice.enough for advice in plan.advice[1:])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.microbatch_tokens=8192", "train.microbatch_tokens=8192 is less than rollout.max_tokens=65536"),
        ("engine.max_total_tokens=32768", "engine.max_total_tokens=32768 is less than rollout.max_tokens=65536"),
        ("train.parallel.expert=7", "train.parallel"),
        ("hardware.disk_gb=100", "disk of runs_dir: "),
        ("hardware.host_memory_gb=16", "memory of a trainer host: "),
        ("engine.max_total_tokens=4194304", "GPU of an engine: 113.2 GiB do not fit in 70.4 GiB; what helps: engine."),
        ("hardware.trainer_nodes=2", "train.parallel.world_size=32 is more than hardware.trainer_nodes=2 times"),
    ],
)
def test_refusals_name_the_key_or_the_resource(override: str, line: str) -> None:
    assert refusal_of("paper-swe", override).startswith(line)


def test_an_unknown_model_or_gpu_size_is_a_user_error() -> None:
    with pytest.raises(UserError, match="'Nobody' is not a known model"):
        make_plan(recipe("paper-swe", "model=models/Nobody"))
    with pytest.raises(UserError, match=r"hardware\.gpu_memory_gb"):
        make_plan(recipe("paper-swe", "hardware.gpu_memory_gb=null", "train.device=cuda"))


def test_notes_mention_context_length_and_kv_cache() -> None:
    notes = " ".join(make_plan(recipe("paper-swe", "engine.count=1")).notes)
    assert "max_position_embeddings=40960" in notes
    assert "holds 32 trajectories of 65536 tokens and 256 run at once" in notes
    shorter = make_plan(recipe("paper-swe", "model=x/Qwen3-30B-A3B-Instruct-2507", "train.ray_address=head:6379"))
    assert not any("max_position" in note or "Ray" in note for note in shorter.notes)


def test_the_engines_are_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("http://a\nhttp://b # the second\n")
    for override, engines in (("engine.count=3", 3), ("engine.urls=[a]", 1), (f"engine.urls_file={tmp_path}/urls", 2)):
        assert resource(make_plan(recipe("paper-swe", override)), "GPU of an engine").count == 4 * engines


def test_weight_deltas_cost_a_copy_of_the_weights_on_both_sides() -> None:
    config = recipe("two-nodes", "engine.weight_sync=delta")
    plan, weights = make_plan(config), 2 * parameters_of(planned_model(config.model))  # bfloat16
    assert size_of(resource(plan, "memory of a trainer host").items, "weights as sent") == weights
    received = size_of(resource(plan, "memory of an engine host").items, "weights as received")
    assert received == 8 // config.engine.gpus * weights


def test_an_average_of_the_weights_costs_memory_of_the_host() -> None:
    plans = [make_plan(recipe("two-nodes", *more)) for more in ((), ("train.ema={}",))]
    plain, averaged = (resource(plan, "memory of a trainer host").items for plan in plans)
    assert 4 * size_of(averaged, "average") == size_of(averaged, "checkpoint"), "of three other numbers"
    assert 3 * size_of(averaged, "checkpoint") == 4 * size_of(plain, "checkpoint")


def test_a_teachers_tokens_cost_memory_of_their_micro_batch() -> None:
    configs = [
        recipe("two-nodes", "rollout.dynamic_sampling.enabled=false", f"train.distill={{teacher: x, top_k: {k}}}")
        for k in ("null", "64")
    ]
    plain, whole = (make_plan(config).rank.activations for config in configs)
    assert whole - plain == 64 * 48 * configs[0].train.microbatch_tokens // configs[0].train.parallel.context
    served, external = (
        [item.what for item in resource(make_plan(recipe("distill-small", *more)), "memory of this machine").items]
        for more in ((), ("train.distill.teacher=http://x",))
    )
    assert [what for what in served if what not in external] == ["teacher's engine"]


def test_a_directory_has_priority_over_known_models(tmp_path: Path) -> None:
    directory = tmp_path / "Qwen3-30B-A3B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    with pytest.raises(ConfigError, match="model_type 'nobody' is not supported"):
        make_plan(recipe("paper-swe", f"model={directory}"))


def test_the_command_prints_json_and_sets_the_exit_code() -> None:
    command = [sys.executable, "-m", "agent_rl.cli", "plan", "configs/paper-swe.yaml", "--json", "hardware.disk_gb=9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["refusal"].startswith("disk of runs_dir")
    assert done.stderr == f"error: {said['refusal']}\n"
    assert said["parameters"] == parameters_of(QWEN)
    assert all(one["total"] == sum(item["size"] for item in one["items"]) for one in said["resources"])


def test_the_page_on_clusters_has_the_plan_of_its_config() -> None:
    page = (ROOT / "docs/tutorials/first-cluster.md").read_text()
    (printed,) = re.findall(r"```text\n(two-nodes: .*?)\n```", page, re.DOTALL)
    plan = CliRunner().invoke(app, ["plan", str(ROOT / "configs/two-nodes.yaml"), "train.ray_address=FIRST:6379"])
    assert plan.output.startswith(printed)


def test_a_quantized_checkpoint_is_planned_in_the_dtypes_of_trainer_and_engine(tmp_path: Path) -> None:
    plain = json.loads((ROOT / "agent_rl/demo_model/data/tiny-moe/config.json").read_text())
    directory = tmp_path / "tiny-fp8"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(plain | {"quantization_config": {"quant_method": "fp8"}}))
    plan, quantized = (make_plan(recipe("quickstart", *more)) for more in ((), (f"model={directory}",)))
    assert quantized.resources == plan.resources
    assert any(f"{directory} is quantized" in note for note in quantized.notes)
    assert not any("quantized" in note for note in plan.notes)


def test_known_figures_of_the_field() -> None:
    """Qwen3-30B-A3B: 98,304 bytes of bfloat16 KV a token (48 layers x 4 heads x 128 x 2 x 2), 384 of routes."""
    assert kv_bytes_per_token(QWEN, "bfloat16") == 98304
    assert kv_bytes_per_token(QWEN, "bfloat16", 8) == 98304 // 4, "four heads on eight GPUs are held twice"
    assert route_bytes(QWEN) == 384
    train = TrainConfig(dtype="bfloat16", microbatch_tokens=1024)
    rank = rank_bytes(QWEN, train, microbatches=1, device="cuda")
    assert rank.weights + rank.gradients + rank.optimizer == parameters_of(QWEN) * (2 + 4 + 12)


def test_adapters_are_all_that_has_gradients_state_and_checkpoints() -> None:
    """Of Qwen3-30B-A3B at rank 16, by hand: a layer's attention has one A for query, key and value; so have gate and up
    of each of its 128 experts."""
    attention = (2048 + 4096 + 2 * 512) + (4096 + 2048)
    trained = 16 * 48 * (attention + 128 * ((2048 + 2 * 768) + (768 + 2048)))
    train = TrainConfig(dtype="bfloat16", microbatch_tokens=1024, lora=LoraConfig(rank=16))
    rank = rank_bytes(QWEN, train, microbatches=1, device="cuda")
    assert rank.weights == 2 * (parameters_of(QWEN) + trained)
    assert (rank.gradients, rank.optimizer) == (4 * trained, 12 * trained)
    plans = [make_plan(recipe("paper-swe", "train.parallel.tensor=1", *more)) for more in ((), ("train.lora.rank=8",))]
    sent, changes = (size_of(plan.traffic, "weight sync") for plan in plans)
    assert changes < sent / 30
    checkpoints = [size_of(resource(plan, "disk of runs_dir").items, "checkpoints") for plan in plans]
    assert checkpoints[1] == checkpoints[0] * trained / 2 / parameters_of(QWEN)


def test_frozen_modules_have_no_gradients_and_no_state() -> None:
    """The attention of Qwen3-30B-A3B, by hand: the projections and the norms of query and key of each layer."""
    frozen = 48 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 2 * 128)
    train = TrainConfig(dtype="bfloat16", microbatch_tokens=1024, freeze=("attention",))
    rank, trained = rank_bytes(QWEN, train, microbatches=1, device="cuda"), parameters_of(QWEN) - frozen
    assert (rank.weights, rank.gradients, rank.optimizer) == (2 * parameters_of(QWEN), 4 * trained, 12 * trained)


layouts = st.builds(
    lambda tensor, pipeline, data, expert: ParallelConfig(
        world_size=tensor * pipeline * data, tensor=tensor, pipeline=pipeline, expert=min(expert, tensor * data)
    ),
    *map(st.sampled_from, ((1, 2, 4), (1, 2, 4), (1, 2, 8), (1, 2, 8))),
)


@given(layouts)
def test_ranks_together_hold_the_whole_model(parallel: ParallelConfig) -> None:
    """The fullest rank has at least its share; cuts add nothing but what every rank needs (norms, routers)."""
    dense, experts = rank_parameters(QWEN, parallel)
    whole_dense, whole_experts = rank_parameters(QWEN, ParallelConfig())
    assert experts == whole_experts // (parallel.pipeline * parallel.expert)
    share = whole_dense / (parallel.tensor * parallel.pipeline)
    everywhere = QWEN.num_layers * (QWEN.num_experts * QWEN.hidden + 2 * QWEN.hidden + 2 * QWEN.head_dim) + QWEN.hidden
    ends = QWEN.vocab_size * QWEN.hidden // parallel.tensor
    assert share <= dense <= share + everywhere + ends


@given(layouts, st.sampled_from(["none", "selective", "full"]), st.sampled_from(["float32", "bfloat16"]))
def test_knobs_reduce_memory(parallel: ParallelConfig, recompute: Any, dtype: Any) -> None:
    def size(**changes: Any) -> int:
        data = {"parallel": parallel, "recompute": recompute, "dtype": dtype, "microbatch_tokens": 65536, **changes}
        return replace(rank_bytes(QWEN, TrainConfig(**data), microbatches=8, device="cuda"), start=0).total

    assert size(recompute="full") < size(recompute="selective") < size(recompute="none")
    assert size(microbatch_tokens=32768) < size()
    unshared = parallel.model_copy(update={"distributed_optimizer": False})
    assert size(parallel=unshared) >= size()
    assert size(dtype="bfloat16", recompute="none") < size(dtype="float32", recompute="none")


def test_the_start_counts_where_the_optimizer_lies_on_the_host() -> None:
    """Megatron copies the experts' weights into the distributed optimizer's buffer beside all weights and gradients."""
    parallel = ParallelConfig(world_size=8, tensor=4, expert=8)
    train = TrainConfig(dtype="bfloat16", microbatch_tokens=32768, recompute="full", parallel=parallel)
    configs = [train.model_copy(update={"offload_optimizer": offload}) for offload in (False, True)]
    on_device, on_host = (rank_bytes(QWEN, config, microbatches=1, device="cuda") for config in configs)
    experts = rank_parameters(QWEN, parallel)[1]
    assert on_host.total == on_host.weights + on_host.gradients + 2 * experts
    assert on_host.total > replace(on_host, start=0).total
    assert on_device.total == replace(on_device, start=0).total, "the state that is made later is larger"


def test_borrowed_experts_are_counted() -> None:
    """Qwen3-30B-A3B: an expert of 3 x 2048 x 768 bfloat16 weights, and a pool of 128 in each of 48 layers."""
    plan = make_plan(recipe("paper-swe", "train.balance={enabled: true, slots: 4}"))
    sizes = {item.what: item.size for one in plan.resources for item in one.items}
    assert sizes["borrowed"] == 2 * 4 * 3 * 2048 * 768 * 2
    assert sizes["expert pool"] == 48 * 128 * 3 * 2048 * 768 * 2
    assert plan.refusal() is None
    exchanged = "train.balance={enabled: true, transfer: {recompute: exchange}}"
    without = {item.what for one in make_plan(recipe("paper-swe", exchanged)).resources for item in one.items}
    assert "expert pool" not in without


def test_slots_that_do_not_fit_are_refused_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*overrides: str) -> None:
        config = recipe("paper-swe", *overrides)
        check_expert_slots(config, planned_model(config.model))

    rank = resource(make_plan(recipe()), "GPU of a trainer rank")
    just = f"hardware.gpu_memory_gb={1.02 * rank.total / 0.95 / GIB}"
    check("train.balance={enabled: true, slots: 4}", just)
    check("train.balance={enabled: true}", "hardware.gpu_memory_gb=20")  # too small without slots too
    many = ["train.balance={enabled: true, slots: 96, transfer: {recompute: exchange}}", just]
    line = r"^train\.balance: GPU of a trainer rank: [\d.]+ GiB do not fit in [\d.]+ GiB, [\d.]+ GiB without"
    with pytest.raises(ConfigError, match=line):
        check(*many)

    def passed(config: RunConfig, purpose: str) -> Checked:
        return Checked(
            config,
            planned_model(config.model),
            ClusterRequest.of(config),
        )

    monkeypatch.setattr("agent_rl.controller.preflight.run", passed)  # the model is not on this machine
    started = CliRunner().invoke(app, ["train", str(ROOT / "configs/paper-swe.yaml"), *many])
    assert re.match(line, str(started.exception))


def test_selective_recomputation_keeps_the_other_activations() -> None:
    def kept(recompute: Any, *modules: Any) -> int:
        train = TrainConfig(recompute=recompute, recompute_modules=modules)
        return layer_bytes(QWEN, train, 4096, layer=0, device="cpu")

    both, moe, attention = (kept("selective", *modules) for modules in (("core_attn", "moe"), ("moe",), ("core_attn",)))
    assert both < moe < attention < kept("none", "moe")
    assert moe - kept("selective", "moe", "layernorm") == 2 * 4096 * QWEN.hidden * 4, "the outputs of two norms"
    config = recipe("paper-swe", "train.recompute=selective", "train.recompute_modules=[moe, layernorm]")
    train = config.train.model_copy(update={"optimizer_moments": "bfloat16"})
    rank = rank_bytes(QWEN, train, microbatches=1, device="cuda")
    assert 1.0 <= rank.total / (60.1 * GIB) <= 1.03, "the peak of a dry run of 65,536 tokens"
    layer = layer_bytes(QWEN, train, 8192, layer=0, device="cuda")
    assert layer == pytest.approx((0.35 - 0.15) / 3 * GIB, rel=0.05), "dry runs of 1 and 4 layers"
