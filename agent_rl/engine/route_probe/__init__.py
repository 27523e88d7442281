"""Whether a running engine captures routes that can be replayed."""
