"""Every objective and correction against a direct float64 transcription of its formula, one token after another."""

from __future__ import annotations

import math
import sys
from importlib.metadata import EntryPoint
from typing import Any, get_args

import pytest
from pydantic import ValidationError

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.config import (  # noqa: E402
    Clip,
    CorrectionConfig,
    CorrectionMask,
    CorrectionWeight,
    KlEstimator,
    TrainConfig,
)
from agent_rl.config.objectives import OBJECTIVES, Aggregation, ObjectiveSpec, objective_spec  # noqa: E402
from agent_rl.train.loss.corrections import RATIOS, correction_factors, weight_moments  # noqa: E402
from agent_rl.train.loss.objectives import (  # noqa: E402
    AGGREGATIONS,
    KL_ESTIMATORS,
    Terms,
    Tokens,
    aggregation_weights,
    grpo,
    kl_estimate,
    objective_terms,
)
from sandbox import registry as plugins  # noqa: E402

LENGTHS = (7, 1, 12, 5, 4)


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(seed: int = 0) -> dict[str, Any]:
    """Sequences of LENGTHS, advantages one a sequence; the fifth has no sampled token."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -torch.rand(total, generator=generator) * 3
    mask = (torch.rand(total, generator=generator) < 0.7) & (sequence < len(LENGTHS) - 1)
    advantages = torch.randn(len(LENGTHS), generator=generator)[sequence]
    new = old + torch.randn(total, generator=generator) * 0.5
    return {"new": new, "old": old, "advantages": advantages, "mask": mask, "sequence": sequence}


def members(data: dict[str, Any], sequence: int) -> list[int]:
    return [t for t in range(len(data["new"])) if data["mask"][t] and data["sequence"][t] == sequence]


def reference_term(objective: str, data: dict[str, Any], t: int, clip: Clip) -> float:
    new, old, a = (float(data[name][t]) for name in ("new", "old", "advantages"))
    ratio = math.exp(new - old)
    if objective == "gspo":
        own = members(data, int(data["sequence"][t]))
        ratio = math.exp(sum(float(data["new"][u] - data["old"][u]) for u in own) / len(own))
    bounded = min(max(ratio, 1 - clip.low), 1 + clip.high)
    if objective == "cispo":
        return -bounded * a * new
    if objective == "reinforce":
        return -ratio * a
    if objective == "sapo":
        tau = clip.tau[a <= 0]
        return -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if objective == "gmpo":
        own = [float(data["new"][u] - data["old"][u]) for u in members(data, int(data["sequence"][t]))]
        kept = [min(log, clip.high) if a > 0 else max(log, -clip.low) for log in own]
        return -a * math.exp(sum(kept) / len(kept))
    term = -min(ratio * a, bounded * a)
    return min(term, -clip.dual * a) if clip.dual is not None and a < 0 else term


@pytest.mark.parametrize("dual", [None, 1.3])
@pytest.mark.parametrize("objective", OBJECTIVES.built_in)
def test_terms_equal_the_formula(objective: str, dual: float | None) -> None:
    data, clip = draw(), Clip(0.2, 0.28, dual, tau=(1.0, 1.5))
    terms = objective_terms(objective, *(data[n] for n in ("new", "old", "advantages", "mask", "sequence")), clip)
    for t in range(len(data["new"])):
        if data["mask"][t]:
            assert float(terms.loss_T[t]) == pytest.approx(reference_term(objective, data, t, clip), rel=1e-12)


def summed(objective: str, data: dict[str, Any], new: Any, clip: Clip) -> Any:
    terms = objective_terms(objective, new, data["old"], data["advantages"], data["mask"], data["sequence"], clip)
    return (terms.loss_T * data["mask"]).sum()


@pytest.mark.parametrize("objective", ["grpo", "reinforce", "sapo", "gmpo"])
def test_gradients_equal_finite_differences(objective: str) -> None:
    data, clip, step = draw(), Clip(0.2, 0.28, 1.5, tau=(1.0, 1.5)), 1e-6
    new = data["new"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(summed(objective, data, new, clip), new)
    for t in range(len(new)):
        shift = torch.zeros_like(new)
        shift[t] = step
        slope = (summed(objective, data, new + shift, clip) - summed(objective, data, new - shift, clip)) / (2 * step)
        assert gradient[t].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-8)
        if not data["mask"][t]:
            assert gradient[t].item() == 0.0


def test_gspo_token_has_the_gradient_of_gspo() -> None:
    """Per sequence: gspo's own loss is |i| * -min(s A, clip(s) A), summed over tokens; both have one gradient."""
    data, clip = draw(), Clip(3e-4, 4e-4)
    new = data["new"].clone().requires_grad_()
    (of_tokens,) = torch.autograd.grad(summed("gspo", data, new, clip), new)
    plain = torch.zeros(())
    for sequence in range(len(LENGTHS) - 1):
        own = members(data, sequence)
        s = ((new[own] - data["old"][own]).mean()).exp()
        a = data["advantages"][own[0]]
        plain = plain - len(own) * torch.minimum(s * a, s.clamp(1 - clip.low, 1 + clip.high) * a)
    (of_sequences,) = torch.autograd.grad(plain, new)
    torch.testing.assert_close(of_tokens, of_sequences, rtol=1e-12, atol=1e-14)


def test_cispo_keeps_every_tokens_gradient() -> None:
    data, clip = draw(), Clip(0.2, 0.28)
    new = data["new"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(summed("cispo", data, new, clip), new)
    weight = (data["new"] - data["old"]).exp().clamp(0.8, 1.28)
    torch.testing.assert_close(gradient, -weight * data["advantages"] * data["mask"])


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_aggregation_equals_the_formula_also_over_micro_batches(aggregation: Aggregation) -> None:
    data, values = draw(), torch.randn(sum(LENGTHS))
    own = [members(data, s) for s in range(len(LENGTHS))]
    tokens, sequences = sum(map(len, own)), sum(bool(o) for o in own)
    expected = {
        "token": sum(float(values[t]) for o in own for t in o) / tokens,
        "sequence": sum(sum(float(values[t]) for t in o) / len(o) for o in own if o) / sequences,
        "constant": sum(sum(float(values[t]) for t in o) / 100.0 for o in own) / sequences,
    }[aggregation]
    counts = {"tokens": tokens, "sequences": sequences, "length": 100.0, "dtype": torch.float64}
    whole = aggregation_weights(aggregation, data["mask"], data["sequence"], **counts)
    assert float((whole * values).sum()) == pytest.approx(expected, rel=1e-12)
    total = 0.0
    for part, first in ((slice(0, 8), 0), (slice(8, 29), 2)):  # cut between sequences, as micro-batches are
        weights = aggregation_weights(aggregation, data["mask"][part], data["sequence"][part] - first, **counts)
        total += float((weights * values[part]).sum())
    assert total == pytest.approx(expected, rel=1e-12)


def test_kl_estimators_equal_their_formulas_and_their_means_the_kl() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])
    exact = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(estimator, p.log(), q.log())).sum()) == pytest.approx(exact, rel=1e-12)
    assert float(kl_estimate("k2", p.log(), q.log())[0]) == pytest.approx(math.log(0.5 / 0.3) ** 2 / 2)
    assert (kl_estimate("k3", torch.randn(99), torch.randn(99)) >= 0).all()


def reference_weight(bounds: CorrectionConfig, data: dict[str, Any], t: int) -> float:
    own = members(data, int(data["sequence"][t]))
    logs = [float(data["new"][u] - data["old"][u]) for u in own]
    if bounds.veto is not None and min(logs) < math.log(bounds.veto):
        return 0.0
    ratio = math.exp(float(data["new"][t] - data["old"][t]))
    whole, mean = math.exp(sum(logs)), math.exp(sum(logs) / len(logs))

    def inside(value: float, weight: float) -> float:
        return weight if bounds.mask_low <= value <= bounds.mask_high else 0.0

    weight = {None: 1.0, "token": ratio, "sequence": whole}[bounds.weight]
    if bounds.weight is not None:
        weight = min(max(weight, bounds.weight_low), bounds.weight_high or math.inf)
    return (
        weight
        if bounds.mask is None
        else inside({"token": ratio, "sequence": whole, "geometric": mean}[bounds.mask], weight)
    )


@pytest.mark.parametrize("veto", [None, 0.5])
@pytest.mark.parametrize("high", [None, 1.25])
@pytest.mark.parametrize("mask", [None, *get_args(CorrectionMask)])
@pytest.mark.parametrize("weight", [None, *get_args(CorrectionWeight)])
def test_corrections_equal_their_formulas(
    weight: CorrectionWeight | None, mask: CorrectionMask | None, high: float | None, veto: float | None
) -> None:
    seen = set()
    weighing = {"weight": weight, "weight_low": 0.9, "weight_high": high}
    for seed in range(5):
        data, bounds = draw(seed), CorrectionConfig(**weighing, mask=mask, mask_low=0.8, mask_high=1.25, veto=veto)
        weights = correction_factors(bounds, data["new"] - data["old"], data["mask"], data["sequence"])
        assert not weights.requires_grad
        for t in range(len(weights)):
            if data["mask"][t]:
                assert float(weights[t]) == pytest.approx(reference_weight(bounds, data, t), rel=1e-12)
                seen.add(float(weights[t]) == 0.0)
    if mask is not None:
        assert seen == {True, False}, "the draw must meet both sides of the bounds"


def test_a_long_sequences_product_does_not_overflow() -> None:
    log_ratio, mask = torch.full((20_000,), 0.5), torch.ones(20_000, dtype=torch.bool)
    sequence = torch.zeros(20_000, dtype=torch.int64)
    for bounds in (CorrectionConfig(weight="sequence", weight_high=None), CorrectionConfig(mask="sequence")):
        assert torch.isfinite(correction_factors(bounds, log_ratio, mask, sequence)).all()


@pytest.mark.parametrize("weight", get_args(CorrectionWeight))
def test_normalized_weights_have_the_mean_one_over_what_was_sampled(weight: CorrectionWeight) -> None:
    """By moments of parts that add up, as micro-batches' and ranks' do; before the mask leaves anything out."""
    data, bounds = draw(), CorrectionConfig(weight=weight, normalize=True)
    ratio, mask, sequence = data["new"] - data["old"], data["mask"], data["sequence"]
    parts = [weight_moments(bounds, *(v[part] for v in (ratio, mask, sequence))) for part in (slice(8), slice(8, 29))]
    count, total = torch.stack(parts).sum(0).tolist()
    assert count == int(mask.sum())
    factors = correction_factors(bounds, ratio, mask, sequence, mean=total / count)
    assert float(factors[mask].mean()) == pytest.approx(1.0, rel=1e-12)
    masked = CorrectionConfig(weight=weight, normalize=True, mask="token", mask_low=0.8, mask_high=1.25)
    kept = correction_factors(masked, ratio, mask, sequence, mean=total / count)
    assert torch.equal(kept, torch.where((kept != 0), factors, torch.zeros(())))
    assert (kept == 0).any()


def test_the_configs_choices_are_what_the_losses_register() -> None:
    assert set(get_args(Aggregation)) == AGGREGATIONS.keys()
    assert {*get_args(CorrectionWeight), *get_args(CorrectionMask)} == RATIOS.keys()
    assert set(get_args(KlEstimator)) == KL_ESTIMATORS.keys()


def test_every_objective_has_its_formula() -> None:
    formulas = {name: OBJECTIVES.load(objective_spec(name).formula).__name__ for name in OBJECTIVES.built_in}
    assert formulas == {name: name for name in OBJECTIVES.built_in}


HALVED = ObjectiveSpec("tests_halved:halved", clip=(0.1, 0.1))
"""An objective as another package would bring it."""


def halved(tokens: Tokens, clip: Clip) -> Terms:
    whole = grpo(tokens, clip)
    return Terms(whole.loss_T / 2, whole.clipped_T, whole.ratio_T)


def test_an_objective_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests_halved", sys.modules[__name__])
    point = EntryPoint("halved", "tests_halved:HALVED", "agent_rl.objectives")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    data, clip = draw(), TrainConfig(objective="halved").clip
    assert clip == Clip(0.1, 0.1)
    for name in ("halved", "tests_halved:HALVED"):
        assert summed(name, data, data["new"], clip) == summed("grpo", data, data["new"], clip) / 2
    with pytest.raises(ValidationError, match=r"train\.dual_clip: objective halved"):
        TrainConfig(objective="halved", dual_clip=3.0)
    with pytest.raises(ValidationError, match=r"train\.objective: objective 'tests_halved:LENGTHS' is a tuple"):
        TrainConfig(objective="tests_halved:LENGTHS")
