"""Candidates by putting bugs into code whose tests pass: which tests run which functions is found out first."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.context import EnvContext
from envs.swe.repositories import WORKDIR, in_workdir
from envs.swe.sandboxes import SITE
from envs.swe.task_synthesis.candidate import (
    Candidate,
    Change,
    Fallen,
    draft,
    egg_info,
    import_root,
    is_code,
    is_test_module,
    pytest_command,
)
from envs.swe.task_synthesis.checkout import Checkout
from envs.swe.task_synthesis.mutations import Bug, Site, sites
from envs.swe.task_synthesis.requirements import requirements_of
from envs.swe.task_synthesis.site_packages import SitePackages
from envs.swe.task_synthesis.tracer import TRACER
from envs.swe.task_synthesis.validation import USAGE, without_addopts
from sandbox import SandboxError, SandboxFileError, SandboxSpec

_MODULES = 24
"""Test modules that are looked at: the others stay in the repository, where the agent sees them."""
_RUN = 2
"""Test modules that check one bug."""
_TRACE = "/tmp/agent-rl-trace"
_TRACE_BYTES = 16 << 20
_MODULE_SECONDS = 15.0


_Traced = tuple[float, str, list[tuple[str, int]]]
"""Seconds of a test module, its path, and the functions that its passing tests run."""


@dataclass
class Injection:
    """Bugs in a checkout, in an order drawn from ``seed``."""

    checkout: Checkout
    context: EnvContext
    sites: SitePackages
    directory: Path
    seed: int = 0
    jobs: int = 2
    _places: dict[str, tuple[str, Site, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"inject {self.checkout.repo}"

    @property
    def left_out(self) -> Mapping[str, int]:
        return self.checkout.left_out

    async def candidates(self) -> Sequence[str]:
        """Places in functions that passing tests run: no two of a function before each has had one."""
        modules = sorted(filter(is_test_module, self.checkout.files))
        if not modules:
            raise Fallen("no tests", "no file test_*.py or *_test.py")
        rng = random.Random(f"inject/{self.seed}")
        chosen = sorted(rng.sample(modules, min(_MODULES, len(modules))))
        covering = await self._covering(chosen)
        if not covering:
            raise Fallen("no test passes", f"of {len(chosen)} modules")
        by_function: dict[tuple[str, int, str], list[str]] = defaultdict(list)
        for path in sorted(path for path in self.checkout.files if is_code(path)):
            for site in await asyncio.to_thread(sites, self.checkout.files[path]):
                self._take(path, site, covering, by_function)
        return _dealt(by_function, rng)

    def _take(
        self,
        path: str,
        site: Site,
        covering: Mapping[tuple[str, int], Sequence[str]],
        by_function: dict[tuple[str, int, str], list[str]],
    ) -> None:
        if site.bugs and (run := covering.get((path, site.bugs[0].function[0]))):
            key = f"{path}:{site.line}:{site.column}"
            self._places.setdefault(key, (path, site, tuple(run[:_RUN])))
            by_function[(path, *site.bugs[0].function)].append(key)

    async def draft(self, key: str) -> Candidate:
        path, site, run = self._places[key]
        bug = random.Random(f"{self.seed}/{key}").choice(site.bugs)
        files = self._shown(run) | {path: bug.source}
        hidden = {test: self.checkout.files[test] for test in run}
        change = Change(
            repo=self.checkout.repo,
            task_id=_task_id(self.checkout, key, bug),
            files=files,
            fixed={path: self.checkout.files[path]},
            hidden=hidden,
            run=run,
            commit=self.checkout.commit,
            decoys=[{path: other.source} for other in site.bugs if other is not bug],
            root=import_root(self.checkout.files),
        )
        return draft(change, await self._site())

    def _shown(self, hidden: Sequence[str]) -> dict[str, str]:
        files = {path: text for path, text in self.checkout.files.items() if path not in hidden}
        return files | egg_info(files, self.checkout.package, import_root(files))

    async def _site(self) -> str:
        checkout = self.checkout
        return await self.sites.of(requirements_of(checkout.files, checkout.package, checkout.metadata))

    async def _covering(self, modules: Sequence[str]) -> dict[tuple[str, int], list[str]]:
        """The test modules that run each function (its file and first line), the quickest first."""
        site = await self._site()
        parts = [modules[start :: self.jobs] for start in range(min(self.jobs, len(modules)))]
        traces = await asyncio.gather(*(self._trace(part, site) for part in parts))
        covering: dict[tuple[str, int], list[str]] = defaultdict(list)
        for _, module, functions in sorted(row for trace in traces for row in trace):
            for function in functions:
                covering[function].append(module)
        return dict(covering)

    async def _trace(self, modules: Sequence[str], site: str) -> list[_Traced]:
        """What the passing tests of some modules run; nothing of those that don't end in time."""
        files = self._shown(())
        command = pytest_command(import_root(files), modules).replace(
            "-m pytest ", "-m pytest -p agent_rl_tracer --continue-on-collection-errors "
        )
        script = f"export PYTHONPATH=/tmp:$PYTHONPATH AGENT_RL_TRACE={_TRACE}; {command}"
        seconds = _MODULE_SECONDS * len(modules)
        try:
            async with self.context.sandbox(site_spec(self.context, self.directory / site)) as sandbox:
                await sandbox.write_files({**in_workdir(files), "/tmp/agent_rl_tracer.py": TRACER.encode()})
                ran = await sandbox.exec(script, timeout=seconds, cwd=WORKDIR)
                if ran.exit_code == USAGE:
                    await sandbox.exec(without_addopts(script), timeout=seconds, cwd=WORKDIR)
                return _traced(await sandbox.read_file(_TRACE, max_bytes=_TRACE_BYTES))
        except (SandboxFileError, SandboxError):
            return []


def site_spec(context: EnvContext, site: Path) -> SandboxSpec:
    """A sandbox that imports from the directory ``site``."""
    env = {**context.limits.env, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": SITE}
    return replace(context.limits, workdir=WORKDIR, env=env, ro_binds={**context.limits.ro_binds, str(site): SITE})


def _traced(trace: bytes) -> list[_Traced]:
    """What the tracer wrote; nothing where it is not of that form, as the code under test may have written it."""
    try:
        rows = json.loads(trace)
        return [
            (float(seconds), str(module), [(str(path), int(line)) for path, line in functions])
            for module, (seconds, functions) in rows.items()
        ]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []


def _dealt(by_function: Mapping[tuple[str, int, str], list[str]], rng: random.Random) -> list[str]:
    """One key of each function, then a second one of each that has more, and so on, in a drawn order."""
    piles = [rng.sample(by_function[name], len(by_function[name])) for name in sorted(by_function)]
    rng.shuffle(piles)
    longest = max(map(len, piles), default=0)
    dealt = [pile[depth] for depth in range(longest) for pile in piles if depth < len(pile)]
    return list(dict.fromkeys(dealt))


def _task_id(checkout: Checkout, key: str, bug: Bug) -> str:
    place = key.replace("/", ".").replace(":", "-")
    return f"{checkout.repo}-{bug.family}-{place}"
