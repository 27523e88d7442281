"""Sandboxes made by a container engine: docker, or podman through the same interface."""
