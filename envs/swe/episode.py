"""One started task, and the agent's patch read from its sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from envs.context import EnvContext
from envs.swe.adjudication import Controls
from envs.swe.diff.agent_patch import changed_paths, file_patches, required_blobs
from envs.swe.diff.git_diff import FilePatch
from envs.swe.diff.snapshot import SKIPPED_NAMES, BaseSnapshot, read_blobs
from envs.swe.grading import grade_changes
from envs.swe.records import SweRecord
from envs.swe.repositories import RepositoryCache
from envs.swe.sandboxes import agent_sandbox, sandbox_spec, task_sandbox
from envs.types import EnvsError, Grade, Message
from sandbox import Sandbox, SandboxDiskFullError, SandboxFileError, TreeFile
from tools import ToolSet

MAX_PATCH_BYTES = 1 << 20


class PatchError(EnvsError):
    """No patch can be taken from the agent's repository; the policy caused this."""


@dataclass(frozen=True)
class SweEpisode:
    """A started task: the agent's sandbox with its repository and without the hidden tests.

    ``listing`` is git's listing of the repository before the agent's first command, empty for a local task.
    """

    context: EnvContext
    record: SweRecord
    sandbox: Sandbox
    listing: bytes
    messages: Sequence[Message]
    tools: ToolSet
    site_root: Path | None = None
    controls: Controls | None = None

    async def patch(self) -> str:
        """The agent's changes so far, as a git diff. Raises ``PatchError`` if the agent broke its repository."""
        return "".join(part.text for part in await self._changes())

    async def grade(self) -> Grade:
        """Grade the agent's patch. The sandbox stays usable."""
        try:
            changes = await self._changes()
            try:
                site_root, controls = self.site_root, self.controls
                return await grade_changes(self.context, self.record, changes, site_root=site_root, controls=controls)
            except SandboxDiskFullError:
                await self._changes()  # raises PatchError if the agent's sandbox filled the disk
                raise
        except PatchError as error:
            return Grade(reward=0.0, resolved=False, suspected_hack=(str(error),))

    async def _changes(self) -> Sequence[FilePatch]:
        """The file patches from the base to the sandbox's files, read without the sandbox's programs.

        Files that are not UTF-8 text get a patch marked binary. Raises ``PatchError`` if the files cannot be read or
        the patch exceeds ``MAX_PATCH_BYTES``, and ``SandboxLostError`` if the sandbox is gone.
        """
        base = await asyncio.to_thread(self._base)
        limits, workdir = base.limits(MAX_PATCH_BYTES), self.record.workdir
        try:
            tree = await self.sandbox.read_tree(workdir, skip=SKIPPED_NAMES, limits=limits, known=base.known)
        except SandboxFileError as error:
            raise PatchError(f"no patch can be taken: {error}") from None
        paths = await asyncio.to_thread(changed_paths, base, tree)
        spec = self.context.without_agent(self.sandbox.spec)
        fresh_sandbox = partial(task_sandbox, self.context, self.record, spec)
        contents = await read_blobs(fresh_sandbox, self.sandbox, base, required_blobs(base, tree, paths))
        return await asyncio.to_thread(partial(_limited_patches, base, tree, paths, contents))

    def _base(self) -> BaseSnapshot:
        if self.record.is_local:
            return BaseSnapshot.from_files(self.record.files)
        return BaseSnapshot.from_listing(self.listing)


def _limited_patches(
    base: BaseSnapshot, tree: Mapping[str, TreeFile], paths: Sequence[str], contents: Mapping[str, bytes]
) -> list[FilePatch]:
    parts: list[FilePatch] = []
    size = 0
    for part in file_patches(base, tree, paths, contents):
        size += len(part.text.encode())
        if size > MAX_PATCH_BYTES:
            raise PatchError(f"the patch is larger than {MAX_PATCH_BYTES} bytes")
        parts.append(part)
    return parts


@asynccontextmanager
async def start_episode(
    context: EnvContext,
    record: SweRecord,
    *,
    site_root: Path | None = None,
    repositories: RepositoryCache | None = None,
    controls: Controls | None = None,
) -> AsyncIterator[SweEpisode]:
    """Start the record's task; leaving the context closes its sandbox.

    ``site_root`` is the directory that the record's ``site_packages`` is relative to. ``repositories`` caches the git
    directories of local records between episodes, ``controls`` the gold patches' runs.
    """
    spec = context.for_agent(sandbox_spec(context, record, site_root))
    async with agent_sandbox(context, record, spec, repositories) as (sandbox, listing):
        scaffold = context.scaffold
        tools = scaffold.tools(sandbox, style=context.tool_style, timeout=context.tool_timeout)
        messages = scaffold.initial_messages(record.problem_statement, record.workdir, context.tool_style)
        yield SweEpisode(context, record, sandbox, listing, messages, tools, site_root, controls)
