"""Programs in processes of their own, with eight devices of a CPU or with one."""

import contextlib
import io
import traceback
from multiprocessing.connection import Connection

from tests import kills
from tests.compiling import begin


def printed_by(program: str, devices: int = 1) -> str:
    """What a program prints. Raises AssertionError if it fails.

    The process is forked from a server that has imported jax and dpx, because that takes as long as most programs.
    """
    context = kills.server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_say, args=(program, devices, sender))
    process.start()
    sender.close()
    try:
        done, said = receiver.recv()
    except EOFError:
        done, said = False, "the process ended before its program did"
    process.join()
    assert done, said[-4000:]
    return said


def on_eight_devices(program: str) -> str:
    return printed_by(program, 8)


def _say(program: str, devices: int, sender: Connection) -> None:
    """In the new process, in which jax has not computed anything yet."""
    begin(devices)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, {})
    except BaseException:
        sender.send((False, traceback.format_exc()))
    else:
        sender.send((True, printed.getvalue()))
