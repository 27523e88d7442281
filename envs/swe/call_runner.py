"""Makes the calls of a hidden test run in a sandbox and prints the value of each, marked with the run's nonce.

:mod:`envs.swe.calls` puts it into the sandbox, beside a file ``order``: the nonce, then a module and a call a line. It
shares its process with the code under test, which may do with it what it likes: what is expected is not here, so an
answer is right only if the code under test finds it. It runs on the sandbox's own Python and imports nothing that
Python has not loaded already: it is started for every episode.
"""

import os
import sys


def answer(module: str, call: str) -> str:
    """The value of ``call`` in ASCII, or which exception it raised."""
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
        os.write(channel, f"{nonce} {index} {answer(module, call)}\n".encode(errors="replace"))
    os._exit(0)  # threads that the code under test left behind don't keep it


main()
