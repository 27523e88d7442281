"""The repository as the agent finds it: its files and one commit.

The episodes of a group start from the same files, and running git takes most of an episode's start. The commit has a
fixed author and date, so every sandbox would create the same git directory: it is made once per set of files and copied
into the other sandboxes.
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

from envs.swe.diff.agent_patch import BUILD_ARTIFACTS
from envs.swe.records import WORKDIR
from sandbox import Sandbox, SandboxStartError

SETUP_TIMEOUT = 120.0
_DATE = "2000-01-01T00:00:00+0000"

# One commit with a fixed author and date: no future commits to read, and the same hash in every sandbox. The attributes
# keep files as they are: no conversion of line ends and no filters.
_COMMIT = f"""set -e
git init -q -b main --template=
mkdir -p .git/info
printf '%s\\n' {shlex.join(BUILD_ARTIFACTS)} > .git/info/exclude
echo '* -text !filter !ident !working-tree-encoding' > .git/info/attributes
git add -A
export GIT_AUTHOR_DATE={_DATE} GIT_COMMITTER_DATE={_DATE}
git -c gc.auto=0 commit -q --no-verify --allow-empty -m 'Start of the task'"""


async def create_initial_commit(sandbox: Sandbox, *, before: str = "", after: str = "") -> None:
    """Make the sandbox's working directory a repository of one commit.

    ``before`` and ``after`` are bash to run in the same command. Raises ``SandboxStartError`` with git's last words.
    """
    result = await sandbox.exec(f"{before}{_COMMIT}\n{after}", timeout=SETUP_TIMEOUT)
    if not result.ok:
        raise SandboxStartError(f"the repository could not be set up: {result.text.strip()[-300:]}")


@dataclass
class _CachedRepository:
    """The git directory of one set of files (path -> content), None before it is made, empty if it is too large."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    git_files: Mapping[str, bytes] | None = None


class RepositoryCache:
    """Creates repositories in sandboxes. Keeps the git directories of the ``capacity`` most recently used file sets."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._repositories: OrderedDict[str, _CachedRepository] = OrderedDict()

    async def populate(self, sandbox: Sandbox, files: Mapping[str, str]) -> None:
        """Write ``files`` and their git directory into the working directory of a new sandbox.

        Raises ``SandboxError``.
        """
        repository, content = self._repository_for(files), workdir_files(files)
        async with repository.lock:  # the other sandboxes wait until the first one has created the git directory
            if repository.git_files is None:
                await sandbox.write_files(content)
                await create_initial_commit(sandbox)
                git_files = await read_archive(sandbox, "tar -cf - .git")
                repository.git_files = {f"{WORKDIR}/{path}": file for path, file in git_files.items()}
                return
        await sandbox.write_files({**content, **repository.git_files})
        if not repository.git_files:
            await create_initial_commit(sandbox)

    def _repository_for(self, files: Mapping[str, str]) -> _CachedRepository:
        key = hashlib.sha256(repr(sorted(files.items())).encode("utf-8", "surrogatepass")).hexdigest()
        repository = self._repositories.setdefault(key, _CachedRepository())
        self._repositories.move_to_end(key)
        while len(self._repositories) > self._capacity:
            self._repositories.popitem(last=False)
        return repository


def workdir_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files as bytes, by their absolute path in a sandbox."""
    return {f"{WORKDIR}/{path}": content.encode() for path, content in files.items()}


async def read_archive(sandbox: Sandbox, script: str, stdin: str = "") -> dict[str, bytes]:
    """The files in the tar archive that ``script`` (bash) writes; none if it is too large for a command's output.

    Raises ``SandboxStartError`` if it takes too long.
    """
    result = await sandbox.exec(script, timeout=SETUP_TIMEOUT, stdin=stdin.encode())
    if result.timed_out:
        raise SandboxStartError(f"the sandbox's files could not be read within {SETUP_TIMEOUT:.0f} s")
    if result.truncated or not result.stdout:
        return {}
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        members = [(member.name, archive.extractfile(member)) for member in archive if member.isfile()]
        return {name.removeprefix("./"): file.read() for name, file in members if file is not None}
