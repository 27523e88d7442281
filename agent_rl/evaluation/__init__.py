"""Evaluations: running, reporting, storing and comparing them, and the quarantine of broken tasks."""
