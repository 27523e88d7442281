"""Episodes of an agent and what they leave: trajectories, groups, metrics, records. See docs/rollout.md."""
