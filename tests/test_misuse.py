"""Programs that a user might plausibly write, and what each becomes: refused with its message, or truly billed.

None may print an epsilon that is too small. What cannot be refused is listed in docs/sharp_edges.md.
"""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.accounting.cost import profile_of_run
from dpx.mechanism import guards
from dpx.states import record
from dpx.states.record import unit_fingerprint
from tests import problems
from tests.problems import as_a_user
from tests.problems import cross_entropy as loss

ROWS = 12
SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=50)
OTHER = dpx.PoissonSampling(examples=1000, batch_size=10)
PARAMS = {"w": jnp.zeros((5, 2)), "b": jnp.zeros(2)}
GRADS = jax.tree.map(lambda p: jnp.ones((ROWS, *p.shape)), PARAMS)
DATA = (np.ones((1000, 5), np.float32), np.arange(1000) % 2)
KEY = jax.random.key(3)
FULL = dpx.FullBatch(examples=ROWS)


def dp_sgd(noise_multiplier=1.0, sampling=SAMPLING, key=KEY, clip_norm=1.0):
    return problems.dp_sgd(sampling, noise_multiplier, clip_norm=clip_norm, key=key)


def budget(**length):
    return dpx.Budget(epsilon=2.0, delta=1e-5, **length)


def fresh():
    return dp_sgd().init(PARAMS)


def cost(mechanism, steps_or_state):
    return dpx.epsilon(mechanism, steps_or_state, delta=1e-5)


def update(grads, params=None, **options):
    return dp_sgd().update(grads, fresh(), params, **options)


def refused(words, program, *arguments, **named):
    with pytest.raises(ValueError, match=words):
        program(*arguments, **named)


def released(optimizer, steps=3, grads=GRADS, state=None):
    """The state of any optax transformation after some updates."""
    state = optimizer.init(PARAMS) if state is None else state
    for _ in range(steps):
        _, state = optimizer.update(grads, state, PARAMS, included=jnp.ones(ROWS, bool))
    return state


def bill(optimizer, mechanism=None, **options):
    """What a user who wraps a mechanism would print."""
    return cost(mechanism or dp_sgd(), released(optimizer, **options))


def resumed(before, after, steps=3):
    """Some steps of one mechanism, then some of another on its state; the second one's bill."""
    return cost(after, released(after, steps, state=released(before, steps)))


@functools.cache
def gradient_of(mechanism):
    """Jitted, because every operation outside of jit is a program of its own."""
    return jax.jit(dpx.private_updates(loss, mechanism))


def stepped(mechanism, state=None, *, key=KEY, by=None):
    """The state after a step on the next drawn batch. by: the mechanism whose compiled step is called."""
    state = mechanism.init(PARAMS) if state is None else state
    batch = mechanism.sampling.take(DATA, key, state)
    return gradient_of(by or mechanism)(PARAMS, batch, state).state


def step_of(mechanism, batch):
    return gradient_of(mechanism)(PARAMS, batch, mechanism.init(PARAMS))


def frozen(mask):
    """A state under layers that the mask freezes."""
    return dpx.in_coordinates(dp_sgd(), dpx.coordinates.trainable(mask=mask)).init(PARAMS)


def tiny(batch_size=ROWS):
    """Rows of data, without anything that says which of them count."""
    return jax.tree.map(lambda rows: rows[:batch_size], DATA)


def impure():
    """A schedule that reads a variable: the run sees 4, the bill would see 0.5... or the other way round."""
    noise = {"now": 0.5}

    def schedule(step):
        return jnp.full((), noise["now"]) + 0 * step

    before = dp_sgd(schedule)
    state = released(before)
    noise["now"] = 4.0
    return cost(dp_sgd(lambda step: schedule(step)), state)


def schedule_that_counts():
    """A schedule that gives another number every time that it is called."""
    calls = iter(range(1000))
    return bill(dp_sgd(lambda step: jnp.full((), 0.5 + next(calls)) + 0 * step))


def beyond_the_plan():
    mechanism = dp_sgd(budget(steps=3))
    return SAMPLING.take(DATA, KEY, released(mechanism, 3))


def projected_inside(mechanism):
    return dpx.mechanisms.clip_then_project(mechanism, rank=12, kind="gaussian")


@dpx.accounting.accepts_budget
def projected(*, noise_multiplier):
    return projected_inside(dp_sgd(noise_multiplier))


def best_of(trials):
    return dpx.accounting.best_of((dp_sgd(), 3), trials=trials, score_on="public")


def search_on_private_data():
    return dpx.tuning.search(
        lambda trial: None,
        configurations=[0.1, 1.0],
        score=lambda params: 0.0,
        optimizer=lambda rate, key: dp_sgd(key=key),
        key=KEY,
        trials=10,
        steps=3,
        delta=1e-5,
        score_on="private",  # type: ignore
    )


def error_feedback():
    numbers = {"clip_norm": 1.0, "feedback_norm": 0.1, "outer_clip_norm": 2.0, "noise_multiplier": 1.0}
    return bill(dpx.methods.dice_sgd(**numbers, sampling=SAMPLING, key=KEY))


def stacked_states():
    states = jax.vmap(lambda _: dp_sgd().init(PARAMS))(jnp.arange(3))
    return cost(dp_sgd(), states)


def under_jit():
    return jax.jit(lambda state: cost(dp_sgd(), state))(dp_sgd().init(PARAMS))


def take_under_jit():
    return jax.jit(lambda state: SAMPLING.take(DATA, KEY, state))(dp_sgd().init(PARAMS))


def inject():
    made = optax.inject_hyperparams(lambda noise_multiplier: dp_sgd(noise_multiplier))(noise_multiplier=1.0)
    return bill(made)


SHUFFLED = dpx.ShuffledEpochs(examples=1000, batch_size=64)


def after_batch(sampling, change):
    """The bill of a step on a drawn batch that `change` makes something else of."""
    mechanism = dp_sgd(sampling=sampling)
    batch = sampling.take(DATA, KEY, mechanism.init(PARAMS))
    return cost(mechanism, step_of(mechanism, change(batch)).state)


def twice_by_update():
    mechanism = dp_sgd()
    state = mechanism.init(PARAMS)
    batch = SAMPLING.take(DATA, KEY, state)
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(PARAMS, batch.examples)
    for _ in range(2):
        _, state = mechanism.update(grads, state, PARAMS, included=batch.included, drawn=batch.drawn)
    return cost(mechanism, state)


def lookahead_that_resets():
    ahead = optax.lookahead(dp_sgd(sampling=FULL), sync_period=2, slow_step_size=0.5, reset_state=True)
    params = optax.LookaheadParams(PARAMS, PARAMS)
    state = ahead.init(params)
    for _ in range(5):
        _, state = ahead.update(GRADS, state, params)
    return cost(dp_sgd(sampling=FULL), state)


def named_chain_of_ones_own():
    sums = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g + g.sum(0, keepdims=True), grads))
    own = optax.GradientTransformation(lambda params: (), sums.update)
    return bill(optax.named_chain(("pre", own), ("dp", dp_sgd())))


BUDGET, LONGER = budget(steps=100), budget(steps=400)
FIXED = dpx.FixedSizeSampling(examples=1000, batch_size=50)
PART = dpx.coordinates.trainable(mask={"w": True, "b": False})
OPTAX = optax.chain(dp_sgd(), optax.sgd(0.1))
MIXED = {"w": "private", "b": "public"}
SAME_KEY = (dp_sgd(), 100), (dp_sgd(2.0), 100)

REFUSED = {  # the program and the words of its message
    "resume with another kind of sampling": (lambda: bill(dp_sgd(), dp_sgd(sampling=FIXED)), "another sampling"),
    "bill several runs at once": (stacked_states, "give each a key of its own"),
    "a chain inside of coordinates": (
        lambda: released(dpx.in_coordinates(dpx.chain(dp_sgd(), optax.adamw(0.1)), PART), 1),
        r"chain must be outside of coordinates .*dpx\.chain\(dpx\.in_coordinates",
    ),
    "a chain of nothing": (lambda: dpx.chain(dp_sgd()), "transforms must be optax transforms.*got none"),
    "bill inside jit": (under_jit, "traced|tracing"),
    "masked with nothing masked": (lambda: bill(optax.masked(dp_sgd(), True)), "wrapped.*MaskedState"),
    "multi_transform, all in one": (
        lambda: bill(optax.multi_transform({"a": dp_sgd()}, {"w": "a", "b": "a"})),
        "wrapped.*PartitionState",
    ),
    "inject_hyperparams": (inject, "wrapped.*Inject"),
    "apply_if_finite": (
        lambda: cost(dp_sgd(), optax.apply_if_finite(dp_sgd(), 3).init(PARAMS)),
        "wrapped.*ApplyIfFiniteState",
    ),
    "schedule_free": (lambda: bill(optax.contrib.schedule_free(dp_sgd(), 0.1)), "wrapped.*ScheduleFreeState"),
    "two mechanisms in a chain": (
        lambda: cost(dp_sgd(), optax.chain(dp_sgd(), dp_sgd()).init(PARAMS)),
        "exactly one mechanism's state, found 2",
    ),
    "no mechanism": (lambda: cost(dp_sgd(), optax.adam(0.1).init(PARAMS)), "exactly one mechanism's state, found 0"),
    "a search by a score on private data": (
        search_on_private_data,
        "a score on private data without noise has no known cost",
    ),
    "the best of half a run": (lambda: best_of(trials=0.5), "trials must be a finite number at least 1"),
    "a winner of another search": (
        lambda: dpx.privacy_report(dp_sgd(), 4, delta=1e-5, tuning=best_of(trials=10)),
        "the run must be one that the search counted",
    ),
    "a batch without its padding": (lambda: step_of(dp_sgd(), tiny()), r"dpx.Batch\(examples, included=None\)"),
    "update without the padding": (lambda: update(GRADS, PARAMS), "included must be given"),
    "weights for inclusion": (lambda: step_of(dp_sgd(), dpx.Batch(tiny(), jnp.ones(ROWS))), "included must be bool"),
    "inclusion of another batch": (
        lambda: step_of(dp_sgd(), dpx.Batch(tiny(), jnp.ones(ROWS + 1, bool))),
        "included must have shape",
    ),
    "half a full batch": (
        lambda: step_of(dp_sgd(sampling=FULL), dpx.Batch(tiny(ROWS // 2), None)),
        f"has {ROWS} rows, got {ROWS // 2}",
    ),
    "gradients without params": (lambda: update(GRADS), "params must be given"),
    "data of another length": (lambda: SAMPLING.take(tiny(500), KEY, fresh()), "must hold the 1000 examples"),
    "draw from a sampling that is not billed": (
        lambda: OTHER.take(DATA, KEY, fresh()),
        "counts another sampling than",
    ),
    "draw inside jit": (take_under_jit, "outside of jit"),
    "a step beyond the budget": (beyond_the_plan, "the budget is spent: .* 3 steps, and 3 were taken"),
    "a drawn batch whose padding is forgotten": (
        lambda: after_batch(SAMPLING, lambda batch: batch._replace(included=None)),
        "not those that `take` drew",
    ),
    "all data in every shuffled step": (
        lambda: after_batch(SHUFFLED, lambda batch: dpx.Batch(DATA, None)),
        "has 64 rows, got 1000",
    ),
    "a batch used twice by update": (twice_by_update, "another step than it was drawn for"),
    "a lookahead that resets the count": (lookahead_that_resets, "may have reset its count"),
    "coordinates in dpx.chain": (
        lambda: dpx.chain(dp_sgd(), PART),
        r"write dpx.in_coordinates\(mechanism, coordinates\)",
    ),
    "an optax transform among coordinates": (
        lambda: dpx.in_coordinates(dp_sgd(), optax.sgd(0.1)),
        "optax transforms belong behind the mechanism",
    ),
    "a mask of other parameters": (lambda: frozen({"w": True, "c": False}), "mask must be a pytree prefix"),
    "a budget of no epochs": (lambda: budget(epochs=0), "epochs must be a finite number"),
    "a budget of no length": (lambda: budget(), "exactly one of steps and epochs"),
    "a budget of two lengths": (
        lambda: budget(steps=3, epochs=1),
        "a dpx.Budget must have exactly one of steps and epochs, such as steps=1 for one release; got 3 and 1",
    ),
    "a schedule of a budget": (
        lambda: dp_sgd(optax.linear_schedule(BUDGET, 1.0, 100)).event(1),
        "a Budget is not a number: .* decorate a function of noise_multiplier with dpx.accounting.accepts_budget",
    ),
    "a multiple of a budget": (lambda: dp_sgd(2.0 * BUDGET), "a Budget is not a number"),
    "a budget of no steps": (lambda: budget(steps=0), "steps must be a whole number"),
    "calibrated without a mechanism": (
        lambda: dpx.accounting.calibrate(lambda noise: noise, steps=1, epsilon=1.0, delta=1e-5),
        "make must return a mechanism for a noise multiplier, got 1.0",
    ),
    "an attack on one key": (
        lambda: dpx.audit.lower_bound(lambda key: dp_sgd(), steps=1, delta=1e-5, key=KEY),
        "make must build its mechanism with the key that it is given",
    ),
    "a contract of one key": (
        lambda: dpx.audit.check_contract(dp_sgd(), rebuild=lambda key: dp_sgd()),
        "rebuild must build its mechanism with the key that it is given",
    ),
    "parameters of NaN": (
        lambda: dpx.fit(loss, dpx.chain(dp_sgd(), optax.sgd(0.1)), PARAMS | {"b": np.nan}, DATA, steps=1, delta=1e-5),
        "params must hold no NaN, .* got NaN in b$",
    ),
    "a setup with parameters of NaN": (
        lambda: dpx.check_setup(loss, dp_sgd(), PARAMS | {"b": np.full(2, np.nan)}, dpx.Batch(tiny(), None)),
        "params must hold no NaN, .* got NaN in b$",
    ),
    "a count of a count": (
        lambda: dpx.statistics.release_count(1000, noise_multiplier=1.0, key=KEY),
        "data must hold a value of each example, .* got one number: a count",
    ),
    "a mean of a mean": (
        lambda: dpx.statistics.release_mean(jnp.ones(()), low=0.0, high=1.0, noise_multiplier=1.0, key=KEY),
        "data must hold a value of each example",
    ),
    "the class of a sampling": (lambda: dp_sgd(sampling=dpx.FullBatch), "sampling must be .* got the type FullBatch"),
    "an event that is a mechanism": (
        lambda: dpx.accounting.event_epsilon(dp_sgd(), delta=1e-5),
        "event must be a DpEvent, such as optimizer.event",
    ),
    "a mechanism for a run": (lambda: dpx.compose_runs(dp_sgd(), 3), "a run must be a pair .* got a Mechanism"),
    "a ledger without a path": (lambda: dpx.PrivacyLedger(3, epsilon=1.0, delta=1e-5), "path must be a path, got 3"),
    "a number for a schedule": (
        lambda: dpx.schedules.every(1.0, steps=3),
        r"schedule must be a function of \(step\), got 1.0",
    ),
    "a number for a strategy": (
        lambda: dpx.strategies.loss(0.9, steps=3),
        "strategy must be a dpx.strategies.Strategy, got 0.9",
    ),
    "scores of what is no mechanism": (
        lambda: dpx.audit.canary_scores(lambda key: 3, steps=1, key=KEY),
        "make must be a function from a key to a mechanism, got one to 3",
    ),
    "a mean of a table": (
        lambda: dpx.statistics.release_mean({"x": 1}, low=0.0, high=1.0, noise_multiplier=1.0, key=KEY),
        "data must be numbers, .* got a dict of length 1$",
    ),
    "a mean in no ledger": (
        lambda: dpx.statistics.release_mean(np.ones(9), low=0, high=1, noise_multiplier=1.0, key=KEY, ledger="a.json"),
        "ledger must be a dpx.PrivacyLedger, got 'a.json'",
    ),
    "one category": (
        lambda: dpx.statistics.release_histogram(np.ones(9), categories=3, noise_multiplier=1.0, key=KEY),
        "categories must be distinct, .* got 3",
    ),
    "a mask of nothing": (lambda: dpx.coordinates.trainable(mask=None), "at least one layer trainable, .* of: None"),
    "calibrated on what takes no noise": (
        lambda: dpx.accounting.accepts_budget(lambda clip_norm: None),
        "noise_multiplier",
    ),
    "noise from the data": (lambda: jax.jit(lambda x: dp_sgd(x).event(1))(jnp.ones(())), "traced"),
}
ALIKE = {  # by the words of the message: programs that it refuses
    "other noise": {
        "resume with another number of planned steps": lambda: resumed(dp_sgd(BUDGET), dp_sgd(LONGER)),
        "bill a checkpoint by a rebuilt mechanism of more steps": lambda: bill(dp_sgd(BUDGET), dp_sgd(LONGER)),
        "bill by a mechanism with more noise": lambda: bill(dp_sgd(), dp_sgd(1.1)),
        "bill a schedule by its first number": lambda: bill(dp_sgd(optax.linear_schedule(1.0, 0.5, 3))),
        "an impure schedule that changes between run and bill": impure,
    },
    "different samplings": {
        "resume with a smaller batch": lambda: resumed(dp_sgd(), dp_sgd(sampling=OTHER)),
        "resume with a smaller batch, billed by the first": lambda: cost(
            dp_sgd(), released(dp_sgd(sampling=OTHER), state=released(dp_sgd()))
        ),
    },
    "another kind of event": {
        "bill projected releases by the mechanism inside": lambda: bill(projected(noise_multiplier=1.0)),
        "bill error feedback as DP-SGD": error_feedback,
    },
    "must not be inside optax.masked": {
        "masked": lambda: bill(optax.masked(dp_sgd(), {"w": True, "b": False})),
        "partition": lambda: bill(optax.partition({"private": dp_sgd(), "public": optax.sgd(0.1)}, MIXED)),
    },
    "examples on axis 0": {
        "MultiSteps": lambda: bill(optax.MultiSteps(dp_sgd(), 2)),
        "mean gradients": lambda: update(PARAMS, PARAMS, included=jnp.ones(2, bool)),
    },
    "must come first": {
        "clip_by_global_norm before": lambda: bill(optax.chain(optax.clip_by_global_norm(1.0), dp_sgd())),
        "trace before": lambda: bill(optax.chain(optax.trace(0.9), dp_sgd())),
        "zero_nans before": lambda: bill(optax.chain(optax.zero_nans(), dp_sgd())),
        "before, in a chain in a chain": lambda: bill(
            optax.chain(optax.chain(optax.trace(0.9), dp_sgd()), optax.sgd(0.1))
        ),
        "optax first in dpx.chain": lambda: dpx.chain(optax.clip(1.0), dp_sgd()),
        "an optax chain in coordinates": lambda: dpx.in_coordinates(optax.chain(dp_sgd()), PART),
    },
    "use dpx.chain": {
        "named_chain": lambda: bill(optax.named_chain(("dp", dp_sgd()), ("sgd", optax.adam(0.1)))),
        "a transform of one's own in a named chain": named_chain_of_ones_own,
    },
    "must be a dpx Mechanism": {
        "the bill of an optax chain": lambda: cost(OPTAX, 3),
        "the report of an optax chain": lambda: dpx.privacy_report(OPTAX, 3, delta=1e-5),
        "the steps of an optax chain": lambda: dpx.accounting.max_steps(OPTAX, epsilon=1.0, delta=1e-5),
    },
    "one gradient of each example": {
        "mean gradients that look like two examples": lambda: update({"w": PARAMS["w"][:2]}, {"w": PARAMS["w"][:2]}),
        "gradients of another model": lambda: update(GRADS, PARAMS | {"w": jnp.zeros((5, 3))}),
    },
    "whole number": {
        "a step that is no whole number": lambda: SAMPLING.draw(KEY, 1.7),
        "a step before the first": lambda: SAMPLING.draw(KEY, -1),
    },
    "at least one layer trainable, .* all of: b, w": {
        "nothing trainable": lambda: frozen({"w": False, "b": False}),
        "no path trainable": lambda: frozen(lambda path: "lora" in path),
    },
    "mask must give Python bools": {
        "a mask of arrays": lambda: frozen({"w": jnp.ones((5, 2), bool), "b": True}),
        "a path that gives no bool": lambda: frozen(lambda path: path.find("w")),
    },
    "the optimizer must be a dpx Mechanism": {
        "an optimizer that is normalized": lambda: dpx.mechanisms.normalized(optax.sgd(0.1)),
        "an optimizer whose sum is projected": lambda: dpx.mechanisms.clip_then_project(
            optax.sgd(0.1), rank=2, kind="subset"
        ),
    },
    "a key of its own": {
        "two runs with one key": lambda: dpx.compose_runs(*SAME_KEY, shared_batches=False),
        "two runs with one key on shared batches": lambda: dpx.compose_runs(*SAME_KEY, shared_batches=True),
    },
    "put dpx.accounting.accepts_budget on the function": {
        "a budget inside a wrapper that costs more": lambda: dpx.mechanisms.clip_then_project(
            dp_sgd(BUDGET), rank=12, kind="gaussian"
        ),
        "another event for a calibrated mechanism": lambda: dp_sgd(BUDGET).replace(event=lambda steps: None),
    },
}
REFUSED |= {name: (program, words) for words, programs in ALIKE.items() for name, program in programs.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    program, message = REFUSED[name]
    with as_a_user():
        refused(message, program)


def test_a_schedule_that_counts_its_calls_is_billed_as_run_or_refused():
    try:
        epsilon = schedule_that_counts()
    except ValueError as error:
        assert "other noise" in str(error)
    else:  # its first number was traced once and ran at every step
        assert epsilon == pytest.approx(cost(dp_sgd(0.5), 3))


def truth(noise_multiplier, steps, sampling=SAMPLING):
    """Of a state, which counts the numbers of PARAMS."""
    numbers = sum(np.size(leaf) for leaf in jax.tree.leaves(PARAMS))
    event = sampling.event(np.full(steps, noise_multiplier))
    return profile_of_run(event, relation=sampling.relation, numbers=numbers).epsilon(1e-5)


def test_a_rebuilt_mechanism_with_the_same_numbers_goes_on():
    before, after = dp_sgd(BUDGET), dp_sgd(budget(steps=100))
    assert resumed(before, after) == pytest.approx(truth(before.noise_multiplier, 100))
    same = dpx.PoissonSampling(examples=np.int64(1000), batch_size=50.0)
    assert resumed(dp_sgd(), dp_sgd(sampling=same)) == pytest.approx(truth(1.0, 6))


def test_steps_beyond_the_plan_are_billed():
    mechanism = dp_sgd(budget(steps=3))
    state = released(mechanism, 5)
    assert cost(mechanism, state) == pytest.approx(truth(mechanism.noise_multiplier, 5))
    assert cost(mechanism, state) > 2.0
    assert SAMPLING.take(DATA, KEY, state, beyond_budget=True).included.any()


def test_a_batch_used_twice_is_not_billed():
    """Two releases that share a batch cost more than two of independent batches."""
    mechanism = dp_sgd()
    batch = SAMPLING.take(DATA, KEY, mechanism.init(PARAMS))
    once = stepped(mechanism)
    assert cost(mechanism, once) == pytest.approx(truth(1.0, 1))
    twice = gradient_of(mechanism)(PARAMS, batch, once).state
    for state in (twice, stepped(mechanism, twice)):
        refused("another step than it was drawn for", cost, mechanism, state)


def test_more_rows_than_are_drawn_are_not_billed():
    mechanism = dp_sgd(sampling=dpx.FixedSizeSampling(examples=1000, batch_size=ROWS))
    assert cost(mechanism, released(mechanism, 1)) > 0
    twice = jax.tree.map(lambda rows: jnp.concatenate([rows, rows]), GRADS)
    _, state = mechanism.update(twice, mechanism.init(PARAMS), PARAMS, included=jnp.ones(2 * ROWS, bool))
    refused("more rows that count than its sampling draws", cost, mechanism, state)


def test_repeated_rows_are_not_billed():
    """Two views of every example as two rows would each be clipped, so one example would count twice."""
    mechanism = dp_sgd()
    batch = SAMPLING.take(DATA, KEY, mechanism.init(PARAMS))
    views = jax.tree.map(lambda rows: np.concatenate([rows, rows]), batch._replace(drawn=None))
    state = step_of(mechanism, views._replace(drawn=batch.drawn)).state
    refused("not those that `take` drew", cost, mechanism, state)


def test_batches_of_another_sampling_are_not_billed():
    """A notebook in which the batch size is changed, but the iterator of batches is not made again."""
    bills, draws = dpx.PoissonSampling(examples=1000, batch_size=4), dpx.PoissonSampling(examples=1000, batch_size=50)
    mechanism = dp_sgd(sampling=bills)
    size, state = draws.draw(KEY, 0).indices.size, mechanism.init(PARAMS)
    gradient = gradient_of(mechanism)
    for sampling in (bills, draws):
        batch = sampling.take(DATA, KEY, dp_sgd(sampling=sampling).init(PARAMS), size=size)
        after = gradient(PARAMS, batch, state).state
        if sampling is bills:
            assert cost(mechanism, after) > 0
    refused("drawn by another sampling than that of the mechanism", cost, mechanism, after)
    assert dpx.check_setup(loss, mechanism, PARAMS, batch).findings[0].name == "drawn"


def test_a_step_that_was_compiled_with_another_key_is_not_billed():
    """As by a cache that forgets the key, an old exported program or an old closure: both runs have the same noise."""
    mine, others = dp_sgd(), dp_sgd(key=jax.random.key(4))
    wrong, right = stepped(mine, by=others), stepped(mine)
    for question in (
        lambda: cost(mine, wrong),
        lambda: dpx.privacy_report(mine, wrong, delta=1e-5),
        lambda: dpx.compose_runs((mine, wrong), (others, 1), shared_batches=False),
    ):
        refused("drawn with a key other than the mechanism's", question)
    assert cost(mine, right) > 0
    for both in (stepped(mine, wrong), stepped(mine, right, by=others)):
        for mechanism in (mine, others):
            refused("drawn with more than one key", cost, mechanism, both)


def test_runs_on_different_units_are_not_added():
    """A run per example costs a user with many examples more than its bill, so no sum of both bills is true."""
    owners = np.arange(1000) // 10
    units = {"example": DATA, "user": dpx.UserData(DATA, owners), "household": dpx.UserData(DATA, owners, unit="home")}

    def user_loss(params, item):
        rows, included = item
        return jnp.mean(jax.vmap(loss, (None, 0))(params, rows), where=included)

    runs, makers = {}, {}
    for number, (name, data) in enumerate(units.items()):
        sampling = dpx.PoissonSampling(examples=1000 if name == "example" else 100, batch_size=5)
        mechanism = dp_sgd(sampling=sampling, key=jax.random.key(number))
        gradient = jax.jit(dpx.private_updates(loss if name == "example" else user_loss, mechanism))
        state = mechanism.init(PARAMS)
        batch = mechanism.sampling.take(data, mechanism.key, state)
        makers[name], runs[name] = mechanism, (mechanism, gradient(PARAMS, batch, state).state)
        ((chunk, *_),) = map(list, mechanism.sampling.batches(data, mechanism.key, state, steps=1, chunk_size=20))
        unit = unit_fingerprint({"household": "home"}.get(name, name))
        assert int(chunk.drawn.unit) == int(runs[name][1].unit) == unit
    for one, other in (("example", "user"), ("user", "household")):
        refused("protect the same unit", dpx.compose_runs, runs[one], runs[other], shared_batches=False)
        earlier = dpx.compose_runs(runs[one], shared_batches=False)
        refused("protect the same unit", dpx.compose_runs, earlier, runs[other], shared_batches=False)
        trials = {"trials": 2, "score_on": "public"}
        winner = dpx.accounting.best_of(runs[one], **trials)
        refused("protect the same unit", dpx.accounting.best_of, runs[one], runs[other], **trials)
        refused("protect the same unit", dpx.compose_runs, winner, runs[other], shared_batches=False)
    with pytest.warns(UserWarning, match=r"sample from \[100, 1000\] units"):
        dpx.compose_runs(runs["example"], (makers["user"], 1), shared_batches=False)
    mechanism, state = runs["user"]
    mixed = SAMPLING.take(DATA, mechanism.key, dp_sgd().init(PARAMS))
    drawn = mixed.drawn._replace(step=1, sampling=state.sampling)
    grads = jax.tree.map(lambda p: jnp.ones((len(mixed.included), *p.shape)), PARAMS)
    _, state = mechanism.update(grads, state, PARAMS, included=mixed.included, drawn=drawn)
    refused("units of different kinds", cost, mechanism, state)


@pytest.mark.parametrize(
    "sampling",
    [
        dpx.ShuffledEpochs(examples=1000, batch_size=50),
        dpx.sampling.RandomAllocation(examples=1000, steps_per_epoch=20),
        dpx.sampling.CyclicPoissonSampling(examples=1000, batch_size=50, bands=4),
    ],
    ids=lambda sampling: type(sampling).__name__,
)
def test_several_keys_for_one_epoch_are_not_billed(sampling):
    """Batches of two orders may hold an example twice an epoch."""
    mechanism = dp_sgd(sampling=sampling)
    first = stepped(mechanism)
    same, other = (stepped(mechanism, first, key=key) for key in (KEY, jax.random.key(4)))
    assert cost(mechanism, same) == pytest.approx(cost(mechanism, 2), rel=1e-4)
    refused("more than one key", cost, mechanism, other)


def test_runs_under_vmap_have_keys_of_their_own():
    """Folds of the data, or first parameters, under one key have one noise."""

    def run(key, scale):
        optimizer = dp_sgd(sampling=FULL, key=key)
        params = jax.tree.map(lambda leaf: leaf + scale, PARAMS)
        batch = dpx.Batch(jax.tree.map(lambda leaf: leaf[:ROWS], DATA), None)
        return dpx.private_updates(loss, optimizer)(params, batch, optimizer.init(params)).updates["b"]

    runs, scales = jax.random.split(KEY, 2), jnp.zeros(2)
    grid = jax.vmap(jax.vmap(run, (0, None)), (None, 0))  # of runs and scales: each scale has all the keys
    for shared, keys in (jax.vmap(run, (None, 0)), KEY), (grid, runs):
        refused("with one key they have the same noise", jax.jit(shared), keys, scales)
    one, other = jax.jit(jax.vmap(run))(runs, scales)
    assert jnp.abs(one - other).min() > 1e-3
    grads = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), GRADS)
    for noise, check in (
        (1.0, functools.partial(refused, "with one key they have the same noise")),
        (0.0, lambda f: f()),
    ):
        made = dp_sgd(noise, FULL)
        check(lambda made=made: jax.vmap(lambda g: made.update(g, made.init(PARAMS), PARAMS)[0])(grads))


def test_runs_under_vmap_that_have_one_key_have_no_cost():
    """Where nothing sees it before they run: in a branch that the data choose, and with equal keys."""

    def run(key, x):
        made = dp_sgd(sampling=FULL, key=key)
        state, grads = made.init(PARAMS), jax.tree.map(lambda leaf: x * leaf, GRADS)
        return jax.lax.cond(x > 0, lambda: made.update(grads, state, PARAMS)[1], lambda: state).problem

    both, problem = jnp.arange(2.0), list(record.REASONS).index("devices") + 1
    runs, alike = jax.random.split(KEY, 2), jnp.stack([KEY, KEY])
    found = jax.jit(jax.vmap(run, (None, 0)))(KEY, both), *map(jax.jit(jax.vmap(run)), (alike, runs), (both, both))
    np.testing.assert_array_equal(found, [[0, problem], [0, problem], [0, 0]])
    grid = jax.jit(jax.vmap(jax.vmap(run)))(jnp.stack([runs, runs]), jnp.ones((2, 2)))
    np.testing.assert_array_equal(grid, np.full((2, 2), problem))


def test_devices_have_keys_of_their_own(monkeypatch):
    """As under `jax.pmap`, for which `jax.vmap` stands here, without noise, which it would refuse."""
    monkeypatch.setattr(record, "untracked_mapped_axes", lambda: ("devices",))
    made = dp_sgd(0.0, FULL)
    for other, expected in ((1.0, 0), (0.0, list(record.REASONS).index("devices") + 1)):
        grads = jax.tree.map(lambda leaf, other=other: jnp.stack([leaf, other * leaf, leaf]), GRADS)
        step = jax.vmap(lambda g: made.update(g, made.init(PARAMS), PARAMS)[1].problem, axis_name="devices")
        assert np.all(step(grads) == expected)


def test_a_gradient_in_a_shard_map_is_of_one_device():
    """There, `jax.grad` by parameters that all devices share is a sum over the devices, so over examples."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    made, split, same = dp_sgd(sampling=FULL), jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def step(params, examples):
        batch = dpx.Batch(examples, jnp.ones(ROWS, bool))
        return dpx.private_updates(loss, made, norms="vmap")(params, batch, made.init(PARAMS)).updates

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(same, split), out_specs=same)
    refused("must each have a key of their own", jax.eval_shape, sharded, PARAMS, tiny())


def test_a_private_gradient_is_not_differentiated():
    mechanism = dp_sgd()
    batch = dpx.Batch(tiny(), jnp.ones(ROWS, bool))

    def released_bias(params):
        return dpx.private_updates(loss, mechanism)(params, batch, mechanism.init(params)).updates["b"][0]

    refused("must not be differentiated", jax.eval_shape, jax.grad(released_bias), PARAMS)


def test_an_extra_argument_is_refused():
    """A line search behind the mechanism would read the loss of the batch without noise."""
    mechanism = dpx.chain(dp_sgd(), optax.scale(0.1))
    given = {"included": jnp.ones(ROWS, bool), "value": jnp.ones(())}
    refused(r"takes no \['value'\]", mechanism.update, GRADS, mechanism.init(PARAMS), PARAMS, **given)


@pytest.mark.parametrize(
    "changes", [{"key": jax.random.key(4)}, {"noise_multiplier": 9.0}, {"sampling": OTHER}], ids=str
)
def test_parts_are_not_exchanged_without_those_that_need_them(changes):
    refused("must not change without", dp_sgd().replace, **changes)


def test_batches_follow_the_state_not_the_epoch():
    """A loop whose step restarts every epoch would draw the first epoch's batches again; `take` does not see it."""
    mechanism = dp_sgd()
    state, batches = mechanism.init(PARAMS), []
    gradient = gradient_of(mechanism)
    data = np.arange(5000, dtype=np.float32).reshape(1000, 5) / 5000, DATA[1]
    for _ in range(2):
        for _ in range(2):
            batch = SAMPLING.take(data, KEY, state)
            batches.append(np.asarray(batch.examples[0]).tobytes())
            state = gradient(PARAMS, batch, state).state
    assert len(set(batches)) == 4
    assert cost(mechanism, state) == pytest.approx(truth(1.0, 4))


def test_an_unhashable_schedule_is_one_number_for_clip_and_noise():
    """One that counts its calls would clip to one norm and add the noise of another if jax traced it twice."""

    class Counting:
        __hash__ = None  # type: ignore
        calls = 0

        def __call__(self, step):
            self.calls += 1
            return jnp.float32(4.0**self.calls) + 0 * step.astype(jnp.float32)

    full = dpx.FullBatch(examples=1)
    grads = jax.tree.map(lambda p: jnp.full((1, *p.shape), 1e6), PARAMS)
    silent, noisy = (
        dp_sgd(noise, full, clip_norm=Counting()).update(grads, dp_sgd(noise, full).init(PARAMS), PARAMS)[0]
        for noise in (0.0, 1.0)
    )
    clip_norm = float(optax.tree.norm(silent))
    noise = jax.tree.map(jnp.subtract, noisy, silent)
    standard = optax.tree.norm(noise) / clip_norm
    assert 0.3 * np.sqrt(12) < float(standard) < 2 * np.sqrt(12)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_runs_on_shared_batches_cost_more_than_apart(accountant):
    one, other = dp_sgd(1.0), dp_sgd(2.0, key=jax.random.key(4))
    shared = dpx.compose_runs((one, 40), (other, 30), shared_batches=True)
    apart = dpx.compose_runs((one, 40), (other, 30), shared_batches=False)
    together = 1.25**-0.5
    event = SAMPLING.event(np.r_[np.full(30, together), np.ones(10)])
    by_hand = profile_of_run(event, relation="zero_out", accountant=accountant, runs=2).epsilon(1e-5)
    assert shared.epsilon(delta=1e-5, accountant=accountant) == pytest.approx(by_hand)
    assert shared.epsilon(delta=1e-5, accountant=accountant) > apart.epsilon(delta=1e-5, accountant=accountant)
    assert apart.epsilon(delta=1e-5, accountant=accountant) > dpx.epsilon(one, 40, delta=1e-5, accountant=accountant)
    assert shared.delta(epsilon=1.0) > apart.delta(epsilon=1.0)


def test_shared_batches_cost_what_is_known():
    """Figures worked out by another accountant: Poisson rate .01, noise multipliers 1, 1000 steps."""
    sampling = dpx.PoissonSampling(examples=1000, batch_size=10)
    runs = [(dp_sgd(sampling=sampling, key=jax.random.key(seed)), 1000) for seed in range(2)]
    assert dpx.compose_runs(*runs, shared_batches=True).epsilon(delta=1e-5) == pytest.approx(4.47, rel=5e-3)
    assert dpx.compose_runs(*runs, shared_batches=False).epsilon(delta=1e-5) == pytest.approx(2.58, rel=5e-3)


def test_runs_that_drew_with_one_key_are_composed_as_sharing_their_batches():
    """Two mechanisms with keys of their own, whose batches were taken with one key, or each with its own."""
    made, other_key = (dp_sgd(), dp_sgd(key=jax.random.key(4))), jax.random.key(4)
    one = [(mechanism, stepped(mechanism)) for mechanism in made]
    two = [(mechanism, stepped(mechanism, key=key)) for mechanism, key in zip(made, (KEY, other_key), strict=True)]
    refused("drew with one key", dpx.compose_runs, *one, shared_batches=False)
    refused("drew with several keys", dpx.compose_runs, *two, shared_batches=True)
    mechanism, state = one[0]
    for key in (other_key, KEY):  # another key for one step, and the first again
        state = stepped(mechanism, state, key=key)
    for shared in (False, True):
        words = "one of these runs drew its batches with several keys"
        refused(words, dpx.compose_runs, (mechanism, state), one[1], shared_batches=shared)
    shared, apart = dpx.compose_runs(*one, shared_batches=True), dpx.compose_runs(*two, shared_batches=False)
    assert shared.epsilon(delta=1e-5) > apart.epsilon(delta=1e-5) > 0


def test_what_compose_refuses():
    one, other = dp_sgd(), dp_sgd(key=jax.random.key(4))
    elsewhere = dp_sgd(key=jax.random.key(4), sampling=OTHER)
    replaced = dp_sgd(key=jax.random.key(4), sampling=dpx.FixedSizeSampling(examples=1000, batch_size=50))
    harder = projected(noise_multiplier=1.0)
    for runs, shared, message in [
        ((), False, "at least one"),
        (((one, 3), (replaced, 3)), False, "the same neighboring relation"),
        (((one, 3), (elsewhere, 3)), True, "must share a sampling"),
        (((other, 3), (harder, 3)), True, "one Gaussian a step"),
        (((one, released(one)), (elsewhere, 3)), False, None),
        (((one, released(other)), (elsewhere, 3)), False, "a key other"),
        (((one, released(dp_sgd(2.0))), (other, 3)), False, "other noise"),
    ]:
        if message is None:
            assert dpx.compose_runs(*runs, shared_batches=shared).epsilon(delta=1e-5) > 0
            continue
        refused(message, dpx.compose_runs, *runs, shared_batches=shared)


def test_a_budget_is_that_of_the_outermost_composition():
    """Resolved for the mechanism inside, the projected one would cost 3.1 for a budget of 2 (by RDP, which is fast)."""
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=100, accountant="rdp")
    mechanism = projected(noise_multiplier=budget)
    assert 1.99 <= dpx.epsilon(mechanism, 100, delta=1e-5, accountant="rdp") <= 2.0
    inside = projected(noise_multiplier=dp_sgd(budget).noise_multiplier)
    assert dpx.epsilon(inside, 100, delta=1e-5, accountant="rdp") > 2.1
    assert mechanism.budget == budget
    assert math.isclose(float(mechanism.init(PARAMS).inner.planned_steps), 100)


def test_a_loop_that_forgets_the_state_is_warned():
    """All steps have one noise, and with a budget the cost of the first state is that of the whole run."""
    planned = dp_sgd(budget(steps=8))
    for mechanism in (planned, dp_sgd()):
        state = mechanism.init(PARAMS)
        for _ in range(3):
            mechanism.update(GRADS, state, PARAMS, included=jnp.ones(ROWS, bool))
        with pytest.warns(UserWarning, match="the state has taken no step.*had the same noise"):
            assert cost(mechanism, state) == pytest.approx(cost(mechanism, 8) if mechanism is planned else 0, rel=1e-4)
    with pytest.warns(UserWarning, match="the state has taken no step"):
        dpx.privacy_report(planned, planned.init(PARAMS), delta=1e-5)


def test_each_process_looks_for_nan_in_what_it_holds():
    """A program over all processes would wait forever for one that has raised."""
    for value in (0.0, np.nan):
        shard = SimpleNamespace(data=np.full(2, value, np.float32))
        assert guards._has_nan(SimpleNamespace(is_fully_addressable=False, addressable_shards=[shard])) == (value != 0)


def test_a_rate_in_place_of_a_batch_size_is_warned_of():
    with pytest.warns(
        UserWarning, match=r"batch_size = 0.05 is below 1, .* batch_size = rate \* examples = 50"
    ) as seen:
        dpx.PoissonSampling(examples=1000, batch_size=0.05)
    assert [each.filename for each in seen] == [__file__]
