"""Checks whether a task can be won without solving it. ``agent-rl doctor`` runs these checks in separate sandboxes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from envs.context import EnvContext
from envs.swe.adjudication import open_case
from envs.swe.diff.git_diff import is_test_path, patched_paths
from envs.swe.grading import grade_patch
from envs.swe.records import SweRecord
from envs.swe.reward_hacks import reward_hacks
from envs.swe.sandboxes import HIDDEN_IN_IMAGE, PRESENT, agent_sandbox, sandbox_spec
from envs.types import Finding
from sandbox import Sandbox, SandboxLostError, blob_name

_TIMEOUT = 120.0

# Every part of git that could hold future commits: refs, reflogs, unreachable objects, other repositories.
_HISTORY = """
line() { head -n 3 | tr '\\n' ' '; }
echo "commits $(git rev-list --all --reflog --count)"
echo "refs $(git for-each-ref --format='%(refname)' | grep -vx refs/heads/main | line)"
echo "reflog $(wc -l < .git/logs/HEAD)"
echo "stored $(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c commit)"
echo "dangling $(git fsck --no-progress --unreachable --no-reflogs 2>&1 | line)"
cd .git
echo "left $(present packed-refs ORIG_HEAD FETCH_HEAD shallow objects/info/alternates objects/pack/* | line)"
cd ..
places=(/ "$PWD" /tmp "$HOME")
repositories() { find "${places[@]}" -xdev \\( -name .git -o -name '*.git' \\) -not -path "$PWD/.git"; }
echo "others $(repositories 2>/dev/null | sort -u | line)"
"""
_ONE_COMMIT = {"commits": "1", "refs": "", "reflog": "1", "stored": "1", "dangling": "", "left": "", "others": ""}

# Hash and size of an image's hidden tests, without those that are visible in its repository.
_HIDDEN_HASHES = """
git apply --whitespace=nowarn - 2>/dev/null
for path in {paths}; do [ -e "$path" ] && find -L "$path" -type f -size +0; done | sort -u | while read -r file; do
    hash=$(git hash-object --no-filters "$file")
    git ls-tree -r {visible_tree} | grep -qF "$hash" || echo "$hash $(wc -c < "$file")"
done
"""
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Git's name of the tree without files: the hidden tests are removed from the agent's repository."""
# Copies of the hidden tests anywhere in the sandbox under any name: files of a hidden test's size with its hash.
_COPIES = """
find / "$PWD" /tmp "$HOME" -xdev -type f \\( {sizes} \\) 2>/dev/null | sort -u | head -n 20000 > /tmp/.agent-rl-found
paste -d ' ' <(git hash-object --no-filters --stdin-paths < /tmp/.agent-rl-found) /tmp/.agent-rl-found \
    | grep -F {hashes} | head -n 3
present {directories}
rm -f /tmp/.agent-rl-found
"""
# Files of an image that name a hidden test as pytest does (``::test_name``), without names in its sources and texts.
_NAMED = """
sort -u > /tmp/.agent-rl-names
git grep -ohF -f /tmp/.agent-rl-names -- '*.py' '*.md' '*.rst' '*.txt' | sort -u > /tmp/.agent-rl-shown
grep -vxF -f /tmp/.agent-rl-shown /tmp/.agent-rl-names > /tmp/.agent-rl-left
find "$PWD" /tmp /var/tmp /root "$HOME" /home /opt -xdev \\( -name site-packages -o -name '.agent-rl-*' \\) -prune \
    -o -type f -size -16384k -print0 2>/dev/null | xargs -0 grep -lF -f /tmp/.agent-rl-left 2>/dev/null \\
    | sort -u | head -n 3
rm -f /tmp/.agent-rl-names /tmp/.agent-rl-shown /tmp/.agent-rl-left
"""


async def audit_record(context: EnvContext, record: SweRecord, *, site_root: Path | None = None) -> list[Finding]:
    """The findings on a task, in this order: its git history, its hidden tests, and reward hacks tried as patches.

    Raises ``SandboxError`` or ``GradingError`` if a check cannot run.
    """
    spec = sandbox_spec(context, record, site_root)
    hidden_sizes = await _hidden_contents(context, record, site_root)
    async with agent_sandbox(context, record, spec) as (sandbox, _):
        findings = [await _check_history(sandbox), await _check_copies(sandbox, record, hidden_sizes)]
        module = await _fixed_module(sandbox, record)
    verifiable, reason = await open_case(context, record, site_root).verifiability()
    findings.append(Finding("mutants", verifiable != "no", f"verifiable: {verifiable}; {reason}"))
    for name, patch in reward_hacks(record, module):
        grade = await grade_patch(context, record, patch, site_root=site_root)
        outcome = "rewarded" if grade.reward > 0.0 or grade.resolved else "no reward"
        suspicion = "; ".join(grade.suspected_hack) or "nothing recorded"
        findings.append(Finding(f"hack: {name}", outcome == "no reward", f"{outcome}; {suspicion}"))
    return findings


async def _check_history(sandbox: Sandbox) -> Finding:
    values = dict(line.partition(" ")[::2] for line in (await _run(sandbox, PRESENT + _HISTORY)).splitlines())
    wrong = [
        f"{key}: {values.get(key, 'no output').strip()}"
        for key, expected in _ONE_COMMIT.items()
        if values.get(key, "?").strip() != expected
    ]
    return Finding("history", not wrong, "; ".join(wrong) or "one commit, nothing else in git")


async def _hidden_contents(context: EnvContext, record: SweRecord, site_root: Path | None) -> dict[str, int]:
    """Git's hash of each hidden test's content -> its size in bytes. Image tests are read in the original image."""
    if record.is_local:
        new = [text.encode() for path, text in record.tests.items() if record.files.get(path) != text]
        return {blob_name(content): len(content) for content in new if content.strip()}
    paths = sorted(record.hidden) if record.swebench else HIDDEN_IN_IMAGE
    visible_tree = _EMPTY_TREE if record.swebench and record.swebench.hidden_files else "HEAD"
    patch = record.swebench.test_patch if record.swebench else ""
    async with context.sandbox(sandbox_spec(context, record, site_root)) as sandbox:
        script = _HIDDEN_HASHES.format(paths=shlex.join(paths), visible_tree=visible_tree)
        output = await _run(sandbox, script, stdin=patch)
    return {digest: int(size) for digest, size in (line.split() for line in output.splitlines())}


async def _check_copies(sandbox: Sandbox, record: SweRecord, hidden_sizes: dict[str, int]) -> Finding:
    """Check that the agent's sandbox has no copy of a hidden test and none of the paths where images keep tests."""
    if record.calls:
        return Finding("hidden tests", True, "the expected values of the calls never enter a sandbox")
    directories = [] if record.is_local else list(HIDDEN_IN_IMAGE)
    if not hidden_sizes:
        return Finding("hidden tests", False, "the task has no hidden test that differs from the agent's files")
    sizes = " -o ".join(f"-size {size}c" for size in sorted(set(hidden_sizes.values())))
    hashes = " ".join(f"-e {digest}" for digest in sorted(hidden_sizes))
    script = PRESENT + _COPIES.format(sizes=sizes, hashes=hashes, directories=shlex.join([*directories, "/r2e_tests"]))
    found = [line.split(" ", 1)[-1] for line in (await _run(sandbox, script)).splitlines()]
    if not record.is_local:
        names = {re.split(r"::|\.", key.partition("[")[0])[-1].strip() for key in record.expected}
        named = await _run(sandbox, _NAMED, stdin="".join(f"::{name}\n" for name in sorted(names) if name))
        found += [f"{path} names hidden tests" for path in named.splitlines()]
    leaked = ", ".join(found)
    clean = f"none of {len(hidden_sizes)} contents is in the agent's sandbox"
    return Finding("hidden tests", not leaked, leaked or clean)


async def _fixed_module(sandbox: Sandbox, record: SweRecord) -> tuple[str, str] | None:
    """Path and content of a Python file that the reference fix changes, so the tests import it. None if none."""
    for path in sorted(patched_paths(record.gold)):
        if path.endswith(".py") and not is_test_path(path):
            result = await sandbox.exec(["cat", path], timeout=_TIMEOUT, cwd=sandbox.spec.workdir)
            if result.ok and result.stdout.strip():
                return path, result.stdout.decode(errors="replace")
    return None


async def _run(sandbox: Sandbox, script: str, stdin: str = "") -> str:
    result = await sandbox.exec(script, timeout=_TIMEOUT, cwd=sandbox.spec.workdir, stdin=stdin.encode())
    if result.timed_out or result.truncated:
        raise SandboxLostError(f"an audit's command was cut off after {result.seconds:.0f} s")
    return result.stdout.decode(errors="replace")
