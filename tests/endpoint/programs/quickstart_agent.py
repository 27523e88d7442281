"""The quickstart's agent as a separate program: an `openai` client, and the task's tools over HTTP.

It does what the built-in loop does: one call a turn, a turn without a call is answered with what is wrong with it, and
three of those in a row end the episode.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import openai

URL = os.environ["AGENT_RL_URL"]
MODEL = os.environ["AGENT_RL_MODEL"]


def sandbox(path: str, body: Any = None) -> Any:
    """One request to the task's sandbox."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{URL}/sandbox/{path}", data=data)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main() -> None:
    task = sandbox("task")
    client = openai.OpenAI(max_retries=0)
    messages: list[Any] = task["messages"]
    failures = 0
    while failures < task["max_parse_failures"]:
        try:
            reply = client.chat.completions.create(model=MODEL, messages=messages, tools=task["tools"])
        except openai.BadRequestError:
            return  # the context is full, or all turns are taken
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            failures += 1
            seen = {"role": "tool", "tool_call_id": "none", "content": message.model_extra["parse_failure"]}
        else:
            failures = 0
            call = message.tool_calls[0]
            request = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
            result = sandbox("call", request)
            if result["submitted"]:
                return
            seen = {"role": "tool", "tool_call_id": call.id, "content": result["text"]}
        messages.append(seen)


if __name__ == "__main__":
    main()
