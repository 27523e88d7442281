"""A dense Qwen3 made from the small MoE model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from agent_rl.config.loader import MODELS

TINY = json.loads((MODELS["tiny-moe"] / "config.json").read_text())
EXPERTS = [key for key in TINY if "expert" in key or "router" in key or "moe" in key]
EXPERTS += ["norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"]


def dense_model(moe: Path) -> Path:
    """A Qwen3 beside ``moe``: a layer's first expert in place of its experts."""
    from safetensors.torch import load_file, save_file  # numpy knows no bfloat16

    directory = moe.with_name("dense")
    shutil.copytree(moe, directory)
    kept = {key: value for key, value in TINY.items() if key not in EXPERTS}
    kept |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    kept["intermediate_size"] = TINY["moe_intermediate_size"]
    (directory / "config.json").write_text(json.dumps(kept))
    weights = {
        name.replace("experts.0.", ""): tensor
        for name, tensor in load_file(moe / "model.safetensors").items()
        if ".experts." not in name or ".experts.0." in name
        if ".mlp.gate." not in name
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
