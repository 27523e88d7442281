"""What a model is: its family, its sizes, and where it lies."""
