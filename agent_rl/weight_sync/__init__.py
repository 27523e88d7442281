"""The trainer's weights into the engines: asking, sending, receiving, checking."""
