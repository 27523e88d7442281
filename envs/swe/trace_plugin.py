"""Lists the repository's files that a run of the hidden tests opens; :mod:`envs.swe.test_side` installs it.

It is the ``sitecustomize`` of the gold patch's run, so it uses only features of Python 3.6. Without audit hooks (Python
3.7 and older) the list is empty.
"""

import json
import os
import re
import sys

_TOP = os.path.realpath(os.getcwd()) + os.sep
_INSTALLED = re.compile(r"/(site-packages|dist-packages|\.venv|\.git)/")
_HELPER = re.compile(rb"^\s*(import|from)\s+(pytest|unittest)\b|^\s*def\s+(assert|check|expect|verify)_", re.MULTILINE)
_seen = {}  # type: ignore[var-annotated]


def _relative(path: object) -> str:
    """The path of a file of the repository below its top directory, or an empty string."""
    full = "" if isinstance(path, int) else os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
    inside = full.startswith(_TOP) and not _INSTALLED.search(full)
    return re.sub(r"__pycache__/([^/.]+)\.[^/]*pyc$", r"\1.py", full[len(_TOP) :]) if inside else ""


def _opener(frame: object) -> str:
    while frame is not None:
        name = frame.f_code.co_filename  # type: ignore[attr-defined]
        if not name.startswith("<") and _relative(name):
            return _relative(name)
        frame = frame.f_back  # type: ignore[attr-defined]
    return ""


def _audit(event: str, arguments: "tuple[object, ...]") -> None:
    if event != "open" or arguments[0] is None:
        return
    path = _relative(arguments[0])
    if not path or path in _seen:
        return
    _seen[path] = opener = _opener(sys._getframe(1))
    try:
        with open(_TOP + path, "rb") as file:
            row = json.dumps([path, opener, _HELPER.search(file.read()) is not None])
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "trace"), "a") as out:
            out.write(row + "\n")
    except OSError:
        pass


if hasattr(sys, "addaudithook"):
    sys.addaudithook(_audit)
