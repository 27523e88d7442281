"""Trains any agent program through an HTTP endpoint with the API that it already uses:
docs/how-to/agent-programs.md."""
