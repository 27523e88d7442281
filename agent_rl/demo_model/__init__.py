"""The starting model: a tiny Qwen3-MoE, its tokenizer and chat template, and the warm-up that teaches it the format."""
