"""Assignment of sequences to micro-batches and data ranks, by cost."""
