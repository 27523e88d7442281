"""The Megatron-core model behind the trainer: layout, model, checkpoints, log-probs, routing replay.

Only :mod:`agent_rl.train.megatron.packed_batch` may be imported without megatron-core.
"""
