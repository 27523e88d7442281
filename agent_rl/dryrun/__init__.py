"""``agent-rl dry-run``: runs a trainer rank's code on a simulated GPU and records memory, compute and traffic."""
