"""Sandboxes of a container engine: docker or podman."""
