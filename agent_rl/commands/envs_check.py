"""``agent-rl envs check``: runs the conformance suite on one environment."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from agent_rl.errors import UserError
from agent_rl.monitoring.console import cell
from envs import EnvContext, load_environment, needs_sandbox
from envs.conformance import check_environment
from sandbox import NullBackend, open_backend


async def run_check(name: str, options: Sequence[str], splits: Sequence[str]) -> bool:
    """Check the environment ``name`` and print one row per check. Returns True if all passed."""
    backend = open_backend("auto", run_id=uuid.uuid4().hex[:12]) if needs_sandbox(name) else NullBackend()
    try:
        environment = load_environment(name, EnvContext(backend=backend), dict(map(_parse_option, options)))
        findings = await check_environment(environment, splits)
    finally:
        await backend.close()
    table = Table("check", "", "details")
    for finding in findings:
        table.add_row(finding.check, "passed" if finding.ok else "FAILED", cell(finding.detail))
    Console().print(table)
    return all(finding.ok for finding in findings)


def _parse_option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise UserError(f"{text!r}: expected option=value")
    return key, yaml.safe_load(value)
