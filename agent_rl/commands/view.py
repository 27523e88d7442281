"""``agent-rl view``: a page about one or more runs, served on this machine or exported."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from agent_rl.viewer.api import Resources
from agent_rl.viewer.export import export
from agent_rl.viewer.server import HOST, listen, web_server


def run_view(
    directories: Sequence[Path], *, port: int, out: Path | None, trajectories: int, open_browser: bool
) -> None:
    """Serve until Ctrl-C, or write the export to ``out``. Raises UserError for a directory that is none, or a port
    that is taken."""
    resources = Resources(directories)
    if out is not None:
        print(f"{out}: {export(resources, out, trajectories) / 1e6:.1f} MB")
        return
    with listen(port) as opened:
        address = f"http://{HOST}:{opened.getsockname()[1]}/"
        print(f"{address} (Ctrl-C stops it)", flush=True)
        if open_browser and _has_screen():
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            web_server(resources).run(sockets=[opened])


def _has_screen() -> bool:
    """Without a screen, Python would open a browser in the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
