"""``agent-rl dry-run``: a rank's own code on a GPU that is not there, to see what it would hold, compute and send."""
