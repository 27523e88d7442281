"""Transfer of the trainer's weights to the engines, with checks."""
