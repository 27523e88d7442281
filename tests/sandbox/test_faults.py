"""A run that is killed with many sandboxes in every stage of their lives leaves nothing behind after the next start."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sandbox.reap import open_place

CHURN = Path(__file__).with_name("churn.py")
COUNT = 40  # benchmarks/bench_sandbox.py has 300


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("bubblewrap", "docker")]
)
def test_nothing_is_left_of_a_killed_run_after_the_next_start(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, following = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("killed", "following"))
    churn = [sys.executable, CHURN, backend]
    with subprocess.Popen([*churn, str(COUNT), killed], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        done = [json.loads(run.stdout.readline()) for _ in range(COUNT // 2)]
        run.kill()
        run.wait()
        left = [lease for lease in open_place(backend).leases() if lease.owner.run_id == killed]
    assert [sandbox for sandbox in done if "error" in sandbox] == []
    assert [lease.dead for lease in left] == [True]
    assert left[0].sandboxes, "it was killed in the middle"
    rest = subprocess.run([*churn, str(COUNT // 2), following], capture_output=True, check=True, timeout=120).stdout
    sandboxes = [json.loads(line) for line in rest.splitlines()]
    assert len(sandboxes) == COUNT // 2
    assert [sandbox for sandbox in sandboxes if "error" in sandbox] == []
    assert [lease for lease in open_place(backend).leases() if lease.owner.run_id in (killed, following)] == []
