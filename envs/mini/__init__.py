"""Generated tasks: small Python repositories with one seeded bug each."""

from envs.mini.environment import MiniEnvironment, initial_messages, verify_records
from envs.mini.generator import GENERATOR_VERSION, SPLITS, MiniTask, generate, stream, to_record
from envs.mini.templates import FAMILIES, HELDOUT_FAMILIES

__all__ = [
    "FAMILIES",
    "GENERATOR_VERSION",
    "HELDOUT_FAMILIES",
    "SPLITS",
    "MiniEnvironment",
    "MiniTask",
    "generate",
    "initial_messages",
    "stream",
    "to_record",
    "verify_records",
]
