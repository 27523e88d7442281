"""``agent-rl view``: a run as a page, served on this machine or exported as files."""
