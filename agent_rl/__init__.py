"""agent-rl: reinforcement learning of software-engineering agents on Mixture-of-Experts models."""

__version__ = "0.1.0"
