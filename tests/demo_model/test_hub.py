"""Models by their hub id, from a fake hub on this machine: downloads resume, work offline, or are refused."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from agent_rl.config.loader import MODELS

pytestmark = pytest.mark.slow

COMMIT = "c0ffee" * 6 + "c0ff"
FILES = {
    **{path.name: path.read_bytes() for path in MODELS["tiny-moe"].iterdir() if path.is_file()},
    "model.safetensors": bytes(24 << 20),  # the hub's client writes pieces of 10 MiB
    "pytorch_model.bin": b"the same weights in another form",
}
FETCH = """
import sys
from pathlib import Path
from agent_rl.errors import UserError
from agent_rl.models.hub import fetch_model
try:
    print(fetch_model(Path(sys.argv[1]), "model"))
except UserError as error:
    sys.exit(str(error))
"""


@dataclass
class Hub:
    """``ranges``: the first byte that each request for a file wants; ``sent``: the bytes sent."""

    url: str = ""
    cut: set[str] = field(default_factory=set)
    ranges: dict[str, list[int]] = field(default_factory=dict)
    sent: int = 0

    async def info(self, request: web.Request) -> web.Response:
        name, revision = request.match_info["name"], request.match_info["revision"]
        known = "RepoNotFound" if name != "tiny" else "" if revision in ("main", COMMIT) else "RevisionNotFound"
        if error := "GatedRepo" if name == "gated" else known:
            status = 403 if name == "gated" else 404
            return web.json_response({"error": error}, status=status, headers={"X-Error-Code": error})
        return web.json_response({"id": "acme/tiny", "sha": COMMIT, "siblings": [{"rfilename": at} for at in FILES]})

    async def tree(self, request: web.Request) -> web.Response:
        files = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
        return web.json_response(files)

    async def file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        start = int((re.findall(r"bytes=(\d+)-", request.headers.get("range", "")) or ["0"])[0])
        data = FILES[name][start:]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Content-Length": str(len(data))}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        self.ranges.setdefault(name, []).append(start)
        answer = web.StreamResponse(status=206 if start else 200, headers=headers)
        await answer.prepare(request)
        whole = name not in self.cut
        part = data if whole else data[: len(data) // 2]
        self.sent += len(part)
        await answer.write(part)
        if not whole:
            await asyncio.sleep(0)
            request.transport.close()  # the connection breaks
        return answer


@asynccontextmanager
async def hub(cut: set[str]) -> AsyncIterator[Hub]:
    served = Hub(cut=cut)
    app = web.Application()
    app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", served.info)
    app.router.add_get("/api/models/{owner}/{name}/tree/{revision}", served.tree)
    app.router.add_route("*", "/{owner}/{name}/resolve/{revision}/{file}", served.file)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


async def fetched(name: str, url: str, home: Path, **more: str) -> tuple[int, str, str]:
    """The exit code, output and error of a process that fetches ``name``."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **more}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FETCH, name, stdout=-1, stderr=-1, env=environment, cwd=Path(__file__).parents[2]
    )
    out, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode().strip(), error.decode().strip()


@pytest.mark.long
async def test_a_download_resumes_after_a_broken_connection_and_is_found_offline(tmp_path: Path) -> None:
    async with hub({"model.safetensors"}) as served:
        code, _, error = await fetched("acme/tiny", served.url, tmp_path)
        assert (code, error.splitlines()[-1].endswith("start again to resume the download")) == (1, True), error
        served.cut.clear()
        code, directory, bars = await fetched("acme/tiny", served.url, tmp_path)
        assert code == 0, bars
        assert "model.safetensors" in bars or "Fetching" in bars, "it says how far it is"
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            assert (Path(directory) / name).read_bytes() == FILES[name]
        assert not (Path(directory) / "pytorch_model.bin").exists()
        assert max(served.ranges["model.safetensors"]) > 0, "a broken connection goes on where it was"
        assert served.ranges["tokenizer.json"] == [0], "a complete file is not fetched again"
        sent = served.sent
        assert (await fetched(f"acme/tiny@{COMMIT}", served.url, tmp_path))[:2] == (0, directory)
        assert served.sent == sent, "what is cached is not fetched again"
    assert (await fetched("acme/tiny", served.url, tmp_path))[:2] == (0, directory), "the hub is gone"
    (Path(directory) / "model.safetensors").unlink()
    code, _, error = await fetched("acme/tiny", served.url, tmp_path, HF_HUB_OFFLINE="1")
    assert (code, error.count("\n"), error.split(":")[1]) == (1, 0, " acme/tiny")
    assert "download it where there is a network" in error


async def test_a_model_that_the_hub_does_not_return_is_one_line(tmp_path: Path) -> None:
    async with hub(set()) as served:
        url = served.url
        names = ("acme/other", "acme/gated", "acme/tiny@v9")
        errors = [(await fetched(name, url, tmp_path))[2] for name in names]
    errors.append((await fetched("acme/tiny", url, tmp_path))[2])
    reasons = (
        f"{url} has no such model, or needs a token that may read it (HF_TOKEN)",
        f"{url} requires accepting its terms: do so, and set HF_TOKEN",
        f"{url} has no revision v9 of it",
        f"not in the cache ({tmp_path}/hub), and {url} cannot be reached: name a directory, or download it where there "
        "is a network (hf download acme/tiny)",
    )
    for name, error, reason in zip((*names, "acme/tiny"), errors, reasons, strict=True):
        assert error == f"model: {name}: no directory here, {'' if reason.startswith('not') else 'and '}{reason}"
