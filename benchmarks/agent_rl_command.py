"""Run a command of agent-rl and print it."""

from __future__ import annotations

import shlex
import subprocess
import sys


def agent_rl(*arguments: str) -> None:
    """Exits with the command's code where it fails."""
    print(f"$ agent-rl {shlex.join(arguments)}", flush=True)
    if (code := subprocess.run([sys.executable, "-m", "agent_rl.cli", *arguments], check=False).returncode) != 0:
        sys.exit(code)
