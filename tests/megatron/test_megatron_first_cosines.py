"""The first cosines of a process, by two threads at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.exhaustive, pytest.mark.timeout(600)]

FIRST = """
import torch
from agent_rl.train.megatron.cpu import set_up_vector_functions
torch.set_num_threads(2)
set_up_vector_functions()
angles = torch.outer(torch.arange(118.0), 1e6 ** -(torch.arange(32.0) / 32))
assert torch.equal(angles.cos(), angles.cos())
"""


def test_they_are_those_of_the_second_call_in_every_process() -> None:
    """Without the set-up one in ten fails where two cores are free."""
    path = os.pathsep.join(sys.path)
    for _ in range(40):
        subprocess.run([sys.executable, "-c", FIRST], env={**os.environ, "PYTHONPATH": path}, check=True)
