"""The lines of the contract about secrets: nothing but released values leaves, and no program branches on raw data.

Marks spread from raw data and keys through the equations of a program, and show what depends on them.

The line "bits": a Gaussian mechanism on real numbers need not be private in floating point, because the bits of a noisy
float can show the sum under it. The bits that `keys.release` returns are private. So the check traces the step with
constants in place of its results, and then no public number may depend on raw data. The constants still depend on the
key, the step and the deviation, so a grid or noise that depends on the data is found too. The rounding of the sum that
`keys.release` gets must be at most ETA, by which the noise is larger than stated. A `FloatPair` (two float32 per
coordinate) ensures that. A mechanism that merges the pair into one number, or adds rows in its own way, does not.
"""

import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.audit.contract import inputs
from dpx.audit.contract.subject import STEPS, NotChecked, Violation, all_but_one, all_included
from dpx.audit.contract.trial import MechanismUnderTest
from dpx.audit.stand_ins import replacing_key_functions
from dpx.states.reading import publishable_state
from dpx.sums.rounding import ETA, FloatPair, as_pair, with_low_part
from dpx.values import Tree, unflatten_vectors
from dpx.xla.jaxprs import propagate_marks

RAW, KEY = 1, 2  # marks
SHIFT = 16.0  # how far the data is moved, in standard deviations of the noise


def check_no_data_leaks(trial: MechanismUnderTest) -> str:
    """Checks that two datasets with the same noisy sums give the same public values."""
    trial.require_noise()
    _require_own_event_for_unreleased(trial)
    if not trial.draws_noise_by_dpx:
        return _require_state_ignores_data(trial)
    for step in STEPS:
        loud = inputs.take_rows(trial.contributions_by_path(step)["update"], slice(inputs.RANDOM))
        sums = inputs.flattened_leaves(jax.tree.map(lambda rows: rows.sum(0), loud)).astype(np.float32)
        change = inputs.oscillating_values(trial.traced.numbers, 1.0, 0.3)
        exchange = _noise_change_offsetting_sums(trial, step)
        if exchange is None:
            raise NotChecked("the update has no derivative, and its noise has another shape than the sums")
        change *= np.float32(SHIFT / max(np.abs(exchange @ change).max(), 1e-30))
        noise = 1 + inputs.oscillating_values(trial.traced.normals, 0.01)  # all differ, so rounding decides nothing
        other_noise = (noise - exchange @ change).astype(np.float32)
        state = trial.state_after(step)
        pair = trial.traced.derivatives_at([(sums, noise), (sums + change, other_noise)], state, trial.params)[:2]
        expected, found = (jax.tree.map(lambda leaf, place=place: leaf[place], pair) for place in (0, 1))
        try:
            inputs.require_close(found, expected, 3e-5)
        except AssertionError as error:
            words = f"two data sets with the same noisy sums differ in public values, at step {step}"
            raise Violation(f"{words} ({error})") from None
    return f"data moved by {SHIFT:g} deviations and the noise back: the same public values at {len(STEPS)} steps"


def _noise_change_offsetting_sums(trial: MechanismUnderTest, step: int) -> np.ndarray | None:
    """Returns X such that the change -X z of the noise offsets a change z of the sums. Without a derivative, as for a
    number that only selects among the others, the entries of X come from the stated multiplier."""
    release = trial.release(step)
    if trial.traced.normals != trial.traced.numbers:
        return None if release.flat else release.exchange
    stated = np.eye(trial.traced.numbers) / (trial.multiplier(step) * trial.clip_norm(step) * (1 + ETA))
    return stated if release.flat else release.exchange + stated * ~release.exchange.any(0)


def _require_state_ignores_data(trial: MechanismUnderTest) -> str:
    """For noise that is not dpx's, requires that the public state does not depend on the data at all."""
    rows = trial.problems[0].rows
    for step in STEPS:
        both = [trial.update(rows, trial.state_after(step), given) for given in (all_included(), all_but_one(2))]
        states = [public_part(result)[1] for result in both]
        try:
            inputs.require_close(*states)
        except AssertionError:
            raise NotChecked(
                f"the public state moves with the data at step {step}, and the noise does not come from "
                "dpx.keys.release, so it cannot be exchanged for data"
            ) from None
    return "the public state does not depend on the data; no update was exchanged, because the noise is not dpx's"


def _require_own_event_for_unreleased(trial: MechanismUnderTest):
    """Raises Violation if unreleased state affects a release, but the event accounts for each release separately."""
    state = trial.state_after(4)
    if jax.tree.structure(publishable_state(state)) == jax.tree.structure(state) or not trial.costed_by_multiplier:
        return
    shown = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(publishable_state(state))}

    def moved_leaf(path, leaf):
        hidden = jax.tree_util.keystr(path) not in shown and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf + 1 if hidden else leaf

    other = jax.tree_util.tree_map_with_path(moved_leaf, state)
    nobody = np.zeros(inputs.ROWS, bool)
    rows = trial.problems[0].rows
    found, expected = [public_part(trial.update(rows, given, nobody)) for given in (other, state)]
    try:
        inputs.require_close(found, expected)
    except AssertionError:
        raise Violation("unreleased state enters a release, but the event accounts for each separately") from None


def public_part(result: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    updates, state = result
    return updates, publishable_state(state)


def check_no_data_branches(trial: MechanismUnderTest) -> str:
    """Checks that no conditional or loop on any path depends on raw data."""
    names = []
    for problem in trial.problems:
        for name, path in problem.paths.items():
            arguments = problem.rows, trial.state_after(0), all_but_one()
            closed = jax.make_jaxpr(path)(*arguments)
            raw = [RAW] * len(jax.tree.leaves(problem.rows))
            marks, found = raw + [0] * (len(closed.jaxpr.invars) - len(raw)), set()

            def visit(equation, marks, control, found=found):
                found |= {equation.primitive.name} if control & RAW else set()

            propagate_marks(closed, marks, visit)
            if found:
                raise Violation(f"{', '.join(sorted(found))} depends on raw data ({name} of {problem.name})")
            names.append(f"{name} of {problem.name}")
    return f"no cond and no while depends on raw data in {', '.join(names)}"


def check_released_bits(trial: MechanismUnderTest) -> str:
    """Checks that public values depend only on public values and on what `keys.release` returns for exact sums."""
    closed, names = _program_without_releases(trial)
    grads = len(jax.tree.leaves(trial.params))
    state = trial.state_after(STEPS[0])
    shown = {jax.tree_util.keystr(path) for path, _ in _paths_of_leaves(publishable_state(state))}
    state = [0 if jax.tree_util.keystr(path) in shown else RAW for path, _ in _paths_of_leaves(state)]
    marks = propagate_marks(closed, [RAW] * grads + state + [0], lambda *_: None)
    raw = [name for name, mark in zip(names, marks, strict=True) if mark & RAW]
    if raw:
        raise Violation(
            f"{raw[0]} depends on raw data by another way than `dpx.keys.release`, so its bits may show the data, "
            "whatever epsilon is for real numbers"
        )
    require_low_parts_read(trial)
    words = f"{len(names)} public arrays are functions of what `keys.release` put on its grid"
    return "; ".join(filter(None, [words, require_small_rounding(trial)]))


def _program_without_releases(trial: MechanismUnderTest) -> tuple[core.ClosedJaxpr, list[str]]:
    """The jaxpr of a step with constants in place of releases, and the names of the public arrays that it returns."""

    def constant(key, step, total, deviation, **_):
        stands_for = jnp.float32(deviation) + jnp.float32(step) + jax.random.key_data(key)[0].astype(jnp.float32)
        return jax.tree.map(lambda x: jnp.full(x.shape, stands_for), as_pair(total).high)

    def public(grads, state, included):
        updates, after = trial.mechanism.update(grads, state, trial.params, included=included)
        return {"updates": updates, "state": publishable_state(after)}

    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((len(all_included()), *p.shape), p.dtype), trial.params)
    with replacing_key_functions(release=constant):
        closed, shapes = jax.make_jaxpr(public, return_shape=True)(grads, trial.state_after(STEPS[0]), all_included())
    return closed, [jax.tree_util.keystr(path) for path, _ in _paths_of_leaves(shapes)]


def _paths_of_leaves(tree: Tree) -> list:
    return jax.tree_util.tree_leaves_with_path(tree)


LOW, HIGH = 2.0**-30, 2.0**-12  # changes of a sum of 1, below and above half a unit in its last place
# One row of 64 is small. A chain of float32 additions then moves by 7 to 15 ETA, even over microbatches of up to 64.
LONG, APART = 2**13, 64
LARGE_SHARE = 31 / 32  # of the clip norm
SMALL_SHARE = 0.77  # of half a unit of the sum, which rounds to one unit or to none
REMOVED = 1  # one of the large rows


class RecordedRelease(NamedTuple):
    """What `keys.release` was given. total: high + low, float64 (n,). deviation: standard deviation of the noise."""

    total: np.ndarray
    deviation: float


def require_low_parts_read(trial: MechanismUnderTest) -> None:
    """Raises Violation if a release reads only the high parts of a sum, and not the low ones."""
    state, release = trial.state_after(0), with_recorded_releases(trial.mechanism.release)
    like = [as_pair(one).high for one in trial.shapes_of_sums]

    def with_changed_sum(number: int = -1, high: float = 0, low: float = 0) -> list[RecordedRelease]:
        """The release's arguments when the high and low parts of one sum are changed."""
        sums = []
        for place, shapes in enumerate(like):
            size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
            change = inputs.oscillating_values(size, 1.0) * (place == number)
            parts = (np.float32(1) + np.float32(high) * change, np.float32(low) * change)
            sums.append(FloatPair(*(unflatten_vectors(part.astype(np.float32), shapes) for part in parts)))
        return release(tuple(sums), state, trial.params)

    before = with_changed_sum()
    for number in range(len(like)):
        of_high, of_low = with_changed_sum(number, high=HIGH), with_changed_sum(number, low=LOW)
        for one, large, small in zip(before, of_high, of_low, strict=True):
            expected, found = (large.total - one.total) * (LOW / HIGH), small.total - one.total
            moved = np.abs(expected) > 1e-3 * np.abs(expected).max(initial=0)
            if not (np.abs(found - expected) <= 0.5 * np.abs(expected))[moved].all():
                raise Violation(
                    "a release reads the high numbers of a sum, and not the low ones: hand the "
                    "`dpx.sums.rounding.FloatPair` to `dpx.keys.release`, because a float32 sum of many rows moves "
                    "by more than the clip norm"
                )


def require_small_rounding(trial: MechanismUnderTest) -> str:
    """Raises Violation if a row moves a long sum more than ETA farther than an empty one. Returns "" if not tried."""
    multiplier = trial.multiplier(0)
    if not multiplier > 0:
        return ""
    rows, state = _gradients_lost_to_rounding(trial), trial.state_after(0)

    def update(grads, included):
        return trial.mechanism.update(grads, state, trial.params, included=included)

    handed, every = with_recorded_releases(update), np.arange(LONG)
    sets = (every >= 0, every != REMOVED, every == REMOVED, every < 0)
    whole, others, alone, none = (handed(_null_excluded_rows(rows, included), included) for included in sets)
    squares = [
        np.sum(((a.total - b.total) - (c.total - d.total)) ** 2) / a.deviation**2
        for a, b, c, d in zip(whole, others, alone, none, strict=True)
        if a.deviation > 0
    ]
    excess = multiplier * math.sqrt(sum(squares)) / ETA
    if not excess <= 1:
        raise Violation(
            f"one of {LONG} rows moves the sum by {excess * ETA:.3g} clip norms more than it moves an empty one, and "
            f"{ETA:.3g} is in the cost: the rounding of the others depends on it"
        )
    return f"of {LONG} rows against its rounding, one moves the sum by {excess:.2g} ETA more than alone"


def with_recorded_releases(function: Callable) -> Callable[..., list[RecordedRelease]]:
    """Compiles `function` to return what it passes to `keys.release`, even from inside jit or a loop.

    A call raises NotChecked if nothing was recorded.
    """

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
    def traced(*arguments):
        numbers = itertools.count()

        def record(key, step, total, deviation):
            high, low = with_low_part(as_pair(total))
            jax.debug.callback(functools.partial(_record_arguments, next(numbers)), high, low, jnp.float32(deviation))
            return jax.tree.map(jnp.add, high, low)

        with replacing_key_functions(release=record):
            return function(*arguments)

    def run(*arguments) -> list[RecordedRelease]:
        with _ONE_RUN:
            _seen.clear()
            jax.block_until_ready(traced(*arguments))
            jax.effects_barrier()
            found = [_seen[number] for number in sorted(_seen)]
        if not found:  # the mechanism has a jitted function, and jax kept its trace with another stand-in
            raise NotChecked("what `keys.release` was given cannot be read: leave out jax.jit inside of the mechanism")
        return found

    return run


_seen: dict[int, RecordedRelease] = {}  # from the last run; not in a closure, because jax keeps traces of functions
_ONE_RUN = threading.Lock()


def _record_arguments(number, high, low, deviation):
    _seen[number] = RecordedRelease(inputs.flattened_leaves(high) + inputs.flattened_leaves(low), float(deviation))


def _gradients_lost_to_rounding(trial: MechanismUnderTest) -> Tree:
    """Gradients, float32 (LONG, ...). In every coordinate, the first ones sum to slightly more than a power of two, and
    to less if one is removed. Some others are below half a unit of a sum above that power, so they round away. In a sum
    below the power, each counts (Casacuberta et al. 2022, https://arxiv.org/abs/2207.10635)."""
    power = 2.0 ** ((2 * LONG // 3).bit_length() - 1)
    count = math.ceil(power / LARGE_SHARE)
    column = np.zeros(LONG)
    column[APART * math.ceil(count / APART) :: APART] = -SMALL_SHARE * np.spacing(np.float32(power)) / 2
    column[:count] = LARGE_SHARE
    column[0] = power + LARGE_SHARE / 2 - (count - 1) * LARGE_SHARE
    size = sum(leaf.size for leaf in jax.tree.leaves(trial.params))
    unit = 2.0 ** math.floor(math.log2(trial.clip_norm(0) / math.sqrt(size)))  # a power of two rounds nothing
    return unflatten_vectors(np.broadcast_to(np.float32(unit * column[:, None]), (LONG, size)), trial.params)


def _null_excluded_rows(rows: Tree, included: np.ndarray) -> Tree:
    return jax.tree.map(lambda g: g * included.reshape(-1, *[1] * (g.ndim - 1)), rows)
