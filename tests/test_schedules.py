"""Schedules, and that a running mechanism's noise is the billed one, step by step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import schedules
from dpx.schedules import value_at, values_over
from dpx.values import require_whole

SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=10)
KEY = jax.random.key(0)
PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
STEPS = 12


def dynamic(**changes):
    return dpx.methods.dynamic_dp_sgd(
        **({"clip_norm": 0.5, "noise_multiplier": 2.0, "steps": STEPS, "sampling": SAMPLING, "key": KEY} | changes)
    )


def realized_scale(mechanism, steps):
    """Multiplier x clip norm of each step of a run, (steps,): its noise divided by that of a unit mechanism."""
    unit = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=KEY)
    none, included = jax.tree.map(lambda p: jnp.zeros((0, *p.shape)), PARAMS), jnp.zeros(0, bool)
    state, unit_state, scales = mechanism.init(PARAMS), unit.init(PARAMS), []
    update, unit_update = jax.jit(mechanism.update), jax.jit(unit.update)
    for _ in range(steps):
        noise, state = update(none, state, PARAMS, included=included)
        standard, unit_state = unit_update(none, unit_state, PARAMS, included=included)
        ratios = np.concatenate([np.ravel(noise[name] / standard[name]) for name in PARAMS])
        assert np.ptp(ratios) < 1e-5 * ratios[0]
        scales.append(ratios.mean())
    return np.array(scales)


def billed_multipliers(mechanism, steps):
    """The multiplier that each step adds to the bill; (steps,)."""

    def multipliers(event):
        parts = [getattr(event, "event", None)] if hasattr(event, "event") else getattr(event, "events", [])
        inside = [m for part in parts for m in multipliers(part)] * getattr(event, "count", 1)
        return inside + ([event.noise_multiplier] if hasattr(event, "noise_multiplier") else [])

    bills = [sorted(multipliers(mechanism.event(t))) for t in range(steps + 1)]
    added = []
    for before, after in zip(bills[:-1], bills[1:], strict=True):
        for multiplier in before:
            after.remove(multiplier)
        added.extend(after)
        after.extend(before)
    return np.array(added)


RUNNING = {
    "growing mu": (dynamic(rho_mu=4.0), lambda t: 0.5),
    "sensitivity decay": (dynamic(rho_c=4.0), lambda t: 0.5 * 4 ** (-(t + 1) / STEPS)),
    "both": (dynamic(rho_mu=3.0, rho_c=2.0), lambda t: 0.5 * 2 ** (-(t + 1) / STEPS)),
    "per epoch": (dynamic(rho_mu=3.0, rho_c=2.0, every=4), lambda t: 0.5 * 2 ** (-(t // 4 * 4 + 1) / STEPS)),
    "d2p": (dpx.methods.d2p_sgd(noise_multiplier=3.0, power=0.5, every=3, sampling=SAMPLING, key=KEY), lambda t: 1.0),
    "optax": (
        dpx.dp_sgd(
            clip_norm=optax.cosine_decay_schedule(2.0, 20),
            noise_multiplier=lambda step: jnp.array([3, 3, 3, 1, 1, 2, 2, 5, 5, 1, 4, 4.0])[step],
            sampling=SAMPLING,
            key=KEY,
        ),
        lambda t: 1 + np.cos(np.pi * t / 20),
    ),
}


def test_an_eager_step_reads_the_billed_number():
    """At the edges of stairs too, where a division rounded differently is one stair off."""
    for transition in (3, 41, 47, 55, 61, 82, 83, 97):
        schedule = optax.exponential_decay(2.0, transition, 0.5, staircase=True)
        billed = values_over(schedule, 6 * transition + 1)
        eager = [float(value_at(schedule, jnp.int32(k * transition))) for k in range(7)]
        np.testing.assert_array_equal(eager, billed[::transition])


@pytest.mark.parametrize("wrap", [lambda schedule: schedule, jax.jit])
def test_an_array_that_a_schedule_reads_is_changed_in_place(wrap):
    """Clip, noise and bill are compiled at different times, and read the array as it was when the mechanism was built.

    With two rows, the gradients are summed in a loop, which is compiled at every call outside of jit.
    """
    table, params = np.ones(8, np.float32), {"w": jnp.zeros(5)}
    mechanism = dpx.dp_sgd(
        clip_norm=wrap(lambda step: jnp.sum(table * (jnp.arange(8) == step))),
        noise_multiplier=0.0,
        sampling=dpx.FullBatch(examples=2),
        key=KEY,
    )
    step = dpx.private_updates(lambda p, x: 100 * jnp.sum(x * p["w"]), mechanism, microbatch_size=1)
    batch, state = dpx.Batch(jnp.ones((2, 5)), None), mechanism.init(params)
    _, state, _ = step(params, batch, state)
    table[:] = 10
    updates, state, _ = step(params, batch, state)
    assert jnp.linalg.norm(updates["w"]) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("read", [jnp.asarray, lambda n: jnp.minimum(n, 9), jax.jit(lambda n: n + 0), lambda n: n])
@pytest.mark.parametrize("wrap", [lambda schedule: schedule, jax.jit])
def test_a_number_that_a_schedule_reads_is_changed_in_place(read, wrap):
    """A NumPy array without an axis is an operand of an equation, and not a constant of the program."""
    number = np.array(5.0, np.float32)
    noise = dpx.dp_sgd(
        clip_norm=1.0, noise_multiplier=wrap(lambda step: read(number)), sampling=SAMPLING, key=KEY
    ).noise_multiplier
    number[...] = 0.01
    assert values_over(noise, 3).tolist() == [float(value_at(noise, jnp.int32(t))) for t in range(3)] == [5.0] * 3


def test_an_eager_step_reads_the_billed_number_of_a_schedule_in_bfloat16():
    noise = dpx.dp_sgd(
        clip_norm=1.0, noise_multiplier=lambda t: jnp.bfloat16(3.3) / (t + jnp.bfloat16(1)), sampling=SAMPLING, key=KEY
    ).noise_multiplier
    assert values_over(noise, 20).tolist() == [float(value_at(noise, jnp.int32(t))) for t in range(20)]


def by_callback(step):
    return jax.pure_callback(
        lambda _: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32), step, vmap_method="sequential"
    )


@jax.custom_batching.custom_vmap
def another_under_vmap(step):
    return jnp.float32(1) + 0 * step


another_under_vmap.def_vmap(lambda size, batched, step: (jnp.float32(9) + 0 * step, True))
REFERENCE = jax.new_ref(jnp.float32(1))
REFUSED = {
    "several values": (lambda step: jnp.ones(2), r"with the values \['float32\[2\]'\]"),
    "a pair": (lambda step: (1.0, 2.0), "with the values"),
    "nothing": (lambda step: None, r"with the values \[\]"),
    "a complex number": (lambda step: 1j, "with the values"),
    "a truth value": (lambda step: step < 3, "with the values"),
    "a failing function": (lambda step: {}["noise"], "that raises KeyError"),
    "a branch in Python": (
        lambda step: 1.0 if step < 3 else 2.0,
        "raises TracerBoolConversionError: for a Python if, take jnp.where",
    ),
    "a callback": (by_callback, "calls Python"),
    "a callback in a branch": (
        lambda step: jax.lax.cond(step > 3, by_callback, lambda _: jnp.float32(1), step),
        "calls",
    ),
    "a callback in jit": (jax.jit(by_callback), "calls Python"),
    "a reference": (lambda step: REFERENCE[...], "reads a reference"),
    "numbers of an rbg key": (  # the cost, under jax.vmap, had those of the first step's key at every step
        lambda step: 1 + jax.random.uniform(jax.random.fold_in(jax.random.key(1, impl="rbg"), step)),
        "draws from a key of kind rbg",
    ),
    "another value under vmap": (another_under_vmap, "may change"),
}


@pytest.mark.parametrize("name", ["noise_multiplier", "clip_norm"])
@pytest.mark.parametrize("schedule", REFUSED)
def test_refused_schedules(schedule, name):
    """A callback that reads another number for the clip than for the noise, or for the bill, makes epsilon wrong."""
    function, message = REFUSED[schedule]
    numbers = {"clip_norm": 1.0, "noise_multiplier": 1.0} | {name: function}
    with pytest.raises(ValueError, match=f"{name} must be a number, or a function of the step.*{message}"):
        dpx.dp_sgd(**numbers, sampling=SAMPLING, key=KEY)


def test_a_schedule_may_be_an_object_that_cannot_be_hashed():
    @dataclasses.dataclass
    class Falling:
        start: float

        def __call__(self, step):
            return self.start / (step + 1)

    assert [float(value_at(Falling(6.0), jnp.int32(t))) for t in range(3)] == [6.0, 3.0, 2.0]
    assert values_over(Falling(6.0), 3).tolist() == [6.0, 3.0, 2.0]


def assert_billed_is_realized(realized, billed, clips):
    np.testing.assert_allclose(realized, billed * clips, rtol=2e-6)


@pytest.mark.parametrize("name", RUNNING)
def test_the_noise_of_every_step_is_the_billed_one(name, ungridded):
    mechanism, clip = RUNNING[name]
    clips = np.array([clip(t) for t in range(STEPS)])
    realized, billed = realized_scale(mechanism, STEPS), billed_multipliers(mechanism, STEPS)
    assert_billed_is_realized(realized, billed, clips)
    for shifted in (np.roll(billed, 1) * clips, billed * np.roll(clips, 1)):
        if np.ptp(shifted - billed * clips) > 1e-6:  # a schedule that is constant cannot be shifted
            with pytest.raises(AssertionError):
                assert_billed_is_realized(realized, shifted / clips, clips)


def test_a_number_of_steps_of_numpy_is_one_of_python():
    noise = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=lambda step: 2.0 + step, sampling=SAMPLING, key=KEY)
    assert noise.event(np.int64(20)) == noise.event(np.int8(20)) == noise.event(20)


def test_formulas():
    steps = np.arange(STEPS)
    for schedule, expected in [
        (schedules.inverse_power(init_value=3.05, power=0.25), 3.05 * (steps + 1) ** -0.25),
        (
            schedules.every(schedules.inverse_power(init_value=3.05, power=0.5), steps=5),
            3.05 * (steps // 5 + 1) ** -0.5,
        ),
        (schedules.growing_mu(noise_multiplier=2.0, rho_mu=5.0, steps=STEPS), 2 * 5 ** (-(steps + 1) / STEPS)),
        (schedules.sensitivity_decay(clip_norm=0.1, rho_c=5.0, steps=STEPS), 0.1 * 5 ** (-(steps + 1) / STEPS)),
    ]:
        np.testing.assert_allclose(values_over(schedule, STEPS), expected, rtol=1e-6)
        np.testing.assert_allclose([schedule(step) for step in range(STEPS)], expected, rtol=1e-6)  # as optax's do
        np.testing.assert_array_equal(  # the bill reads what a jitted step runs with
            values_over(schedule, STEPS),
            [jax.jit(lambda t, s=schedule: value_at(s, t))(t) for t in jnp.arange(STEPS)],
        )


def test_sensitivity_decay_costs_what_static_noise_costs():
    decaying, static = dynamic(rho_c=5.0), dpx.dp_sgd(clip_norm=0.5, noise_multiplier=2.0, sampling=SAMPLING, key=KEY)
    assert decaying.event(STEPS) == static.event(STEPS)
    assert dynamic(rho_mu=3.0).event(STEPS) == dynamic(rho_mu=3.0, rho_c=9.0).event(STEPS)


def test_the_noise_of_dynamic_dp_sgd_is_a_number():
    with pytest.raises(ValueError, match="noise_multiplier"):
        dynamic(noise_multiplier=lambda step: 2.0)


def test_a_data_driven_schedule_is_refused():
    """The data of a step cannot set its noise, because the bill has no data."""

    def train(data):
        mechanism = dpx.dp_sgd(
            clip_norm=1.0, noise_multiplier=lambda step: data.mean() + 0 * step, sampling=SAMPLING, key=KEY
        )
        return mechanism.event(3) and 0

    with pytest.raises(ValueError, match="step alone"):
        jax.jit(train)(jnp.ones(3))


def test_whole_numbers_are_those_of_python_and_numpy():
    assert [require_whole("steps", value) for value in (1, np.int64(7), np.uint8(3))] == [1, 7, 3]
    for value in (0, True, 1.0, np.float32(2), np.bool_(True), "1", None):
        with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got"):
            require_whole("steps", value)


class Settings:
    sigma = 4.0

    def schedule(self, step):
        return self.sigma * jnp.float32(0.99) ** step.astype(jnp.float32)


def test_a_mechanism_that_is_rebuilt_after_a_change_is_billed_by_the_new_schedule():
    """A notebook cell that runs again: jax and dpx keep programs of a function, which reads what has changed."""
    settings, sampling = Settings(), dpx.PoissonSampling(examples=100, batch_size=10)
    number = np.array(4.0)
    for schedule in (
        settings.schedule,
        lambda step: settings.schedule(step),
        lambda step: jnp.float32(number) + 0 * step,
    ):
        bills = []
        for sigma in (4.0, 0.7):
            settings.sigma, number[...] = sigma, sigma
            made = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=schedule, sampling=sampling, key=dpx.secret_key())
            settings.sigma, number[...] = 100.0, 100.0  # a change after the build is no change of this mechanism
            grads, params = {"w": jnp.ones((3, 2))}, {"w": jnp.ones(2)}
            _, state = made.update(grads, made.init(params), params, included=jnp.ones(3, bool))
            bills.append(dpx.epsilon(made, 1, delta=1e-5))
            assert dpx.epsilon(made, state, delta=1e-5) == pytest.approx(bills[-1], rel=1e-4)
            assert f"standard deviation {sigma:g}" in str(made)
        assert bills[1] > 5 * bills[0]
