"""The shipped scaffolds (:mod:`envs.scaffold`): the default one and those of published projects."""
