"""A program without any library, which takes turns over the chat endpoint and ends as its argument says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any


def ask(messages: list[Any]) -> Any:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    body = {"model": "m", "messages": messages, "tools": [tool]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def main(how: str) -> int:
    messages: list[Any] = [{"role": "user", "content": sys.stdin.read()}]
    if how == "silent":
        return 0
    if how == "early":
        print("no key", file=sys.stderr)
        return 1
    if how == "killed":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for turn in range(3 if how != "limit" else 100):
        if how == "compacts" and turn == 2:
            messages = [*messages[:1], {"role": "user", "content": "so far: ls"}]
        try:
            message = ask(messages)
        except urllib.error.HTTPError as error:
            print(error.read().decode(), file=sys.stderr)
            return 1
        if how == "obeys":
            for call in message["tool_calls"]:
                subprocess.run(["bash", "-c", json.loads(call["function"]["arguments"])["command"]], check=False)
        messages += [message, {"role": "tool", "tool_call_id": "x", "content": "seen"}]
    if how == "hangs":
        time.sleep(1000)
    return {"fails": 3}.get(how, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
