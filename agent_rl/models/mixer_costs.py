"""What the token mixer of a layer costs: FLOPs, stored activations, an engine's cache. Imports no torch.

Numbers are of the whole layer. Symbols: Q and KV the widths of all query and all key or value heads; D, K and V a
head's widths of query, key and value; C tokens of a chunk, w of a window.

=========  ================================  ===========================  ============================================
mixer      an engine caches                  FLOPs of a token and of a    source
                                             pair of tokens
=========  ================================  ===========================  ============================================
grouped    2 KV a token                      2 Q a pair                   Narayanan et al., arXiv 2104.04473, appendix
window     2 KV a token, of the last w       4 Q w a token                as above
latent     latent + rotary key a token       heads (D + V) a pair         DeepSeek-V2, arXiv 2405.04434, section 2.1
indexer    one more key a token              its heads x width a pair     DeepSeek-V3.2, arXiv 2512.02556
delta      heads K V float32 and the         heads C (6 K + 4 V) +        Gated DeltaNet, arXiv 2412.06464
           convolution's last inputs         6 heads K V a token
           a sequence, nothing a token
mamba      heads D N float32 and the         2 C heads (N + D) +          Mamba-2, arXiv 2405.21060, section 6; N the
           convolution's last inputs         4 heads D N a token          width of the state
           a sequence, nothing a token
none       nothing                           nothing                      the layer is an MLP
=========  ================================  ===========================  ============================================

Trainers compute latent attention with full keys and values, and all pairs of a sequence with an indexer.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.models.parts import Delta, Latent, Mamba
from agent_rl.models.spec import ModelSpec

CHUNK = 64
"""Tokens of a chunk of the delta rule and of Mamba-2 in the trainer."""


@dataclass(frozen=True, slots=True)
class MixerCost:
    """The cost of one layer's mixer.

    - FLOPs of a forward pass over n tokens: ``projections`` n + ``token`` n + ``pair`` n (n + 1).
    - Numbers that autograd stores of a token: ``projected`` by projections, and ``regrouped`` by ranks with several
      groups of heads; ``core`` inside of attention and ``core_float32`` in float32, or ``core_inputs`` to compute both
      again; ``joined``, the input of the output projection, which with a GPU's kernel is the ``attended`` part of
      ``core``. ``gathered``: keys and values, which context ranks exchange.
    - Engine: ``cached`` numbers per token of the last ``window`` (0: of all), and ``state_float32`` and ``state``
      numbers per sequence, in ``heads`` that engines divide among GPUs.
    """

    projections: int = 0
    joined: int = 0
    pair: int = 0
    token: int = 0
    projected: int = 0
    regrouped: int = 0
    core: int = 0
    core_inputs: int = 0
    core_float32: int = 0
    attended: int = 0
    gathered: int = 0
    cached: int = 0
    heads: int = 1
    window: int = 0
    state_float32: int = 0
    state: int = 0


def mixer_cost(model: ModelSpec, layer: int) -> MixerCost:
    """The cost of the mixer of ``layer``. Raises ValueError for a mixer without formulas."""
    match model.mixer(layer):
        case "grouped":
            return _grouped(model, model.windows[layer] if model.windows else 0)
        case "latent" if model.latent is not None:
            return _latent(model, model.latent)
        case "delta" if model.delta is not None:
            return _delta(model.hidden, model.delta)
        case "mamba" if model.mamba is not None:
            return _mamba(model.hidden, model.mamba)
        case "none":
            return MixerCost()
        case other:
            raise ValueError(f"{model.kind}: no cost of the mixer {other} is known")


def shares_prompts_late(model: ModelSpec) -> bool:
    """Whether engines share a prompt only after a request with it has ended: they keep a state, or a window's keys, at
    the end of a request and not at each of its tokens."""
    return any(model.windows) or not {"delta", "mamba"}.isdisjoint(model.mixers)


def _grouped(model: ModelSpec, window: int) -> MixerCost:
    query, key, hidden = model.q_width, model.kv_width, model.hidden
    matrices = hidden * (2 * query + 2 * key + query * model.output_gate)
    return MixerCost(
        projections=2 * matrices,
        joined=query + query * model.output_gate,
        pair=0 if window else 2 * query,
        token=4 * query * window,
        projected=query + 2 * key + query * model.output_gate,
        regrouped=query,  # the queries of several groups are copied for their norm; those of one are a view
        core=2 * query + key,
        attended=query,
        core_inputs=query + key,
        gathered=2 * key,
        cached=2 * key,
        heads=model.kv_heads,
        window=window,
    )


def _latent(model: ModelSpec, latent: Latent) -> MixerCost:
    hidden, heads = model.hidden, model.heads
    query, value = heads * (latent.plain_dim + latent.rotary_dim), heads * latent.value_dim
    expanded = heads * (latent.plain_dim + latent.value_dim)
    down = hidden * (latent.q_rank + latent.cache_width)
    up = (latent.q_rank or hidden) * query + latent.kv_rank * expanded + value * hidden
    index = index_pair = index_key = 0
    if (indexer := model.indexer) is not None:
        width = indexer.heads * indexer.head_dim
        index = latent.q_rank * width + hidden * (indexer.head_dim + indexer.heads)
        index_pair, index_key = width, indexer.head_dim
    return MixerCost(
        projections=2 * (down + up + index),
        joined=value,
        pair=query + value + index_pair,
        projected=2 * (latent.q_rank + latent.cache_width) + query + expanded,
        core=2 * query + value,
        core_inputs=2 * query,
        gathered=query + value,
        cached=latent.cache_width + index_key,
    )


def _delta(hidden: int, delta: Delta) -> MixerCost:
    key, value, heads = delta.key_width, delta.value_width, delta.value_heads
    convolved, state = 2 * key + value, heads * delta.key_dim * delta.value_dim
    matrices = hidden * (convolved + value + 2 * heads) + value * hidden
    spread = heads * delta.key_dim  # each key head serves several value heads
    return MixerCost(
        projections=2 * (matrices + convolved * delta.kernel),
        joined=2 * value,
        token=heads * CHUNK * (6 * delta.key_dim + 4 * delta.value_dim) + 6 * state,
        projected=2 * convolved + value + 2 * heads,
        # Queries and keys once by key head and six times, with decay and beta, by value head; values, outputs and their
        # norm; five chunk x chunk matrices; a state of each chunk.
        core_float32=6 * spread + 2 * key + 6 * value + 5 * heads * CHUNK + state // CHUNK,
        core_inputs=convolved,
        heads=heads,
        state_float32=state,
        state=convolved * (delta.kernel - 1),
    )


def _mamba(hidden: int, mamba: Mamba) -> MixerCost:
    width, convolved, spread = mamba.width, sum(mamba.convolved), mamba.heads * mamba.state
    rows, state = width + convolved + mamba.heads, width * mamba.state
    return MixerCost(
        projections=2 * (hidden * rows + width * hidden + convolved * mamba.kernel),
        joined=width,
        token=2 * CHUNK * (spread + width) + 4 * state,
        projected=rows + convolved,
        # Input and output vectors by head, also with their decay; the convolved; values, outputs and their norm; three
        # chunk x chunk matrices; a state of each chunk.
        core_float32=4 * spread + convolved + 5 * width + 3 * mamba.heads * CHUNK + state // CHUNK,
        core_inputs=rows,
        heads=mamba.heads,
        state_float32=state,
        state=convolved * (mamba.kernel - 1),
    )
