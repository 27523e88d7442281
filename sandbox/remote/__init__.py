"""Sandboxes on machines of a provider, through an agent that runs in them."""
