"""One started task."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from envs.context import EnvContext
from envs.swe.adjudication import Controls
from envs.swe.diff.agent_patch import PatchError, take_patch
from envs.swe.diff.git_diff import FilePatch
from envs.swe.grading import grade_changes
from envs.swe.records import SweRecord
from envs.swe.repositories import Repositories
from envs.swe.sandboxes import agent_sandbox, sandbox_spec
from envs.types import Grade, Message
from sandbox import Sandbox
from tools import ToolSet


@dataclass(frozen=True)
class SweEpisode:
    """A started task: the agent's sandbox with its repository and without the hidden tests."""

    context: EnvContext
    record: SweRecord
    sandbox: Sandbox
    listing: bytes
    messages: Sequence[Message]
    tools: ToolSet
    site_root: Path | None = None
    controls: Controls | None = None

    async def patch(self) -> str:
        """What the agent changed so far, as a git diff. Raises ``PatchError`` if it broke its repository."""
        return "".join(part.text for part in await self._changes())

    async def grade(self) -> Grade:
        """Grade the agent's patch; the sandbox may go on being used."""
        try:
            changes = await self._changes()
        except PatchError as error:
            return Grade(reward=0.0, resolved=False, suspected_hack=(str(error),))
        return await grade_changes(self.context, self.record, changes, site_root=self.site_root, controls=self.controls)

    async def _changes(self) -> Sequence[FilePatch]:
        return await take_patch(self.context, self.sandbox, self.record, self.listing)


@asynccontextmanager
async def start_episode(
    context: EnvContext,
    record: SweRecord,
    *,
    site_root: Path | None = None,
    repositories: Repositories | None = None,
    controls: Controls | None = None,
) -> AsyncIterator[SweEpisode]:
    """Start the record's task; leaving closes its sandbox. ``site_root`` is where its ``site_packages`` are found,
    ``repositories`` remembers the git directories of local records from one episode to the next, ``controls`` the gold
    patches' runs."""
    spec = context.for_agent(sandbox_spec(context, record, site_root))
    async with agent_sandbox(context, record, spec, repositories) as (sandbox, listing):
        scaffold = context.scaffold
        tools = scaffold.tools(sandbox, style=context.tool_style, timeout=context.tool_timeout)
        messages = scaffold.opening(record.problem_statement, record.workdir, context.tool_style)
        yield SweEpisode(context, record, sandbox, listing, messages, tools, site_root, controls)
