"""Comparison of two safetensors files."""

from __future__ import annotations

from pathlib import Path


def assert_same_tensors(first: Path, second: Path) -> None:
    """Both files have the same names, and the same bits under each."""
    import torch
    from safetensors.torch import load_file

    one, other = load_file(first), load_file(second)
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []
