"""What all plots share. matplotlib is imported when a plot is drawn."""

from typing import Any


def labeled(axes: Any, x: str, y: str) -> Any:
    """matplotlib axes, new ones for None, with the names of both quantities."""
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(layout="constrained")
    axes.set(xlabel=x, ylabel=y)
    return axes


def draw_guessing(axes: Any, x: Any, y: Any):
    """A dotted line for an attacker who guesses, once in these axes. x, y: float (points,)."""
    if all(line.get_label() != "guessing" for line in axes.lines):
        axes.plot(x, y, "k:", linewidth=1, label="guessing")
    axes.legend()
