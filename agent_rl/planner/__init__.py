"""``agent-rl plan``: what memory, disk, traffic and time a config takes, and what would make it fit."""
