"""What the command line's commands do, one module each; ``agent_rl/cli`` reads their arguments."""
