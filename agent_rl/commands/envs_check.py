"""``agent-rl envs check``: the conformance suite on one environment."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from agent_rl.errors import UserError
from agent_rl.monitoring.console import cell
from envs import EnvContext, load_environment, needs_sandboxes
from envs.conformance import check_environment
from sandbox import NullBackend, open_backend


async def run_check(name: str, options: Sequence[str], splits: Sequence[str]) -> bool:
    """Check environment ``name`` and print a row a promise; True if all are kept."""
    backend = open_backend("auto", run_id=uuid.uuid4().hex[:12]) if needs_sandboxes(name) else NullBackend()
    try:
        environment = load_environment(name, EnvContext(backend=backend), dict(map(_option, options)))
        findings = await check_environment(environment, splits)
    finally:
        await backend.close()
    table = Table("promise", "", "found")
    for finding in findings:
        table.add_row(finding.check, "kept" if finding.ok else "BROKEN", cell(finding.detail))
    Console().print(table)
    return all(finding.ok for finding in findings)


def _option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise UserError(f"{text!r}: write an option as name=value")
    return key, yaml.safe_load(value)
