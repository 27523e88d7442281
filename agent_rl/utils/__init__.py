"""Helpers that every part may use: concurrency, HTTP, files of a run."""
