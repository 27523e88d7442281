"""What the negative control of a success costs: the time of gradings with it over the time without, on the real tasks.

``python -m benchmarks.bench_mutants --tasks .cache/tasks/real.jsonl --repeats 5`` prints one line per task with the
ratio for a success and for an epoch of which half of the gradings are successes, and the medians. A success is a fix
that differs from the reference fix in one added file; a failure adds that file alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import uuid
from pathlib import Path

from envs import EnvContext
from envs.swe import SweRecord, diff_files, read_jsonl
from envs.swe.adjudication import Controls
from envs.swe.diff.git_diff import split_patch
from envs.swe.grading import grade_changes
from sandbox import SandboxSpec
from sandbox.factory import open_backend


async def measure(context: EnvContext, record: SweRecord, root: Path, repeats: int) -> list[tuple[float, float]]:
    """The ratios of a task's successes and epochs. The first success, which reads the hidden tests, counts too."""
    notes = diff_files({}, {"agent_notes.txt": "done\n"})
    controls: Controls = {}
    ratios = []
    for _ in range(repeats):
        success, failure = [
            await grade_changes(context, record, list(split_patch(patch)), site_root=root, controls=controls)
            for patch in (record.gold + notes, notes)
        ]
        assert (success.resolved, failure.resolved) == (True, False), success.suspected_hack
        without = success.seconds - success.mutant_seconds
        ratios.append((success.seconds / without, (success.seconds + failure.seconds) / (without + failure.seconds)))
    return ratios


async def main(tasks: Path, repeats: int, backend_name: str) -> None:
    backend = open_backend(backend_name, run_id=f"bench-{uuid.uuid4().hex[:8]}")
    try:
        context = EnvContext(backend, limits=SandboxSpec(memory_mb=1024), grade_timeout=300.0)
        every: list[tuple[float, float]] = []
        for record in read_jsonl(tasks):
            ratios = await measure(context, record, tasks.parent, repeats)
            every += ratios
            print(f"{record.id:24} {' '.join(f'{success:.2f}/{epoch:.2f}' for success, epoch in ratios)}", flush=True)
        for name, column in zip(("a success", "an epoch with 50 % successes"), zip(*every, strict=True), strict=True):
            print(f"{name}: median {statistics.median(column):.2f} of {len(every)}, at most {max(column):.2f}")
    finally:
        await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=Path, default=Path(".cache/tasks/real.jsonl"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="bubblewrap")
    options = parser.parse_args()
    asyncio.run(main(options.tasks, options.repeats, options.backend))
