"""Who may use Ray: a local one listens on loopback only and refuses every call without its random token.

Ray's token mode is off by default, and a server of Ray runs any code for any caller. A cluster has the mode and the
token of its own environment (``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN`` or ``RAY_AUTH_TOKEN_PATH``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager


def new_token() -> dict[str, str]:
    """The environment variables of a local Ray with a new token. Its processes inherit them; no command line has
    them."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def requires_token() -> bool:
    """Whether this process's environment has Ray's token mode. A cluster without it accepts every client."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def read_token() -> None:
    """Read mode and token from the environment. Ray reads them once in a process, and keeps those of a session before.
    The connection that is opened next keeps them."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # missing in Ray's types

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def on_loopback() -> Iterator[None]:
    """A Ray that starts within the block has the node address 127.0.0.1, and all of its servers listen only there. (Ray
    replaces the argument ``_node_ip_address="127.0.0.1"`` by an address that other machines reach.)"""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
