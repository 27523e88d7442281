"""Sandboxes of bubblewrap, which needs no container engine."""
