"""The printed pipeline: numbers, schedules and groups of layers in words, and the place of a stage.

`Mechanism.stages` names the computations in order. In dpx, the stage before `SUM` bounds every example and the stage
after it adds the noise, which shows a wrapper where its own stages belong.
"""

from collections.abc import Callable
from typing import Any

import jax

from dpx.schedules import ScalarOrSchedule, values_over
from dpx.values import Tree, path_of

SUM = "sum over the batch"


def insert_around_sum(
    stages: tuple[str, ...], *, before_bound: tuple[str, ...] = (), before_noise: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """`stages` with others inserted before the bound and before the noise; all of them first if there is no `SUM`."""
    if SUM not in stages:
        return (*before_bound, *before_noise, *stages)
    bound, noise = max(stages.index(SUM) - 1, 0), stages.index(SUM) + 1
    return (*stages[:bound], *before_bound, *stages[bound:noise], *before_noise, *stages[noise:])


def describe(value: ScalarOrSchedule) -> str:
    """A number, or the first number of a schedule, in words."""
    return f"{values_over(value, 1)[0]:.6g} (at step 0 of a schedule)" if callable(value) else f"{value:.6g}"


def describe_share(share: ScalarOrSchedule) -> str:
    return "a scheduled share" if callable(share) else f"a share of {share:.4g}"


def describe_period(every: int) -> str:
    return "every step" if every == 1 else f"every {every} steps"


def describe_groups(values: Tree, words: Callable[[Any], str] = describe) -> str:
    """The values of the groups of layers in words, each after the path of its group; a single value has no path."""
    paths, _ = jax.tree_util.tree_flatten_with_path(values)
    return ", ".join(f"{path_of(path)} {words(leaf)}".strip() for path, leaf in paths)
