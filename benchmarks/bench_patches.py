"""What it costs to read an agent's files from outside its sandbox, where the sandbox's own git was asked for a diff
before.

``python benchmarks/bench_patches.py [--backend docker] [--files 6600] [--pairs 5]`` prints one JSON object, for
a task of the real ones that brings its files along (``local``, if they are built) and one in an image of so many files
(``image``):

- ``taken`` and ``asked``: median seconds until the patch is there, read from outside and asked of git;
- ``grade``: median seconds of what follows and is the same, the patch's grading in a fresh sandbox;
- ``ratio``: of (taken + grade) to (asked + grade) (goal: 1.1).

Both ways are timed in turns, in the same sandbox, and must give patches that change the same paths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import checkout  # noqa: F401
from support import containers

from envs import EnvContext
from envs.swe import SweRecord, diff_files, read_jsonl, start_episode
from envs.swe.diff.git_diff import patched_paths
from envs.swe.grading import grade_patch
from sandbox import ImagePolicy, Sandbox, SandboxSpec, open_backend
from sandbox.docker.client import connect
from tests.envs.images import BUILT, GIT_WITH_A_FUTURE, SYSTEM, directory_image

LINES = 350
ASK = """git add -A -- . ':(exclude,glob)**/__pycache__/**' ':(exclude,glob)**/*.pyc' &&
git -c core.quotePath=false diff --cached --no-color --no-ext-diff --no-textconv --no-renames --full-index HEAD"""
CHECK = (
    "python3 -c 'import calc; assert calc.add(2, 3) == 5' && echo PASSED t.py::test_add || echo FAILED t.py::test_add"
)


def files_of(count: int) -> dict[str, str]:
    """A repository of ``count`` files of 8 KiB, five of which the fix changes."""
    numbered = {
        f"pkg{n % 20}/sub{n % 200}/m{n}.py": "".join(f"v{n}_{i} = {i * n}\n" for i in range(LINES))
        for n in range(count)
    }
    return {**numbered, "calc.py": "def add(a, b):\n    return a - b\n"}


def row(files: Mapping[str, str], image: str) -> SweRecord:
    fixed = {path: text.replace("a - b", "a + b").replace("_7 =", "_seven =") for path, text in files.items()}
    changed = [*list(files)[:4], "calc.py"]
    return SweRecord(
        repo_name="calc",
        docker_image=image,
        expected_output_json='{"test_add": "PASSED"}',
        problem_statement="add(2, 3) gives -1.",
        test_command=f"sleep 1; echo '= short test summary info ='; {CHECK}",
        gold_patch=diff_files({path: files[path] for path in changed}, {path: fixed[path] for path in changed}),
    )


@contextmanager
def image_of(files: Mapping[str, str], backend: str, root: Path) -> Iterator[str]:
    if backend == "bubblewrap":
        yield str(directory_image(root / "image", files, GIT_WITH_A_FUTURE))
        return
    api, name = connect(backend), f"docker.io/bench-{uuid.uuid4().hex[:8]}"
    content = {f"/testbed/{path}": text.encode() for path, text in files.items()}
    containers.build(api, f"{name}/calc:1", content, f"cd /testbed\n{GIT_WITH_A_FUTURE}")
    yield f"{name}/calc:1"
    containers.forget_images(api, name)
    api.close()


async def ask_git(sandbox: Sandbox) -> str:
    return (await sandbox.exec(ASK, timeout=120)).stdout.decode()


async def measure(context: EnvContext, record: SweRecord, pairs: int) -> Mapping[str, float]:
    taken, asked, graded = [], [], []
    async with start_episode(context, record, site_root=BUILT.parent) as episode:
        applied = await episode.sandbox.exec("git apply -", timeout=60, stdin=record.gold.encode())
        assert applied.ok, applied.text
        for _ in range(pairs):
            began = time.perf_counter()
            patch = await episode.patch()
            taken.append(time.perf_counter() - began)
            began = time.perf_counter()
            said = await ask_git(episode.sandbox)
            asked.append(time.perf_counter() - began)
            assert patched_paths(patch) == patched_paths(said)
            began = time.perf_counter()
            assert (await grade_patch(context, record, patch, site_root=BUILT.parent)).resolved
            graded.append(time.perf_counter() - began)
    new, old, grade = (statistics.median(seconds) for seconds in (taken, asked, graded))
    figures = {"taken": new, "asked": old, "grade": grade, "ratio": (new + grade) / (old + grade)}
    return {name: round(value, 3) for name, value in figures.items()}


async def bench(backend_name: str, count: int, pairs: int) -> Mapping[str, object]:
    figures: dict[str, object] = {"load": os.getloadavg()[0], "backend": backend_name, "files": count}
    with tempfile.TemporaryDirectory() as directory, image_of(files_of(count), backend_name, Path(directory)) as image:
        policy = ImagePolicy(root=Path(directory))
        backend = open_backend(backend_name, run_id=f"bench-{uuid.uuid4().hex[:8]}", images=policy)
        limits = SandboxSpec(memory_mb=1024, ro_binds=SYSTEM if backend_name == "bubblewrap" else {})
        try:
            context = EnvContext(backend, limits=limits, grade_timeout=120.0)
            figures["image"] = await measure(context, row(files_of(count), image), pairs)
            if BUILT.is_file():
                local = EnvContext(backend, limits=SandboxSpec(memory_mb=1024), grade_timeout=200.0)
                figures["local"] = await measure(local, read_jsonl(BUILT)[2], pairs)
        finally:
            await backend.close()
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="bubblewrap", choices=("bubblewrap", "docker", "podman"))
    parser.add_argument("--files", type=int, default=6600)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(bench(options.backend, options.files, options.pairs)), indent=1))
