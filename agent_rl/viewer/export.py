"""Exports a run's page: one HTML file that opens without a server, or a directory for a static web server.

Both contain all resources of the served page except trajectories, and the trajectories that
:func:`select_trajectories` returns. The HTML file contains each resource gzipped and makes no requests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from agent_rl.errors import UserError
from agent_rl.utils.run_files import replacing, write_atomic
from agent_rl.viewer.api import Resources

STATIC = Path(__file__).parent / "static"
_PATH = re.compile(
    r"runs|exported|\d+/(run|metrics|trajectories|(steps|loads|t)/[\w-]+|eval/[\w-]+(/\w+)?|routes/[\w.-]+/map)",
    re.ASCII,
)
"""The exported resources, which name the files. No part of them is text from a run's directory."""
_SERVED = b'<meta name="agent-rl-source" content="api">'
_STYLE = b'<link rel="stylesheet" href="app.css">\n'
_SCRIPT = b'<script src="app.js" defer></script>\n'


def export(source: Resources, out: Path, trajectories: int) -> int:
    """Write the page with at least ``trajectories`` trajectories of each run to ``out``: one file if it ends in
    ``.html``.

    Returns the number of bytes written. Raises UserError for a directory that is not empty.
    """
    chosen = {run["run"]: select_trajectories(source, run["run"], trajectories) for run in source.read("runs")["runs"]}
    singles = (path for run, ids in chosen.items() for path in _singles(source, run, ids))
    bodies = ((path, source.body(path)) for path in chain(source.pages(), singles))
    listed = ("exported", orjson.dumps({"notes": [], "trajectories": chosen}, option=orjson.OPT_NON_STR_KEYS))
    write = _write_file if out.suffix == ".html" else _write_dir
    return write(out, chain([listed], bodies))


def select_trajectories(source: Resources, run: int, count: int) -> list[str]:
    """At least ``count`` trajectories of a run, if it has as many: whole groups, first those with the largest
    difference between trainer and engine log-probs, then the newest."""
    columns = _columns(source, run)
    gaps = np.nan_to_num(np.array(columns["worst_gap_without_replay"], np.float64))
    groups: dict[tuple[str, int], list[int]] = {}
    for row, group in enumerate(zip(columns["n"], columns["group"], strict=True)):
        groups.setdefault(group, []).append(row)
    chosen: list[str] = []
    for rows in sorted(groups.values(), key=lambda rows: (max(gaps[row] for row in rows), rows[0]), reverse=True):
        if len(chosen) >= count:
            break
        chosen += [columns["id"][row] for row in rows]
    return chosen


def _columns(source: Resources, run: int) -> Mapping[str, Any]:
    """The columns of a run's trajectories. Raises UserError if they are damaged."""
    found: Mapping[str, Any] = source.read(f"{run}/trajectories")
    if "error" in found:
        raise UserError(f"--export: {found['error']['text']}")
    columns: Mapping[str, Any] = found["columns"]
    return columns


def _singles(source: Resources, run: int, ids: Sequence[str]) -> Iterator[str]:
    """The paths of trajectories, and of the layers of each of their branches."""
    columns = _columns(source, run)
    branches = dict(zip(columns["id"], columns["branches"], strict=True))
    for id in ids:
        yield f"{run}/t/{id}"
        yield from (f"{run}/routes/{id}{f'.{branch}' if branch else ''}/map" for branch in range(branches[id]))


def _write_dir(out: Path, bodies: Iterator[tuple[str, bytes]]) -> int:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--export {out}: exists already; choose a new directory, or a file name ending in .html")
    size = 0
    for path, body in bodies:
        if not _PATH.fullmatch(path):
            raise UserError(f"--export: {path!r} is no resource of a run")
        file = out / "data" / f"{path}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        size += file.write_bytes(body)
    for name in ("app.js", "app.css"):
        shutil.copyfile(STATIC / name, out / name)
    page = (STATIC / "index.html").read_bytes().replace(_SERVED, _SERVED.replace(b"api", b"directory"))
    write_atomic(out / "index.html", page)
    return size


def _write_file(out: Path, bodies: Iterator[tuple[str, bytes]]) -> int:
    # Only </script ends a script element; in JavaScript strings <\\/script is the same text.
    script = (STATIC / "app.js").read_bytes().replace(b"</script", b"<\\/script")
    style = (STATIC / "app.css").read_bytes()
    head = _policy(script, style) + _SERVED.replace(b"api", b"embedded")
    page = (STATIC / "index.html").read_bytes().replace(_SERVED, head).replace(_SCRIPT, b"")
    before, _, after = page.replace(_STYLE, b"<style>" + style + b"</style>\n").partition(b"</body>")
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary, temporary.open("wb") as file:
        file.write(before)
        for path, body in bodies:
            packed = base64.b64encode(gzip.compress(body, mtime=0))
            file.write(
                b'<script type="application/gzip" id="data:%b">%b</script>\n' % (html.escape(path).encode(), packed)
            )
        return file.tell() + file.write(b"<script>" + script + b"</script>\n</body>" + after)


def _policy(script: bytes, style: bytes) -> bytes:
    """A content security policy that allows the embedded script and style and no requests."""
    script_hash, style_hash = (base64.b64encode(hashlib.sha256(text).digest()) for text in (script, style))
    rules = b"default-src 'none'; script-src 'sha256-%b'; style-src 'sha256-%b'; img-src data:" % (
        script_hash,
        style_hash,
    )
    return b'<meta http-equiv="Content-Security-Policy" content="%b">\n' % rules
