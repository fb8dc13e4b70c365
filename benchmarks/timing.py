"""Times of rows that take turns, so that other load on the machine slows all of them equally."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ONE_CORE = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
SLOW = 2.0  # seconds of one step
SHORT, LONG = 1.0, 15.0  # seconds of all steps of a row: less is too little for few rounds, more is enough at any time
MORE = 12  # times the rounds, for a short row


def pin(core: int):
    """This process and those it starts, on one core and with one thread each; before any framework is imported."""
    if core >= 0:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_CORE}"
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        os.sched_setaffinity(0, {core})


class Timer:
    """The seconds of one more step, after the first."""

    def __init__(self, run: Callable[[], Any], clock: Callable[[], float]):
        self.run, self.clock, self.last = run, clock, SLOW
        self()

    def __call__(self) -> float:
        if self.last < SLOW:
            self.run()  # untimed: the memory that the row before gives back late is not this row's cost
        time.sleep(0.01)
        start = self.clock()
        self.run()
        self.last = self.clock() - start
        return self.last


def interleaved(rows: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """The seconds of every row, `rounds` of them or more if it is short; a row that takes long leaves earlier."""
    times: dict[Any, list[float]] = {name: [] for name in rows}
    for number in range(MORE * rounds):
        for name, seconds in rows.items():
            if sum(times[name]) < (LONG if number < rounds else SHORT):
                times[name].append(seconds())
    return times
