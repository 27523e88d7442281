"""``python serve.py [sglang arguments]``: the SGLang server, tied to the life of the process that started it.

Run as a file by the engine environment's interpreter, which has no other module of this project. The server spawns
child processes; each imports this file again as its main module, so top-level patches apply there too.

Standard input is a pipe whose write end only the owner holds. It closes when the owner stops the server or is killed,
also by SIGKILL; then the whole process group is killed.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any


def _reserve_port() -> socket.socket:
    """A socket that is bound to the server's address, and never listens. Raises OSError where another process has it.

    The server listens there after its imports, which take 10 s; until then any process could be given the port. SGLang
    would not end then: it waits for its warm-up, which waits for the server.
    """
    arguments = dict(itertools.pairwise(sys.argv))
    host = arguments.get("--host", "127.0.0.1")
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's own socket has it
    reserved.bind((host, int(arguments.get("--port", 30000))))
    return reserved


if __name__ == "__main__":
    RESERVED = _reserve_port()

# What imports create lives as long as the process. Collections would walk it again and again, and free nothing.
gc.disable()
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cpu"))
    import cpu_shims

    cpu_shims.install()

import lora_merge  # beside this file, like the next ones
import raw_routes
import store_address
import tensor_updates
import uvicorn.config

uvicorn.config.WS_PROTOCOLS["auto"] = None  # no websockets: SGLang checks the key of HTTP requests only
lora_merge.install(Path(sys.argv[sys.argv.index("--model-path") + 1]))
store_address.install()
tensor_updates.install()
GRAMMARS = None
if importlib.util.find_spec("xgrammar"):
    import grammars

    GRAMMARS = grammars
    GRAMMARS.install()
if "--enable-return-routed-experts" in sys.argv:
    raw_routes.install()
MIRROR = None
if os.environ.get("AGENT_RL_WEIGHT_SYNC") == "delta":
    import mirror

    MIRROR = mirror.install()

gc.freeze()
gc.enable()

KEY = os.environ.get("AGENT_RL_ENGINE_KEY", "")
"""Required of every client. Command lines are visible to other users, so it comes through the environment."""


def _hide_key() -> None:
    """Keep the key out of the log, where SGLang prints its arguments."""
    make_record = logging.getLogRecordFactory()

    def without_key(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        text = record.getMessage()
        if KEY in text:
            record.msg, record.args = text.replace(KEY, "(hidden)"), ()
        return record

    logging.setLogRecordFactory(without_key)


if KEY:
    _hide_key()


def _die_with_owner() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Run sglang's launcher with our arguments."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # the group is killed later, so it must hold only our processes
    threading.Thread(target=_die_with_owner, name="die-with-owner", daemon=True).start()
    from sglang.launch_server import load_plugins, prepare_server_args, run_server
    from sglang.srt.entrypoints import http_server

    raw_routes.serve(http_server)
    if GRAMMARS is not None:
        GRAMMARS.serve(http_server.app)
    if MIRROR is not None:
        mirror.serve(http_server.app, MIRROR)
    load_plugins()
    run_server(prepare_server_args([*sys.argv[1:], *([f"--api-key={KEY}"] if KEY else [])]))


if __name__ == "__main__":
    main()
