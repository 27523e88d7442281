"""A pytest plugin, as text for a sandbox: it writes which functions below the working directory each test module's
passing tests called, and how many seconds the module took: module -> [seconds, [[path, first line], ...]].

It writes as each module ends, so that one that hangs takes only itself and those after it along.
"""

TRACER = """
import json, os, sys, threading, time

import pytest

HERE = os.getcwd() + os.sep
modules, calls = {}, set()


def note(frame, event, argument):
    if event == "call":
        calls.add(frame.f_code)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    calls.clear()
    item.agent_rl_failed = False
    began = time.monotonic()
    sys.setprofile(note)
    threading.setprofile(note)
    yield
    sys.setprofile(None)
    threading.setprofile(None)
    module = item.nodeid.partition("::")[0]
    seconds, found = modules.setdefault(module, [0.0, set()])
    modules[module][0] = seconds + time.monotonic() - began
    if not item.agent_rl_failed:
        places = {(code.co_filename, code.co_firstlineno) for code in calls}
        found.update((name[len(HERE):], line) for name, line in places if name.startswith(HERE))
    if nextitem is None or nextitem.nodeid.partition("::")[0] != module:
        with open(os.environ["AGENT_RL_TRACE"], "w") as out:
            json.dump(modules, out, default=sorted)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    item.agent_rl_failed |= not outcome.get_result().passed
"""
