"""Finds which hidden tests can run apart from the code: ``python -m envs.swe.isolate TASKS --out MORE_TASKS``.

The tests of a record run in a sandbox of their own, with the gold patch twice and once without a change. Those that
have their expected status both times become the record's ``isolated``, provided that one of them fails without a
change.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from envs.context import EnvContext
from envs.swe.adjudication import read_run
from envs.swe.records import SweRecord, write_jsonl
from envs.swe.sandboxes import run_apart, sandbox_spec
from envs.swe.sources import read_jsonl
from envs.types import EnvsError
from sandbox import SandboxError, SandboxSpec, open_backend


async def isolate(context: EnvContext, record: SweRecord, site_root: Path) -> tuple[SweRecord, int]:
    """The record with its ``isolated`` tests, and how many of them fail without a change. Raises ``SandboxError``."""
    if not (record.is_local and record.runs_pytest):
        return record, 0
    gold = [await _statuses(context, record, record.gold, site_root) for _ in range(2)]
    fit = [test for test, status in record.expected.items() if all(run.get(test) == status for run in gold)]
    before = await _statuses(context, record, "", site_root)
    failing = sum(before.get(test) != record.expected[test] for test in fit)
    return record.model_copy(update={"isolated": tuple(fit) if failing else ()}), failing


async def _statuses(context: EnvContext, record: SweRecord, patch: str, site_root: Path) -> Mapping[str, str]:
    run = await run_apart(context, record, sandbox_spec(context, record, site_root), patch)
    verdict = await asyncio.to_thread(read_run, record, run)
    return verdict.tests if verdict else {}


async def _isolate_all(tasks: Path, out: Path, backend_name: str) -> None:
    backend = open_backend(backend_name, run_id=f"isolate-{uuid.uuid4().hex[:8]}")
    context = EnvContext(backend, limits=SandboxSpec(memory_mb=1024, cpus=2.0))
    done = []
    try:
        for record in read_jsonl(tasks):
            found, failing = await isolate(context, record, tasks.parent)
            done.append(found)
            share = f"{len(found.isolated)} of {len(record.expected)} tests run apart"
            print(f"{record.id}: {share}, {failing} of them fail without a change", flush=True)
    finally:
        await backend.close()
    write_jsonl(out, done)


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit code 2 and one line for what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m envs.swe.isolate", description="Find tests that can run apart.")
    parser.add_argument("tasks", type=Path, help="a JSONL file of task records")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write, in the same directory")
    parser.add_argument("--backend", default="auto", help="the sandbox where the tests run (default %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.out.resolve().parent != arguments.tasks.resolve().parent:
            raise EnvsError(f"--out {arguments.out}: right would be a file in the directory of {arguments.tasks}")
        asyncio.run(_isolate_all(arguments.tasks, arguments.out, arguments.backend))
    except (EnvsError, SandboxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
