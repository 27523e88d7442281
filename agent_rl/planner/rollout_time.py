"""How long a rollout takes: a queue of episodes that share engines, the loop and, without GPUs, the processors.

With b requests running in an engine, a decode step takes s(b), and an episode costs the engine
``e(b) = sampled s(b) / b + prefill`` seconds. C of N episodes run at once on E engines, each of them for
``L = other + b e(b)``: ``other`` in its sandbox and in the loop. As many episodes leave an engine as enter it,
``L = C / E e(b)``, which determines b. The rollout takes ``N / C L``, and what the longest episode takes more than the
mean, alone. Pure; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.models.mixer_costs import shares_prompts_late
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.assumptions import Assumptions
from agent_rl.planner.hardware import GPUS
from agent_rl.planner.memory_model import BYTES, kv_bytes_per_token, rank_parameters
from agent_rl.planner.plan import PhaseTime
from agent_rl.planner.planner import engine_count
from agent_rl.train.batching.cost import sequence_cost


@dataclass(frozen=True, slots=True)
class RolloutModel:
    """Predicts rollouts of ``config`` with ``model`` on ``device`` (cpu or cuda)."""

    config: RunConfig
    model: ModelSpec
    device: str
    assume: Assumptions

    def rollout(self, name: str, episodes: int, *, group: int, waits: bool = True) -> PhaseTime:
        """The time of ``episodes``, ``group`` of which share a prompt. ``waits``: until the last one has ended."""
        engines, assume = engine_count(self.config.engine), self.assume
        at_once = min(episodes, self.config.rollout.concurrency)
        prefill, other = self._prefill(group), self._other(group)
        running = self._running(at_once / engines, prefill, other)
        if self.device == "cpu":
            running *= assume["batch_share"]
        decoding = assume["sampled_tokens"] * self.decode_step(running)
        engine = decoding + running * prefill
        bounds = {
            "environment" if other > engine else "engine": other + engine,
            "engine's capacity": at_once / engines * engine / running,
            "the loop's process": at_once * assume["turns"] * assume["loop_turn"],
        }
        if self.device == "cpu":
            bounds["processors"] = at_once * (other + engine / running) / assume["cores"]
        bound, seconds = max(bounds.items(), key=lambda item: item[1])
        rate = f"{assume['sampled_tokens'] * at_once / seconds:,.0f} sampled tokens/s"
        note = (
            f"{bound}; {rate}, {running:.0f} requests in an engine; an episode takes {seconds:,.1f} s, without waiting "
            f"{decoding:,.1f} to decode, {running * prefill:,.1f} to prefill, {other:,.1f} in its environment"
        )
        alone = other + assume["sampled_tokens"] * self.decode_step(1) + prefill
        last = (assume["longest_episode"] - 1) * alone if waits else 0.0
        return PhaseTime(name, episodes / at_once * seconds + last, note)

    def decode_step(self, running: float) -> float:
        """Seconds of a decode step of one engine with ``running`` requests."""
        assume, model = self.assume, self.model
        if self.device == "cpu":
            token = self._copies * assume["engine_copy"] + self._flops / assume["engine_flops"]
            return model.num_layers * assume["engine_layer"] + running * token
        span, dtype = self.config.engine.gpus, self.config.engine.dtype
        dense, experts = rank_parameters(model, ParallelConfig())
        chosen = 1 - (1 - model.top_k / model.num_experts) ** running if model.num_experts else 0.0
        read = (dense + chosen * experts) * BYTES[dtype] / span
        read += running * assume["tokens"] / 2 * kv_bytes_per_token(model, dtype, span)
        layer = assume["engine_layer"] + assume["engine_exchange"] * (span > 1)
        memory = GPUS[self.config.hardware.gpu].memory * assume["memory"]
        return model.num_layers * layer + running * assume["engine_token"] + read / memory

    def _other(self, group: int) -> float:
        """Seconds of an episode outside of the engine."""
        assume = self.assume
        turns = assume["turns"] * (assume["tool_seconds"] + assume["loop_turn"])
        return assume["task_seconds"] / group + assume["start_seconds"] + turns + assume["grade_seconds"]

    @property
    def _copies(self) -> int:
        return len(self.model.moe_layer_ids) * self.model.top_k

    @property
    def _flops(self) -> float:
        """FLOPs of a token in the middle of an episode."""
        cost = sequence_cost(self.model)
        return cost.linear + cost.quadratic * self.assume["tokens"]

    def _prefill(self, group: int) -> float:
        """Seconds that one engine spends on the prompts and observations of an episode, and on its requests."""
        assume = self.assume
        shared = 1 if shares_prompts_late(self.model) else group
        observed = assume["tokens"] - assume["sampled_tokens"] - assume["prompt_tokens"]
        tokens = assume["prompt_tokens"] / shared + max(0.0, observed)
        requests = assume["turns"] * assume["engine_request"]
        if self.device == "cpu":
            return requests + tokens * (self._copies * assume["prefill_copy"] + self._flops / assume["engine_flops"])
        peak = GPUS[self.config.hardware.gpu].flops[self.config.engine.dtype] * self.config.engine.gpus
        return requests + tokens * self._flops / (peak * assume["prefill"])

    def _running(self, per_engine: float, prefill: float, other: float) -> float:
        """Requests in an engine at once, by bisection; at most what its KV cache and its limit allow."""
        engine, assume = self.config.engine, self.assume
        most = min(per_engine, engine.max_running_requests, engine.max_total_tokens / assume["tokens"])
        low, high = 0.0, most
        for _ in range(40):
            middle = (low + high) / 2
            cost = assume["sampled_tokens"] * self.decode_step(middle) / middle + prefill
            low, high = (middle, high) if other < (per_engine - middle) * cost else (low, middle)
        return max(high, 1e-3)
