"""Tasks of Harbor and Terminal-Bench, read from their directories and graded as Harbor grades them."""

from envs.harbor.environment import HarborEnvironment
from envs.harbor.tasks import HarborTask, read_task
