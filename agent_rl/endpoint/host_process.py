"""Runs an agent program on this machine; it ends with the process that runs it, however that ends."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sandbox import ExecResult
from sandbox.process import run_process

LONGEST = 30 * 86400.0
"""Seconds a program may run; ``rollout.time_limit`` ends it before, and does not pass while weights change."""
_OUTPUT_BYTES = 1 << 20
_WATCHED = """(read -r -u "$0"; kill -KILL 0) < /dev/null > /dev/null 2>&1 & exec bash -c "$1\""""
"""Kills the program's process group when nobody holds the other end of the pipe ``$0`` any more."""


async def run_on_host(command: str, env: Mapping[str, str], stdin: bytes) -> ExecResult:
    """Run a shell's ``command`` with no environment but ``env``, and what it started until it has ended itself."""
    ours, held = os.pipe()
    try:
        done = await run_process(
            ["bash", "-c", _WATCHED, str(ours), command],
            timeout=LONGEST,
            limit=_OUTPUT_BYTES,
            stdin=stdin,
            pass_fds=(ours,),
            env=env,
        )
    finally:
        os.close(held)
        os.close(ours)
    return ExecResult(done.returncode, done.stdout, done.stderr, done.seconds, done.timed_out, done.truncated)
