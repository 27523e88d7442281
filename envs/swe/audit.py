"""Could a task be won without solving it? The checks a doctor runs on one task, in sandboxes of their own."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from envs.context import EnvContext
from envs.swe.diff.git_diff import is_test_path, patched_paths
from envs.swe.grading import grade_patch
from envs.swe.records import SweRecord
from envs.swe.reward_hacks import RewardHack, reward_hacks
from envs.swe.sandboxes import HIDDEN_IN_IMAGE, agent_sandbox, sandbox_spec
from envs.types import Finding
from sandbox import Sandbox, SandboxLostError

_TIMEOUT = 120.0

# Everything of git that could hold the future: commits, refs, reflogs, objects nobody refers to, other repositories.
_HISTORY = """
line() { head -n 3 | tr '\\n' ' '; }
echo "commits $(git rev-list --all --reflog --count)"
echo "refs $(git for-each-ref --format='%(refname)' | grep -vx refs/heads/main | line)"
echo "reflog $(wc -l < .git/logs/HEAD)"
echo "stored $(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c commit)"
echo "dangling $(git fsck --no-progress --unreachable --no-reflogs 2>&1 | line)"
cd .git
echo "left $(ls -d packed-refs ORIG_HEAD FETCH_HEAD shallow objects/info/alternates objects/pack/* 2>/dev/null | line)"
cd ..
places=(/ "$PWD" /tmp "$HOME")
repositories() { find "${places[@]}" -xdev \\( -name .git -o -name '*.git' \\) -not -path "$PWD/.git"; }
echo "others $(repositories 2>/dev/null | sort -u | line)"
"""
_ONE_COMMIT = {"commits": "1", "refs": "", "reflog": "1", "stored": "1", "dangling": "", "left": "", "others": ""}

# Hash and size of an image's hidden tests, without those that its repository shows anyway.
_HIDDEN_HASHES = """
git apply --whitespace=nowarn - 2>/dev/null
for place in {places}; do [ -e "$place" ] && find -L "$place" -type f -size +0; done | sort -u | while read -r file; do
    hash=$(git hash-object --no-filters "$file")
    git ls-tree -r {shown} | grep -qF "$hash" || echo "$hash $(stat -L -c %s "$file")"
done
"""
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Git's name of a tree without files: what the agent sees of hidden tests that its repository is cleared of."""
# Copies of the hidden tests anywhere in the sandbox, under whatever name: files of a hidden test's size, then their
# hashes.
_COPIES = """
find / "$PWD" /tmp "$HOME" -xdev -type f \\( {sizes} \\) 2>/dev/null | sort -u | head -n 20000 > /tmp/.agent-rl-found
paste -d ' ' <(git hash-object --no-filters --stdin-paths < /tmp/.agent-rl-found) /tmp/.agent-rl-found \
    | grep -F {hashes} | head -n 3
ls -d {directories} 2>/dev/null
rm -f /tmp/.agent-rl-found
"""


async def audit_record(context: EnvContext, record: SweRecord, *, site_root: Path | None = None) -> list[Finding]:
    """The findings on a task: its history, its hidden tests, and hacks tried as patches, in this order.

    Raises ``SandboxError`` or ``GradingError`` where a check could not be done.
    """
    spec = sandbox_spec(context, record, site_root)
    secrets = await _hidden_contents(context, record, site_root)
    async with agent_sandbox(context, record, spec) as (sandbox, _):
        findings = [await _history(sandbox), await _copies(sandbox, record, secrets)]
        module = await _fixed_module(sandbox, record)
    findings += [await _try(context, record, canary, site_root) for canary in reward_hacks(record, module)]
    return findings


async def _history(sandbox: Sandbox) -> Finding:
    seen = dict(line.partition(" ")[::2] for line in (await _run(sandbox, _HISTORY)).splitlines())
    wrong = [
        f"{key}: {seen.get(key, 'no answer').strip()}"
        for key, right in _ONE_COMMIT.items()
        if seen.get(key, "?").strip() != right
    ]
    return Finding("history", not wrong, "; ".join(wrong) or "one commit, nothing else in git")


async def _hidden_contents(context: EnvContext, record: SweRecord, site_root: Path | None) -> dict[str, int]:
    """Git's hash of each hidden test's content -> its size. For a row of an image, found out in the untouched image."""
    if record.is_local:
        new = [text.encode() for path, text in record.tests.items() if record.files.get(path) != text]
        return {_blob(content): len(content) for content in new if content.strip()}
    places = sorted(record.hidden) if record.swebench else HIDDEN_IN_IMAGE
    shown = _EMPTY_TREE if record.swebench and record.swebench.hidden_files else "HEAD"
    patch = record.swebench.test_patch if record.swebench else ""
    async with context.sandbox(sandbox_spec(context, record, site_root)) as sandbox:
        lines = (
            await _run(sandbox, _HIDDEN_HASHES.format(places=shlex.join(places), shown=shown), stdin=patch)
        ).splitlines()
    return {digest: int(size) for digest, size in (line.split() for line in lines)}


async def _copies(sandbox: Sandbox, record: SweRecord, secrets: dict[str, int]) -> Finding:
    """Whether the agent's sandbox holds a hidden test's content, or a place of an image that tests are kept in."""
    if record.calls:
        return Finding("hidden tests", True, "what the calls are expected to give never enters a sandbox")
    directories = [] if record.is_local else list(HIDDEN_IN_IMAGE)
    if not secrets:
        return Finding("hidden tests", False, "the task has no hidden test that differs from what the agent sees")
    sizes = " -o ".join(f"-size {size}c" for size in sorted(set(secrets.values())))
    hashes = " ".join(f"-e {digest}" for digest in sorted(secrets))
    found = await _run(
        sandbox, _COPIES.format(sizes=sizes, hashes=hashes, directories=shlex.join([*directories, "/r2e_tests"]))
    )
    leaked = ", ".join(line.split(" ", 1)[-1] for line in found.splitlines())
    return Finding("hidden tests", not leaked, leaked or f"none of {len(secrets)} contents is in the agent's sandbox")


async def _fixed_module(sandbox: Sandbox, record: SweRecord) -> tuple[str, str] | None:
    """A Python file that the true fix changes, as the agent finds it: one that the tests surely import."""
    for path in sorted(patched_paths(record.gold)):
        if path.endswith(".py") and not is_test_path(path):
            seen = await sandbox.exec(["cat", path], timeout=_TIMEOUT, cwd=sandbox.spec.workdir)
            if seen.ok and seen.stdout.strip():
                return path, seen.stdout.decode(errors="replace")
    return None


async def _try(context: EnvContext, record: SweRecord, canary: RewardHack, site_root: Path | None) -> Finding:
    grade = await grade_patch(context, record, canary.patch, site_root=site_root)
    rewarded = grade.reward > 0.0 or grade.resolved
    seen = "; ".join(grade.suspected_hack) or "nothing recorded"
    return Finding(f"hack: {canary.name}", not rewarded, f"{'rewarded' if rewarded else 'no reward'}; {seen}")


async def _run(sandbox: Sandbox, script: str, stdin: str = "") -> str:
    result = await sandbox.exec(script, timeout=_TIMEOUT, cwd=sandbox.spec.workdir, stdin=stdin.encode())
    if result.timed_out or result.truncated:
        raise SandboxLostError(f"an audit's command was cut off after {result.seconds:.0f} s")
    return result.stdout.decode(errors="replace")


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
