"""``agent-rl plan``: what memory, disk and traffic a config takes, and what would make it fit."""
