"""``agent-rl view``: serves or exports the viewer's page for one or more runs."""

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


def run_view(paths: Sequence[Path], *, port: int, out: Path | None, trajectories: int, open_browser: bool) -> None:
    """Serve the page until Ctrl-C, or export it to ``out``. Raises UserError for an invalid directory or used port."""
    resources = Resources(paths)
    if out is not None:
        print(f"{out}: {export(resources, out, trajectories) / 1e6:.1f} MB")
        return
    with listen(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        print(f"{address} (Ctrl-C stops it)", flush=True)
        if open_browser and _has_display():
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            web_server(resources).run(sockets=[listener])


def _has_display() -> bool:
    """Whether a graphical browser can open. Without a display Python opens a text browser in the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
