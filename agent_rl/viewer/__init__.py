"""``agent-rl view``: a run as a web page, served locally or exported as files."""
