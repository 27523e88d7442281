"""A context of one backend, in which attacks are played."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from envs import EnvContext
from sandbox import SandboxSpec, SandboxUnavailableError, open_backend


@asynccontextmanager
async def context_of(name: str, limits: SandboxSpec, **options: Any) -> AsyncIterator[EnvContext]:
    """A context on the backend ``name``, closed at the end; ``options`` are an ``EnvContext``'s. Skips the test where
    this machine lacks it."""
    try:
        backend = open_backend(name, run_id=f"test-{uuid.uuid4().hex[:8]}")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        yield EnvContext(backend, limits=limits, **options)
    finally:
        await backend.close()
