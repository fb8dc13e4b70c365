"""The printed pipeline: numbers, schedules and groups of layers in words, and where a stage belongs.

`Mechanism.stages` names what is computed, in order. In the pipelines of dpx the stage before `SUM` bounds every
example, and the stage after it adds the noise, so wrappers find their place by this one stage.
"""

from collections.abc import Callable
from typing import Any

import jax

from dpx._numbers import ScalarOrSchedule, over

Tree = Any  # a pytree

SUM = "sum over the batch"


def around_sum(
    stages: tuple[str, ...], *, before_bound: tuple[str, ...] = (), before_noise: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """`stages` with others put before the bound and before the noise; all in front where there is no `SUM`."""
    if SUM not in stages:
        return (*before_bound, *before_noise, *stages)
    bound, noise = max(stages.index(SUM) - 1, 0), stages.index(SUM) + 1
    return (*stages[:bound], *before_bound, *stages[bound:noise], *before_noise, *stages[noise:])


def describe(value: ScalarOrSchedule) -> str:
    """A number, or a schedule by its first number."""
    return f"{over(value, 1)[0]:.6g} (at step 0 of a schedule)" if callable(value) else f"{value:.6g}"


def describe_share(share: ScalarOrSchedule) -> str:
    """A share in [0, 1] of the coordinates."""
    return "a scheduled share" if callable(share) else f"a share of {share:.4g}"


def describe_period(every: int) -> str:
    """How often something happens that happens every `every` steps."""
    return "every step" if every == 1 else f"every {every} steps"


def describe_groups(values: Tree, words: Callable[[Any], str] = describe) -> str:
    """A value for each group of layers, each behind the group's path; one value alone stands without a path."""
    paths, _ = jax.tree_util.tree_flatten_with_path(values)
    return ", ".join(f"{path_of(path)} {words(leaf)}".strip() for path, leaf in paths)


def path_of(path: tuple[Any, ...]) -> str:
    """The path of a leaf in words, such as "dense/kernel"; "" for a tree that is one leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
