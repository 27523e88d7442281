"""Candidates from bugs injected into tested code. A traced test run first finds which tests call which functions."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.context import EnvContext
from envs.swe.repositories import WORKDIR, workdir_files
from envs.swe.sandboxes import with_site_packages
from envs.swe.task_synthesis.candidate import Candidate, CandidateRejected, CodeChange, make_candidate, pytest_command
from envs.swe.task_synthesis.checkout import Checkout
from envs.swe.task_synthesis.files import import_root, is_code, is_test_module, with_egg_info
from envs.swe.task_synthesis.mutations import InjectionSite, injection_sites
from envs.swe.task_synthesis.requirements import requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages
from envs.swe.task_synthesis.validation import USAGE, without_addopts
from sandbox import SandboxError, SandboxFileError

_MAX_MODULES = 24
"""Test modules to trace. The others stay in the repository, visible to the agent."""
_MODULES_PER_BUG = 2
_TRACE_PATH = "/tmp/agent-rl-trace"
_MAX_TRACE_BYTES = 16 << 20
_MODULE_TIMEOUT_S = 15.0


_ModuleTrace = tuple[float, str, list[tuple[str, int]]]
"""Seconds of a test module, its path, and the (path, first line) of the functions that its passing tests call."""

# A pytest plugin. It writes the functions below the working directory that each test module's passing tests called, and
# the module's seconds: module -> [seconds, [[path, first line], ...]]. It writes after each module, so that a module
# that hangs loses only itself and the modules after it.
_TRACER = """
import json, os, sys, threading, time
import pytest
HERE = os.getcwd() + os.sep
modules, calls = {}, set()
def note(frame, event, argument):
    if event == "call":
        calls.add(frame.f_code)
def profile(function):
    sys.setprofile(function)
    threading.setprofile(function)
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    calls.clear()
    item.agent_rl_failed = False
    began = time.monotonic()
    profile(note)
    yield
    profile(None)
    module = item.nodeid.partition("::")[0]
    row = modules.setdefault(module, [0.0, set()])
    row[0] += time.monotonic() - began
    if not item.agent_rl_failed:
        places = {(code.co_filename, code.co_firstlineno) for code in calls}
        row[1].update((name[len(HERE):], line) for name, line in places if name.startswith(HERE))
    if nextitem is None or nextitem.nodeid.partition("::")[0] != module:
        with open(os.environ["AGENT_RL_TRACE"], "w") as out:
            json.dump(modules, out, default=sorted)
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    item.agent_rl_failed |= not (yield).get_result().passed
"""


@dataclass
class InjectionSource:
    """Bugs injected into a checkout, in a random order of ``seed``."""

    checkout: Checkout
    context: EnvContext
    site_packages: SitePackages
    directory: Path
    seed: int = 0
    jobs: int = 2
    _sites: dict[str, tuple[str, InjectionSite, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"inject {self.checkout.repo}"

    @property
    def omitted(self) -> Mapping[str, int]:
        return self.checkout.omitted

    async def candidate_keys(self) -> Sequence[str]:
        """Keys of injection sites in functions that passing tests call: one per function, then a second, etc."""
        modules = sorted(filter(is_test_module, self.checkout.files))
        if not modules:
            raise CandidateRejected("no tests", "no file test_*.py or *_test.py")
        rng = random.Random(f"inject/{self.seed}")
        chosen = sorted(rng.sample(modules, min(_MAX_MODULES, len(modules))))
        covering = await self._covering_modules(chosen)
        if not covering:
            raise CandidateRejected("no test passes", f"of {len(chosen)} modules")
        by_function: dict[tuple[str, int, str], list[str]] = defaultdict(list)
        for path in sorted(path for path in self.checkout.files if is_code(path)):
            for site in await asyncio.to_thread(injection_sites, self.checkout.files[path]):
                if site.bugs and (run := covering.get((path, site.bugs[0].function[0]))):
                    key = f"{path}:{site.line}:{site.column}"
                    self._sites.setdefault(key, (path, site, tuple(run[:_MODULES_PER_BUG])))
                    by_function[(path, *site.bugs[0].function)].append(key)
        return _interleave(by_function, rng)

    async def candidate(self, key: str) -> Candidate:
        path, site, run = self._sites[key]
        bug = random.Random(f"{self.seed}/{key}").choice(site.bugs)
        change = CodeChange(
            repo=self.checkout.repo,
            task_id=f"{self.checkout.repo}-{bug.family}-{key.replace('/', '.').replace(':', '-')}",
            files=self._visible_files(run) | {path: bug.source},
            fixed={path: self.checkout.files[path]},
            hidden={test: self.checkout.files[test] for test in run},
            commit=self.checkout.commit,
            decoys=[{path: other.source} for other in site.bugs if other is not bug],
        )
        return make_candidate(change, await self._install_site_packages())

    def _visible_files(self, hidden: Sequence[str]) -> dict[str, str]:
        files = {path: text for path, text in self.checkout.files.items() if path not in hidden}
        return with_egg_info(files, self.checkout.package)

    async def _install_site_packages(self) -> str:
        checkout = self.checkout
        return await self.site_packages.install(requirements_of(checkout.files, checkout.package, checkout.metadata))

    async def _covering_modules(self, modules: Sequence[str]) -> dict[tuple[str, int], list[str]]:
        """The test modules that call each function (its path and first line), fastest first."""
        site = await self._install_site_packages()
        parts = [modules[start :: self.jobs] for start in range(min(self.jobs, len(modules)))]
        traces = await asyncio.gather(*(self._trace(part, site) for part in parts))
        covering: dict[tuple[str, int], list[str]] = defaultdict(list)
        for _, module, functions in sorted(row for trace in traces for row in trace):
            for function in functions:
                covering[function].append(module)
        return dict(covering)

    async def _trace(self, modules: Sequence[str], site: str) -> list[_ModuleTrace]:
        """Trace the passing tests of some modules. Modules that do not end in time are missing in the result."""
        files = self._visible_files(())
        command = pytest_command(import_root(files), modules).replace(
            "-m pytest ", "-m pytest -p agent_rl_tracer --continue-on-collection-errors "
        )
        script = f"export PYTHONPATH=/tmp:$PYTHONPATH AGENT_RL_TRACE={_TRACE_PATH}; {command}"
        seconds = _MODULE_TIMEOUT_S * len(modules)
        env = {**self.context.limits.env, "PYTHONDONTWRITEBYTECODE": "1"}
        spec = with_site_packages(replace(self.context.limits, workdir=WORKDIR, env=env), self.directory / site)
        try:
            async with self.context.sandbox(spec) as sandbox:
                await sandbox.write_files({**workdir_files(files), "/tmp/agent_rl_tracer.py": _TRACER.encode()})
                result = await sandbox.exec(script, timeout=seconds, cwd=WORKDIR)
                if result.exit_code == USAGE:
                    await sandbox.exec(without_addopts(script), timeout=seconds, cwd=WORKDIR)
                return _parse_trace(await sandbox.read_file(_TRACE_PATH, max_bytes=_MAX_TRACE_BYTES))
        except (SandboxFileError, SandboxError):
            return []


def _parse_trace(trace: bytes) -> list[_ModuleTrace]:
    """The tracer's output. Empty if it is malformed: the code under test can write the file."""
    try:
        rows = json.loads(trace)
        return [
            (float(seconds), str(module), [(str(path), int(line)) for path, line in functions])
            for module, (seconds, functions) in rows.items()
        ]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []


def _interleave(by_function: Mapping[tuple[str, int, str], list[str]], rng: random.Random) -> list[str]:
    """One key of each function, then a second one of each function, and so on, in random order."""
    piles = [rng.sample(by_function[name], len(by_function[name])) for name in sorted(by_function)]
    rng.shuffle(piles)
    longest = max(map(len, piles), default=0)
    keys = [pile[depth] for depth in range(longest) for pile in piles if depth < len(pile)]
    return list(dict.fromkeys(keys))
