"""Routing replay: the given experts are used forward and in recomputation, and wrong use is refused. Gates are compared
with transformers in test_model_families.py, layouts in test_megatron_parallel.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_tiny as tiny
import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

pytestmark = pytest.mark.megatron
Build = Callable[..., Any]


@pytest.fixture
def batch() -> PackedBatch:
    return tiny.packed()


def total(logprobs: Tensor, _entropy: Tensor | None, _batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    return logprobs.sum(), {}


def refused(message: str) -> Any:
    """Expects a ReplayError in the block."""
    from r3.megatron_replay import ReplayError

    return pytest.raises(ReplayError, match=message)


def test_absent_rows_use_the_routers_own_experts(build: Build, batch: PackedBatch) -> None:
    model, given = build(), tiny.random_routes(len(batch))
    native = model.forward_logprobs([batch], None, record=True)[0]
    # Only the rows of the last sequence are absent, so all of its values are native.
    present = torch.arange(len(batch)) < int(batch.cu_seqlens[-2])
    mixed = model.forward_logprobs([batch], [PackedRoutes(given, present)], record=True)[0]
    assert torch.equal(mixed.routes[present], given[present])
    assert torch.equal(mixed.routes[~present], native.routes[~present])
    # Experts multiply other numbers of rows at once, which may round otherwise.
    torch.testing.assert_close(mixed.logprobs[~present], native.logprobs[~present], rtol=0, atol=1e-5)
    garbage = given.clone()
    garbage[~present] = 255  # no expert id; an absent row is never read
    again = model.forward_logprobs([batch], [PackedRoutes(garbage, present)])[0]
    assert torch.equal(mixed.logprobs, again.logprobs)
    none = PackedRoutes(garbage, torch.zeros_like(present))
    assert torch.equal(model.forward_logprobs([batch], [none])[0].logprobs, native.logprobs)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_passes_of_training_use_the_given_experts(build: Build, batch: PackedBatch, recompute: str) -> None:
    model = build(recompute=recompute)
    parts = [batch, tiny.packed(seed=9, lengths=(21, 4))]
    given = [tiny.random_routes(len(part), seed=len(part)) for part in parts]
    seen: dict[int, list[Tensor]] = {}
    for layer in model.modules[0].decoder.layers:
        maps = seen[layer.layer_number] = []
        layer.mlp.router.register_forward_hook(lambda _m, _i, output, maps=maps: maps.append(output[1].clone()))
    model.train_microbatches(parts, [tiny.everywhere(experts) for experts in given], total)
    order = [0, 0, 1, 1] if recompute == "full" else [0, 1]  # each recomputed before the next goes forward
    for number, maps in seen.items():
        assert len(maps) == len(order)
        for which, used in zip(order, maps, strict=True):
            wanted = torch.zeros_like(used).scatter(1, given[which][:, number - 1].long(), True)
            assert torch.equal(used, wanted), f"layer {number}"


def test_an_observer_gets_the_experts_that_the_routers_used(build: Build, batch: PackedBatch) -> None:
    model, observer = build(recompute="full"), tiny.RouterEvents()
    parts = [batch, tiny.packed(seed=9, lengths=(21, 4))]
    given = [PackedRoutes(tiny.random_routes(len(part)), torch.arange(len(part)) % 4 != 0) for part in parts]
    model.replayer.observer = observer
    model.train_microbatches(parts, given, total)
    for layer in range(1, tiny.LAYERS + 1):
        assigned = observer.of("assigned", layer)
        assert [event[0] for event in assigned] == [0, 1]
        for (_, rows), routes in zip(assigned, given, strict=True):
            assert torch.equal(rows[routes.present], routes.experts[routes.present, layer - 1])
        assert observer.of("action", layer) == [(m, a) for m in (0, 1) for a in ("replay_forward", "replay_backward")]
        ran = observer.of("forwarded", layer)
        assert [event[:2] for event in ran] == [(m, a) for m in (0, 1) for a in ("replay_forward", "replay_backward")]
        for microbatch, _, used, expected, fallback in ran:
            routes = given[microbatch]
            assert torch.equal(used, expected)
            wanted = routes.experts[:, layer - 1].long().sort(-1).values
            assert torch.equal(used[routes.present], wanted[routes.present])
            assert fallback == int((~routes.present).sum())
    observer.events.clear()
    model.forward_logprobs([batch], None)
    assert {event[0] for event in observer.events} == {"action", "forwarded"}  # nothing was assigned
    assert {event[3] for event in observer.events} == {"replay_forward"}
    assert all(event[5] is None and event[6] == len(batch) for event in observer.events if event[0] == "forwarded")
    model.replayer.observer = None
    observer.events.clear()
    model.forward_logprobs([batch], None)
    assert observer.events == []


def test_partial_recomputation_replays_only_the_recomputed_layers(
    build: Build, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputation by block, of the first three layers of a chunk."""
    from agent_rl.train.megatron import model as building

    whole = building.transformer_config

    def first_three(*arguments: Any) -> Any:
        config = whole(*arguments)
        config.recompute_method, config.recompute_num_layers = "block", 3
        return config

    monkeypatch.setattr(building, "transformer_config", first_three)
    model, observer = build(recompute="full"), tiny.RouterEvents()
    model.replayer.observer = observer
    model.train_microbatches([batch], [tiny.everywhere(tiny.random_routes(len(batch)))], total)
    for layer in range(1, tiny.LAYERS + 1):
        again = [event for event in observer.of("forwarded", layer) if event[1] == "replay_backward"]
        assert len(again) == (layer <= 3)


def test_multi_token_prediction_keeps_its_own_routes(build: Build) -> None:
    """Its routers have no column in the routes, and a layer number after the last one's."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.spec_utils import ModuleSpec

    from agent_rl.train.megatron.kernel_choice import Kernels
    from agent_rl.train.megatron.layers import block_spec
    from agent_rl.train.megatron.model import HiddenGPT
    from agent_rl.train.megatron.moe import grouped_matmul
    from agent_rl.train.megatron.norms import RMSNorm
    from agent_rl.train.megatron.varlen import sdpa_per_segment
    from r3.megatron_replay import RouterReplayer

    built = build(recompute="full")
    config = replace(built.config, mtp_num_layers=1, recompute_method="uniform")
    spec = block_spec(config, built.model_spec, None, kernels=Kernels(sdpa_per_segment, grouped_matmul, False))
    spec.layer_specs[-1].submodules.self_attention.params["attn_mask_type"] = AttnMaskType.causal  # MTP checks it
    norms = {name: RMSNorm for name in ("enorm", "hnorm", "layer_norm")}
    parts = {"eh_proj": ColumnParallelLinear, "transformer_layer": spec.layer_specs[-1], **norms}
    layer = ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=mtp.MultiTokenPredictionLayerSubmodules(**parts))
    block = mtp.MultiTokenPredictionBlockSubmodules([layer])
    ahead = ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=block)
    model = HiddenGPT(config, spec, tiny.VOCAB, 512, position_embedding_type="none", mtp_block_spec=ahead)
    replayer = RouterReplayer([model], range(1, tiny.LAYERS + 1))
    assert RouterReplay.global_router_replay_instances == []
    own = model.mtp.layers[0].transformer_layer.mlp
    assert own.router.layer_number == tiny.LAYERS + 1
    hidden, given = torch.randn(9, 1, 32), tiny.random_routes(9)
    before = own.router(hidden)[1]
    with replayer.forward(0, given, None, backward=False) as used:
        for decoder_layer in model.decoder.layers:
            decoder_layer.mlp(hidden)
        during = own.router(hidden)[1]
        own.router(hidden)  # any number of times
    assert torch.equal(before, during)
    assert torch.equal(torch.stack([used[column] for column in range(tiny.LAYERS)], 1), given.long())
    model.stray = TopKRouter(config, get_default_pg_collection())
    with refused("stray is a router outside the decoder's layers"):
        RouterReplayer([model], range(1, tiny.LAYERS + 1))
    assert RouterReplay.global_router_replay_instances == []


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 5e-2])
def test_replay_brings_a_perturbed_trainer_nearer_to_the_engine(build: Build, noise: float) -> None:
    """Most of the mismatch of noisy weights is due to other experts, and replay removes it."""
    from r3.mismatch.report import k3_kl

    model, batch = build(), tiny.packed(lengths=(200, 200, 200))
    engine = model.forward_logprobs([batch], None, record=True)[0]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.modules[0].parameters():
        parameter.data += noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    native = model.forward_logprobs([batch], None, record=True)[0]
    replayed = model.forward_logprobs([batch], [tiny.everywhere(engine.routes)], record=True)[0]
    assert torch.equal(replayed.routes, engine.routes)
    assert not torch.equal(native.routes.sort(-1).values, engine.routes.sort(-1).values)
    far, near = (k3_kl(output.logprobs.numpy(), engine.logprobs.numpy()) for output in (native, replayed))
    assert near < far / 1.5


def test_router_gradient_by_finite_differences(build: Build, batch: PackedBatch) -> None:
    """With given experts the loss is smooth in the router's weights."""
    model = build()
    given = [tiny.everywhere(tiny.random_routes(len(batch)))]
    router = model.modules[0].decoder.layers[1].mlp.router
    direction = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(4))
    model.train_microbatches([batch], given, total)
    slope = float((router.weight.main_grad * direction).sum())
    step, losses, start = 2e-3, [], router.weight.data.clone()
    for sign in (1, -1):
        router.weight.data = start + sign * step * direction
        losses.append(model.forward_logprobs([batch], given)[0].logprobs.double().sum())
    assert float((losses[0] - losses[1]) / (2 * step)) == pytest.approx(slope, rel=0.01)
    assert abs(slope) > 0.1


def test_two_models_in_a_process_are_independent(build: Build, batch: PackedBatch, tmp_path: Path) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    tiny.make(tmp_path / "other", seed=5)
    first, second = build(), build(tmp_path / "other")
    alone = second.forward_logprobs([batch], None)[0].logprobs
    given = tiny.random_routes(len(batch))
    steered: list[Tensor] = []

    def loss(logprobs: Tensor, _entropy: Tensor | None, _batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        steered.append(second.forward_logprobs([batch], None)[0].logprobs)  # during the step of the first
        return logprobs.sum(), {}

    first.train_microbatches([batch], [tiny.everywhere(given)], loss)
    assert torch.equal(steered[0], alone)
    assert RouterReplay.global_router_replay_instances == []


@pytest.mark.parametrize(
    ("row", "experts", "message"),
    [
        (6, [5, 5], r"row 6, MoE layer 3: experts \[5, 5\] are not 2 different ids"),
        (0, [1, 8], r"row 0, MoE layer 3: experts \[1, 8\]"),
    ],
)
def test_wrong_experts_are_refused(
    build: Build, batch: PackedBatch, row: int, experts: list[int], message: str
) -> None:
    routes = tiny.random_routes(len(batch))
    routes[row, 3] = torch.tensor(experts, dtype=torch.uint8)
    with refused(message):
        build().forward_logprobs([batch], [tiny.everywhere(routes)])


def test_a_byte_names_each_of_256_experts() -> None:
    from r3.megatron_replay import validate_routes

    routes, present = torch.tensor([[[0, 255]]], dtype=torch.uint8), torch.ones(1, dtype=torch.bool)
    validate_routes(routes, present, moe_layers=1, top_k=2, num_experts=256)
    with refused(r"\[0, 255\] are not 2 different ids below 255"):
        validate_routes(routes, present, moe_layers=1, top_k=2, num_experts=255)


@pytest.mark.parametrize("shape", [(3, 2), (4, 1)], ids=["a-layer-short", "wrong-top-k"])
def test_routes_of_another_shape_are_refused(build: Build, batch: PackedBatch, shape: tuple[int, int]) -> None:
    routes = tiny.random_routes(len(batch))[:, : shape[0], : shape[1]]
    with refused(r"the model needs \[tokens, 4, 2\]"):
        build().forward_logprobs([batch], [tiny.everywhere(routes)])


def routed(model: Any, calls: Iterable[tuple[int, int]]) -> None:
    """A forward pass with routes of seven tokens that calls layers with numbers of tokens, ``(layer, tokens)``."""
    layers = model.modules[0].decoder.layers
    with model.replayer.forward(0, tiny.random_routes(7), torch.ones(7, dtype=torch.bool), backward=True):
        for layer, tokens in calls:
            layers[layer].mlp(torch.zeros(tokens, 1, 32))


EVERY_LAYER = [(layer, 7) for layer in range(tiny.LAYERS)]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (EVERY_LAYER[:3], "layer 4: its routes were consumed 0 times"),
        ([(0, 7), (0, 7)], "layer 1: routed twice"),
        ([(0, 6)], "the router has 6 tokens and top-2, the routes are"),
    ],
)
def test_rows_must_be_consumed_exactly_once(build: Build, batch: PackedBatch, calls: Any, message: str) -> None:
    model = build(recompute="full")
    with refused(message):
        routed(model, calls)
    model.replayer.clear()
    model.forward_logprobs([batch], None)  # works after the failure


def test_recomputation_must_consume_rows_exactly_once(build: Build) -> None:
    model = build(recompute="full")
    routed(model, EVERY_LAYER)
    with refused("layer 1: its routes were consumed 0 times in the recomputation, not 1"):
        model.replayer.finish(1, backward=True)
    model.replayer.clear()
    routed(model, EVERY_LAYER)
    first, hidden = model.modules[0].decoder.layers[0].mlp, torch.zeros(7, 1, 32)
    first(hidden)
    with refused("layer 1: recomputed more often"):
        first(hidden)
    model.replayer.clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"moe_router_fusion": True}, "fused router ignores replay"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn routing ignores replay"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "quantile_balancing routing ignores replay"),
        ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, ": sinkhorn routing ignores replay"),
        ({"moe_expert_capacity_factor": 1.0}, "dropped tokens"),
        ({"moe_router_force_load_balancing": True}, "random logits"),
        ({"moe_input_jitter_eps": 0.1}, "jittered inputs"),
        ({"moe_enable_routing_replay": False}, "replay is off"),
    ],
)
def test_routers_that_cannot_replay_are_refused(build: Build, change: dict[str, Any], reason: str) -> None:
    from r3.megatron_replay import check_supported

    config = build().config
    check_supported(config)
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__ if hasattr(config, name)}
    with refused(reason):
        check_supported(SimpleNamespace(**fields | change))


def test_experts_that_tensor_ranks_would_not_reduce_are_refused(build: Build) -> None:
    from r3.megatron_replay import RouterReplayer

    model = build()
    model.config.tensor_model_parallel_size = 2
    with refused("layer 1: with tensor parallelism 2 and expert parallelism 1"):
        RouterReplayer(model.modules, model.layer_numbers)
    for layer in model.modules[0].decoder.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.allreduce = False
    RouterReplayer(model.modules, model.layer_numbers)
