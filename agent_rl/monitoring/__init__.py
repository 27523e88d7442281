"""What the user sees of a run: its folder, metrics, live display and picture."""
