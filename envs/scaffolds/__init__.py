"""The shipped scaffolds (:mod:`envs.scaffold`), one module each."""
