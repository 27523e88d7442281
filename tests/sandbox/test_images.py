"""Image pulls and removal with a real engine and a real registry on loopback, behind a proxy that injects failures."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import containers
from support.loop_clock import LoopClock

from sandbox import (
    ImageMissingError,
    ImagePolicy,
    ImagePullError,
    ImageSettings,
    SandboxError,
    SandboxPool,
    SandboxSpec,
    bounded,
)
from sandbox.docker.backend import DockerBackend
from sandbox.docker.client import EngineClient, connect, translate_errors
from sandbox.docker.images import ImageStore
from tests.sandbox.conftest import Host

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]
_SIZE = 300_000
Store = Callable[..., ImageStore]


class RegistryProxy:
    """A proxy of the registry: refuses the next ``refusals`` manifests and delays manifests until ``open`` is set."""

    def __init__(self, registry: str) -> None:
        proxy = self
        self.refusals, self.requests, self.waiting, self.max_waiting = 0, 0, 0, 0
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if "/manifests/" in self.path and proxy.refuses():
                    return self.respond(429, {}, b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}')
                accept = {"Accept": ", ".join(self.headers.get_all("Accept", []))}
                request = urllib.request.Request(registry + self.path, headers=accept, method=self.command)
                try:
                    with urllib.request.urlopen(request, timeout=30) as response:
                        self.respond(response.status, dict(response.headers), response.read())
                except urllib.error.HTTPError as error:
                    self.respond(error.code, dict(error.headers), error.read())

            do_HEAD = do_GET

            def respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
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
            self.requests += 1
            self.waiting += 1
            self.max_waiting = max(self.max_waiting, self.waiting)
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
    """The URL of a registry with the images one, two and three of about ``_SIZE`` bytes each."""
    with containers.registry(tmp_path_factory.mktemp("registry")) as address:
        for name in ("one", "two", "three"):
            api.import_image_from_data(some_files(), repository=f"{address}/{name}", tag="1")
            containers.push(api, f"{address}/{name}:1")
        yield f"http://{address}"


@pytest.fixture
def proxy(registry: str, api: EngineClient) -> Iterator[RegistryProxy]:
    proxy = RegistryProxy(registry)
    yield proxy
    proxy.close()
    containers.forget_images(api, proxy.address)


@pytest.fixture
def store(api: EngineClient, tmp_path: Path) -> Callable[..., ImageStore]:
    async def call(work: Callable[[], None], error: type[SandboxError]) -> None:
        await asyncio.to_thread(translate_errors, work, error)

    def make(**policy: float) -> ImageStore:
        images = ImagePolicy(pull=True, initial_backoff=0.01, **policy)
        return ImageStore(api, images, call, tmp_path / "cache/ledger.json")

    return make


def some_files() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        member = tarfile.TarInfo("noise")
        member.size = _SIZE
        tar.addfile(member, io.BytesIO(os.urandom(_SIZE)))
    return stream.getvalue()


def has(api: EngineClient, *images: str) -> list[bool]:
    return [bool(api.images(image)) for image in images]


async def test_a_refused_pull_is_retried(proxy: RegistryProxy, store: Store, api: EngineClient) -> None:
    images, image = store(), f"{proxy.address}/one:1"
    proxy.refusals = 3
    await images.fetch(image)
    assert has(api, image) == [True]
    assert proxy.requests >= 4
    await images.close()


async def test_attempts_are_limited(proxy: RegistryProxy, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    proxy.refusals = 1000
    with pytest.raises(ImagePullError, match=r"one:1' could not be pulled: .*") as error:
        await store(attempts=3).fetch(f"{proxy.address}/one:1")
    assert "\n" not in str(error.value)
    assert len(caplog.records) == 2, "each attempt but the last is logged with its reason"
    assert "slow down" in caplog.text


async def test_a_missing_image_is_not_retried(proxy: RegistryProxy, store: Store) -> None:
    with pytest.raises(ImageMissingError, match="no-such:1' can't be pulled"):
        await store().fetch(f"{proxy.address}/no-such:1")
    assert proxy.requests <= 2  # the engine itself may ask once more, for an older format


async def test_concurrent_pulls_are_limited_and_shared(proxy: RegistryProxy, store: Store, api: EngineClient) -> None:
    images = store(max_concurrent_pulls=2)
    names = [f"{proxy.address}/{name}:1" for name in ("one", "two", "three")]
    proxy.open.clear()
    fetches = [asyncio.create_task(images.fetch(name)) for name in [*names, *names]]
    await Host().until(lambda: proxy.waiting == 2, "two pulls wait")
    fetches[0].cancel()  # the other one that waits for this image still gets it
    proxy.open.set()
    ended = await asyncio.gather(*fetches, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert ended[1:] == [None] * 5
    assert has(api, *names) == [True] * 3
    assert proxy.max_waiting == 2


async def test_budget_removes_only_the_least_recently_used_pulled_image(
    proxy: RegistryProxy, store: Store, api: EngineClient
) -> None:
    images = store(budget_gb=2.5 * _SIZE / 1e9)
    one, two, three = (f"{proxy.address}/{name}:1" for name in ("one", "two", "three"))
    mine = f"{proxy.address}/mine:1"
    api.import_image_from_data(some_files(), repository=f"{proxy.address}/mine", tag="1")
    await images.fetch(one)
    await images.fetch(two)
    images.mark_used(one)
    images.mark_used(mine)
    await images.fetch(three)
    assert has(api, one, two, three, mine) == [True, False, True, True]
    # An image that a container uses stays, and so does one whose name the user gave to another image.
    container = api.create_container(one, ["none"])["Id"]
    try:
        api.tag(mine, f"{proxy.address}/three", tag="1", force=True)
        await images.fetch(two)
        images.mark_used(two)
        await images.fetch(two)
        assert has(api, one, two, three, mine) == [True] * 4
    finally:
        api.remove_container(container)


async def test_a_start_pulls_its_image(
    proxy: RegistryProxy, api: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    image = f"{proxy.address}/one:1"
    without = DockerBackend(run_id="pulls-not")
    with pytest.raises(ImageMissingError, match=f"docker pull {image}"):
        await without.start(SandboxSpec(image=image))
    with pytest.raises(ImageMissingError, match=f"docker pull {image}"):
        await without.image_settings(image)
    await without.close()
    backend = DockerBackend(run_id="pulls", images=ImagePolicy(pull=True))
    assert await backend.image_settings(image) == ImageSettings("/", "0:0")
    sandbox = await backend.start(SandboxSpec(image=image))
    assert await sandbox.read_file("/noise", max_bytes=_SIZE)
    await backend.close()
    (ledger,) = Path(tmp_path, "agent-rl").glob("images-*.json")  # noqa: ASYNC240
    assert image in ledger.read_text()


async def test_a_pull_does_not_count_against_the_start_timeout(
    proxy: RegistryProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pool, clock = SandboxPool(DockerBackend(run_id="slow-pull", images=ImagePolicy(pull=True))), LoopClock()
    proxy.open.clear()

    async def start() -> None:
        async with bounded(600, "starting the task"):
            await pool.start(SandboxSpec(image=f"{proxy.address}/two:1"))

    starting = asyncio.create_task(start())
    await Host().until(lambda: proxy.waiting > 0, "the pull waits")
    await clock.put_forward(5000)
    proxy.open.set()
    await starting
    await pool.close()
