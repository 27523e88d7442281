"""Container images that tests build, and a registry on this machine that they come from."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import docker.errors
import pytest

from sandbox import SandboxUnavailableError
from sandbox.docker.backend import DEFAULT_IMAGE
from sandbox.docker.client import EngineClient, connect


def build(api: EngineClient, tag: str, files: Mapping[str, bytes], set_up: str) -> None:
    """Build image ``tag``: the sandboxes' base image, ``files`` (absolute path -> content), then ``set_up`` run in
    bash.

    No two builds give one image: a process of the tests removes its images, and the sandboxes made of them, by their
    ids.
    """
    if not api.images(DEFAULT_IMAGE):
        pytest.skip(f"the engine has no image {DEFAULT_IMAGE} (python -m sandbox.base_image)")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        recipe = f"FROM {DEFAULT_IMAGE}\nCOPY files /\nCOPY set-up /\nRUN bash -e /set-up && rm /set-up\n"
        named = {f"files{path}": content for path, content in {"/.made-by-a-test": uuid.uuid4().bytes, **files}.items()}
        for name, content in {"Dockerfile": recipe.encode(), "set-up": set_up.encode(), **named}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    context.seek(0)
    said = list(api.build(fileobj=context, custom_context=True, tag=tag, network_mode="none", rm=True, decode=True))
    assert "error" not in said[-1], "".join(line.get("stream", line.get("error", "")) for line in said)


@contextmanager
def built_image(engine: str, files: Mapping[str, bytes], set_up: str) -> Iterator[str]:
    """The name of an image as :func:`build` makes it in ``engine``, removed at the end."""
    try:
        api = connect(engine)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    name = f"docker.io/test-{uuid.uuid4().hex[:8]}"
    build(api, f"{name}/calc:1", files, set_up)
    yield f"{name}/calc:1"
    forget_images(api, name)
    api.close()


@contextmanager
def registry(directory: Path) -> Iterator[str]:
    """A registry that keeps its images in ``directory``; its address. Docker asks those on loopback without
    encryption."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no registry is installed: apt-get install docker-registry")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    storage = {"filesystem": {"rootdirectory": str(directory / "data")}}
    config = {"version": "0.1", "log": {"level": "error"}, "storage": storage, "http": {"addr": address}}
    (directory / "config.json").write_text(json.dumps(config))  # JSON is YAML
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", directory / "config.json"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not _reachable(address):
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.01)
        yield address
    finally:
        process.kill()
        process.wait()


def push(api: EngineClient, image: str) -> None:
    """Push ``image`` to the registry that its name begins with, and forget it here."""
    name, _, tag = image.rpartition(":")
    assert "error" not in str(api.push(name, tag=tag))
    api.remove_image(image, force=True)


def forget_images(api: EngineClient, address: str) -> None:
    """Remove every image that was pulled from, or named for, the registry at ``address``, tagged or not."""
    for image in api.images():
        names = [*(image["RepoTags"] or []), *(image["RepoDigests"] or [])]
        if any(name.startswith(f"{address}/") for name in names):
            with suppress(docker.errors.ImageNotFound):  # it went with another one
                api.remove_image(image["Id"], force=True)


def _reachable(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/v2/", timeout=5).close()
    except OSError:
        return False
    return True
