"""``python -m agent_rl.cli``."""

from agent_rl.cli import main

if __name__ == "__main__":
    main()
