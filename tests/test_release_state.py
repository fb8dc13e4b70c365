"""What a state has paid for: where it is found, what it counts, and what of a state may be shown."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import dpx
from dpx.states import reading
from dpx.states.reading import read_run_facts
from dpx.states.record import LARGEST_WEIGHT, RECORD_VERSION, ReleaseState, noise_order_hash
from tests.mechanisms import ALL, PARAMS

SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=8)
ROWS = 4
GRADS = jax.tree.map(lambda p: jnp.ones((ROWS, *p.shape)), PARAMS)
EVERYONE = jnp.ones(ROWS, bool)


def of_steps(mechanism, steps, state):
    """The bill of a number of steps, for the numbers that `state` has."""
    return dpx.epsilon(mechanism, steps, delta=1e-5, numbers=read_run_facts(state).numbers)


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
        dpx.in_coordinates(dp_sgd(), dpx.coordinates.random_freeze(freeze_rate=0.5, every=3, key=jax.random.key(1)))
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
@pytest.mark.long_cases("TrainState", "nnx.Optimizer", "Lookahead", "coordinates", "a chain in a chain")
def test_accepted(name, promoting):
    state = ACCEPTED[name]()
    assert dpx.accounting.steps_taken(state) == 2
    mechanism = dp_sgd(sampling=dpx.FullBatch(examples=ROWS)) if name == "Lookahead" else dp_sgd()
    assert dpx.epsilon(mechanism, state, delta=1e-5) == of_steps(mechanism, 2, state) > 0


@pytest.mark.parametrize("case", ALL)
def test_a_step_may_be_given_its_state_from_the_first_one_on(case):
    """jax refuses to donate one buffer twice, so that the first step of a run would fail."""
    leaves = [leaf for leaf in jax.tree.leaves(case.mechanism.init(PARAMS)) if isinstance(leaf, jax.Array)]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size}) == len([x for x in leaves if x.size])


def test_precision_of_long_runs():
    """A plain float32 sum of 100,000 terms would be off by 1e-3; noise that is 2e-5 less is another mechanism's."""
    run = jax.jit(lambda r, noise: jax.lax.scan(lambda s, _: (s.after_release(noise), None), r, length=100_000)[0])
    for noise in (0.77, 1.3, 5.1):
        release = run(ReleaseState.empty_record(), jnp.float32(noise))
        assert float(release.precision[0]) == pytest.approx(1e5 * float(np.float32(noise)) ** -2, rel=1e-6)
    mechanism = dp_sgd(noise_multiplier=5.1)
    state = mechanism.init(PARAMS).with_fields(noise_key=dpx.keys.mark_of_key(mechanism.key), order=release.order)
    state = state._replace(step=release.step, precision=release.precision)
    assert dpx.epsilon(mechanism, state, delta=1e-5) > 0
    with pytest.raises(ValueError, match="other noise"):
        dpx.epsilon(dp_sgd(noise_multiplier=5.1 * (1 + 2e-5)), state, delta=1e-5)


STORED = ReleaseState(  # what dpx 0.2.0 stored after three steps: change it only together with RECORD_VERSION
    step=np.int32(3),
    precision=np.float32([0.75, 0.0]),
    facts=np.uint32(
        # version, sampling, event, planned_steps, plan, numbers, in_integers
        [2, 3798831405, 2371962088, 0, 3, 2, 0]
        # order, noise_key, batch_key, unit, problem
        + [838860800, 3949760163, 3949760163, 3364924869, 0]
    ),
)


def test_a_stored_record_is_read_or_refused_by_its_version():
    """A state in no folder of `fit` says itself how to read it, also one that was pickled without a version."""
    sampling, key = dpx.PoissonSampling(examples=60, batch_size=12), dpx.secret_key(2**40 + 5)
    mechanism = dp_sgd(noise_multiplier=2.0, sampling=sampling, key=key)
    data, params = np.ones((60, 2), np.float32), np.zeros(2, np.float32)
    optimizer = dpx.chain(mechanism, optax.identity())
    made = dpx.fit(lambda p, x: ((p - x) ** 2).sum(), optimizer, params, data, steps=3, delta=1e-5).state
    assert jax.tree.map(np.array_equal, reading.release_state(made), STORED) == ReleaseState(*[True] * 3)
    assert dpx.epsilon(mechanism, STORED, delta=1e-5) == pytest.approx(0.9946841476, rel=1e-6)
    for version in (RECORD_VERSION + 1, 0):
        other = STORED.with_fields(version=version)
        for read in (dpx.accounting.steps_taken, lambda state: sampling.take(data, key, state)):
            with pytest.raises(ValueError, match=f"record of version 2, which this dpx reads, got {version}: finish"):
                read(other)


def test_no_noise_is_billed_as_infinity_and_counts_as_finite():
    state = moved(dp_sgd(noise_multiplier=0.0))
    assert np.isfinite(state.precision).all()
    assert dpx.epsilon(dp_sgd(noise_multiplier=0.0), state, delta=1e-5) == np.inf


def test_terms_are_those_of_the_sampling_and_the_event():
    def terms(**changes):
        return tuple(dp_sgd(**changes).fingerprints.tolist())

    same = [
        {"noise_multiplier": 2.0},
        {"clip_norm": 3.0},
        {"key": jax.random.key(9)},
        {"sampling": dpx.PoissonSampling(examples=np.int64(1000), batch_size=8.0)},
    ]
    assert {terms(**changes) for changes in same} == {terms()}
    other = [
        dpx.PoissonSampling(examples=2000, batch_size=16),  # the same rate
        dpx.PoissonSampling(examples=1000, batch_size=8.5),
        dpx.PoissonSampling(examples=1000, batch_size=8, weights=np.arange(1000)),
        dpx.PoissonSampling(examples=1000, batch_size=8, weights=np.arange(1000)[::-1]),
        dpx.PoissonSampling(examples=1000, batch_size=8, most_rows=16),
        dpx.PoissonSampling(examples=1000, batch_size=8, most_rows=17),
        dpx.FixedSizeSampling(examples=1000, batch_size=8),
        dpx.ShuffledEpochs(examples=1000, batch_size=8),
        dpx.FullBatch(examples=1000),
        dpx.sampling.RandomAllocation(examples=1000, steps_per_epoch=125),
        dpx.sampling.RandomAllocation(examples=1000, steps_per_epoch=124),
        dpx.sampling.CyclicPoissonSampling(examples=1000, batch_size=8, bands=1),
        dpx.sampling.CyclicPoissonSampling(examples=1000, batch_size=8, bands=2),
        dpx.sampling.FixedOrder(examples=1000, batch_size=8),
    ]
    assert len({terms()} | {terms(sampling=sampling) for sampling in other}) == 15
    dice = dict(clip_norm=1.0, feedback_norm=0.1, noise_multiplier=1.0, sampling=SAMPLING, key=jax.random.key(0))
    kinds = [{"outer_clip_norm": 2.0, "reset_every": r} for r in (None, 1, 5, 50)] + [{"outer_clip_norm": 3.0}]
    assert len({tuple(dpx.methods.dice_sgd(**dice, **kind).fingerprints.tolist()) for kind in kinds}) == 5
    ranks = [dpx.mechanisms.clip_then_project(dp_sgd(), rank=r, kind="gaussian") for r in (4, 12)]
    assert len({terms()} | {tuple(made.fingerprints.tolist()) for made in ranks}) == 3


@flax.struct.dataclass
class Flax:
    step: int
    unreleased_error: Any


def test_what_may_be_shown_has_nothing_unreleased():
    secret, shown = jnp.ones(3), jnp.zeros(2)
    assert dpx.publishable_state(Flax(3, secret)) == Flax(3, None)
    module = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    shown_module = dpx.publishable_state(module)  # its containers can be called, and are no functions for that
    jax.tree.map(np.testing.assert_array_equal, shown_module, module)
    nested = dpx.publishable_state({"state": (Flax(3, secret), [shown])})
    assert nested["state"][0] == Flax(3, None) and nested["state"][1][0] is shown
    flat = {
        ("unreleased_error", "b"): secret,
        ("inner", "unreleased_error"): secret,
        '.unreleased_error["w"]': secret,
        "inner/unreleased_error/w": secret,
        "opt.0.unreleased_error": secret,
        "metrics": dpx.gradients.Unreleased(secret, secret, secret),
        "unreleased": secret,
        jax.tree_util.GetAttrKey("unreleased_error"): secret,
        ("release", "step"): shown,
        "mean": shown,
    }
    public = dpx.publishable_state(flat)
    assert [name for name, part in public.items() if part is not None] == [("release", "step"), "mean"]
    assert all(public[name] is shown for name in (("release", "step"), "mean"))


def state_after(multipliers, mechanism):
    """The state of a mechanism after releases with these noise multipliers, (steps,)."""

    def run(multipliers):
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        record = mechanism.check_and_release((zeros,), mechanism.init(PARAMS), PARAMS, jnp.int32(0))[1]
        empty = mechanism.init(PARAMS).with_fields(noise_key=record.noise_key)
        return jax.lax.scan(lambda state, sigma: (state.after_release(sigma), None), empty, multipliers)[0]

    return jax.jit(run)(jnp.asarray(multipliers, jnp.float32))


EPOCHS = dpx.ShuffledEpochs(examples=100, batch_size=10)
ALLOCATED = dpx.sampling.RandomAllocation(examples=100, steps_per_epoch=10)
LOW_STEP = np.where(np.arange(100) % 10 == 0, 0.5, 5.0)
RISING = 0.5 + np.arange(10)


@pytest.mark.parametrize(
    ("made", "billed", "sampling"),
    [
        (lambda t: jnp.asarray(RISING)[t % 10], lambda t: jnp.asarray(RISING)[t // 10], EPOCHS),
        (lambda t: jnp.asarray(LOW_STEP)[t], lambda t: jnp.asarray(np.sort(LOW_STEP))[t], EPOCHS),
        (lambda t: jnp.asarray(RISING)[t % 10], lambda t: jnp.asarray(RISING)[t // 10], ALLOCATED),
        (lambda t: jnp.where(t == 7, 0.1, 1e4), lambda t: 1 / jnp.sqrt((100 + 99e-8) / 100) + 0 * t, SAMPLING),
        (lambda t: jnp.where(t == 40, 2.0, 1.0), lambda t: jnp.where(t == 41, 2.0, 1.0), SAMPLING),
    ],
    ids=["ten values", "one low step an epoch", "ten values, allocated", "one low step of all", "two steps exchanged"],
)
def test_the_same_noise_in_another_order_is_other_noise(made, billed, sampling):
    """Their sums of sigma^-2 agree, and their bills do not."""
    making, billing = (dp_sgd(noise_multiplier=schedule, sampling=sampling) for schedule in (made, billed))
    state = state_after(jax.vmap(made)(jnp.arange(100)), making)
    assert dpx.epsilon(making, state, delta=1e-5) == of_steps(making, 100, state)
    for question in (
        lambda: dpx.epsilon(billing, state, delta=1e-5),
        lambda: dpx.privacy_report(billing, state, delta=1e-5),
        lambda: dpx.compose_runs((billing, state), shared_batches=False),
    ):
        with pytest.raises(ValueError, match="in another order"):
            question()


@pytest.mark.parametrize("steps", [1, pytest.param(10, marks=pytest.mark.long), 1000, 100_000])
@pytest.mark.long_cases("100000", "1000")
def test_rounding_of_a_schedule_is_no_other_order(steps):
    """Another machine may evaluate a schedule with up to 64 other roundings; a step with a tenth less noise differs."""
    schedule = np.float32(0.7) + np.cos(np.arange(steps) / 300, dtype=np.float32) ** 2
    rng = np.random.default_rng(steps)
    for _ in range(20):
        rounded = (schedule.view(np.int32) + rng.integers(-63, 64, steps, dtype=np.int32)).view(np.float32)
        record = state_after(rounded, dp_sgd(noise_multiplier=lambda t: 1.0))
        reading._require_recorded_multipliers(record, schedule.astype(np.float64), "")
    one_lower = schedule.copy()
    one_lower[rng.integers(steps)] *= 0.9
    with pytest.raises(ValueError, match="other noise"):
        reading._require_recorded_multipliers(state_after(schedule, dp_sgd()), one_lower.astype(np.float64), "")
    both = [noise_order_hash(schedule.view(np.uint32), np.arange(steps, dtype=np.int32))]
    both.append(noise_order_hash(jnp.asarray(schedule.view(np.uint32)), jnp.arange(steps, dtype=jnp.int32)))
    np.testing.assert_array_equal(*both)


def test_weights_of_the_order_are_spread():
    """Of two steps, no weight is more often equal than by chance; and they have both signs, so that they cancel."""
    weights = noise_order_hash(np.full(2**16, 1 << 6, np.uint32), np.arange(2**16, dtype=np.int32)).view(np.int32)
    assert set(np.abs(weights)) == set(range(128, LARGEST_WEIGHT + 1))
    for apart in (1, 2, 5, 10, 100, 128, 1000, 1024):
        assert (weights[apart:] == weights[:-apart]).mean() < 1.5 / 256
        products = weights[apart:].astype(float) * weights[:-apart]
        assert abs(products.mean()) < 5 * 192**2 / 2**8
    assert abs(weights.astype(float).sum()) < 5 * 192 * 2**8


def test_a_state_of_an_earlier_record_is_refused():
    """As they were stored: five fields in place of three, by name, by place, and in flax's state dict."""
    state = moved(dp_sgd())
    earlier = {"step": 2, "precision": np.zeros(2), "terms": np.zeros(2), "planned_steps": 0, "stream": 0}
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        ReleaseState(**earlier)
    with pytest.raises(TypeError, match="takes 4 positional arguments but 6 were given"):
        ReleaseState(*earlier.values())
    with pytest.raises(ValueError, match="field names of the state dict and the named tuple do not match"):
        flax.serialization.from_state_dict(state, earlier)


class Registered:
    """A container that jax knows; its only part holds a function of the data."""

    def __init__(self, unreleased_error):
        self.unreleased_error = unreleased_error


class WithoutNames(Registered):
    pass


class WithNames(Registered):
    pass


class _UnreleasedSums(Registered):
    pass


class Sums(dpx.gradients.Unreleased):
    pass


class Capitals(NamedTuple):
    Unreleased_error: Any
    step: int


@dataclasses.dataclass
class Fields:
    _unreleased: Any
    inner: Any


def unflatten(kind):
    return lambda _, children: kind(*children)


jax.tree_util.register_pytree_node(WithoutNames, lambda one: ((one.unreleased_error,), None), unflatten(WithoutNames))
jax.tree_util.register_pytree_with_keys(
    WithNames,
    lambda one: (((jax.tree_util.GetAttrKey("unreleased_error"), one.unreleased_error),), None),
    unflatten(WithNames),
)
jax.tree_util.register_dataclass(Fields, data_fields=["_unreleased", "inner"], meta_fields=[])
SECRET = 123456.789


class WithKeys(TrainState):
    dropout_rng: Any = None
    KEY: Any = None
    rngs: Any = None


def test_the_public_part_of_a_train_state():
    """Its parameters, step and optimizer state stay; its functions, its keys and the error of error feedback go."""
    raw, typed = jax.random.key_data(jax.random.key(3)), jax.random.key(3)
    dice = dict(clip_norm=1.0, feedback_norm=0.1, outer_clip_norm=2.0, noise_multiplier=1.0, sampling=SAMPLING)
    optimizer = dpx.chain(dpx.methods.dice_sgd(**dice, key=typed), optax.adam(0.1))
    keys = dict(dropout_rng=raw, KEY=np.asarray(raw), rngs={"dropout": raw, "params": [typed]})
    whole = WithKeys.create(apply_fn=lambda p, x: x, params=PARAMS, tx=optimizer, **keys)
    whole = whole.replace(step=7)
    public = dpx.publishable_state(whole)
    assert isinstance(public, WithKeys) and public.step == 7 and public.apply_fn is public.tx is None
    assert public.dropout_rng is public.KEY is None and public.rngs == {"dropout": None, "params": [None]}
    inner = whole.opt_state.inner
    assert jax.tree.leaves(inner.unreleased_error) and public.opt_state.inner.unreleased_error is None
    expected = whole.opt_state._replace(inner=inner._replace(unreleased_error=None))
    chex.assert_trees_all_equal((public.params, public.opt_state), (whole.params, expected))
    with pytest.raises(ValueError, match="^state must "):
        dpx.publishable_state(whole.replace(rngs={1, 2}))


def test_what_cannot_be_read_by_name_is_refused():
    data = np.full(3, SECRET)
    objects = np.array([{"unreleased_error": data}, None], dtype=object)
    table = np.zeros(2, [("unreleased_error", np.float32)])
    for refused in (WithoutNames(data), objects, table, table[0], Registered(data), {1, 2}):
        for state in (refused, {"inner": [refused]}, Capitals(0, refused), Fields(0, refused)):
            with pytest.raises(ValueError, match="^state must ") as failed:
                dpx.publishable_state(state)
            assert str(SECRET) not in str(failed.value)


def test_other_spellings_and_types_of_what_is_unreleased():
    data, step = np.full(3, SECRET), 3
    assert dpx.publishable_state(Capitals(data, step)) == Capitals(None, step)
    assert dpx.publishable_state(Fields(data, Fields(data, None))) == Fields(None, Fields(None, None))
    assert dpx.publishable_state(WithNames(data)).unreleased_error is None
    nested = {"a": {"b": {"UNRELEASED": data, "c": step}}, ("x", "Unreleased_y"): data, b"unreleased": data}
    assert dpx.publishable_state(nested) == {"a": {"b": {"UNRELEASED": None, "c": step}}} | dict.fromkeys(
        list(nested)[1:]
    )
    secrets = [
        _UnreleasedSums(data),
        Sums(data, data, data),
        jax.tree_util.Partial(jnp.add, data),
        functools.partial(jnp.add, data),
        lambda: data,
        jnp.add,
        dpx.secret_key(),
        None,
    ]
    assert dpx.publishable_state(secrets) == [None] * len(secrets)
