"""The whole loss, every part with every other, against its formula written out once more as loops over floats."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.config import Clip, CorrectionConfig, CorrectionMask, CorrectionWeight, KlConfig, RunConfig, TrainConfig
from agent_rl.config.objectives import OBJECTIVES, Aggregation, objective_spec

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.train.batching.packing import MicroBatch, pack  # noqa: E402
from agent_rl.train.batching.partition import split_step  # noqa: E402
from agent_rl.train.loss.corrections import correction_factors  # noqa: E402
from agent_rl.train.loss.objectives import aggregation_weights  # noqa: E402
from agent_rl.train.loss.policy_loss import LossCounts, policy_loss  # noqa: E402
from agent_rl.types import Sample  # noqa: E402

NAMES = ("new", "old", "log_ratio", "log_weight", "advantages", "weights", "reference", "entropy")
PENALTIES = (
    KlConfig(),
    KlConfig(coefficient=0.3, estimator="k2"),
    KlConfig(coefficient=0.3, estimator="k3"),
    KlConfig(coefficient=0.3, estimator="k1", apply_to="reward"),
    KlConfig(coefficient=0.3, estimator="k3", unbiased=True),
    KlConfig(coefficient=0.3, estimator="k1", unbiased=True),
)
CORRECTIONS = tuple(itertools.product((None, *get_args(CorrectionWeight)), (None, *get_args(CorrectionMask))))
"""Weights and masks."""
LENGTH = 50
"""What the aggregation ``constant`` divides by."""


@dataclass(frozen=True)
class Case:
    """Sequences of floats ``[T]`` by name; ``mask`` and ``sequence`` beside them."""

    values: dict[str, np.ndarray]
    mask: np.ndarray
    sequence: np.ndarray

    def take(self, rows: np.ndarray, sequence: np.ndarray | None = None) -> Case:
        """Some rows, perhaps of renamed sequences."""
        names = self.sequence[rows] if sequence is None else sequence
        return Case({name: values[rows] for name, values in self.values.items()}, self.mask[rows], names)

    @property
    def counts(self) -> LossCounts:
        weight = float(self.values["weights"][self.mask].sum())
        return LossCounts(int(self.mask.sum()), len(set(self.sequence[self.mask].tolist())), weight)


def draw(lengths: list[int], seed: int) -> Case:
    generator, total = np.random.default_rng(seed), sum(lengths)
    old = -generator.random(total) * 3
    values = {
        "new": np.minimum(old + generator.normal(size=total) * 0.4, -1e-3),
        "old": old,
        "log_ratio": generator.normal(size=total) * 0.3,
        "log_weight": generator.normal(size=total) * 0.3,
        "advantages": generator.normal(size=total),
        "weights": generator.random(total) + 0.5,
        "reference": old + generator.normal(size=total) * 0.5,
        "entropy": generator.random(total) * 2,
        "selected": generator.random(total) < 0.3,
    }
    return Case(values, generator.random(total) < 0.7, np.repeat(np.arange(len(lengths)), lengths))


def computed(case: Case, chosen: TrainConfig, counts: LossCounts) -> tuple[Any, Any, Any]:
    """The result, and its leaf tensors of log-probs and entropies."""
    tensors = {name: torch.tensor(case.values[name]) for name in NAMES}
    new, entropy = tensors["new"].requires_grad_(), tensors["entropy"].requires_grad_()
    mask, sequence = torch.tensor(case.mask), torch.tensor(case.sequence)
    ratio, weight = tensors["log_ratio"], tensors["log_weight"]
    factors = correction_factors(chosen.correction, ratio, mask, sequence, log_weight_T=weight)
    named = {"entropy_T": entropy, "weights_T": tensors["weights"], "reference_T": tensors["reference"]}
    named["selected_T"] = torch.tensor(case.values["selected"]) > 0
    rest = {"train": chosen, "length": LENGTH, "counts": counts}
    result = policy_loss(new, tensors["old"], factors, tensors["advantages"], mask, sequence, **named, **rest)
    return result, new, entropy


def direct(case: Case, chosen: TrainConfig, counts: LossCounts, frozen: np.ndarray | None = None) -> float:
    """The formula. ``frozen``: log-probs for whatever the formula has under a stop-gradient."""
    v, total = case.values, 0.0
    frozen = v["new"] if frozen is None else frozen
    for sequence in sorted(set(case.sequence.tolist())):
        own = sampled_tokens(case, sequence)
        for t in own:
            term = direct_correction(case, chosen, own, t, frozen) * direct_term(case, chosen, own, t, frozen)
            if chosen.kl.coefficient and chosen.kl.apply_to == "loss":
                d = v["new"][t] - v["reference"][t]
                ratio = math.exp(v["new"][t] - v["old"][t]) if chosen.kl.unbiased else 1.0
                estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[chosen.kl.estimator] * ratio
                limited = chosen.kl.estimator == "k3" and chosen.kl.k3_limit is not None
                term += chosen.kl.coefficient * (min(estimate, chosen.kl.k3_limit or 0) if limited else estimate)
            term -= chosen.entropy_coefficient * v["entropy"][t]
            sizes = {"sequence": counts.sequences * len(own), "constant": counts.sequences * LENGTH}
            sizes["prompt"] = counts.weight
            total += v["weights"][t] * term / sizes.get(chosen.loss_aggregation, counts.tokens)
    return total


def sampled_tokens(case: Case, sequence: int) -> list[int]:
    return [t for t in range(len(case.mask)) if case.mask[t] and case.sequence[t] == sequence]


def direct_term(case: Case, chosen: TrainConfig, own: list[int], t: int, frozen: np.ndarray) -> float:
    v, clip, advantage = case.values, chosen.clip, case.values["advantages"][t]
    log_ratio = v["new"][t] - v["old"][t]
    if chosen.objective == "gspo":
        log_ratio = min(sum(frozen[u] - v["old"][u] for u in own) / len(own) + v["new"][t] - frozen[t], 10)
    ratio = math.exp(log_ratio)
    if chosen.objective == "gmpo":
        return -math.exp(sum(direct_gmpo(case, clip, u) for u in own) / len(own)) * advantage
    if chosen.objective == "reinforce":
        return -ratio * advantage
    if chosen.objective == "kl_cov":
        return clip.options["kl"] * abs(log_ratio) * bool(v["selected"][t]) - ratio * advantage
    if chosen.objective in ("dppo_tv", "dppo_kl"):
        pull = clip.options["log_ratio_penalty"] * log_ratio**2
        return pull - (0 if diverged(case, chosen, t, frozen) else ratio * advantage)
    if chosen.objective == "sapo":
        tau = clip.tau[0 if advantage > 0 else 1]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    if chosen.objective == "cispo":
        weight = min(max(math.exp(frozen[t] - v["old"][t]), 1 - clip.low), 1 + clip.high)
        return -weight * advantage * v["new"][t]
    term = -min(ratio * advantage, min(max(ratio, 1 - clip.low), 1 + clip.high) * advantage)
    if chosen.objective == "clip_cov" and v["selected"][t] and term == -ratio * advantage:
        return 0.0
    return min(term, -clip.dual * advantage) if clip.dual is not None and advantage < 0 else term


def diverged(case: Case, chosen: TrainConfig, t: int, frozen: np.ndarray) -> bool:
    """Whether DPPO masks the token: its probability moved with its advantage, and further than the clip."""
    p, q, up = math.exp(frozen[t]), math.exp(case.values["old"][t]), case.values["advantages"][t] > 0
    distance = abs(p - q)
    if chosen.objective == "dppo_kl":
        distance = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return (p > q) == up and distance > (chosen.clip.high if up else chosen.clip.low)


def direct_gmpo(case: Case, clip: Clip, u: int) -> float:
    """The logarithm of the token's ratio, clipped where it rises with its advantage."""
    log_ratio = case.values["new"][u] - case.values["old"][u]
    return min(log_ratio, clip.high) if case.values["advantages"][u] > 0 else max(log_ratio, -clip.low)


def direct_correction(case: Case, chosen: TrainConfig, own: list[int], t: int, frozen: np.ndarray) -> float:
    ratios, weights, bounds = case.values["log_ratio"], case.values["log_weight"], chosen.correction
    away = sum(case.values["old"][u] - frozen[u] for u in own) / len(own)
    if bounds.opsm is not None and case.values["advantages"][t] < 0 and away > bounds.opsm:
        return 0.0
    if bounds.veto is not None and min(math.exp(ratios[u]) for u in own) < bounds.veto:
        return 0.0
    total = sum(ratios[u] for u in own)
    masked = {"token": ratios[t], "sequence": total, "geometric": total / len(own)}
    if bounds.mask is not None and not bounds.mask_low <= math.exp(masked[bounds.mask]) <= bounds.mask_high:
        return 0.0
    if bounds.weight is None:
        return 1.0
    weight = math.exp(sum(weights[u] for u in own) if bounds.weight == "sequence" else weights[t])
    if bounds.weight == "icepop" and not bounds.weight_low <= weight <= (bounds.weight_high or math.inf):
        return 0.0
    return min(max(weight, bounds.weight_low), bounds.weight_high or math.inf)


CLIPS: dict[str, dict[str, Any]] = {
    "grpo": {"eps_low": 0.2, "eps_high": 0.28},
    "cispo": {"eps_low": 0.2, "eps_high": 0.28},
    "gspo": {"eps_low": 0.08, "eps_high": 0.09},
    "reinforce": {},
    "sapo": {"tau_positive": 2.0, "tau_negative": 3.0},
    "gmpo": {"eps_low": 0.2, "eps_high": 0.3},
    "dppo_tv": {"eps_low": 0.05, "eps_high": 0.08, "objective_options": {"log_ratio_penalty": 0.02}},
    "clip_cov": {"eps_low": 0.2, "eps_high": 0.28},
    "kl_cov": {"objective_options": {"kl": 0.7}},
    "dppo_kl": {"eps_low": 0.01, "eps_high": 0.02, "objective_options": {"log_ratio_penalty": 0.0}},
}
"""Wide enough that many ratios are not clipped; gspo's are the widest that the config accepts."""


def all_settings() -> list[TrainConfig]:
    """Every objective with every aggregation, correction and penalty. Dual clip, veto, entropy and the correction's
    upper bound alternate."""
    bounds, found = {"weight_low": 0.9, "mask_low": 0.8, "mask_high": 1.25}, []
    parts = itertools.product(OBJECTIVES.built_in, get_args(Aggregation), CORRECTIONS, PENALTIES)
    for index, (objective, aggregation, (weight, mask), kl) in enumerate(parts):
        high, veto = 1.25 if index % 11 else None, None if index % 3 else 0.5
        opsm = 0.05 if index % 4 else None
        correction = CorrectionConfig(**bounds, weight=weight, weight_high=high, mask=mask, veto=veto, opsm=opsm)
        dual = 1.3 if index % 2 and objective in ("grpo", "gspo") else None
        options = {**CLIPS[objective], "dual_clip": dual, "entropy_coefficient": 0.05 if index % 5 else 0.0}
        found.append(TrainConfig(objective=objective, aggregation=aggregation, correction=correction, kl=kl, **options))
    return found


ALL = all_settings()
LENGTHS = [7, 1, 12, 5, 4]


def test_every_combination_equals_the_formula() -> None:
    for index, chosen in enumerate(ALL):
        case = draw(LENGTHS, seed=index)
        result, *_ = computed(case, chosen, case.counts)
        assert result.loss.item() == pytest.approx(direct(case, chosen, case.counts), rel=1e-10, abs=1e-12), chosen
        groups = [sampled_tokens(case, sequence) for sequence in range(len(LENGTHS))]
        factors = [direct_correction(case, chosen, own, t, case.values["new"]) for own in groups for t in own]
        reported = (result.correction.item(), result.dropped.item())
        assert reported == (pytest.approx(sum(factors)), factors.count(0.0)), chosen


def test_every_combinations_gradient_equals_finite_differences() -> None:
    """In every log-prob and every entropy. Whatever is under a stop-gradient keeps its value."""
    step = 1e-6
    for index, chosen in enumerate(ALL[::7]):
        case = draw([3, 4], seed=index)
        result, new, entropy = computed(case, chosen, case.counts)
        slopes = torch.autograd.grad(result.loss, (new, entropy), allow_unused=True)
        for name, slope in zip(("new", "entropy"), slopes, strict=True):
            for t in range(len(case.mask)):
                sides = []
                for shift in (step, -step):
                    moved = case.values[name].copy()
                    moved[t] += shift
                    shifted = replace(case, values={**case.values, name: moved})
                    sides.append(direct(shifted, chosen, case.counts, frozen=case.values["new"]))
                got = 0.0 if slope is None else float(slope[t])
                assert got == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8), (chosen, name)


def gradient(case: Case, chosen: TrainConfig, counts: LossCounts) -> tuple[float, np.ndarray]:
    result, new, entropy = computed(case, chosen, counts)
    slopes = torch.autograd.grad(result.loss, (new, entropy), allow_unused=True)
    return result.loss.item(), np.stack([np.zeros(len(new)) if s is None else s.numpy() for s in slopes])


Batch = tuple[list[int], int, TrainConfig]
batches = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 2**31), st.sampled_from(ALL))


@settings(deadline=None, max_examples=60)
@given(batches, st.randoms(use_true_random=False))
def test_neither_packing_order_nor_micro_batches_change_the_sum(batch: Batch, random: Any) -> None:
    """Sequences in any order, in any number of micro-batches: each token's gradient and the loss stay the same."""
    lengths, seed, chosen = batch
    case = draw(lengths, seed)
    loss, slopes = gradient(case, chosen, case.counts)
    order = list(range(len(lengths)))
    random.shuffle(order)
    cuts = sorted(random.sample(range(1, len(order)), random.randint(0, len(order) - 1)))
    total, found = 0.0, np.full_like(slopes, np.nan)
    for start, stop in itertools.pairwise([0, *cuts, len(order)]):
        members = [np.flatnonzero(case.sequence == sequence) for sequence in order[start:stop]]
        rows = np.concatenate(members)
        part = case.take(rows, np.repeat(np.arange(len(members)), [len(own) for own in members]))
        share, found[:, rows] = gradient(part, chosen, case.counts)
        total += share
    assert total == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(found, slopes, rtol=1e-9, atol=1e-12)


JUNK = st.sampled_from((np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 0.0))


@settings(deadline=None, max_examples=100)
@given(batches, st.fixed_dictionaries({name: JUNK for name in NAMES}))
def test_tokens_that_were_not_sampled_have_no_effect(batch: Batch, junk: dict[str, float]) -> None:
    """Infinite values and NaN at these tokens change neither the loss nor a gradient."""
    lengths, seed, chosen = batch
    case = draw(lengths, seed)
    kept = np.flatnonzero(case.mask)
    if not len(kept):
        return
    names = {sequence: place for place, sequence in enumerate(dict.fromkeys(case.sequence[kept].tolist()))}
    subset = case.take(kept, np.array([names[s] for s in case.sequence[kept].tolist()]))
    loss, slopes = gradient(subset, chosen, case.counts)
    spoiled = {name: values.copy() for name, values in case.values.items()}
    for name, value in junk.items():
        spoiled[name][~case.mask] = value
    with_padding, found = gradient(replace(case, values=spoiled), chosen, case.counts)
    assert with_padding == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(found[:, kept], slopes, rtol=1e-9, atol=1e-12)
    assert (found[:, ~case.mask] == 0).all()


@settings(deadline=None, max_examples=100)
@given(batches, st.data())
def test_extreme_log_probs_of_sampled_tokens_give_finite_gradients(batch: Batch, data: st.DataObject) -> None:
    """In float32, with the clip or a correction that drops them."""
    lengths, seed, chosen = batch
    case = draw(lengths, seed)
    extreme = st.sampled_from((0.0, -1e-6, -90.0, -101.0, -1e4))
    for name in ("new", "old", "reference"):
        case.values[name][:] = data.draw(st.lists(extreme, min_size=sum(lengths), max_size=sum(lengths)))
    case.values["log_ratio"][:] = case.values["log_weight"][:] = case.values["old"] - case.values["reference"]
    case = replace(case, values={name: values.astype(np.float32) for name, values in case.values.items()})
    loss, slopes = gradient(case, chosen, case.counts)
    assert math.isfinite(loss)
    assert np.isfinite(slopes).all()


PAPER = {"eps_low": 0.2, "eps_high": 0.2}
K1, K2 = KlConfig(coefficient=0.01, estimator="k1", apply_to="reward"), KlConfig(coefficient=0.01, estimator="k2")
PRESETS: dict[str, TrainConfig] = {
    "GRPO": TrainConfig(**PAPER, aggregation="sequence", kl=KlConfig(coefficient=0.04)),
    "DAPO": TrainConfig(eps_low=0.2, eps_high=0.28, aggregation="token"),
    "Dr.GRPO": TrainConfig(**PAPER, aggregation="constant", advantage_scale="none"),
    "GSPO": TrainConfig(objective="gspo", eps_low=3e-4, eps_high=4e-4, aggregation="sequence"),
    "CISPO": TrainConfig(objective="cispo", eps_low=1.0, eps_high=0.27, aggregation="token"),
    "SAPO": TrainConfig(objective="sapo", tau_positive=1.0, tau_negative=1.05, aggregation="sequence"),
    "GMPO": TrainConfig(objective="gmpo", eps_low=0.4, eps_high=0.4, aggregation="sequence"),
    "REINFORCE++": TrainConfig(**PAPER, baseline="batch", advantage_scale="batch", kl=K1),
    "REINFORCE++ with baseline": TrainConfig(**PAPER, advantage_scale="batch", kl=K2),
    "REINFORCE, leave-one-out": TrainConfig(
        objective="reinforce", aggregation="constant", baseline="leave_one_out", advantage_scale="none"
    ),
    "clip-cov": TrainConfig(objective="clip_cov", eps_low=0.2, eps_high=0.2),
    "KL-cov": TrainConfig(objective="kl_cov"),
    "DPPO, total variation": TrainConfig(objective="dppo_tv", eps_low=0.2, eps_high=0.2),
    "DPPO, KL": TrainConfig(objective="dppo_kl", eps_low=0.05, eps_high=0.05),
    "prime-rl's default": TrainConfig(
        objective="dppo_tv", objective_options={"log_ratio_penalty": 1e-3}, advantage_scale="none"
    ),
    "MaxRL": TrainConfig(**PAPER, advantage_scale="mean"),
    "dual clip": TrainConfig(eps_low=0.2, eps_high=0.27, dual_clip=3.0),
}
"""What the config lines of docs/reference/objectives.md must give."""


def table(head: str) -> list[list[str]]:
    """The cells of a table of docs/reference/objectives.md, by row."""
    lines = (Path(__file__).parents[2] / "docs/reference/objectives.md").read_text().splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[lines.index(head) + 2 :])
    return [[cell.strip() for cell in row[1:-1].replace("\\|", "!").split("|")] for row in rows]


def documented() -> dict[str, dict[str, Any]]:
    """The config lines of docs/reference/objectives.md's table, by objective."""
    rows = table("| objective | equation | source | `train:` |")
    return {row[0]: yaml.safe_load(row[-1].strip("`")) for row in rows}


def test_the_documented_config_lines_give_the_papers_losses() -> None:
    found = documented()
    assert found.keys() == PRESETS.keys()
    for name, wanted in PRESETS.items():
        train = RunConfig.model_validate({"name": "test", "model": ".", "train": found[name]}).train
        for key in ("objective", "clip", "loss_aggregation", "baseline", "advantage_scale", "correction", "kl"):
            assert getattr(train, key) == getattr(wanted, key), f"{name}: {key}"
        assert train.entropy_coefficient == 0
        assert train.normalizes_on_ranks == (name == "REINFORCE++")
        case = draw(LENGTHS, seed=3)
        result, *_ = computed(case, train, case.counts)
        assert result.loss.item() == pytest.approx(direct(case, wanted, case.counts), rel=1e-10), name


def test_the_page_has_every_objectives_own_defaults() -> None:
    rows = table("| `objective` | `eps_low` | `eps_high` | `tau_positive` | `tau_negative` | `aggregation` |")
    found = {row[0].strip("`"): row[1:] for row in rows}
    assert found.keys() == set(OBJECTIVES.built_in)
    for name, cells in found.items():
        train = TrainConfig(objective=name)
        expected = [*((train.clip.low, train.clip.high) if math.isfinite(train.clip.high) else ("", ""))]
        expected += [*(train.clip.tau or ("", "")), train.loss_aggregation]
        assert cells == [f"{fact:g}" if isinstance(fact, float) else fact for fact in expected], name


def test_the_page_has_every_objectives_options() -> None:
    listed = table("| `objective` | options |")
    rows = {name: cells.replace("`", "") for names, cells in listed for name in re.findall(r"`(\w+)`", names)}
    assert rows.keys() == {name for name in OBJECTIVES.built_in if objective_spec(name).options}
    for name, cells in rows.items():
        assert yaml.safe_load("{" + cells.replace("2e-4", "2.0e-4") + "}") == objective_spec(name).options


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_every_mini_steps_weights_add_up_over_ranks(lengths: list[int], mini_steps: int, ranks: int, seed: int) -> None:
    """Over its micro-batches on all ranks; a sample in which nothing was sampled counts for nothing."""
    generator = np.random.default_rng(seed)
    samples = [
        Sample(np.zeros(n, np.int32), generator.random(n) < chance, np.zeros(n, np.float32), 1.0, None)
        for n, chance in zip(lengths, generator.choice([0, 0.7], len(lengths)), strict=True)
    ]
    shares = split_step(samples, mini_steps=mini_steps, budget=32, ranks=ranks)
    for step in zip(*shares, strict=True):
        counts = {(share.sampled_tokens, share.sequences, share.weight) for share in step}
        assert len(counts) == 1, "every rank divides by the same"
        ((tokens, sequences, weight),) = counts
        assert weight == tokens, "every sample weighs 1"
        batches = [pack(samples, ids) for share in step for ids in share.micro_batches]
        wanted = {"token": 1.0, "sequence": 1.0, "constant": tokens / (LENGTH * max(1, sequences)), "prompt": 1.0}
        for aggregation in get_args(Aggregation):
            total = sum(shares_of(batch, aggregation, max(1, tokens), max(1, sequences)) for batch in batches)
            assert total == pytest.approx(wanted[aggregation] if tokens else 0.0, rel=1e-12)


def shares_of(batch: MicroBatch, aggregation: Aggregation, tokens: int, sequences: int) -> float:
    """The sum of a micro-batch's weights; ``constant`` divides by LENGTH."""
    sequence = torch.from_numpy(np.repeat(np.arange(len(batch.sample_ids)), np.diff(batch.cu_seqlens)))
    counts = {"tokens": tokens, "sequences": sequences, "length": LENGTH, "weight": tokens, "dtype": torch.float64}
    return aggregation_weights(aggregation, torch.from_numpy(batch.mask_T), sequence, **counts).sum().item()
