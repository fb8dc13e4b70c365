"""Time and interval width of the accountants on long schedules, and a comparison with dp-accounting for each event.

    OMP_NUM_THREADS=1 python -m benchmarks.accounting

Writes benchmarks/results/accounting.md. Every row runs in a process of its own.
"""

import argparse
import multiprocessing
import os
import resource
import time
from typing import Any

from benchmarks import report

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

LONG, SHORT, RATE = 10_000, 300, 0.01


def schedule(steps: int):
    import numpy as np

    return np.linspace(3, 1, steps)


def interval(steps: int) -> dict[str, Any]:
    from dpx import accounting

    found = accounting.schedule_epsilon(schedule(steps), sampling_rate=RATE, delta=1e-6)
    return {"lower": found.lower, "upper": found.upper, "width": found.upper / found.lower - 1}


def rdp(steps: int) -> dict[str, Any]:
    from dpx import accounting

    return {
        "upper": accounting.schedule_epsilon(schedule(steps), sampling_rate=RATE, delta=1e-6, accountant="rdp").upper
    }


def calibration(steps: int) -> dict[str, Any]:
    from dpx import accounting

    found = accounting.calibrate_schedule(schedule(steps), sampling_rate=RATE, epsilon=2, delta=1e-5)
    return {"scale": found.scale, "lower": found.interval.lower, "upper": found.interval.upper}


def mechanism_epsilon(steps: int) -> dict[str, Any]:
    from dpx import accounting

    return {"upper": accounting.event_epsilon(_event(steps), delta=1e-6)}


def random_allocation(steps: int) -> dict[str, Any]:
    """Epochs of 1,000 steps at noise multiplier 1."""
    import numpy as np

    from dpx import accounting, sampling

    event = sampling.RandomAllocation(examples=10**6, steps_per_epoch=1000).event(np.ones(steps))
    return {"upper": accounting.event_epsilon(event, delta=1e-6)}


def dp_accounting_calibration(steps: int) -> dict[str, Any]:
    """By its own search, from a bracket around the answer and to the tolerance that ours has."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    scale = dp_accounting.calibrate_dp_mechanism(
        PLDAccountant,
        lambda scale: _event(steps, scale),
        2,
        1e-5,
        dp_accounting.ExplicitBracketInterval(0.3, 1.0),
        tol=1e-4 * 0.6,
    )
    return {"scale": scale, "upper": PLDAccountant().compose(_event(steps, scale)).get_epsilon(1e-5)}


def dp_accounting_pld(steps: int) -> dict[str, Any]:
    from dp_accounting.pld import PLDAccountant

    return {"upper": PLDAccountant().compose(_event(steps)).get_epsilon(1e-6)}


def dp_accounting_rdp(steps: int) -> dict[str, Any]:
    from dp_accounting.rdp import RdpAccountant

    return {"upper": RdpAccountant().compose(_event(steps)).get_epsilon(1e-6)}


def _event(steps: int, scale: float = 1.0):
    import dp_accounting

    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(float(scale * sigma)))
            for sigma in schedule(steps)
        ]
    )


ROWS = [
    (interval, LONG, "at most 5 s, 1 GiB, width 2.5%"),
    (calibration, LONG, "at most 10 s"),
    (rdp, LONG, "at most 3 s"),
    (mechanism_epsilon, LONG, "seconds"),
    (random_allocation, 100 * 1000, "at most 2 s"),
    (interval, SHORT, ""),
    (rdp, SHORT, ""),
    (calibration, SHORT, ""),
    (dp_accounting_pld, SHORT, ""),
    (dp_accounting_rdp, SHORT, ""),
    (dp_accounting_calibration, SHORT, ""),
]


def _child(task, steps: int, connection) -> None:
    import dpx.accounting  # noqa: F401 - imports are not timed

    start, used = time.perf_counter(), time.process_time()
    result = task(steps)
    result["seconds"] = time.perf_counter() - start
    result["cpu_seconds"] = time.process_time() - used
    result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    connection.send(result)


def measure(task, steps: int) -> dict[str, Any]:
    """One run in a fresh process: its result, wall-clock seconds without imports, peak memory with them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(task, steps, theirs))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows: list[dict[str, Any]] = [
        {"task": task.__name__, "steps": steps, "wanted": wanted, **measure(task, steps)}
        for task, steps, wanted in ROWS
    ]
    seconds: dict[Any, float] = {(row["task"], row["steps"]): row["cpu_seconds"] for row in rows}
    ratios = {
        f"PLD interval, {SHORT} steps": seconds["dp_accounting_pld", SHORT] / seconds["interval", SHORT],
        f"RDP, {SHORT} steps": seconds["dp_accounting_rdp", SHORT] / seconds["rdp", SHORT],
        f"calibration, {SHORT} steps": seconds["dp_accounting_calibration", SHORT] / seconds["calibration", SHORT],
    }
    page = report.write(
        "accounting",
        "# Accounting of long schedules",
        report.heading(
            "benchmarks.accounting", ("dp-accounting", "numpy", "scipy"), threads=os.environ["OMP_NUM_THREADS"]
        )
        + f" Schedule: linspace(3, 1, steps), sampling rate {RATE}, delta 1e-6; calibration to (2, 1e-5).",
        report.grid(
            ("task", "steps", "seconds", "CPU seconds", "peak GiB", "lower", "upper", "wanted"), map(cells, rows)
        ),
        report.grid(
            ("against dp-accounting, event by event", "times less CPU time"),
            [(name, f"{ratio:.0f}") for name, ratio in ratios.items()],
        ),
    )
    print(page)


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    sizes = (f"{row[name]:.2f}" for name in ("seconds", "cpu_seconds", "peak_gib"))
    lower = f"{row['lower']:.4f}" if "lower" in row else ""
    return row["task"], row["steps"], *sizes, lower, f"{row['upper']:.4f}", row["wanted"]


if __name__ == "__main__":
    main()
