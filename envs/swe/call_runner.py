"""Makes the calls of a hidden test run in a sandbox and prints the value of each, marked with the run's nonce.

:mod:`envs.swe.calls` writes it into the sandbox with a file ``order``: one line with the nonce, then one line per call
with its module and expression. It shares its process with the code under test, which can change it at will. The
expected values are not here, so a result is right only if the code under test computes it. It runs on the sandbox's own
Python and imports only modules that Python has loaded already, because it starts once per episode.
"""

import os
import sys


def evaluate(module: str, call: str) -> str:
    """The value of ``call`` in ASCII, or the type of the exception that it raised."""
    try:
        __import__(module)
        return ascii(eval(call, dict(vars(sys.modules[module]))))
    except BaseException as error:
        return "raises " + type(error).__name__


def main() -> None:
    with open(os.path.join(sys.path[0], "order")) as order:
        nonce, *calls = order.read().splitlines()
    channel, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.path[0] = os.getcwd()
    for index, line in enumerate(calls):
        module, _, call = line.partition(" ")
        os.write(channel, f"{nonce} {index} {evaluate(module, call)}\n".encode(errors="replace"))
    os._exit(0)  # does not wait for threads of the code under test


main()
