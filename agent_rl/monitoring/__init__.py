"""What the user sees of a run: its directory, metrics, live display and picture."""
