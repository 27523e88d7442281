"""Generated tasks: small Python repositories with one seeded bug each."""

from envs.mini.environment import MiniEnvironment, initial_messages
from envs.mini.generator import GENERATOR_VERSION, SPLITS, MiniTask, generate, stream
from envs.mini.records import to_record
from envs.mini.templates import FAMILIES, HELDOUT_FAMILIES
from envs.mini.verify import verify_records

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
