"""A shell session: commands that go on where the last one stopped, in any sandbox.

What lasts is a shell's state, not a process: after each command the shell writes down its directory, variables,
functions, aliases and options, and the next one starts from there. So a session keeps a sandbox's promise that
nothing outlives its command, a killed command leaves the state from before it, and other commands of the sandbox do
not disturb it. What such a session does not have is background jobs from one command to the next.
"""

from __future__ import annotations

import asyncio
import uuid

from sandbox.errors import SandboxFileError
from sandbox.types import Sandbox, SessionResult, ShellSession

# $1 the state's file, $2 the command's number, $3 the command. Variables that only the shell can set are left out.
# Options come last, as they may make the shell stop at what fails before; the number, when all else is written.
_SCRIPT = r"""
if [ -e "$1" ]; then . "$1"
elif [ "$2" -gt 1 ]; then echo "session: its state $1 is gone" >&2; exit 125; fi
__agent_rl=("$@")
__agent_rl_save() {
    {
        echo 'for __agent_rl_name in $(compgen -e); do unset -v "$__agent_rl_name"; done'
        compgen -v | while IFS= read -r __agent_rl_name; do
            case $__agent_rl_name in
                BASHOPTS | BASH_VERSINFO | EUID | PPID | SHELLOPTS | UID) ;;
                *) declare -p "$__agent_rl_name" ;;
            esac
        done
        declare -f; export -pf; alias -p
        printf 'cd -- %q 2>/dev/null || { echo "cd: %q: gone" >&2; cd .; }\nOLDPWD=%q\n' "$PWD" "$PWD" "${OLDPWD-}"
        echo "umask $(umask)"; shopt -p; set +o
    } >| "${__agent_rl[0]}.new" 2>/dev/null &&
    mv -f "${__agent_rl[0]}.new" "${__agent_rl[0]}" && echo "${__agent_rl[1]}" >| "${__agent_rl[0]}.number"
}
trap __agent_rl_save EXIT
set --
eval "${__agent_rl[2]}"
__agent_rl_code=$?
__agent_rl_save
exit $__agent_rl_code
"""
_CLOSE_SECONDS = 20.0


def open_session(sandbox: Sandbox) -> ShellSession:
    """A shell session in ``sandbox``, which goes on to serve other commands beside it."""
    return _Session(sandbox)


class _Session:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._state = sandbox, f"/tmp/.agent-rl-session-{uuid.uuid4().hex[:12]}"
        self._number = 1  # of the next command; 1 until a state was kept
        self._turn = asyncio.Lock()

    async def run(self, command: str, *, timeout: float) -> SessionResult:
        async with self._turn:
            argv = ["bash", "-c", _SCRIPT, "bash", self._state, str(self._number), command]
            result = await self._sandbox.exec(argv, timeout=timeout)
            kept = await self._saved() == self._number
            self._number += kept
        return SessionResult(result, kept)

    async def close(self) -> None:
        async with self._turn:
            self._number = 1
            files = [self._state, f"{self._state}.number", f"{self._state}.new"]
            await self._sandbox.exec(["rm", "-f", "--", *files], timeout=_CLOSE_SECONDS)

    async def _saved(self) -> int | None:
        """The number of the last command whose state was written."""
        try:
            return int(await self._sandbox.read_file(f"{self._state}.number", max_bytes=32))
        except (SandboxFileError, ValueError):
            return None
