"""The space of all sandboxes together, and who is to blame for a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_rl.commands.health import check_sandbox_space, check_sandboxes
from agent_rl.config import RunConfig
from sandbox import SandboxError
from sandbox.disk import Usage


def config(tmp_path: Path, **sandbox: Any) -> RunConfig:
    settings = {"backend": "bubblewrap", **sandbox}
    return RunConfig.model_validate({"name": "space", "model": str(tmp_path), "sandbox": settings})


def test_sandboxes_that_may_take_more_than_is_free_are_refused(tmp_path: Path) -> None:
    run = config(tmp_path, disk_mb=100)
    check_sandbox_space(run, 64, 6400 << 20)
    check_sandbox_space(run, 64, None)
    with pytest.raises(
        SandboxError, match=r"64 sandboxes of sandbox.disk_mb=100 may take 6400 MiB, and 6399 MiB"
    ) as error:
        check_sandbox_space(run, 64, (6400 << 20) - 1)
    assert "\n" not in str(error.value)


@pytest.mark.bubblewrap
async def test_doctor_refuses_more_sandboxes_than_the_disk_holds(tmp_path: Path) -> None:
    (found,) = await check_sandboxes(config(tmp_path, disk_mb=1 << 30))
    assert (found.ok, "lower sandbox.disk_mb or rollout.concurrency" in found.detail) == (False, True)
    (found,) = await check_sandboxes(config(tmp_path, disk_mb=1))
    assert found.ok, found


@pytest.mark.parametrize(
    ("grown", "lacking", "blamed"),
    [
        (Usage(20, 5), Usage(16, 0), True),
        (Usage(16, 5), Usage(16, 0), False),
        (Usage(1 << 40, 5), Usage(0, 1000), False),
        (Usage(0, 1001), Usage(0, 1000), True),
        (Usage(1 << 40, 1 << 20), Usage(), False),
    ],
)
def test_growth_explains_a_shortage_that_is_smaller(grown: Usage, lacking: Usage, blamed: bool) -> None:
    assert grown.explains(lacking) is blamed
