"""A run is killed with sandboxes in every stage; the next run removes all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sandbox.reap import open_lease_store

CHURN = Path(__file__).with_name("churn.py")
COUNT = 12  # benchmarks/bench_sandbox.py uses 300


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("bubblewrap", "docker")]
)
def test_the_next_run_removes_everything_of_a_killed_run(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, following = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("killed", "following"))
    churn = [sys.executable, CHURN, backend]
    with subprocess.Popen([*churn, str(COUNT), killed], stdout=subprocess.PIPE) as run:
        done = [json.loads(run.stdout.readline()) for _ in range(COUNT // 2)]
        run.kill()
        run.wait()
        left = [lease for lease in open_lease_store(backend).leases() if lease.owner.run_id == killed]
    assert [sandbox for sandbox in done if "error" in sandbox] == []
    assert [lease.dead for lease in left] == [True]
    assert left[0].sandboxes, "it was killed too late"
    rest = subprocess.run([*churn, str(COUNT // 2), following], capture_output=True, check=True, timeout=120).stdout
    sandboxes = [json.loads(line) for line in rest.splitlines()]
    assert len(sandboxes) == COUNT // 2
    assert [sandbox for sandbox in sandboxes if "error" in sandbox] == []
    assert [lease for lease in open_lease_store(backend).leases() if lease.owner.run_id in (killed, following)] == []
