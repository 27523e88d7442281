"""Our R2E-Gym tools against R2E-Gym's own scripts: the same turns, the same answers, the same files.

The scripts' answers are recorded (``tests/support/r2egym_scripts.py`` made them, and names the commit); with
``R2E_GYM`` naming a checkout they are run again.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from support import r2egym_scripts

from sandbox import Sandbox, SandboxBackend, SandboxSpec, open_backend
from tools import ParseFailure
from tools.r2egym import R2EGymFormat, r2egym_tools

pytestmark = pytest.mark.bubblewrap

_SOURCE_LINES = re.compile(r"(?<=Traceback \(most recent call last\):\n)(?: .*\n)+", re.MULTILINE)
_LISTING = re.compile(r"(?<=excluding hidden:\n)[^<]*(?=\n)|(?<=:\n)(?:\./.* matches\)\n)+")


def as_listed(observation: str) -> str:
    """``observation`` up to the differences that docs/reference/tools.md lists: a traceback without the lines of its
    source, and directories' entries by name, where R2E-Gym's come as the file system has them."""
    plain = _SOURCE_LINES.sub("", observation)
    return _LISTING.sub(lambda found: "\n".join(sorted(found[0].split("\n"))), plain)


@pytest.fixture
async def backend() -> AsyncIterator[SandboxBackend]:
    backend = open_backend("bubblewrap", run_id=f"r2egym-{uuid.uuid4().hex[:8]}")
    yield backend
    await backend.close()


async def observations(sandbox: Sandbox, turns: list[str]) -> list[str]:
    fmt, tools = R2EGymFormat(), r2egym_tools(sandbox)
    seen = []
    for text in turns:
        call = fmt.parse(text)
        seen.append(call.reason if isinstance(call, ParseFailure) else (await tools.call(call)).text)
    return seen


async def differences(backend: SandboxBackend, sequence: Mapping[str, Any]) -> list[str]:
    """What differs, a text each; none where all is as R2E-Gym's scripts have it."""
    sandbox = await backend.start(SandboxSpec(workdir="/testbed"))
    try:
        await sandbox.write_files({f"/testbed/{path}": data for path, data in r2egym_scripts.repository().items()})
        ours = await observations(sandbox, sequence["turns"])
        tree = await sandbox.read_tree("/testbed", skip={"__pycache__"})
    finally:
        await sandbox.close()
    wrong = [
        f"{text}\nR2E-Gym: {there!r}\nhere:    {here!r}"
        for text, there, here in zip(sequence["turns"], sequence["observations"], ours, strict=True)
        if as_listed(there) != as_listed(here)
    ]
    files = {path: r2egym_scripts.digest(file.data or b"") for path, file in tree.items()}
    return wrong + ([] if files == sequence["files"] else [f"files differ after {sequence['turns']}"])


async def compared(backend: SandboxBackend, sequences: list[dict[str, Any]]) -> list[str]:
    limit = asyncio.Semaphore(4)

    async def one(sequence: Mapping[str, Any]) -> list[str]:
        async with limit:
            return await differences(backend, sequence)

    return [text for found in await asyncio.gather(*map(one, sequences)) for text in found]


async def check(backend: SandboxBackend, sequences: list[dict[str, Any]]) -> None:
    wrong = await compared(backend, sequences)
    assert not wrong, f"{len(wrong)} differ; the first:\n" + "\n\n".join(wrong[:5])


async def test_only_the_listed_differences_exist(backend: SandboxBackend) -> None:
    await check(backend, r2egym_scripts.recorded()[::8])


@pytest.mark.exhaustive
async def test_no_difference_in_any_sequence(backend: SandboxBackend) -> None:
    await check(backend, r2egym_scripts.recorded())
