"""The repository as the agent finds it: its files and one commit, which git makes once for each set of files.

The episodes of a group start from the same files, and git's processes are most of an episode's start. The commit's
author and date are fixed, so the git directory that one sandbox made is the one that git would make again in every
other.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import shlex
import tarfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from envs.swe.diff.tree_diff import LITTER
from envs.swe.records import WORKDIR
from sandbox import Sandbox, SandboxStartError

SETUP_TIMEOUT = 120.0
_DATE = "2000-01-01T00:00:00+0000"

# One commit with a fixed author and date: nothing of the future to read, and the same hash in every sandbox. Files
# are kept as they are, whatever attributes ask for: line ends stay, and no filter is run.
_COMMIT = f"""set -e
git init -q -b main --template=
mkdir -p .git/info
printf '%s\\n' {shlex.join(LITTER)} > .git/info/exclude
echo '* -text !filter !ident !working-tree-encoding' > .git/info/attributes
git add -A
export GIT_AUTHOR_DATE={_DATE} GIT_COMMITTER_DATE={_DATE}
git -c gc.auto=0 commit -q --no-verify --allow-empty -m 'Start of the task'"""


async def first_commit(sandbox: Sandbox, *, before: str = "", after: str = "") -> None:
    """Make the sandbox's working directory a repository of one commit, between two shell texts.

    Raises ``SandboxStartError`` with git's last words.
    """
    result = await sandbox.exec(f"{before}{_COMMIT}\n{after}", timeout=SETUP_TIMEOUT)
    if not result.ok:
        raise SandboxStartError(f"the repository could not be set up: {result.text.strip()[-300:]}")


@dataclass
class _Made:
    """Whether a sandbox has made a repository's commit, and its git directory (path -> content; empty: too large to
    keep)."""

    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    done: bool = False
    directory: Mapping[str, bytes] = field(default_factory=dict)


class Repositories:
    """Sets repositories up in sandboxes. Keeps the git directories of the ``kept`` sets of files that were used
    last."""

    def __init__(self, kept: int = 64) -> None:
        self._kept = kept
        self._made: OrderedDict[str, _Made] = OrderedDict()

    async def set_up(self, sandbox: Sandbox, files: Mapping[str, str]) -> None:
        """Write ``files`` and their git directory into the working directory of a new sandbox.

        Raises ``SandboxError``.
        """
        made, content = self._of(files), in_workdir(files)
        async with made.making:  # the first sandbox makes what the others wait for
            if not made.done:
                await sandbox.write_files(content)
                await first_commit(sandbox)
                made.directory = await _git_dir(sandbox)
                made.done = True
                return
        await sandbox.write_files({**content, **made.directory})
        if not made.directory:
            await first_commit(sandbox)

    def _of(self, files: Mapping[str, str]) -> _Made:
        key = hashlib.sha256(repr(sorted(files.items())).encode("utf-8", "surrogatepass")).hexdigest()
        made = self._made.setdefault(key, _Made())
        self._made.move_to_end(key)
        while len(self._made) > self._kept:
            self._made.popitem(last=False)
        return made


def in_workdir(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files by their absolute path in a sandbox, as bytes."""
    return {f"{WORKDIR}/{path}": content.encode() for path, content in files.items()}


async def _git_dir(sandbox: Sandbox) -> Mapping[str, bytes]:
    """All files of the git directory by absolute path; none where they are more bytes than a command may print."""
    result = await sandbox.exec(["tar", "-cf", "-", ".git"], timeout=SETUP_TIMEOUT, cwd=WORKDIR)
    if not result.ok or result.truncated:
        return {}
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        members = [member for member in archive if member.isfile()]
        contents = [archive.extractfile(member) for member in members]
        return {f"{WORKDIR}/{m.name}": c.read() for m, c in zip(members, contents, strict=True) if c is not None}
