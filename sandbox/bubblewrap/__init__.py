"""Sandboxes made by bubblewrap, where no container engine is wanted or answers."""
