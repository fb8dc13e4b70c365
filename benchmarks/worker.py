"""The rows of one framework in a process of its own, so that several frameworks can take turns separately."""

import ctypes
import gc
import importlib
import multiprocessing
from pathlib import Path
from typing import Any

from benchmarks.problems import PROBLEMS
from benchmarks.timing import CLOCKS, Timer

FRAMEWORKS = {"jax": "jax_rows", "torch": "torch_rows"}  # the package to import, the module of its rows


class Session:
    """The answer of a worker."""

    def __init__(self, framework: str):
        self.module: Any = importlib.import_module(f"benchmarks.{FRAMEWORKS[framework]}")
        self.makers, self.timers, self.runs = {}, {}, {}

    def facts(self) -> dict[str, Any]:
        return {"libraries": self.module.LIBRARIES, "device": self.module.device(), "floor": self.module.FLOOR}

    def names(self, model: str, size: int, budget: float) -> list[str]:
        """The rows of a problem, without those whose gradients for every example, held twice, exceed `budget` GiB."""
        self.runs, self.timers = {}, {}
        gc.collect()
        self.makers = self.module.rows(model, size)
        too_large = 2 * 4 * size * PROBLEMS[model].parameters > budget * 2**30
        return [name for name in self.makers if not (too_large and name in self.module.STACKED)]

    def make(self, name: str, clock: str) -> float:
        """Seconds of tracing and compiling, or of whatever comes before the first step."""
        start = CLOCKS[clock]()
        self.runs[name] = self.makers[name]()
        return CLOCKS[clock]() - start

    def start(self, name: str, clock: str):
        """The first step."""
        self.timers[name] = Timer(self.runs[name], CLOCKS[clock])

    def time(self, name: str) -> float:
        return self.timers[name]()

    def memory(self, name: str) -> float:
        """Growth of the resident size over three steps at its peak, in MiB."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident("VmRSS")
        for _ in range(3):
            self.runs[name]()
        return resident("VmHWM") - before


def resident(field: str) -> float:
    """MiB; Linux counts in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(found) / 2**10


def serve(connection, framework: str):
    Path("/proc/self/oom_score_adj").write_text("1000")  # of all processes, this one may go
    session = Session(framework)
    while (request := connection.recv()) is not None:
        command, *arguments = request
        try:
            connection.send((getattr(session, command)(*arguments), None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))


class Worker:
    """`worker("time", name)` is `Session(framework).time(name)` there: RuntimeError if it fails, EOFError if dead."""

    def __init__(self, framework: str):
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, framework), daemon=True)
        self.process.start()
        there.close()

    def __call__(self, command: str, *arguments) -> Any:
        self.connection.send((command, *arguments))
        try:
            result, failure = self.connection.recv()
        except EOFError:
            raise EOFError(f"{command} {arguments}: the process died; out of memory? (lower --budget)") from None
        if failure:
            raise RuntimeError(failure)
        return result

    def close(self):
        self.connection.send(None)
        self.process.join()
