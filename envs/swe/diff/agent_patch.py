"""The agent's patch, read back from its sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from envs.context import EnvContext
from envs.swe.diff.git_diff import FilePatch
from envs.swe.diff.snapshot import SKIPPED, Base, look_up
from envs.swe.diff.tree_diff import changed_paths, changes, needed
from envs.swe.records import SweRecord
from envs.swe.sandboxes import task_sandbox
from envs.types import EnvsError
from sandbox import Sandbox, SandboxFileError, TreeFile

MAX_PATCH_BYTES = 1 << 20


class PatchError(EnvsError):
    """The agent left its repository in a state that no patch can be taken from: the policy's doing."""


async def take_patch(context: EnvContext, sandbox: Sandbox, record: SweRecord, listing: bytes) -> Sequence[FilePatch]:
    """What the agent changed: the files of its sandbox, read without its programs, against what they were.

    ``listing`` says what they were for a task in an image. What is no UTF-8 text is shown as binary. Raises
    ``PatchError`` if the agent left a state that no patch can be taken from or changed more than ``MAX_PATCH_BYTES``,
    ``SandboxLostError`` if the sandbox is gone.
    """
    base = await asyncio.to_thread(_base, record, listing)
    try:
        limits = base.limits(MAX_PATCH_BYTES)
        found = await sandbox.read_tree(record.workdir, skip=SKIPPED, limits=limits, known=base.known)
    except SandboxFileError as error:
        raise PatchError(f"no patch can be taken: {error}") from None
    paths = await asyncio.to_thread(changed_paths, base, found)
    fresh = partial(task_sandbox, context, record, context.without_agent(sandbox.spec))
    contents = await look_up(fresh, sandbox, base, needed(base, found, paths))
    return await asyncio.to_thread(partial(_bounded, base, found, paths, contents))


def _base(record: SweRecord, listing: bytes) -> Base:
    return Base.of_files(record.files) if record.is_local else Base.of_listing(listing)


def _bounded(
    base: Base, found: Mapping[str, TreeFile], paths: Sequence[str], contents: Mapping[str, bytes]
) -> list[FilePatch]:
    parts: list[FilePatch] = []
    size = 0
    for part in changes(base, found, paths, contents):
        size += len(part.text.encode())
        if size > MAX_PATCH_BYTES:
            raise PatchError(f"the patch is larger than {MAX_PATCH_BYTES} bytes")
        parts.append(part)
    return parts
