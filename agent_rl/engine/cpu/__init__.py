"""What the SGLang server needs to run on a machine without a GPU.

This directory is put on the path of the *engine environment's* interpreter by ``agent_rl/engine/server/serve.py``, so
that there ``import sgl_kernel`` finds the stand-in beside this file. Nothing here imports anything else of ours.
"""
