"""The R3 paper's figures on the mismatch between trainer and engine (arXiv 2510.11370, figures 2 to 4), as PNG.

Each function returns the bytes of one picture. Needs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from r3.mismatch.report import TAUS, Floats, RouteMismatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 20_000
"""Maximum points of a scatter plot; with more tokens, those nearest to the diagonal are thinned out."""


def probability_scatter(passes: Mapping[str, tuple[Floats, Floats]]) -> bytes:
    """Each sampled token's probability in the engine (x) and in the trainer (y), one panel per pass.

    ``passes``: name -> (log-probs of the trainer, of the engine). Tokens off by more than a factor 2 are red.
    """
    figure = _figure(4.2 * len(passes), 4.2)
    for index, (name, (trainer, engine)) in enumerate(passes.items()):
        axes = figure.add_subplot(1, len(passes), index + 1)
        kept = _thinned(np.abs(trainer - engine))
        x, y = np.exp(engine[kept]), np.exp(trainer[kept])
        beyond = np.abs(trainer[kept] - engine[kept]) > np.log(2)
        for group, color, size in ((~beyond, "tab:blue", 3), (beyond, "tab:red", 10)):
            axes.scatter(x[group], y[group], s=size, color=color, alpha=0.5, linewidths=0, rasterized=True)
        low = float(min(x.min(), y.min(), 0.5))
        for factor, style in ((1, "-"), (2, ":"), (0.5, ":")):
            axes.plot([low, 1], [low * factor, factor], style, color="black", linewidth=0.6)
        axes.set(xscale="log", yscale="log", xlim=(low, 1.1), ylim=(low, 1.1), title=name)
        axes.set(xlabel="probability in the engine", ylabel="probability in the trainer")
        outside = int((np.abs(trainer - engine) > np.log(2)).sum())
        axes.text(0.03, 0.95, f"{outside} of {len(trainer):,} beyond 2x", transform=axes.transAxes, va="top")
    return _png(figure)


def _thinned(distance: Floats) -> Any:
    """Indices of at most :data:`POINTS` tokens: the farther half of them, and every n-th of the others."""
    if len(distance) <= POINTS:
        return np.arange(len(distance))
    order = np.argsort(-distance)
    far, near = order[: POINTS // 2], order[POINTS // 2 :]
    return np.concatenate([far, near[:: -(-len(near) // (POINTS // 2))]])


def f_tau_curves(curves: Mapping[str, Floats]) -> bytes:
    """F(tau), the share of tokens whose probability differs by more than a factor tau, at :data:`TAUS`, by name."""
    figure, taus = _figure(6, 4), np.array(TAUS)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        shown = curve > 0
        label = name if shown.any() else f"{name}: no token beyond {taus.min():g}"
        axes.plot(taus[shown] - 1, curve[shown], label=label, marker=".", markersize=3)
    axes.axvline(1, color="black", linewidth=0.6, linestyle=":")
    axes.text(1.05, 0.95, "τ = 2", transform=axes.get_xaxis_transform(), va="top")
    axes.set(xscale="log", yscale="log", xlabel="τ - 1", ylabel="F(τ): share of tokens beyond a factor τ")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return _png(figure)


def differing_routers(mismatch: RouteMismatch) -> bytes:
    """Where the experts differ: by router and layer, by token, and by sequence."""
    figure = _figure(13, 3.8)
    router, token, sequence = figure.subplots(1, 3)
    layers = np.arange(len(mismatch.by_layer))
    below = np.zeros(len(layers))
    for count in range(1, mismatch.experts.shape[1]):
        share = 100 * mismatch.experts[:, count] / mismatch.tokens
        if not share.any():
            continue
        router.bar(layers, share, bottom=below, label=f"{count} differ{'s' if count == 1 else ''}")
        below += share
    router.set(xlabel="MoE layer", ylabel="% of tokens", title=f"router level: {100 * mismatch.router:.2f} % differ")
    router.legend(title="experts", fontsize=8)
    token.bar(np.arange(len(mismatch.layers)), 100 * mismatch.layers / mismatch.tokens)
    token.set(xlabel="differing layers of a token", ylabel="% of tokens", yscale="log")
    token.set(title=f"token level: {100 * mismatch.token:.2f} % in some layer")
    sequence.hist(mismatch.by_sequence.sum(axis=1), bins=40)
    sequence.axvline(mismatch.sequence, color="black", linewidth=0.8)
    sequence.set(xlabel="mean differing layers per token", ylabel="sequences")
    sequence.set(title=f"sequence level: mean {mismatch.sequence:.3f} of {len(layers)} layers")
    return _png(figure)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # the object interface: no global pyplot state, no display needed

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
