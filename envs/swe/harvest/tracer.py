"""A pytest plugin, as text for a box: it writes which functions below the working folder the passing tests called."""

TRACER = """
import json, os, sys, threading

import pytest

HERE = os.getcwd() + os.sep
passed, calls = set(), set()


def note(frame, event, argument):
    if event == "call":
        calls.add(frame.f_code)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    calls.clear()
    item.agent_rl_failed = False
    sys.setprofile(note)
    threading.setprofile(note)
    yield
    sys.setprofile(None)
    threading.setprofile(None)
    if not item.agent_rl_failed:
        found = {(code.co_filename, code.co_firstlineno) for code in calls}
        passed.update((name[len(HERE):], line) for name, line in found if name.startswith(HERE))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    item.agent_rl_failed |= not outcome.get_result().passed


def pytest_sessionfinish(session):
    with open(os.environ["AGENT_RL_TRACE"], "w") as out:
        json.dump(sorted(passed), out)
"""
