"""Writes the issue of a task from its commit message, from its failing tests, or with a model.

An issue must not contain the fix: no diff, and no lines that the fix adds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import httpx

from envs.swe.records import SweRecord
from envs.swe.task_synthesis.candidate import Candidate, is_changed_line

_MAX_SHARED_CHARS = 60
_MIN_LEAK_CHARS = 24
"""Length from which a line of the fix counts as a leak if the issue contains it."""
_MIN_MESSAGE_CHARS = 160
_MAX_ISSUE_CHARS = 6000
_DIFF = re.compile(r"^(?:diff --git |@@ -\d|(?:---|\+\+\+) [ab]/)", re.MULTILINE)
_TRAILER = re.compile(r"^(?:[A-Z][\w-]*-by|Change-Id|\(cherry picked|Reviewed-on|See merge request)\b.*$", re.MULTILINE)
_MAX_FAILURES = 3
_FRAME = re.compile(r"\S*test\S*\.py:\d+: in ")
"""The frame of a short traceback that shows a line of the test."""
_PROMPT = """Write the issue that a user of the library `{repo}` would have filed before the change below was made.
Say what happens and what should happen, with a short example where it helps. Don't say how to mend it: name no file and
no line of the code, and quote nothing that the change adds. Answer with the issue alone: a title, an empty line, text.

What the author of the change wrote:
{message}

Checks that fail without the change:
{failures}

The change:
{gold}"""


def failure_excerpts(log: str) -> list[str]:
    """For each failed test of a pytest log with short tracebacks: the test's last statement and the error.

    Frames of the code under test are left out.
    """
    details = log.partition("short test summary info")[0]
    sections = re.split(r"^_{3,} .*? _{3,}$", details, flags=re.MULTILINE)[1:]
    return [text for section in sections if (text := _failure_excerpt(section.splitlines()))]


def _failure_excerpt(lines: Sequence[str]) -> str:
    errors = [line for line in lines if re.match(r"E {2,}\S", line) and "Use -v to get" not in line][:12]
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    start = frames[-1] + 1 if frames else len(lines)
    statement = list(takewhile(lambda line: line.startswith("    "), lines[start : start + 6]))
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", "\n".join([*statement, *errors])) if errors else ""


def fix_leak(text: str, gold: str) -> str:
    """The reason why an issue leaks the fix, or an empty string."""
    if _DIFF.search(text):
        return "it holds a diff"
    compact = _without_space(text)
    added = [_without_space(line[1:]) for line in gold.split("\n") if is_changed_line(line) and line.startswith("+")]
    if any(len(line) >= _MIN_LEAK_CHARS and line in compact for line in added):
        return "it holds a line of the fix"
    fix = "".join(added)
    for start in range(0, max(0, len(compact) - _MAX_SHARED_CHARS), _MAX_SHARED_CHARS // 4):
        if compact[start : start + _MAX_SHARED_CHARS] in fix:
            return "it shares a long passage with the fix"
    return ""


def issue_from_message(candidate: Candidate, failed: Sequence[str]) -> str:
    """The issue from the commit message. Failing tests are added if the message is short or leaks the fix."""
    message = _TRAILER.sub("", candidate.message).strip()
    if fix_leak(message, candidate.record.gold) or len(message) > _MAX_ISSUE_CHARS:
        message = message.split("\n")[0][:200]
    if fix_leak(message, candidate.record.gold):
        message = ""
    if len(message) >= _MIN_MESSAGE_CHARS:
        return message
    excerpts = [text for text in dict.fromkeys(failed) if not fix_leak(text, candidate.record.gold)][:_MAX_FAILURES]
    head = message or f"{candidate.record.repo_name} gives wrong results"
    if not excerpts:
        return f"{head}\n\nWhat the library does here is not what its documentation and its tests promise."
    return f"{head}\n\nThese checks fail; they should hold:\n\n" + "\n\n".join(f"```\n{text}\n```" for text in excerpts)


def _without_space(text: str) -> str:
    return re.sub(r"\s+", "", text)


@dataclass
class IssueWriter:
    """Writes issues with a model behind an OpenAI-compatible endpoint.

    ``written`` counts the issues by the model, ``fallbacks`` the other issues by the reason why its text was not used.
    """

    url: str
    model: str
    key: str = ""
    seconds: float = 120.0
    written: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    async def write(self, candidate: Candidate, failed: Sequence[str]) -> str:
        """The model's issue, or the one from the commit message if the model's cannot be used."""
        response = await self._request(candidate, failed)
        if reason := "no answer" if response is None else _rejection_reason(response, candidate.record, failed):
            self.fallbacks[reason] += 1
            return issue_from_message(candidate, failed)
        self.written += 1
        return (response or "").strip()

    async def _request(self, candidate: Candidate, failed: Sequence[str]) -> str | None:
        prompt = _PROMPT.format(
            repo=candidate.record.repo_name,
            message=candidate.message[:_MAX_ISSUE_CHARS] or "(nothing)",
            failures="\n\n".join(failed[:_MAX_FAILURES])[:_MAX_ISSUE_CHARS] or "(not known)",
            gold=candidate.record.gold[: 4 * _MAX_ISSUE_CHARS],
        )
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1024}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with httpx.AsyncClient(timeout=self.seconds) as client:
                response = await client.post(f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers)
            content = response.raise_for_status().json()["choices"][0]["message"]["content"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
            return None
        return content if isinstance(content, str) else None


def _rejection_reason(response: str, record: SweRecord, failed: Sequence[str]) -> str:
    """The reason why a model's issue cannot be used, or an empty string."""
    text = response.strip()
    if not 40 <= len(text) <= _MAX_ISSUE_CHARS or len(set(_words(text))) < 8:
        return "too short, too long or empty words"
    if sum(not (char.isprintable() or char in "\n\t") for char in text):
        return "unprintable"
    if leak := fix_leak(text, record.gold):
        return leak
    known = {*_words(record.repo_name), *_words(record.gold), *_words(" ".join(failed))}
    return "" if known & set(_words(text)) else "about something else"


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z_]{4,}", text.lower())


def writer_counts(writer: IssueWriter | None) -> Mapping[str, object]:
    """The counts of a writer for the report."""
    return {"written": writer.written, "fallbacks": dict(writer.fallbacks)} if writer else {}
