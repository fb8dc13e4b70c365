"""The line of the contract about bits: whatever leaves a step has passed `keys.release`, which rounds to a public grid.

A Gaussian mechanism on real numbers need not be private in floating point, because the bits of a noisy float can show
the sum under it. `keys.release` is private for the bits. So its results are replaced by constants in a trace of the
step, and then no public number may depend on raw data. Since the replacement still depends on the key, the step and the
deviation, a grid or a noise that depends on the data is found too. And what `keys.release` is given must be the sum,
with no more rounding than the noise is larger for (`sums.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from dpx.audit.contract.marks import RAW, spread
from dpx.audit.contract.report import Broken
from dpx.audit.contract.subject import STEPS, everyone
from dpx.audit.contract.sums import require_low_numbers, require_small_rounding
from dpx.audit.contract.trial import Trial
from dpx.audit.stand_ins import replacing
from dpx.states.public import publishable_state
from dpx.xla.totals import as_total


def bits(trial: Trial) -> str:
    """All public numbers are functions of what `keys.release` returned for exact sums, and of public numbers."""
    closed, names = _without_releases(trial)
    grads = len(jax.tree.leaves(trial.params))
    shown = {jax.tree_util.keystr(path) for path, _ in _paths(publishable_state(trial.state(STEPS[0])))}
    state = [0 if jax.tree_util.keystr(path) in shown else RAW for path, _ in _paths(trial.state(STEPS[0]))]
    marks = spread(closed, [RAW] * grads + state + [0], lambda *_: None)
    raw = [name for name, mark in zip(names, marks, strict=True) if mark & RAW]
    if raw:
        raise Broken(
            f"{raw[0]} depends on raw data by another way than `dpx.keys.release`, so its bits may show the data, "
            "whatever epsilon is for real numbers"
        )
    require_low_numbers(trial)
    words = f"{len(names)} public arrays are functions of what `keys.release` put on its grid"
    return "; ".join(filter(None, [words, require_small_rounding(trial)]))


def _without_releases(trial: Trial) -> tuple[Any, list[str]]:
    """The jaxpr of a step without its releases, and the names of the public arrays that it returns."""

    def constant(key, step, total, deviation, **_):
        stands_for = jnp.float32(deviation) + jnp.float32(step) + jax.random.key_data(key)[0].astype(jnp.float32)
        return jax.tree.map(lambda x: jnp.full(x.shape, stands_for), as_total(total).high)

    def public(grads, state, included):
        updates, after = trial.mechanism.update(grads, state, trial.params, included=included)
        return {"updates": updates, "state": publishable_state(after)}

    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((len(everyone()), *p.shape), p.dtype), trial.params)
    with replacing(release=constant):
        closed, shapes = jax.make_jaxpr(public, return_shape=True)(grads, trial.state(STEPS[0]), everyone())
    return closed, [jax.tree_util.keystr(path) for path, _ in _paths(shapes)]


def _paths(tree: Any) -> list:
    return jax.tree_util.tree_leaves_with_path(tree)
