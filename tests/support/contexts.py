"""Backends and contexts of tests; a test is skipped where this machine lacks the backend, or its image."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from envs import EnvContext
from sandbox import ImageMissingError, ImagePolicy, SandboxBackend, SandboxSpec, SandboxUnavailableError, open_backend


@asynccontextmanager
async def backend_of(name: str, *, images: ImagePolicy | None = None, **options: Any) -> AsyncIterator[SandboxBackend]:
    """The backend ``name``, closed at the end."""
    try:
        backend = open_backend(name, run_id=f"test-{uuid.uuid4().hex[:8]}", images=images, **options)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def used_backend_of(name: str, **options: Any) -> AsyncIterator[SandboxBackend]:
    """The same, one whose sandboxes start."""
    async with backend_of(name, **options) as backend:
        try:
            await (await backend.start(SandboxSpec())).close()
        except (SandboxUnavailableError, ImageMissingError) as error:
            pytest.skip(str(error))
        yield backend


@asynccontextmanager
async def context_of(
    name: str, limits: SandboxSpec, *, images: ImagePolicy | None = None, **options: Any
) -> AsyncIterator[EnvContext]:
    """A context on the backend ``name``; ``options`` are an ``EnvContext``'s."""
    async with backend_of(name, images=images) as backend:
        yield EnvContext(backend, limits=limits, **options)
