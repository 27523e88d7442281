"""The codec of weight deltas and the mirror of an engine, without a server."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

torch = pytest.importorskip("torch", reason="needs the trainer environment")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "agent_rl" / "engine" / "server"))  # as in an engine
import delta_codec  # noqa: E402
from delta_codec import DeltaRefused, DeltaWriter, read_delta, state_digest, tensor_digest  # noqa: E402
from mirror import Mirror  # noqa: E402

Tensors = dict[str, np.ndarray]


def packed(old: Tensors, new: Tensors) -> bytes:
    writer = DeltaWriter()
    changed = [name for name in new if writer.add(name, old[name], new[name])]
    return writer.finish(state_of(old), state_of(new), changed)


def state_of(tensors: Tensors) -> str:
    return state_digest({name: tensor_digest(words) for name, words in tensors.items()})


words = st.sampled_from([np.uint16, np.uint32]).flatmap(
    lambda kind: st.integers(1, 400).flatmap(
        lambda size: st.tuples(arrays(kind, size), arrays(kind, size), st.floats(0, 1), st.integers(0, 2**32 - 1))
    )
)


@settings(max_examples=150, deadline=None)
@given(drawn=words, block=st.sampled_from([1, 7, 64, 1 << 22]))
def test_any_change_is_restored_to_the_bit(drawn: tuple[Any, ...], block: int) -> None:
    old, other, share, seed = drawn
    new = np.where(np.random.default_rng(seed).random(len(old)) < share, other, old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_codec, "BLOCK", block)
        delta = read_delta(packed({"a": old}, {"a": new}))
    restored = old.copy()
    for name in delta.load:
        delta.apply(name, restored)
    assert restored.tobytes() == new.tobytes()


def test_long_gaps_are_restored() -> None:
    old = np.zeros(1 << 22, np.uint16)
    new = old.copy()
    new[[0, 127, 256, 1 << 15, (1 << 22) - 1]] = [1, 65535, 2, 32768, 7]
    delta, restored = read_delta(packed({"a": old}, {"a": new})), old.copy()
    delta.apply("a", restored)
    assert (restored == new).all()
    assert len(packed({"a": old}, {"a": new})) < 400


def versions(count: int) -> list[Tensors]:
    """Random bfloat16 and float32 tensors, and versions of them in which ever more elements changed."""
    rng = np.random.default_rng(3)
    first = {
        "dense": rng.integers(0, 1 << 16, 3000, np.uint16),
        "float32": rng.integers(0, 1 << 32, 50, np.uint32),
        "same": rng.integers(0, 1 << 16, 40, np.uint16),
    }
    made = [first]
    for _ in range(count - 1):
        last = {name: array.copy() for name, array in made[-1].items()}
        last["dense"][rng.random(3000) < 0.05 * len(made)] += 1
        last["float32"][rng.integers(0, 50)] -= 3
        made.append(last)
    return made


def tensors_of(version: Tensors) -> list[tuple[str, Any]]:
    kinds = {np.dtype(np.uint16): torch.bfloat16, np.dtype(np.uint32): torch.float32}
    signed = {name: array.view(f"<i{array.itemsize}").copy() for name, array in version.items()}
    return [(name, torch.from_numpy(signed[name]).view(kinds[version[name].dtype]).view(-1, 10)) for name in version]


class Engine:
    """Two ranks with a mirror that holds ``version``: rank 0 writes it, both load."""

    def __init__(self, directory: Path, version: Tensors) -> None:
        files = directory / "data", directory / "index"
        for file in files:
            file.touch()
        self.server, self.ranks = Mirror(*files), [Mirror(*files), Mirror(*files)]
        self.full(version)

    def full(self, version: Tensors) -> None:
        self.ranks[0].begin()
        for item in tensors_of(version):  # one bucket each
            self.ranks[0].write([item])
        self.ranks[0].end()
        self.weights = {name: tensor.clone() for name, tensor in tensors_of(version)}

    def load(self, state: str) -> None:
        self.ranks[0].begin()
        self.weights |= {name: tensor.clone() for name, tensor in self.ranks[0].staged(state)}
        self.ranks[0].end()

    def holds(self, version: Tensors) -> bool:
        return all(
            self.weights[name].dtype == tensor.dtype and bits(self.weights[name]).equal(bits(tensor))
            for name, tensor in tensors_of(version)
        )


def bits(tensor: Any) -> Any:
    return tensor.view(torch.uint8)


def test_deltas_lead_from_version_to_version(tmp_path: Path) -> None:
    made = versions(5)
    engine = Engine(tmp_path, made[0])
    for old, new in itertools.pairwise(made):
        engine.server.stage(packed(old, new))
        assert engine.holds(old), "staging changes nothing"
        assert [name for name, _ in engine.ranks[1].staged(state_of(new))] == ["dense", "float32"]
        engine.load(state_of(new))
        assert engine.holds(new)


def repeated(made: list[Tensors], engine: Engine) -> bytes:
    engine.server.stage(packed(made[0], made[1]))
    engine.load(state_of(made[1]))
    return packed(made[0], made[1])


def never_loaded(made: list[Tensors], engine: Engine) -> bytes:
    engine.server.stage(packed(made[0], made[1]))
    return packed(made[1], made[2])


def restarted(made: list[Tensors], engine: Engine) -> bytes:
    engine.server.forget()  # a new process has an empty index
    return packed(made[0], made[1])


def half_full(made: list[Tensors], engine: Engine) -> bytes:
    engine.ranks[0].begin()
    engine.ranks[0].write(tensors_of(made[0])[:1])
    return packed(made[0], made[1])


def lying(made: list[Tensors], engine: Engine) -> bytes:
    writer = DeltaWriter()
    writer.add("dense", made[0]["dense"], made[1]["dense"])
    writer.digests["dense"] = "0" * 32
    return writer.finish(state_of(made[0]), state_of(made[1]), ["dense"])


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (lambda made, engine: packed(made[1], made[2]), "builds on state .*, and this engine holds"),
        (repeated, "builds on state .*, and this engine holds"),
        (never_loaded, "no complete update came before"),
        (restarted, "no complete update came before"),
        (half_full, "no complete update came before"),
        (lying, "dense would not become what was sent"),
        (lambda made, engine: packed(made[0], made[1])[:-20], "damaged in transfer"),
        (lambda made, engine: b"", "damaged in transfer"),
    ],
    ids=["another base", "repeated", "reordered", "restarted", "half full", "wrong digest", "truncated", "empty"],
)
def test_a_doubtful_delta_is_refused_in_one_line(
    send: Callable[[list[Tensors], Engine], bytes], reason: str, tmp_path: Path
) -> None:
    made = versions(3)
    engine = Engine(tmp_path, made[0])
    data = send(made, engine)
    held = {name: tensor.clone() for name, tensor in engine.weights.items()}
    with pytest.raises(DeltaRefused, match=reason) as refused:
        engine.server.stage(data)
    assert "\n" not in str(refused.value)
    assert all(bits(engine.weights[name]).equal(bits(tensor)) for name, tensor in held.items())
    with pytest.raises(DeltaRefused, match=r"no delta is staged|is staged, not"):
        engine.load(state_of(made[2]))
    engine.full(made[1])
    engine.server.stage(packed(made[1], made[2]))
    engine.load(state_of(made[2]))
    assert engine.holds(made[2]), "a full update ends the doubt"


def test_damage_is_found() -> None:
    """Flipped bits, truncations and swapped halves of a delta."""
    old, new = versions(2)
    data, random = packed(old, new), Random(0)
    for _ in range(800):
        flipped = bytearray(data)
        flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
        first, second = sorted(random.sample(range(1, len(data)), 2))
        swapped = data[:first] + data[second:] + data[first:second]
        for damaged in (flipped, data[: random.randrange(len(data))], swapped):
            if damaged != data:
                with pytest.raises(DeltaRefused, match="damaged in transfer"):
                    read_delta(damaged)


def test_a_malformed_delta_with_a_right_checksum_is_refused() -> None:
    """A sender of another release, for example: whatever stands in it, only DeltaRefused is raised."""
    import xxhash

    old, new = versions(2)
    body, random, refused = packed(old, new)[:-16], Random(1), 0
    for _ in range(300):
        changed = bytearray(body)
        for _ in range(random.randrange(1, 4)):
            changed[random.randrange(len(body))] ^= 1 << random.randrange(8)
        data = bytes(changed) + xxhash.xxh3_128_digest(bytes(changed))
        try:
            delta = read_delta(data)
            for name in delta.digests:
                delta.apply(name, old[name].copy() if name in old else np.zeros(4, np.uint16))
        except DeltaRefused:
            refused += 1
    assert refused > 250


def test_a_generator_of_tensors_reaches_the_loader_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether a tensor is an adapter is found out without consuming the others."""
    from agent_rl.engine.server import lora_merge

    class WeightUpdater:
        def load_weights_from_distributed(self, tensors: Any) -> tuple[bool, str]:
            return True, " ".join(name for name, _ in tensors)

    name = "sglang.srt.model_executor.model_runner_components.weight_updater"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(WeightUpdater=WeightUpdater))
    lora_merge.install(tmp_path)
    named = ((name, torch.zeros(1)) for name in "abc")
    assert WeightUpdater().load_weights_from_distributed(named) == (True, "a b c")
