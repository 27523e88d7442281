"""Memory: neither all logits of a micro-batch nor whole attention matrices exist; inputs of layers on the host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agent_rl.train.megatron.logprobs import CHUNK_LOGITS

pytestmark = pytest.mark.megatron
Build = Callable[..., Any]


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor of any operation, backward passes and recomputation included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor)), 0)
        return made


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_tensor_is_larger_than_the_queries_keys_and_values_of_a_layer(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    """With one sequence of 1,500 tokens."""
    length, vocabulary, widest = 1500, 1024, (4 + 2 * 2) * 16
    tiny.make(tmp_path / "model", vocab_size=vocabulary)
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 100 * vocabulary)
    model = build(tmp_path / "model", recompute=recompute)
    batch = tiny.packed(lengths=(length,))
    routes = tiny.everywhere(tiny.random_routes(length))
    with Largest() as seen:
        model.train_microbatches([batch], [routes], lambda got, _, __: (got.sum(), {}))
        model.forward_logprobs([batch], [routes], entropy=True)
    assert seen.elements == length * widest < length * vocabulary


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_tensor_of_a_graph_outlives_a_step(build: Build, recompute: str) -> None:
    """A dispatcher that keeps its gates holds each layer's recomputed graph until the layer's next pass."""
    model, batch = build(recompute=recompute), tiny.packed()
    before = {id(tensor) for tensor in tiny.tensors_in_graphs()}
    model.train_microbatches([batch], None, lambda got, _, __: (got.sum(), {}))
    assert [tuple(tensor.shape) for tensor in tiny.tensors_in_graphs() if id(tensor) not in before] == []


def test_recomputed_experts_and_norms_change_no_bit(build: Build) -> None:
    """With replayed routes, two micro-batches. Norms run twice where they are recomputed, and keep no output."""
    selective = [("moe",), ("moe", "layernorm")]
    models = [build(), *(build(recompute="selective", recompute_modules=modules) for modules in selective)]
    batches = [tiny.packed(lengths=(length,)) for length in (17, 30)]
    routes = [tiny.everywhere(tiny.random_routes(length)) for length in (17, 30)]
    outputs, kept, gradients = list[Tensor](), list[tuple[int, int]](), []
    for model in models:
        outputs.clear()
        norms = [
            norm
            for layer in model.modules[0].decoder.layers
            for norm in (layer.input_layernorm, layer.pre_mlp_layernorm)
        ]
        hooks = [norm.register_forward_hook(lambda _, __, output: outputs.append(output)) for norm in norms]

        def loss(got: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
            kept.append((len(outputs), sum(output.untyped_storage().nbytes() > 0 for output in outputs)))
            return got.sum(), {}

        model.train_microbatches(batches, routes, loss)
        for hook in hooks:
            hook.remove()
        gradients.append([p.main_grad for part in model.modules for p in part.parameters()])
    assert all(all(map(torch.equal, found, gradients[0])) for found in gradients[1:])
    once, first = 2 * tiny.LAYERS, kept[::2]
    assert first == [(once, once), (once, once), (once, 0)]
    assert [number for number, _ in kept[1::2]] == [2 * once, 2 * once, 3 * once], "the first micro-batch's again"


def test_layer_inputs_on_the_host_change_no_bit(build: Build) -> None:
    """Two micro-batches, then two of other lengths, which reuse the memory of the first."""
    from agent_rl.train.megatron.activation_offload import HostActivations, offload_layer_inputs

    kept: list[int] = []
    plain = HostActivations.store
    models = [build(recompute="full") for _ in range(2)]
    offload_layer_inputs(models[1].modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostActivations, "store", lambda self, x: kept.append(x.numel()) or plain(self, x))
        for lengths in ((17, 30), (9, 41)):
            batches = [tiny.packed(lengths=(length,)) for length in lengths]
            for model in models:
                model.train_microbatches(batches, None, lambda got, _, __: (got.sum(), {}))
                model.forward_logprobs(batches, None)
            found, wanted = ([p.main_grad for part in model.modules for p in part.parameters()] for model in models)
            assert all(map(torch.equal, found, wanted))
    hidden = models[0].model_spec.hidden
    assert kept == [length * hidden for length in (17, 30, 9, 41) for _ in range(tiny.LAYERS)], "and nothing else"


def test_memory_of_inputs_is_reused() -> None:
    from agent_rl.train.megatron.activation_offload import HostActivations

    memory = HostActivations()
    first, second = (torch.full((size, 2), float(size)) for size in (8, 4))
    kept = memory.store(first)
    place = kept[0].data_ptr()
    assert torch.equal(memory.fetch(kept), first)
    again, other = memory.store(second), memory.store(first)
    assert again[0].data_ptr() == place != other[0].data_ptr(), "inputs kept at the same time share no memory"
    assert torch.equal(memory.fetch(again), second)
    assert torch.equal(memory.fetch(other), first)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("length", "limit"), [(4096, 160), pytest.param(8192, 300, marks=pytest.mark.exhaustive)])
def test_a_long_sequence_trains_in_little_memory(length: int, limit: int) -> None:
    """In a process of its own, 8,192 tokens take 183 MiB on top of the model; one head's attention matrix would take
    256 MiB, and that of 4,096 tokens 64 MiB for each of the four heads."""
    script = Path(__file__).parents[2] / "benchmarks" / "bench_long.py"
    command = [sys.executable, str(script), "--point", "--lengths", str(length), "--model", "small"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=550)
    assert json.loads(done.stdout.strip().splitlines()[-1])["bytes"] < limit << 20
