"""The issue of a task: from the words of its commit, from what its tests say, or from a model's pen.

Whoever writes it, it must not hold the fix: neither a diff, nor lines that the fix adds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import httpx

from envs.swe.records import SweRecord
from envs.swe.task_synthesis.candidate import Candidate, is_changed_line

_LONGEST_SHARED = 60
_LINE = 24
"""Characters from which a line of the fix, found in an issue, gives it away."""
_SHORT_MESSAGE = 160
_LONGEST = 6000
_DIFF = re.compile(r"^(?:diff --git |@@ -\d|(?:---|\+\+\+) [ab]/)", re.MULTILINE)
_TRAILER = re.compile(r"^(?:[A-Z][\w-]*-by|Change-Id|\(cherry picked|Reviewed-on|See merge request)\b.*$", re.MULTILINE)
_FAILURES = 3
_FRAME = re.compile(r"\S*test\S*\.py:\d+: in ")
"""Where a short traceback shows a test's own line."""
_PROMPT = """Write the issue that a user of the library `{repo}` would have filed before the change below was made.
Say what happens and what should happen, with a short example where it helps. Don't say how to mend it: name no file and
no line of the code, and quote nothing that the change adds. Answer with the issue alone: a title, an empty line, text.

What the author of the change wrote:
{message}

Checks that fail without the change:
{failures}

The change:
{gold}"""


def failures(log: str) -> list[str]:
    """What a pytest log with short tracebacks tells of each failed test: its last statement and the error, without the
    places in the code under test."""
    whole = log.partition("short test summary info")[0]
    sections = re.split(r"^_{3,} .*? _{3,}$", whole, flags=re.MULTILINE)[1:]
    return [text for section in sections if (text := _failure(section.splitlines()))]


def _failure(lines: Sequence[str]) -> str:
    errors = [line for line in lines if re.match(r"E {2,}\S", line) and "Use -v to get" not in line][:12]
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    start = frames[-1] + 1 if frames else len(lines)
    statement = list(takewhile(lambda line: line.startswith("    "), lines[start : start + 6]))
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", "\n".join([*statement, *errors])) if errors else ""


def holds_fix(text: str, gold: str) -> str:
    """Why an issue gives the fix away; empty where it doesn't."""
    if _DIFF.search(text):
        return "it holds a diff"
    squeezed = _squeeze(text)
    added = [_squeeze(line[1:]) for line in gold.split("\n") if is_changed_line(line) and line.startswith("+")]
    if any(len(line) >= _LINE and line in squeezed for line in added):
        return "it holds a line of the fix"
    whole = "".join(added)
    for start in range(0, max(0, len(squeezed) - _LONGEST_SHARED), _LONGEST_SHARED // 4):
        if squeezed[start : start + _LONGEST_SHARED] in whole:
            return "it shares a long passage with the fix"
    return ""


def from_message(draft: Candidate, failed: Sequence[str]) -> str:
    """The issue in the words of the commit, and of the failing tests where there are few words or they tell the fix."""
    message = _TRAILER.sub("", draft.message).strip()
    if holds_fix(message, draft.record.gold) or len(message) > _LONGEST:
        message = message.split("\n")[0][:200]
    if holds_fix(message, draft.record.gold):
        message = ""
    if len(message) >= _SHORT_MESSAGE:
        return message
    shown = [text for text in dict.fromkeys(failed) if not holds_fix(text, draft.record.gold)][:_FAILURES]
    head = message or f"{draft.record.repo_name} gives wrong results"
    if not shown:
        return f"{head}\n\nWhat the library does here is not what its documentation and its tests promise."
    return f"{head}\n\nThese checks fail; they should hold:\n\n" + "\n\n".join(f"```\n{text}\n```" for text in shown)


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


@dataclass
class Writer:
    """A model behind an OpenAI-compatible endpoint that writes issues. ``fallbacks`` counts why it was not used."""

    url: str
    model: str
    key: str = ""
    seconds: float = 120.0
    written: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    async def write(self, draft: Candidate, failed: Sequence[str]) -> str:
        """The model's issue, or that of the commit's message where the model's can't be used."""
        answer = await self._ask(draft, failed)
        if why := "no answer" if answer is None else _fault(answer, draft.record, failed):
            self.fallbacks[why] += 1
            return from_message(draft, failed)
        self.written += 1
        return (answer or "").strip()

    async def _ask(self, draft: Candidate, failed: Sequence[str]) -> str | None:
        prompt = _PROMPT.format(
            repo=draft.record.repo_name,
            message=draft.message[:_LONGEST] or "(nothing)",
            failures="\n\n".join(failed[:_FAILURES])[:_LONGEST] or "(not known)",
            gold=draft.record.gold[: 4 * _LONGEST],
        )
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1024}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with httpx.AsyncClient(timeout=self.seconds) as client:
                answer = await client.post(f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers)
            return _content(answer.raise_for_status().json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None


def _content(answer: Any) -> str | None:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None


def _fault(answer: str, record: SweRecord, failed: Sequence[str]) -> str:
    """What makes a model's answer unusable, in a few words; empty where nothing does."""
    text = answer.strip()
    if not 40 <= len(text) <= _LONGEST or len(set(_words(text))) < 8:
        return "too short, too long or empty words"
    if sum(not (char.isprintable() or char in "\n\t") for char in text):
        return "unprintable"
    if why := holds_fix(text, record.gold):
        return why
    known = {*_words(record.repo_name), *_words(record.gold), *_words(" ".join(failed))}
    return "" if known & set(_words(text)) else "about something else"


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z_]{4,}", text.lower())


def counts(writer: Writer | None) -> Mapping[str, object]:
    """What came of a writer, for a report."""
    return {"written": writer.written, "fallbacks": dict(writer.fallbacks)} if writer else {}
