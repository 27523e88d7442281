"""Image pulls and removal: a real engine against a real registry on loopback, behind a door that fails when told."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import containers
from support.loop_clock import LoopClock

from sandbox import ImageMissingError, ImagePolicy, ImagePullError, SandboxError, SandboxPool, SandboxSpec, bounded
from sandbox.docker.backend import DockerBackend
from sandbox.docker.engine import EngineClient, connect, converted
from sandbox.docker.images import ImageStore

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]
_SIZE = 300_000


class Door:
    """The registry as the engine sees it. ``refusals`` counts down; while ``open`` is not set, manifests wait."""

    def __init__(self, registry: str) -> None:
        door = self
        self.refusals, self.asked, self.waiting, self.most_waiting = 0, 0, 0, 0
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if "/manifests/" in self.path and door.refuses():
                    return self.answer(429, {}, b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}')
                accept = {"Accept": ", ".join(self.headers.get_all("Accept", []))}
                request = urllib.request.Request(registry + self.path, headers=accept, method=self.command)
                try:
                    with urllib.request.urlopen(request, timeout=30) as response:
                        self.answer(response.status, dict(response.headers), response.read())
                except urllib.error.HTTPError as error:
                    self.answer(error.code, dict(error.headers), error.read())

            do_HEAD = do_GET

            def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                headers.setdefault("Content-Length", str(len(body)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def refuses(self) -> bool:
        with self._lock:
            self.asked += 1
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
        self.open.wait(60)
        with self._lock:
            self.waiting -= 1
            self.refusals -= 1
            return self.refusals >= 0

    def close(self) -> None:
        self.open.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def api() -> Iterator[EngineClient]:
    api = connect()
    yield api
    api.close()


@pytest.fixture(scope="module")
def registry(api: EngineClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a registry that has the images one, two and three, each of about ``_SIZE`` bytes."""
    with containers.registry(tmp_path_factory.mktemp("registry")) as address:
        for name in ("one", "two", "three"):
            api.import_image_from_data(some_files(), repository=f"{address}/{name}", tag="1")
            containers.push(api, f"{address}/{name}:1")
        yield f"http://{address}"


@pytest.fixture
def door(registry: str, api: EngineClient) -> Iterator[Door]:
    door = Door(registry)
    yield door
    door.close()
    containers.forget_images(api, door.address)


@pytest.fixture
def store(api: EngineClient, tmp_path: Path) -> Callable[..., ImageStore]:
    async def call(work: Callable[[], None], error: type[SandboxError]) -> None:
        await asyncio.to_thread(converted, work, error)

    def make(**policy: float) -> ImageStore:
        return ImageStore(api, ImagePolicy(pull=True, first_wait=0.01, **policy), call, tmp_path / "cache/ledger.json")

    return make


def some_files() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo("noise")
        member.size = _SIZE
        tar.addfile(member, io.BytesIO(os.urandom(_SIZE)))
    return stream.getvalue()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has(api: EngineClient, *images: str) -> list[bool]:
    return [bool(api.images(image)) for image in images]


async def test_a_pull_goes_on_after_refusals(door: Door, store: Callable[..., ImageStore], api: EngineClient) -> None:
    images, image = store(), f"{door.address}/one:1"
    door.refusals = 3
    await images.fetch(image)
    assert has(api, image) == [True]
    assert door.asked >= 4
    await images.close()


async def test_attempts_are_bounded(
    door: Door, store: Callable[..., ImageStore], caplog: pytest.LogCaptureFixture
) -> None:
    door.refusals = 1000
    with pytest.raises(ImagePullError, match=r"one:1' could not be pulled: .*") as error:
        await store(attempts=3).fetch(f"{door.address}/one:1")
    assert "\n" not in str(error.value)
    assert len(caplog.records) == 2, "each attempt but the last is told with its reason"
    assert "slow down" in caplog.text


async def test_what_no_registry_has_is_asked_for_once(door: Door, store: Callable[..., ImageStore]) -> None:
    with pytest.raises(ImageMissingError, match="no-such:1' can't be pulled"):
        await store().fetch(f"{door.address}/no-such:1")
    assert door.asked <= 2  # the engine itself may ask once more, for an older format


async def test_pulls_at_once_are_bounded_and_shared(
    door: Door, store: Callable[..., ImageStore], api: EngineClient
) -> None:
    images = store(pulls_at_once=2)
    names = [f"{door.address}/{name}:1" for name in ("one", "two", "three")]
    door.open.clear()
    fetches = [asyncio.create_task(images.fetch(name)) for name in [*names, *names]]
    await asyncio.to_thread(wait_until, lambda: door.waiting == 2)
    fetches[0].cancel()  # the other one that waits for this image still gets it
    door.open.set()
    ended = await asyncio.gather(*fetches, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert ended[1:] == [None] * 5
    assert has(api, *names) == [True] * 3
    assert door.most_waiting == 2


async def test_the_one_used_longest_ago_goes_and_never_what_is_not_ours(
    door: Door, store: Callable[..., ImageStore], api: EngineClient
) -> None:
    images = store(budget_gb=2.5 * _SIZE / 1e9)
    one, two, three = (f"{door.address}/{name}:1" for name in ("one", "two", "three"))
    mine = f"{door.address}/mine:1"
    api.import_image_from_data(some_files(), repository=f"{door.address}/mine", tag="1")
    await images.fetch(one)
    await images.fetch(two)
    images.used(one)
    images.used(mine)
    await images.fetch(three)
    assert has(api, one, two, three, mine) == [True, False, True, True]
    # One that a container uses stays, and so does one that the user has put something else under the name of.
    container = api.create_container(one, ["none"])["Id"]
    try:
        api.tag(mine, f"{door.address}/three", tag="1", force=True)
        await images.fetch(two)
        images.used(two)
        await images.fetch(two)
        assert has(api, one, two, three, mine) == [True] * 4
    finally:
        api.remove_container(container)


async def test_a_sandbox_brings_its_image(
    door: Door, api: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    image = f"{door.address}/one:1"
    without = DockerBackend(run_id="pulls-not")
    with pytest.raises(ImageMissingError, match=f"docker pull {image}"):
        await without.start(SandboxSpec(image=image))
    await without.close()
    backend = DockerBackend(run_id="pulls", images=ImagePolicy(pull=True))
    sandbox = await backend.start(SandboxSpec(image=image))
    assert await sandbox.read_file("/noise", max_bytes=_SIZE)
    await backend.close()
    (ledger,) = Path(tmp_path, "agent-rl").glob("images-*.json")  # noqa: ASYNC240
    assert image in ledger.read_text()


async def test_a_pull_takes_nothing_of_a_start(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pool, clock = SandboxPool(DockerBackend(run_id="slow-pull", images=ImagePolicy(pull=True))), LoopClock()
    door.open.clear()

    async def start() -> None:
        async with bounded(600, "starting the task"):
            await pool.start(SandboxSpec(image=f"{door.address}/two:1"))

    starting = asyncio.create_task(start())
    await asyncio.to_thread(wait_until, lambda: door.waiting > 0)
    await clock.put_forward(5000)
    door.open.set()
    await starting
    await pool.close()
