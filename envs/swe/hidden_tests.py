"""The hidden tests' files: reads them from a record or its image, and gives a run other contents of them."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from envs.context import EnvContext
from envs.swe.diff.agent_patch import decode_text
from envs.swe.diff.git_diff import diff_file, is_test_path, split_patch
from envs.swe.mutants import Statements, visible_statements
from envs.swe.records import SweRecord
from envs.swe.repositories import read_archive
from envs.swe.sandboxes import PRESENT, sandbox_spec, task_sandbox
from sandbox import Sandbox, SandboxLostError

_MAX_BYTES = 64 << 20
_LIST_R2E = "find -L /r2e_tests /root/r2e_tests r2e_tests -name '*.py' -type f 2>/dev/null"
_LIST_VISIBLE = "find . -name '*.py' -path '*test*' -not -path './r2e_tests/*' -not -path '*/.venv/*' 2>/dev/null"


@dataclass(frozen=True)
class HiddenTests:
    """The hidden tests: ``files`` by path, what they replace (``base``), and the statements that the agent can read.

    The paths are those of the record; for tests in an R2E-Gym image they are absolute.
    """

    files: Mapping[str, bytes]
    visible: Statements = frozenset()
    base: Mapping[str, bytes] = field(default_factory=dict)

    def replaced(self, record: SweRecord, files: Mapping[str, bytes]) -> tuple[SweRecord, dict[str, bytes]]:
        """The record with other contents of its hidden tests, and the files to write into its sandbox."""
        if record.is_local:
            tests = {path: content.decode() for path, content in files.items()}
            return record.model_copy(update={"tests": {**record.tests, **tests}}), {}
        spec = record.swebench
        if spec is None or not spec.test_patch:
            return record, {str(PurePosixPath(record.workdir, path)): content for path, content in files.items()}
        parts = split_patch(spec.test_patch)
        patch = "".join(self._file_patch(part.path, files) or part.text for part in parts)
        script = spec.eval_script.replace(spec.test_patch.removesuffix("\n"), patch.removesuffix("\n"))
        update = {"test_patch": patch, "eval_script": script}
        return record.model_copy(update={"swebench": spec.model_copy(update=update)}), {}

    def _file_patch(self, path: str, files: Mapping[str, bytes]) -> str:
        if path not in files:
            return ""
        base = self.base.get(path)
        return diff_file(path, None if base is None else base.decode(), files[path].decode())


async def read_hidden_tests(context: EnvContext, record: SweRecord, site_root: Path | None) -> HiddenTests:
    """The hidden tests of a record. Raises ``SandboxError``."""
    if record.is_local:
        visible = [text.encode() for path, text in record.files.items() if is_test_path(path) and path.endswith(".py")]
        files = {path: text.encode() for path, text in record.tests.items()}
        return HiddenTests(files, await asyncio.to_thread(visible_statements, visible))
    spec = replace(sandbox_spec(context, record, site_root), output_limit_bytes=_MAX_BYTES)
    async with task_sandbox(context, record, spec) as sandbox:
        if record.swebench is None:
            files, old = await _archive(sandbox, _LIST_R2E), await _archive(sandbox, _LIST_VISIBLE)
            return HiddenTests(files, await asyncio.to_thread(visible_statements, tuple(old.values())))
        paths = f"present {shlex.join(sorted(record.swebench.hidden))}"
        base = await _archive(sandbox, paths)
        patch = record.swebench.test_patch
        if not patch:  # the files in the image are hidden from the agent
            return HiddenTests(base)
        files = await _archive(sandbox, f"git apply --whitespace=nowarn - && {paths}", patch)
        if not files and any(
            part.path.endswith(".py") and "\n+++ /dev/null" not in part.text for part in split_patch(patch)
        ):
            raise SandboxLostError(f"task {record.id}: none of its hidden tests could be read in its image")
    in_script = patch.removesuffix("\n") in record.swebench.eval_script
    readable = {path: file for path, file in files.items() if in_script and decode_text(file) is not None}
    return HiddenTests(readable, await asyncio.to_thread(visible_statements, tuple(base.values())), base)


async def _archive(sandbox: Sandbox, listing: str, stdin: str = "") -> dict[str, bytes]:
    """The contents of the Python files whose paths ``listing`` (bash) prints; none if they are too many to read."""
    tar = "grep '[.]py$' | sort -u | tar -chf - --ignore-failed-read -P -T -"
    return await read_archive(sandbox, f"{PRESENT}{{ {listing}; }} | {tar}", stdin)
