"""Runs inside the engine environment's interpreter: starts the SGLang server and dies with its owner."""
