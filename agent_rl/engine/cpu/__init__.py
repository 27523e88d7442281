"""Patches that let the SGLang server run on a machine without a GPU.

``agent_rl/engine/server/serve.py`` puts this directory on the path of the engine environment's interpreter, so that
``import sgl_kernel`` finds the fake beside this file. No module here imports other modules of this project.
"""
