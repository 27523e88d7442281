"""Episodes of an agent and their output: trajectories, groups, metrics, records. See docs/reference/environments.md."""
