"""Generated tasks: small Python repositories with one seeded bug each."""

from envs.mini.environment import MiniEnvironment, initial_messages, verify_records
from envs.mini.generator import GENERATOR_VERSION, SPLITS, MiniTask, generate, stream, to_record
from envs.mini.templates import FAMILIES, HELDOUT_FAMILIES
