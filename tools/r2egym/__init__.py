"""R2E-Gym's tools and call format (github.com/R2E-Gym/R2E-Gym at 69bc953, Apache-2.0).

Each module names the file that it reproduces. Observations are identical except for the differences listed in
docs/reference/tools.md. The tools need no script and no Python in the sandbox.
"""

from tools.r2egym.toolset import R2EGymFormat, r2egym_tools
