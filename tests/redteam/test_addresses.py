"""Which addresses the parts of a run choose for their sockets."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.listeners import listeners_of

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer, ServerNode
from agent_rl.engine.ray_actor import ServerRequest
from agent_rl.utils.sockets import LOOPBACK_INTERFACE, address_towards, is_loopback, listen_at, on_loopback

pytestmark = pytest.mark.redteam

URLS = {
    (): True,
    ("http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"): True,
    ("http://127.0.0.1:1", "http://192.0.2.7:2"): False,
    ("http://127.0.0.1.example.org:1",): False,
    ("http://localhost.example.org:1",): False,
}


@pytest.mark.parametrize("urls", URLS)
def test_engines_are_local_by_their_address(urls: tuple[str, ...]) -> None:
    assert on_loopback(urls) is URLS[urls]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "2001:db8::1", "node-7", "", "::ffff:192.0.2.7"])
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listener_is_at_its_address_only(host: str) -> None:
    with listen_at(host) as listener:
        found = [each for each in listeners_of({os.getpid()}) if each.port == listener.getsockname()[1]]
        assert [each.address for each in found] == [host]
        assert address_towards(host) == host


def test_the_kernels_tables_are_read_as_they_are() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as everywhere:
        [found] = [each for each in listeners_of({os.getpid()}) if each.port == everywhere.getsockname()[1]]
    assert found.address == "::"
    assert not found.on_loopback


def test_a_server_on_loopback_keeps_gloo_and_nccl_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOOPBACK_INTERFACE:
        monkeypatch.delenv(name, raising=False)

    def environment(node: ServerNode) -> dict[str, str]:
        return EngineServer(EngineConfig(device="cpu"), tmp_path, tmp_path / "log", node=node)._environment()

    assert environment(ServerNode()).items() >= LOOPBACK_INTERFACE.items()
    assert not environment(ServerNode("192.0.2.7")).keys() & LOOPBACK_INTERFACE.keys()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert environment(ServerNode())["GLOO_SOCKET_IFNAME"] == "eth7"


def test_each_process_has_a_key_of_its_own_for_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    key = EngineConfig().api_key
    assert key is not None
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert EngineConfig().headers == {"authorization": f"Bearer {key}"}
    assert EngineConfig(urls=("http://127.0.0.1:1",)).headers == {}, "it is sent to no other server"
    monkeypatch.setenv("MY_KEY", "mine")
    assert EngineConfig(api_key_env="MY_KEY").api_key == "mine"


def test_a_key_is_in_no_command_line_and_no_message(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", python=sys.executable)
    server = EngineServer(config, tmp_path, tmp_path / "log", key="the-key")
    assert "the-key" not in str(server._command())
    request: Any = ServerRequest(config, tmp_path, 0, True, ServerNode(), tmp_path, "the-key")
    assert "the-key" not in repr(request)
    assert config.api_key not in config.model_dump_json()
    assert config.api_key not in repr(config)


async def test_a_key_may_begin_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would take it for an option."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "engine"))
    from fake_interpreter import make_interpreter

    config = EngineConfig(device="cpu", python=str(make_interpreter(tmp_path)))
    server = EngineServer(config, tmp_path, tmp_path / "log", key="-key")
    await server.start()
    await server.stop()
    assert "--api-key=-key" in (tmp_path / "starts").read_text().split()


GLOO = """
import os, sys
sys.path[:0] = sys.argv[1:]
from agent_rl.weight_sync.bucket_sender import join_group
from agent_rl.utils.sockets import LOOPBACK_INTERFACE
from support.listeners import listeners_of
os.environ.update(LOOPBACK_INTERFACE)
group = join_group("127.0.0.1", int(sys.argv[-1]), 0, 1, "alone", "gloo", 30.0)
print(sorted({each.address for each in listeners_of({os.getpid()})}))
"""


@pytest.mark.megatron
def test_the_group_of_a_weight_update_listens_on_loopback() -> None:
    with listen_at("127.0.0.1") as probe:
        port = probe.getsockname()[1]
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    ended = subprocess.run([sys.executable, "-c", GLOO, *paths, str(port)], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "['127.0.0.1']", ended.stderr
