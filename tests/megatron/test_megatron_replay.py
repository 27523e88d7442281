"""Routing replay: the experts given are the experts used, the gates are Eq. 8, and wrong use is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
    return PackedBatch.from_sequences(tiny.sequences())


def everywhere(experts: Tensor) -> PackedRoutes:
    return PackedRoutes(experts, torch.ones(len(experts), dtype=torch.bool))


def total(logprobs: Tensor, _entropy: Tensor | None, _batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    return logprobs.sum(), {}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_native_routes_replayed_change_nothing(build: Build, batch: PackedBatch, recompute: str) -> None:
    model = build(recompute=recompute)
    native = model.forward_logprobs([batch], None, record=True)[0]
    replayed = model.forward_logprobs([batch], [everywhere(native.routes)], record=True)[0]
    assert torch.equal(native.logprobs, replayed.logprobs)
    assert torch.equal(native.routes.sort(-1).values, replayed.routes.sort(-1).values)


def test_given_experts_are_used_at_every_token_and_layer(build: Build, batch: PackedBatch) -> None:
    model, given = build(), tiny.random_routes(len(batch))
    native = model.forward_logprobs([batch], None, record=True)[0]
    replayed = model.forward_logprobs([batch], [everywhere(given)], record=True)[0]
    assert torch.equal(replayed.routes, given)
    assert (replayed.logprobs - native.logprobs).abs().max() > 0.01


def test_absent_rows_route_natively(build: Build, batch: PackedBatch) -> None:
    model, given = build(), tiny.random_routes(len(batch))
    native = model.forward_logprobs([batch], None, record=True)[0]
    # Only the last sequence's rows are absent, and nothing before it in the sequence was replayed: all of it is native.
    present = torch.arange(len(batch)) < int(batch.cu_seqlens[-2])
    mixed = model.forward_logprobs([batch], [PackedRoutes(given, present)], record=True)[0]
    assert torch.equal(mixed.routes[present], given[present])
    assert torch.equal(mixed.routes[~present], native.routes[~present])
    assert torch.equal(mixed.logprobs[~present], native.logprobs[~present])
    garbage = given.clone()
    garbage[~present] = 255  # what an absent row holds means nothing, not even as an id
    again = model.forward_logprobs([batch], [PackedRoutes(garbage, present)])[0]
    assert torch.equal(mixed.logprobs, again.logprobs)
    none = PackedRoutes(garbage, torch.zeros_like(present))
    assert torch.equal(model.forward_logprobs([batch], [none])[0].logprobs, native.logprobs)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_training_uses_the_given_experts_forward_and_recomputed(
    build: Build, batch: PackedBatch, recompute: str
) -> None:
    model = build(recompute=recompute)
    parts = [batch, PackedBatch.from_sequences(tiny.sequences(seed=9, lengths=(21, 4)))]
    given = [tiny.random_routes(len(part), seed=len(part)) for part in parts]
    seen: dict[int, list[Tensor]] = {}
    for layer in model.modules[0].decoder.layers:
        router, seen[layer.layer_number] = layer.mlp.router, []
        router.register_forward_hook(
            lambda _m, _i, output, number=layer.layer_number: seen[number].append(output[1].clone())
        )
    model.train_microbatches(parts, [everywhere(experts) for experts in given], total)
    order = [0, 0, 1, 1] if recompute == "full" else [0, 1]  # each recomputed before the next goes forward
    for number, maps in seen.items():
        assert len(maps) == len(order)
        for which, used in zip(order, maps, strict=True):
            wanted = torch.zeros_like(used).scatter(1, given[which][:, number - 1].long(), True)
            assert torch.equal(used, wanted), f"layer {number}"


class Observer:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def assigned(self, layer_number: int, microbatch: int, experts: Tensor) -> None:
        self.events.append(("assigned", layer_number, microbatch, experts.clone()))

    def action(self, layer_number: int, microbatch: int, action: str) -> None:
        self.events.append(("action", layer_number, microbatch, action))

    def forwarded(
        self,
        layer_number: int,
        microbatch: int,
        action: str,
        used: Tensor,
        expected: Tensor | None,
        fallback_rows: int,
    ) -> None:
        self.events.append(("forwarded", layer_number, microbatch, action, used, expected, fallback_rows))

    def of(self, kind: str, layer: int) -> list[tuple[Any, ...]]:
        return [event[2:] for event in self.events if event[:2] == (kind, layer)]


def test_an_observer_sees_what_the_routers_really_used(build: Build, batch: PackedBatch) -> None:
    model, observer = build(recompute="full"), Observer()
    parts = [batch, PackedBatch.from_sequences(tiny.sequences(seed=9, lengths=(21, 4)))]
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


def test_only_the_layers_that_megatron_runs_again_are_expected_again(
    build: Build, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full recomputation by block: of the first layers of a chunk alone."""
    from agent_rl.train.megatron import model as building

    whole = building.transformer_config

    def first_three(*arguments: Any) -> Any:
        config = whole(*arguments)
        config.recompute_method, config.recompute_num_layers = "block", 3
        return config

    monkeypatch.setattr(building, "transformer_config", first_three)
    model, observer = build(recompute="full"), Observer()
    model.replayer.observer = observer
    model.train_microbatches([batch], [everywhere(tiny.random_routes(len(batch)))], total)
    for layer in range(1, tiny.LAYERS + 1):
        again = [event for event in observer.of("forwarded", layer) if event[1] == "replay_backward"]
        assert len(again) == (layer <= 3)


def test_multi_token_prediction_keeps_its_own_routes(build: Build) -> None:
    """Its routers have no column in the routes, and a layer number after the last one's."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from agent_rl.train.megatron.kernel_choice import Kernels
    from agent_rl.train.megatron.model import HiddenGPT, RMSNorm, block_spec
    from agent_rl.train.megatron.moe import grouped_matmul
    from agent_rl.train.megatron.varlen import sdpa_per_segment
    from r3.megatron_replay import ReplayError, RouterReplayer

    model = build(recompute="full")
    config = replace(model.config, mtp_num_layers=1, recompute_method="uniform")
    spec = block_spec(config, model.model_spec, None, kernels=Kernels(sdpa_per_segment, grouped_matmul, False))
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=RMSNorm,
        hnorm=RMSNorm,
        eh_proj=ColumnParallelLinear,
        transformer_layer=spec.layer_specs[-1],
        layer_norm=RMSNorm,
    )
    ahead = ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=layer)]),
    )
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
        own.router(hidden)  # as often as it likes
    assert torch.equal(before, during)
    assert torch.equal(torch.stack([used[column] for column in range(tiny.LAYERS)], 1), given.long())
    model.stray = TopKRouter(config, get_default_pg_collection())
    with pytest.raises(ReplayError, match="stray is a router outside the decoder's layers"):
        RouterReplayer([model], range(1, tiny.LAYERS + 1))
    assert RouterReplay.global_router_replay_instances == []


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 5e-2])
def test_replay_brings_a_perturbed_trainer_nearer_to_the_engine(build: Build, noise: float) -> None:
    """The experts that flip with a little noise on the weights are most of the mismatch; replay leaves the rest."""
    from r3.mismatch.report import k3_kl

    model, batch = build(), PackedBatch.from_sequences(tiny.sequences(lengths=(200, 200, 200)))
    engine = model.forward_logprobs([batch], None, record=True)[0]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.modules[0].parameters():
        parameter.data += noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    native = model.forward_logprobs([batch], None, record=True)[0]
    replayed = model.forward_logprobs([batch], [everywhere(engine.routes)], record=True)[0]
    assert torch.equal(replayed.routes, engine.routes)
    assert not torch.equal(native.routes.sort(-1).values, engine.routes.sort(-1).values)
    far, near = (k3_kl(output.logprobs.numpy(), engine.logprobs.numpy()) for output in (native, replayed))
    assert near < far / 1.5


def test_recomputation_has_the_same_gradient(build: Build, batch: PackedBatch) -> None:
    given = [PackedRoutes(tiny.random_routes(len(batch)), torch.arange(len(batch)) % 3 != 0)]
    gradients = []
    for recompute in ("none", "full"):
        model = build(recompute=recompute)
        model.train_microbatches([batch], given, total)
        gradients.append(model.modules[0].decoder.layers[0].mlp.router.weight.main_grad.clone())
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_moe_layer_equals_equation_8_in_float64(build: Build) -> None:
    """One replayed MoE layer against the sum over experts written out: g_i = I_i exp(s_i) / sum_j I_j exp(s_j)."""
    model = build()
    layer = model.modules[0].decoder.layers[2].mlp
    hidden = torch.randn(19, 1, 32, generator=torch.Generator().manual_seed(3))
    experts = tiny.random_routes(19)
    with torch.no_grad(), model.replayer.forward(0, experts, torch.ones(19, dtype=torch.bool), backward=False):
        output, _ = layer(hidden)
        for other in model.modules[0].decoder.layers:  # the other routers must be asked too
            if other.mlp is not layer:
                other.mlp(hidden)
    model.replayer.clear()
    x = hidden[:, 0].double()
    scores = x @ layer.router.weight.double().T
    chosen = torch.zeros_like(scores).scatter(1, experts[:, 2].long(), 1.0)
    gates = chosen * scores.exp() / (chosen * scores.exp()).sum(-1, keepdim=True)
    wanted = torch.zeros_like(x)
    for index in range(tiny.EXPERTS):
        gate, up = (x @ layer.experts.weight1[index].double().T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        wanted += gates[:, index : index + 1] * (inner @ layer.experts.weight2[index].double().T)
    torch.testing.assert_close(output[:, 0].double(), wanted, rtol=1e-4, atol=1e-5)


def test_router_gradient_by_finite_differences(build: Build, batch: PackedBatch) -> None:
    """With the experts pinned the loss is smooth in the router's weights, and its slope is the gradient."""
    model = build()
    given = [everywhere(tiny.random_routes(len(batch)))]
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


def test_two_models_in_a_process_do_not_meet(build: Build, batch: PackedBatch, tmp_path: Path) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    tiny.make(tmp_path / "other", seed=5)
    first, second = build(), build(tmp_path / "other")
    alone = second.forward_logprobs([batch], None)[0].logprobs
    given = tiny.random_routes(len(batch))
    steered: list[Tensor] = []

    def loss(logprobs: Tensor, _entropy: Tensor | None, _batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        steered.append(second.forward_logprobs([batch], None)[0].logprobs)  # in the middle of the other's step
        return logprobs.sum(), {}

    first.train_microbatches([batch], [everywhere(given)], loss)
    assert torch.equal(steered[0], alone)
    assert RouterReplay.global_router_replay_instances == []


def refused(experts: Tensor, row: int, values: list[int]) -> Tensor:
    changed = experts.clone()
    changed[row, 3] = torch.tensor(values, dtype=torch.uint8)
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: refused(routes, 6, [5, 5]), r"row 6, MoE layer 3: experts \[5, 5\] are not 2 different ids"),
        (lambda routes: refused(routes, 0, [1, 8]), r"row 0, MoE layer 3: experts \[1, 8\]"),
        (lambda routes: routes[:, :3], r"the model needs \[tokens, 4, 2\]"),
        (lambda routes: routes[..., :1], r"the model needs \[tokens, 4, 2\]"),
    ],
    ids=["duplicate", "out-of-range", "a-layer-short", "wrong-top-k"],
)
def test_wrong_routes_are_refused(build: Build, batch: PackedBatch, change: Any, message: str) -> None:
    from r3.megatron_replay import ReplayError

    routes = everywhere(change(tiny.random_routes(len(batch))))
    with pytest.raises(ReplayError, match=message):
        build().forward_logprobs([batch], [routes])


def test_rows_must_be_consumed_exactly_once(build: Build, batch: PackedBatch) -> None:
    from r3.megatron_replay import ReplayError

    model = build(recompute="full")
    hidden = torch.zeros(7, 1, 32)
    routes, present = tiny.random_routes(7), torch.ones(7, dtype=torch.bool)
    layers = [layer.mlp for layer in model.modules[0].decoder.layers]
    with pytest.raises(ReplayError, match="layer 4: its routes were consumed 0 times"):  # noqa: PT012, SIM117
        with model.replayer.forward(0, routes, present, backward=True):
            for layer in layers[:3]:
                layer(hidden)
    model.replayer.clear()
    with pytest.raises(ReplayError, match="layer 1: routed twice"):  # noqa: PT012, SIM117
        with model.replayer.forward(0, routes, present, backward=True):
            layers[0](hidden)
            layers[0](hidden)
    model.replayer.clear()
    with pytest.raises(ReplayError, match="the router has 6 tokens and top-2, the routes are"):  # noqa: SIM117
        with model.replayer.forward(0, routes, present, backward=True):
            layers[0](hidden[:6])
    model.replayer.clear()
    with model.replayer.forward(0, routes, present, backward=True):
        for layer in layers:
            layer(hidden)
    with pytest.raises(ReplayError, match="layer 1: its routes were consumed 0 times in the recomputation, not 1"):
        model.replayer.finish(1, backward=True)
    model.forward_logprobs([batch], None)  # a failure leaves nothing behind


def test_recomputing_too_often_is_refused(build: Build) -> None:
    from r3.megatron_replay import ReplayError

    model = build(recompute="full")
    hidden, present = torch.zeros(7, 1, 32), torch.ones(7, dtype=torch.bool)
    layers = [layer.mlp for layer in model.modules[0].decoder.layers]
    with model.replayer.forward(0, tiny.random_routes(7), present, backward=True):
        for layer in layers:
            layer(hidden)
    layers[0](hidden)
    with pytest.raises(ReplayError, match="layer 1: recomputed more often"):
        layers[0](hidden)
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
    from types import SimpleNamespace

    from r3.megatron_replay import ReplayError, check_supported

    config = build().config
    check_supported(config)
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__ if hasattr(config, name)}
    with pytest.raises(ReplayError, match=reason):
        check_supported(SimpleNamespace(**fields | change))


def test_experts_that_tensor_ranks_would_not_reduce_are_refused(build: Build) -> None:
    from r3.megatron_replay import ReplayError, RouterReplayer

    model = build()
    model.config.tensor_model_parallel_size = 2
    with pytest.raises(ReplayError, match="layer 1: with tensor parallelism 2 and expert parallelism 1"):
        RouterReplayer(model.modules, model.layer_numbers)
    for layer in model.modules[0].decoder.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.allreduce = False
    RouterReplayer(model.modules, model.layer_numbers)


def test_routes_of_one_pass_replay_in_the_next(build: Build, batch: PackedBatch) -> None:
    """R2: the routes recorded in the old-log-prob pass pin the update, whatever the weights have become."""
    model = build()
    recorded = model.forward_logprobs([batch], None, record=True)[0].routes
    for layer in model.modules[0].decoder.layers:
        layer.mlp.router.weight.data.neg_()  # the native choice is now another one
    native = model.forward_logprobs([batch], None, record=True)[0].routes
    pinned = model.forward_logprobs([batch], [everywhere(recorded)], record=True)[0].routes
    assert torch.equal(pinned, recorded)
    assert (native.sort(-1).values != recorded.sort(-1).values).any(-1).float().mean() > 0.5
    assert replace(everywhere(recorded)).experts is recorded
