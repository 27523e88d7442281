"""Shell sessions: commands that continue from the state of the previous one, in any sandbox.

A session keeps the state of a shell, not a process. After each command the shell saves its directory, variables,
functions, aliases and options to a file, and the next command loads them. So no process outlives its command, a killed
command leaves the previous state, and other commands of the sandbox do not interfere. Background jobs end with their
command.
"""

from __future__ import annotations

import asyncio
import uuid

from sandbox.errors import SandboxFileError
from sandbox.types import Sandbox, SessionResult, ShellSession

# $1 the state file, $2 the number of the command, $3 the command. Variables that only the shell can set are left out.
# Options come last because they may make the shell stop at an error; the number is written after everything else.
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
    """Return a new shell session in ``sandbox``; the sandbox can run other commands too."""
    return _Session(sandbox)


class _Session:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._state = sandbox, f"/tmp/.agent-rl-session-{uuid.uuid4().hex[:12]}"
        self._number = 1  # of the next command; 1 until a state is saved
        self._lock = asyncio.Lock()

    async def run(self, command: str, *, timeout: float) -> SessionResult:
        async with self._lock:
            argv = ["bash", "-c", _SCRIPT, "bash", self._state, str(self._number), command]
            result = await self._sandbox.exec(argv, timeout=timeout)
            state_saved = await self._read_saved_number() == self._number
            self._number += state_saved
        return SessionResult(result, state_saved)

    async def close(self) -> None:
        async with self._lock:
            self._number = 1
            files = [self._state, f"{self._state}.number", f"{self._state}.new"]
            await self._sandbox.exec(["rm", "-f", "--", *files], timeout=_CLOSE_SECONDS)

    async def _read_saved_number(self) -> int | None:
        """Return the number of the last command whose state was saved, or None."""
        try:
            return int(await self._sandbox.read_file(f"{self._state}.number", max_bytes=32))
        except (SandboxFileError, ValueError):
            return None
