"""Which sequences share a micro-batch, which rank gets it, and what it costs."""
