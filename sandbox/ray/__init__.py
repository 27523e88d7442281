"""Sandboxes on several machines: a Ray actor on each, and one backend before them."""
