"""R2E-Gym's tools and call format as its own agent meets them (github.com/R2E-Gym/R2E-Gym at 69bc953, Apache-2.0).

Each module names the file whose behaviour it has. What a model reads is the same to the character, up to the
differences that docs/interfaces.md lists; no script is copied into the sandbox, and none of it needs a Python there.
"""

from tools.r2egym.format import R2EGymFormat
from tools.r2egym.toolset import r2egym_tools

__all__ = ["R2EGymFormat", "r2egym_tools"]
