"""What the negative control of a success costs: the time of a grading with it over one without, on the real tasks.

``python -m benchmarks.bench_mutants --tasks .cache/tasks/real.jsonl --repeats 5`` prints one line per task and the
median ratio. Each task is graded with a fix that differs from the reference fix in one added file.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import uuid
from pathlib import Path

from envs import EnvContext
from envs.swe import SweRecord, diff_files, read_jsonl
from envs.swe.diff.git_diff import split_patch
from envs.swe.grading import grade_changes
from sandbox import SandboxSpec
from sandbox.factory import open_backend


async def measure(context: EnvContext, record: SweRecord, root: Path, repeats: int) -> list[float]:
    """The ratios of a task's gradings. The first one, which reads the hidden tests, counts too."""
    parts = list(split_patch(record.gold + diff_files({}, {"agent_notes.txt": "done\n"})))
    controls = {}
    ratios = []
    for _ in range(repeats):
        grade = await grade_changes(context, record, parts, site_root=root, controls=controls)
        assert grade.resolved, grade.suspected_hack
        ratios.append(grade.seconds / (grade.seconds - grade.mutant_seconds))
    return ratios


async def main(tasks: Path, repeats: int, backend_name: str) -> None:
    backend = open_backend(backend_name, run_id=f"bench-{uuid.uuid4().hex[:8]}")
    try:
        context = EnvContext(backend, limits=SandboxSpec(memory_mb=1024), grade_timeout=300.0)
        every: list[float] = []
        for record in read_jsonl(tasks):
            ratios = await measure(context, record, tasks.parent, repeats)
            every += ratios
            print(f"{record.id:24} {' '.join(f'{ratio:.2f}' for ratio in ratios)}", flush=True)
        print(f"median {statistics.median(every):.2f} of {len(every)} gradings, at most {max(every):.2f}")
    finally:
        await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=Path, default=Path(".cache/tasks/real.jsonl"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="bubblewrap")
    options = parser.parse_args()
    asyncio.run(main(options.tasks, options.repeats, options.backend))
