"""OpenHands' tools and its text form of calls, for models without native function calling.

github.com/SWE-Gym/OpenHands at e644a2ca (OpenHands 0.13.1, MIT), the scaffold of SWE-Gym's models, and its editor, the
distribution openhands-aci 0.1.1 (MIT). Each module names the file that it reproduces.
"""

from tools.openhands.toolset import OpenHandsFormat, openhands_tools
