"""What the KL penalty's reference costs a step, and what its routes do to the KL.

Run: ``OMP_NUM_THREADS=2 python benchmarks/bench_reference.py [--rounds N] [--model DIR]``

First a step (old log-probs, forward and backward pass of one packed micro-batch) with the reference's pass over one
without, at the quickstart's model size; and changing places alone.

Then the KL of a policy from its reference, a token, estimated from tokens that the policy samples at temperature 1. The
policy is the model in DIR (the quickstart's, else a random one) with Gaussian noise on every weight, its standard
deviation a share of that of the weight's tensor; the reference is the model itself. The rollout's routes are those of
the same policy in bfloat16, as an engine's are. ``served``: both with routes of their own, the KL of the two models as
they would be served. ``replayed``: both with the rollout's, as ``train.replay: r3`` has it. ``mixed``: the policy with
the rollout's, the reference with its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from one_rank import QUICKSTART, arguments, one_rank, policy
from timing import interleaved, median, ratio
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.config.loader import MODELS
from agent_rl.train.loss.objectives import kl_estimate
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

DIRECTORY = MODELS["tiny-moe"]
NOISE = (0.0, 1e-3, 1e-2, 5e-2)
SEQUENCES, TOKENS = 48, 96


def build(directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    from agent_rl.train.megatron.model import PolicyModel

    return PolicyModel.build(directory, ParallelConfig(), device=device, dtype=dtype)


def cost(device: torch.device, rounds: int) -> None:
    """Print the ratios of a step's time and what is held."""
    from agent_rl.train.reference import Reference

    _, model = policy(device, QUICKSTART)
    reference = Reference(model)
    lengths = torch.randint(200, 300, (33,)).tolist()
    batch = PackedBatch.from_sequences([torch.randint(0, QUICKSTART["vocab_size"], (length,)) for length in lengths])

    def step() -> None:
        model.forward_logprobs([batch], None)
        model.train_microbatches([batch], None, lambda logprobs, _, __: (-logprobs.mean(), {}))

    def with_reference() -> None:
        with reference.swapped_in():
            model.forward_logprobs([batch], None)
        step()

    def exchange() -> None:
        with reference.swapped_in():
            pass

    times = interleaved({"step": step, "with": with_reference, "exchange": exchange}, device, rounds=rounds)
    for clock in ("wall", "processor"):
        print(f"step with a reference over without, {clock} time: {ratio(times, 'with', 'step', clock)}")
    print(f"changing places and back: {1e3 * median(times['exchange'], 'wall'):.1f} ms, of a step's time ", end="")
    print(f"{ratio(times, 'exchange', 'step', 'wall')}")
    held = reference.nbytes / sum(parameter.nbytes for parameter in model.modules[0].parameters())
    print(f"bytes on the host over the model's: {held:.2f}; {len(batch)} tokens, {rounds} rounds, {device.type}")


def sample(model: Any) -> PackedBatch:
    """Sequences that a transformers model samples, each from a random first token."""
    first = torch.randint(3, model.config.vocab_size, (SEQUENCES, 1))
    everything = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": None}
    with torch.no_grad():
        tokens = model.generate(first, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0, **everything)
    return PackedBatch.from_sequences(list(tokens))


def noisy(directory: Path, noise: float, into: Path) -> PackedBatch:
    """Save the model of ``directory`` with noise in ``into``; what it samples."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            spread = weight.std() if weight.numel() > 1 else weight.abs()
            weight += noise * spread * torch.randn(weight.shape)
    model.save_pretrained(into)
    return sample(model)


def kl_by_routes(directory: Path, device: torch.device) -> None:
    """Print one table."""
    from agent_rl.train.reference import Reference

    print(f"\nKL a token of a policy from its reference, {directory.name}, {SEQUENCES * TOKENS} sampled tokens")
    print("| noise | served k1 | k3 | replayed k1 | k3 | mixed k1 | k3 | mixed over replayed, k3 |")
    print("|---|---|---|---|---|---|---|---|")
    for noise in NOISE:
        with tempfile.TemporaryDirectory() as parent:
            batch = noisy(directory, noise, Path(parent))
            model, engine = build(Path(parent), device), build(Path(parent), device, torch.bfloat16)
        recorded = engine.forward_logprobs([batch], None, record=True)[0].routes
        given = PackedRoutes(recorded, torch.ones(len(batch), dtype=torch.bool))
        reference = Reference.load(model, directory)

        def score(routes: PackedRoutes | None, model: Any = model, batch: PackedBatch = batch) -> Tensor:
            return model.forward_logprobs([batch], [routes])[0].logprobs

        own, replayed = score(None), score(given)
        with reference.swapped_in():
            theirs, theirs_replayed = score(None), score(given)
        sampled = torch.ones(len(batch), dtype=torch.bool)
        sampled[batch.cu_seqlens[:-1].long()] = False
        pairs = {"served": (own, theirs), "replayed": (replayed, theirs_replayed), "mixed": (replayed, theirs)}
        means = {
            name: [float(kl_estimate(kind, a, b)[sampled].double().mean()) for kind in ("k1", "k3")]
            for name, (a, b) in pairs.items()
        }
        cells = " | ".join(f"{value:.2e}" for name in pairs for value in means[name])
        times = f"{means['mixed'][1] / means['replayed'][1]:.2f}" if means["replayed"][1] else "-"
        print(f"| {noise:g} | {cells} | {times} |")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--model", type=Path, default=DIRECTORY)
    chosen = parser.parse_args()
    with one_rank(chosen.device) as device:
        cost(device, chosen.rounds)
        torch.manual_seed(0)
        if chosen.model.is_dir():
            kl_by_routes(chosen.model, device)
            return
        with tempfile.TemporaryDirectory() as parent:
            random, _ = policy(device, {**QUICKSTART, "initializer_range": 0.1})
            random.cpu().save_pretrained(parent)
            kl_by_routes(Path(parent), device)


if __name__ == "__main__":
    main()
