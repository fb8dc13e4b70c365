"""What a state has paid for: where it is found, what it counts, and what of a state may be shown."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import dpx
from dpx.states.reading import release_state
from dpx.states.record import ReleaseState
from tests.mechanisms import MECHANISMS, PARAMS

SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=8)
ROWS = 4
GRADS = jax.tree.map(lambda p: jnp.ones((ROWS, *p.shape)), PARAMS)
EVERYONE = jnp.ones(ROWS, bool)


def dp_sgd(**changes):
    arguments: dict[str, Any] = dict(clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=jax.random.key(0))
    return dpx.dp_sgd(**arguments | changes)


def moved(transform, steps=2, params=PARAMS):
    @jax.jit
    def run(grads, params):
        state = transform.init(params)
        for _ in range(steps):
            _, state = transform.update(grads, state, params, included=EVERYONE)
        return state

    return run(GRADS, params)


class Mine(NamedTuple):
    params: Any
    optimizer: Any


@dataclasses.dataclass
class Plain:
    optimizer: Any


jax.tree_util.register_dataclass(Plain, ["optimizer"], [])


def train_state():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.chain(dp_sgd(), optax.sgd(0.1)))
    for _ in range(2):
        _, moved_state = state.tx.update(GRADS, state.opt_state, PARAMS, included=EVERYONE)
        state = state.replace(opt_state=moved_state)
    return state


def nnx_optimizer():
    model = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(dp_sgd(), optax.sgd(0.1)), wrt=nnx.Param)
    grads = jax.tree.map(lambda p: jnp.ones((ROWS, *p.shape)), nnx.state(model, nnx.Param))
    for _ in range(2):
        optimizer.update(model, grads, included=EVERYONE)
    return optimizer


def lookahead():
    """It passes no extra arguments on, so the sampling is one that never pads."""
    full = dp_sgd(sampling=dpx.FullBatch(examples=ROWS))
    ahead = optax.lookahead(full, sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams(PARAMS, PARAMS)
    state = ahead.init(params)
    for _ in range(2):
        _, state = ahead.update(GRADS, state, params)
    return state


ACCEPTED = {
    "the mechanism alone": lambda: moved(dp_sgd()),
    "optax.chain after it": lambda: moved(optax.chain(dp_sgd(), optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    "a chain in a chain": lambda: moved(optax.chain(optax.chain(dp_sgd(), optax.trace(0.9)), optax.scale(-0.1))),
    "dpx.chain": lambda: moved(dpx.chain(dp_sgd(), optax.adam(0.1))),
    "dpx.chain in optax.chain": lambda: moved(optax.chain(dpx.chain(dp_sgd(), optax.adam(0.1)), optax.scale(2.0))),
    "coordinates": lambda: moved(
        dpx.in_coordinates(dp_sgd(), dpx.coordinates.random_freeze(0.5, every=3, key=jax.random.key(1)))
    ),
    "TrainState": train_state,
    "nnx.Optimizer": nnx_optimizer,
    "its state": lambda: nnx_optimizer().opt_state,
    "Lookahead": lookahead,
    "a NamedTuple of the user's": lambda: Mine(PARAMS, moved(optax.chain(dp_sgd(), optax.sgd(0.1)))),
    "a dataclass of the user's": lambda: Plain(moved(dp_sgd())),
    "a dict of the user's": lambda: {"params": PARAMS, "optimizer": moved(dp_sgd())},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name, promoting):
    state = ACCEPTED[name]()
    assert dpx.steps_taken(state) == 2
    mechanism = dp_sgd(sampling=dpx.FullBatch(examples=ROWS)) if name == "Lookahead" else dp_sgd()
    assert dpx.epsilon(mechanism, state, delta=1e-5) == dpx.epsilon(mechanism, 2, delta=1e-5) > 0


@pytest.mark.parametrize("case", MECHANISMS, ids=lambda case: case.name)
def test_every_mechanism_bills_its_own_state(case):
    """The state that counts the releases is billed as the number of steps is, also after a restored checkpoint."""
    mechanism = case.mechanism
    state = jax.eval_shape(mechanism.init, PARAMS)
    sums = jax.eval_shape(lambda state: dpx.mechanism.sum_contributions(mechanism, GRADS, state, EVERYONE)[0], state)
    zeros, nobody = jax.tree.map(lambda s: jnp.zeros(s.shape), sums), jnp.int32(0)
    step = jax.jit(lambda state: mechanism.release_once(zeros, state, PARAMS, nobody)[1])
    state = jax.jit(mechanism.init)(PARAMS)
    for _ in range(4):
        state = step(jax.tree.map(lambda leaf: np.asarray(leaf), state))
    again = case.make(jax.random.key(8))
    assert dpx.epsilon(again, state, delta=1e-5) == dpx.epsilon(mechanism, 4, delta=1e-5)
    release = release_state(state)
    expected = sum(float(np.float32(case.multiplier(t))) ** -2 for t in range(4))
    assert float(release.precision[0]) == pytest.approx(expected, rel=1e-6)


def test_precision_of_long_runs():
    """A plain float32 sum of 100,000 terms would be off by 1e-3; noise that is 2e-5 less is another mechanism's."""
    run = jax.jit(lambda state, noise: jax.lax.scan(lambda s, _: (s.after(noise), None), state, length=100_000)[0])
    for noise in (0.77, 1.3, 5.1):
        release = run(ReleaseState.empty(), jnp.float32(noise))
        assert float(release.precision[0]) == pytest.approx(1e5 * float(np.float32(noise)) ** -2, rel=1e-6)
    mechanism = dp_sgd(noise_multiplier=5.1)
    state = release._replace(terms=mechanism.init(PARAMS).terms)
    assert dpx.epsilon(mechanism, state, delta=1e-5) > 0
    with pytest.raises(ValueError, match="other noise"):
        dpx.epsilon(dp_sgd(noise_multiplier=5.1 * (1 + 2e-5)), state, delta=1e-5)


def test_no_noise_is_billed_as_infinity_and_counts_as_finite():
    state = moved(dp_sgd(noise_multiplier=0.0))
    assert np.isfinite(state.precision).all()
    assert dpx.epsilon(dp_sgd(noise_multiplier=0.0), state, delta=1e-5) == np.inf


def test_terms_are_those_of_the_sampling_and_the_event():
    def terms(**changes):
        return tuple(dp_sgd(**changes).terms.tolist())

    same = [
        {"noise_multiplier": 2.0},
        {"clip_norm": 3.0},
        {"key": jax.random.key(9)},
        {"sampling": dpx.PoissonSampling(examples=np.int64(1000), batch_size=8.0, capacity=100)},
    ]
    assert {terms(**changes) for changes in same} == {terms()}
    other = [
        dpx.PoissonSampling(examples=2000, batch_size=16),  # the same rate
        dpx.PoissonSampling(examples=1000, batch_size=8.5),
        dpx.FixedSizeSampling(examples=1000, batch_size=8),
        dpx.ShuffledEpochs(examples=1000, batch_size=8),
        dpx.FullBatch(examples=1000),
    ]
    assert len({terms()} | {terms(sampling=sampling) for sampling in other}) == 6
    dice = dict(clip_norm=1.0, feedback_norm=0.1, noise_multiplier=1.0, sampling=SAMPLING, key=jax.random.key(0))
    kinds = [{"outer_clip_norm": 2.0, "reset_every": r} for r in (None, 1, 5, 50)] + [{"outer_clip_norm": 3.0}]
    assert len({tuple(dpx.methods.dice_sgd(**dice, **kind).terms.tolist()) for kind in kinds}) == 5
    ranks = [
        dpx.mechanisms.clip_then_project(dp_sgd(), rank=r, kind="gaussian", key=jax.random.key(0)) for r in (4, 12)
    ]
    assert len({terms()} | {tuple(made.terms.tolist()) for made in ranks}) == 3


@flax.struct.dataclass
class Flax:
    step: int
    unreleased_error: Any


def test_what_may_be_shown_has_nothing_unreleased():
    secret, shown = jnp.ones(3), jnp.zeros(2)
    assert dpx.public_state(Flax(3, secret)) == Flax(3, None)
    module = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    shown_module = dpx.public_state(module)  # its containers can be called, and are no functions for that
    jax.tree.map(np.testing.assert_array_equal, shown_module, module)
    nested = dpx.public_state({"state": (Flax(3, secret), [shown])})
    assert nested["state"][0] == Flax(3, None) and nested["state"][1][0] is shown
    flat = {
        ("unreleased_error", "b"): secret,
        ("inner", "unreleased_error"): secret,
        '.unreleased_error["w"]': secret,
        "inner/unreleased_error/w": secret,
        "opt.0.unreleased_error": secret,
        "metrics": dpx.Unreleased(secret, secret, secret),
        "unreleased": secret,
        jax.tree_util.GetAttrKey("unreleased_error"): secret,
        ("release", "step"): shown,
        "mean": shown,
    }
    public = dpx.public_state(flat)
    assert [name for name, part in public.items() if part is not None] == [("release", "step"), "mean"]
    assert all(public[name] is shown for name in (("release", "step"), "mean"))
