"""Quantized checkpoints: which tensors belong together, and their conversion to bfloat16."""
