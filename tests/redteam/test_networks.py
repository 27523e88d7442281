"""Code in a sandbox reaches no socket of the host and none of another sandbox: servers of a run, torch's stores,
sockets without a path, shared memory, and whatever an interface would lead to."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
from support.contexts import used_backend_of

from sandbox import Sandbox, SandboxBackend, SandboxSpec
from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.redteam, pytest.mark.slow]

ABSTRACT = "agent-rl-redteam"
PROBES = {
    "connects to the host's loopback": "reach((LOOPBACK, PORT))",
    "connects to the host's loopback over IPv6": "reach(('::1', PORT6), socket.AF_INET6)",
    "connects to the host's own address": "reach((HOST, PORT))",
    "connects to the address that means every interface": "reach(('0.0.0.0', PORT))",
    "sends datagrams to the host": "datagram()",
    "opens the host's abstract socket": "reach('\\0' + ABSTRACT, socket.AF_UNIX)",
    "looks for a torch store on the loopback": "reach((LOOPBACK, STORE))",
    "asks for a name": "socket.getaddrinfo('example.org', 80)",
    "asks the metadata server of a cloud": "reach(('169.254.169.254', 80))",
    "looks for other sandboxes on the usual bridges": "neighbors()",
    "has an interface besides its loopback": "interfaces()",
    "opens a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); won('opened')",
    "opens a packet socket": "packets()",
    "adds an interface": "run('ip link add dummy0 type dummy && ip addr add 10.9.9.9/24 dev dummy0')",
    "makes a network namespace": "run('unshare -rn true && ip netns add x && nsenter -t 1 -n true')",
    "enters the network of process 1": "enter()",
    "listens to the kernel's connector": "connector()",
    "opens a virtual machine's socket": "reach((2, 1024), 40)",
    "talks to the container engine": "engine()",
    "reads the shared memory of another sandbox": "shared()",
    "finds the process of another sandbox": "processes()",
    "reaches the abstract socket of another sandbox": "reach('\\0' + ABSTRACT + '-neighbor', socket.AF_UNIX)",
    "reaches the port of another sandbox": "reach((LOOPBACK, 34567))",
}
PRELUDE = """
import ctypes, glob, os, socket, struct, subprocess, sys

class Won(Exception): pass

def won(how): raise Won(how)

def reach(address, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        client.connect(address)
        won(f"connected to {address}")

def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(1)
        client.connect((HOST, PORT))
        client.send(b"agent")
        won("sent")

def neighbors():
    for network in ("172.17.0", "172.18.0", "10.88.0", "10.0.2", HOST.rpartition(".")[0]):
        for last in (1, 2, 3):
            with socket.socket() as client:
                client.settimeout(0.1)
                if client.connect_ex((f"{network}.{last}", 22)) in (0, 111):
                    won(f"{network}.{last} answers")
    raise OSError("no route to any")

def interfaces():
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    up = [name for name in names if open(f"/sys/class/net/{name}/operstate").read().strip() == "up"]
    won(up) if up else print("none that is up", end=" ")

def packets():
    with socket.socket(17, socket.SOCK_RAW, socket.htons(3)) as raw:
        raw.bind(("eth0", 0))
        won("bound")

def run(command):
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=5)
    won("it ran") if done.returncode == 0 else print(done.stderr.strip()[-80:], end=" ")

def connector():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11) as kernel:
        kernel.settimeout(1)
        kernel.bind((0, 1))
        kernel.send(struct.pack("=IHHII", 40, 3, 0, 0, os.getpid()) + struct.pack("=IIIIHHI", 1, 1, 0, 0, 4, 0, 1))
        won(kernel.recv(1000))

def enter():
    before = os.readlink("/proc/self/ns/net")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open("/proc/1/ns/net", os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if os.readlink("/proc/self/ns/net") != before: won("entered")

def engine():
    for path in ENGINES: 
        if os.path.exists(path): reach(path, socket.AF_UNIX)
    raise OSError("no socket of an engine")

def shared():
    found = [path for path in glob.glob("/dev/shm/*") + glob.glob("/dev/mqueue/*") if "agent-rl" in path]
    segments = open("/proc/sysvipc/shm").read().splitlines()[1:] if os.path.exists("/proc/sysvipc/shm") else []
    won(found + segments) if found or segments else print("nothing there", end=" ")

def processes():
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        if b"neighbor-" + b"marker" in open(path, "rb").read(): won(path)
    print("not among its processes", end=" ")
"""
NEIGHBOR = """
import socket, time
kept = open("/dev/shm/agent-rl-neighbor", "w")
server = socket.create_server(("0.0.0.0", 34567))
named = socket.socket(socket.AF_UNIX); named.bind("\\0" + NAME + "-neighbor"); named.listen()
open("ready", "w").close()
time.sleep(60)
"""
BACKENDS = {
    "bubblewrap": ("bubblewrap", {}, [pytest.mark.bubblewrap]),
    "docker": ("docker", {}, [pytest.mark.docker, pytest.mark.exhaustive]),
    "podman": ("podman", {}, [pytest.mark.podman, pytest.mark.exhaustive]),
    "gVisor": ("docker", {"runtime": "runsc"}, [pytest.mark.docker, pytest.mark.exhaustive]),
}


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, (_, _, marks) in BACKENDS.items()])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    name, options, _ = BACKENDS[request.param]
    async with used_backend_of(name, **options) as backend:
        yield backend


@pytest.fixture
def targets() -> Iterator[dict[str, object]]:
    """Listeners of the host, a torch store among them, and what a sandbox would need to know to find them."""
    with ExitStack() as stack:
        host = _own_address()
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        tcp6 = stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.bind("\0" + ABSTRACT)
        named.listen()
        store = pytest.importorskip("torch.distributed").TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
        )
        engines = [os.environ.get(name, "").removeprefix("unix://") for name in ("DOCKER_HOST", "CONTAINER_HOST")]
        yield {
            "LOOPBACK": "127.0.0.1", "HOST": host, "PORT": tcp.getsockname()[1], "PORT6": tcp6.getsockname()[1],
            "STORE": store.port, "ABSTRACT": ABSTRACT,
            "ENGINES": [*filter(None, engines), "/var/run/docker.sock", "/run/podman/podman.sock"],
        }  # fmt: skip


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


async def test_no_probe_reaches_anything(backend: SandboxBackend, targets: dict[str, object]) -> None:
    spec = SandboxSpec(memory_mb=256)
    neighbor, agent = await backend.start(spec), await backend.start(spec)
    beside = ["python3", "-c", f"NAME = {ABSTRACT!r}\n{NEIGHBOR}", "neighbor-marker"]
    serving = asyncio.create_task(neighbor.exec(beside, timeout=60))
    try:
        await _probe(backend, agent, targets)
        assert not serving.done(), serving.result().text
        assert await neighbor.read_file("ready") == b""
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def _probe(backend: SandboxBackend, agent: Sandbox, targets: dict[str, object]) -> None:
    program = "\n".join(f"{name} = {value!r}" for name, value in targets.items()) + PRELUDE
    for name, code in PROBES.items():
        body = f"try: {code}\nexcept Won as how: print('WON', how)\nexcept Exception as error: print(repr(error))\n"
        done = await agent.exec(["python3", "-c", f"{program}\n{body}"], timeout=20)
        assert done.exit_code == 0, (name, done.text)
        assert b"WON" not in done.stdout, (name, done.text)
        report_stopped(f"code that {name} ({backend.name})", done.text.strip()[-120:])


def test_the_probes_would_find_what_is_open(targets: dict[str, object]) -> None:
    """The code wins on the host itself, so a refusal is the sandbox's."""
    for port in ("PORT", "STORE"):
        with socket.create_connection(("127.0.0.1", int(str(targets[port]))), timeout=5):
            pass
