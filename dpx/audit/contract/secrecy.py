"""The lines of the contract about secrets: nothing but released values leaves, and no program branches on raw data."""

import jax
import jax.numpy as jnp
import numpy as np

from dpx.audit.contract import inputs as inputs
from dpx.audit.contract.marks import RAW, spread
from dpx.audit.contract.report import Broken, NotChecked
from dpx.audit.contract.subject import STEPS, all_but, everyone
from dpx.audit.contract.trial import Trial
from dpx.states.public import publishable_state
from dpx.trees import Tree

SHIFT = 16.0  # standard deviations of the noise, by which the data is moved


def secrecy(trial: Trial) -> str:
    """Two data sets with the same noisy sums differ in nothing that is public: the noise makes up for the data."""
    trial.require_noise()
    _require_own_event_for_unreleased(trial)
    if not trial.draws_by_dpx:
        return _same_without_exchange(trial)
    for step in STEPS:
        sums = inputs.take(trial.contributions(step)["update"], slice(inputs.RANDOM))  # of some loud gradients
        sums = inputs.flattened(jax.tree.map(lambda rows: rows.sum(0), sums)).astype(np.float32)
        change = np.where(sums == 0, 0, inputs.waves(trial.traced.numbers, 1.0, 0.3))  # no data where a mask has zeros
        exchange = _exchange(trial, step)
        if exchange is None:
            raise NotChecked("the update has no derivative, and its noise has another shape than the sums")
        change *= np.float32(SHIFT / max(np.abs(exchange @ change).max(), 1e-30))
        ones = np.ones(trial.traced.normals, np.float32)
        other_noise = (ones - exchange @ change).astype(np.float32)
        state = trial.state(step)
        pair = trial.traced.program([(sums, ones), (sums + change, other_noise)], state, trial.params)[:2]
        expected, found = (jax.tree.map(lambda leaf, place=place: leaf[place], pair) for place in (0, 1))
        try:
            inputs.require_close(found, expected, 3e-5)
        except AssertionError as error:
            words = f"two data sets with the same noisy sums differ in public values, at step {step}"
            raise Broken(f"{words} ({error})") from None
    return f"data moved by {SHIFT:g} deviations and the noise back: the same public values at {len(STEPS)} steps"


def _exchange(trial: Trial, step: int) -> np.ndarray | None:
    """The noise that makes up for a change of the sums; without derivatives, that of the billed multiplier."""
    release = trial.release(step)
    if not release.flat:
        return release.exchange
    if trial.traced.normals != trial.traced.numbers:
        return None
    return np.eye(trial.traced.numbers) / (trial.multiplier(step) * trial.clip_norm(step))


def _same_without_exchange(trial: Trial) -> str:
    """For noise of the mechanism's own: the public state must not move with the data at all."""
    rows = trial.problems[0].rows
    for step in STEPS:
        both = [trial.update(rows, trial.state(step), given) for given in (everyone(), all_but(2))]
        states = [public_of(result)[1] for result in both]
        try:
            inputs.require_close(*states)
        except AssertionError:
            raise NotChecked(
                f"the public state moves with the data at step {step}, and the noise does not come from "
                "dpx.keys.normal_like, so it cannot be exchanged for data"
            ) from None
    return "the public state does not depend on the data; no update was exchanged, because the noise is not dpx's"


def _require_own_event_for_unreleased(trial: Trial):
    """Raises Broken if unreleased state moves a release that is billed as if each release stood alone."""
    state = trial.state(4)
    if jax.tree.structure(publishable_state(state)) == jax.tree.structure(state) or not trial.billed_by_multiplier:
        return
    shown = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(publishable_state(state))}

    def moved(path, leaf):
        hidden = jax.tree_util.keystr(path) not in shown and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf + 1 if hidden else leaf

    other = jax.tree_util.tree_map_with_path(moved, state)
    nobody = np.zeros(inputs.ROWS, bool)
    rows = trial.problems[0].rows
    found, expected = [public_of(trial.update(rows, given, nobody)) for given in (other, state)]
    try:
        inputs.require_close(found, expected)
    except AssertionError:
        raise Broken("unreleased state enters a release, and the event bills each as if it stood alone") from None


def public_of(result: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    updates, state = result
    return updates, publishable_state(state)


def branches(trial: Trial) -> str:
    """No conditional and no data-dependent loop stands between raw data and what leaves."""
    names = []
    for problem in trial.problems:
        for name, path in problem.paths.items():
            arguments = problem.rows, trial.state(0), all_but()
            closed = jax.make_jaxpr(path)(*arguments)
            raw = [RAW] * len(jax.tree.leaves(problem.rows))
            marks, found = raw + [0] * (len(closed.jaxpr.invars) - len(raw)), set()

            def visit(equation, mark, control, found=found):
                found |= {equation.primitive.name} if control & RAW else set()

            spread(closed, marks, visit)
            if found:
                raise Broken(f"{', '.join(sorted(found))} depends on raw data ({name} of {problem.name})")
            names.append(f"{name} of {problem.name}")
    return f"no cond and no while depends on raw data in {', '.join(names)}"
