"""agent-rl: reinforcement learning of software-engineering agents on Mixture-of-Experts models."""

from agent_rl.shadowing import protect_package_names

__version__ = "0.1.0"

protect_package_names()
