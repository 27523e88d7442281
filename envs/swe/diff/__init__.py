"""Differences between a repository's states: snapshots, lines, git diffs and the agent's patch."""
