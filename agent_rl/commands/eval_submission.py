"""``agent-rl eval submission``: an evaluation in the form of SWE-bench's leaderboard (SWE-bench/experiments on GitHub).

::

    all_preds.jsonl               the patch of each graded task, as swebench's harness reads it too
    metadata.yaml                 facts of the entry; the submitter fills in what is empty
    README.md                     settings and counts of the evaluation; the submitter describes the system in it
    trajs/<task>.json             messages and turns
    logs/<task>/patch.diff        the patch
    logs/<task>/test_output.txt   what its tests printed
    logs/<task>/report.json       swebench's report of the task
    results/results.json          ids of resolved tasks, tasks without patch, and tasks without test output

The repository's ``analysis/get_results.py`` grades the files below ``logs`` again and writes ``results`` itself. It
takes a task without a patch from the absence of its directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agent_rl.errors import AgentRlError, UserError
from agent_rl.evaluation.directory import last_graded, log_path, prediction, read_results
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.utils import foreign
from agent_rl.utils.run_files import write_atomic, write_json

MAX_BYTES = 64 << 20
"""Limit of one log."""
_HIDDEN = ("tests", "patch")
"""Fields of an episode's log that its trajectory leaves out: the names of hidden tests, and the patch."""


def run_eval_submission(evaluation: Path, out: Path, *, sample: int) -> None:
    """Write sample ``sample`` of each task of ``evaluation`` to the new directory ``out``. Raises UserError."""
    try:
        report = json.loads(foreign.read(evaluation, "report.json"))
        results = last_graded(read_results(evaluation / "results.jsonl"))
        model, tasks = str(report["model"] or report["policy"]), [str(one["task_id"]) for one in report["outcomes"]]
    except (OSError, ValueError, KeyError, TypeError, AgentRlError) as error:
        raise UserError(f"{evaluation}: expected the directory of a finished `agent-rl eval` ({error})") from None
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: not empty; give a new directory")
    graded = sorted((one for one in results.values() if one.sample == sample), key=lambda one: one.task_id)
    if not graded:
        raise UserError(f"{evaluation}: no graded sample {sample}")
    rows = [json.dumps(prediction(one, model)) + "\n" for one in graded]
    without_log = []
    for one in graded:
        ran_tests = _write_trajectory(evaluation, out, one)
        if one.patch and not _write_logs(evaluation, out, one, applied=ran_tests):
            without_log.append(one.task_id)
    resolved = [one.task_id for one in graded if one.resolved]
    no_patch = sorted(set(tasks) - {one.task_id for one in graded if one.patch})
    write_atomic(out / "all_preds.jsonl", "".join(rows).encode())
    write_json(out / "results/results.json", {"no_generation": no_patch, "no_logs": without_log, "resolved": resolved})
    write_atomic(out / "metadata.yaml", yaml.safe_dump(_metadata(model), sort_keys=False).encode())
    write_atomic(out / "README.md", _readme(model, report, len(graded), len(tasks), len(resolved)).encode())
    print(f"{out}: {len(graded)} predictions, {len(resolved)} resolved")
    if without_log:
        print(f"{len(without_log)} tasks have no test output, first {without_log[0]!r}")
    print(f"fill in {out / 'metadata.yaml'} and {out / 'README.md'}")


def _write_trajectory(evaluation: Path, out: Path, result: EpisodeResult) -> bool:
    """Write the episode's log. Returns whether a test of it ran, which shows that its patch was applied."""
    source = log_path(evaluation, result.task_id, result.sample)
    try:
        log = json.loads(foreign.read(evaluation, source.relative_to(evaluation).as_posix(), MAX_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: not readable ({error}); expected the log of an episode") from None
    shown = {name: value for name, value in log.items() if name not in _HIDDEN}
    write_atomic(out / "trajs" / f"{source.parent.name}.json", json.dumps(shown, indent=1).encode())
    return bool(log.get("tests"))


def _write_logs(evaluation: Path, out: Path, result: EpisodeResult, *, applied: bool) -> bool:
    """Write the files of a task with a patch. Returns whether it has test output."""
    source = log_path(evaluation, result.task_id, result.sample).with_suffix(".log")
    directory = out / "logs" / source.parent.name
    write_atomic(directory / "patch.diff", result.patch.encode(errors="replace"))
    if not source.is_file():
        return False
    output = foreign.read(evaluation, source.relative_to(evaluation).as_posix(), MAX_BYTES)
    write_atomic(directory / "test_output.txt", output)
    facts = {"patch_is_None": False, "patch_exists": True, "patch_successfully_applied": applied}
    write_json(directory / "report.json", {result.task_id: {**facts, "resolved": bool(result.resolved)}})
    return True


def _metadata(model: str) -> dict[str, Any]:
    """The fields of metadata.yaml. None: the submitter decides. The leaderboard's maintainers set ``checked``."""
    return {
        "info": {"name": model, "authors": None, "logo": None, "report": None, "site": None},
        "tags": {
            "checked": False,
            "model": [model],
            "org": None,
            "os_model": None,
            "os_system": None,
            "system": {"attempts": "1"},
        },
    }


def _readme(model: str, report: Mapping[str, Any], graded: int, tasks: int, resolved: int) -> str:
    requested = "" if report.get("requested") is None else f"; {report['requested']:,} were requested"
    failed = "" if graded == tasks else "; the others ended with infrastructure failures"
    return f"""# {model}

TODO: describe the system, and link its report.

- Evaluated with agent-rl on the environment `{report["env"]}`: {resolved:,} of {graded:,} graded tasks resolved.
- {graded:,} of {tasks:,} tasks were graded{failed}{requested}.

The submitter confirms what the leaderboard's checklist asks:

- [ ] one attempt per task (pass@1)
- [ ] no use of `PASS_TO_PASS` and `FAIL_TO_PASS`
- [ ] no use of the field `hints_text`
- [ ] no web browsing, or none that can find solutions of SWE-bench
"""
