"""Runs in the engine environment's interpreter: starts the SGLang server, which is killed when its owner ends."""
