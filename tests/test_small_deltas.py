"""Small deltas: how many numbers a release is billed for, in every bill of a run, and what has no bill."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx import accounting
from dpx.accounting.cost import cost_of_run, event_epsilon, profile_of_run
from dpx.keys.noise import LARGEST_RELEASE, collect_release_sizes, report_release_size
from dpx.reports import curves
from dpx.states.reading import read_run_facts, release_state
from dpx.states.record import ReleaseState, release_and_record_draws
from tests.mechanisms import MECHANISMS
from tests.mechanisms import PARAMS as OF_CASES

KEY = dpx.secret_key(2**100 + 1)
SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=50)
BIG = dpx.PoissonSampling(examples=10**8, batch_size=10**4)
PARAMS = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}


def mechanism(noise=1.0, sampling=SAMPLING):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=KEY)


def stepped(made, params=None):
    """The state after one step, of two rows."""
    params = PARAMS if params is None else params
    grads = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), params)
    return made.update(grads, made.init(params), params, included=jnp.ones(2, bool))[1]


RUNS = {  # rate, noise, steps, delta: of about the size of published runs
    "ten thousand a batch": (1e-4, 1.0, 100_000, 1e-12),
    "a budget": (1e-4, 0.68, 10_000, 1e-12),
    "VaultGemma": (517_989 / 12.7e9, 0.614, 100_000, 1.1e-10),
    "few large batches": (1e-3, 4.0, 30_000, 1e-13),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.long_cases("ten thousand", "VaultGemma")
def test_a_billion_numbers_cost_hardly_more_than_exact_noise(run):
    rate, noise, steps, delta = RUNS[run]
    numbers: dict = dict(examples=10**9, batch_size=rate * 10**9, noise_multiplier=noise, steps=steps, delta=delta)
    exact = accounting.dp_sgd_epsilon(**numbers, exact_noise=True)
    event = dpx.PoissonSampling(examples=10**9, batch_size=rate * 10**9).event(np.full(steps, noise))
    assert exact == event_epsilon(event, delta=delta, relation="zero_out")
    assert exact < accounting.dp_sgd_epsilon(**numbers, numbers=10**9) < 1.01 * exact
    assert accounting.dp_sgd_epsilon(**numbers) < 1.02 * exact  # of 2^32


def test_another_librarys_noise_is_taken_as_exact():
    schedule: dict = dict(sampling_rate=0.01, delta=1e-8, counts=[50, 50])
    exact = accounting.schedule_epsilon([2.0, 1.0], **schedule, exact_noise=True)
    few, most = (accounting.schedule_epsilon([2.0, 1.0], **schedule, numbers=n) for n in (10**6, 2**32))
    assert exact.lower == few.lower and exact.upper < few.upper < most.upper < 1.001 * exact.upper
    ask: dict = dict(sampling_rate=0.01, counts=[50, 50], epsilon=exact.upper)
    found = accounting.schedule_delta([2.0, 1.0], **ask, exact_noise=True)
    assert found.upper == pytest.approx(1e-8, rel=1e-3)
    scales = [
        accounting.calibrate_schedule([2.0, 1.0], sampling_rate=0.01, epsilon=1.0, delta=1e-8, **options).scale
        for options in (dict(exact_noise=True), dict(numbers=10**6), {})
    ]
    assert scales[0] < scales[1] * (1 + 1e-4) and scales[0] < scales[2]
    with pytest.raises(ValueError, match="exact_noise must be True or False"):
        accounting.dp_sgd_epsilon(examples=10, batch_size=1, noise_multiplier=1, steps=1, delta=1e-3, exact_noise=1)


@pytest.mark.parametrize("numbers", [0, 2**32 + 1, 1.5, "many"])
def test_numbers_out_of_range(numbers):
    with pytest.raises(ValueError, match="numbers must be"):
        dpx.Budget(epsilon=1.0, delta=1e-5, steps=1, numbers=numbers)
    with pytest.raises(ValueError, match="numbers must be"):
        accounting.dp_sgd_epsilon(examples=10, batch_size=1, noise_multiplier=1.0, steps=1, delta=1e-3, numbers=numbers)


def test_a_state_knows_its_numbers():
    made = mechanism()
    for init in (made.init, jax.jit(made.init)):
        state = init(PARAMS)
        assert int(state.numbers) == 15 == read_run_facts(state).numbers and cost_of_run(made, 7).numbers == 2**32
    taken = stepped(made)
    assert read_run_facts(taken).numbers == 15
    spent = [dpx.epsilon(made, taken, delta=1e-12), dpx.epsilon(made, 1, delta=1e-12)]
    assert spent[0] < spent[1] and spent[0] == dpx.epsilon(made, 1, delta=1e-12, numbers=15)
    assert dpx.epsilon(made, taken, delta=1e-12, numbers=2**32) == spent[1]
    with pytest.raises(ValueError, match="at least the 15 of the run, got 14"):
        dpx.epsilon(made, taken, delta=1e-12, numbers=14)


@pytest.mark.parametrize("case", [case for case in MECHANISMS if not case.like], ids=lambda case: case.name)
def test_the_numbers_of_every_method_are_those_that_it_draws(case):
    """By what the release asks `dpx.keys` for, while a step is traced; at init, and after it."""
    made, params = case.mechanism, OF_CASES
    begun = made.init(params)
    sums = jax.eval_shape(
        lambda g, s: tuple(jax.tree.map(lambda _, e: e, f, made.contribute(g, s)[0]) for f in made.contribute(g, s)[2]),
        params,
        begun,
    )
    with collect_release_sizes() as drawn:
        jax.eval_shape(lambda *given: made.release(*given), sums, begun, params)
    assert drawn and sum(drawn) == int(release_state(begun).numbers) > 0


def test_a_release_of_more_numbers_than_init_knew_counts():
    """Such as of a mechanism of one's own, whose `encode` adds coordinates; and of one that draws where nobody sees."""
    inner = mechanism()
    made = inner.replace(
        encode=lambda grad, state: {"grad": grad, "more": jnp.zeros(100)},
        norm=lambda encoded: inner.norm(encoded["grad"]),
        release=lambda sums, state, params: inner.release((sums[0],), state, {"grad": params, "more": jnp.zeros(100)}),
    )
    state = made.init(PARAMS)
    total = ({"grad": PARAMS, "more": jnp.zeros(100)},)
    _, state = made.check_and_release(total, state, PARAMS, jnp.int32(2))
    assert read_run_facts(state).numbers == 115
    unseen = release_and_record_draws(lambda: (None, ReleaseState.empty_record(PARAMS)), budget=None)
    assert int(unseen[1].numbers) == 0  # not known: 2^32
    state = inner.check_and_release((PARAMS,), ReleaseState.empty_record(), PARAMS, jnp.int32(2))[1]
    assert read_run_facts(state).numbers == 2**32


def test_a_budget_states_the_number_of_every_bill():
    budget = dpx.Budget(epsilon=1.0, delta=1e-13, steps=1, numbers=1000)
    made = mechanism(budget)
    state = stepped(made)
    assert int(state.numbers) == 1000
    report = dpx.privacy_report(made, state, delta=1e-13)
    bills = {
        dpx.epsilon(made, 1, delta=1e-13),
        dpx.epsilon(made, state, delta=1e-13),
        report.epsilon["pld"],
        dpx.privacy_report(made, 1, delta=1e-13).spent,
        dpx.compose_runs((made, state), shared_batches=False).epsilon(delta=1e-13),
        dpx.compose_runs((made, 1), shared_batches=False).epsilon(delta=1e-13),
        curves.epsilon_over_steps(made, 1, delta=1e-13).epsilon[-1],
        profile_of_run(made.event(1), relation="zero_out", numbers=1000).epsilon(1e-13),
    }
    assert len(bills) == 1 and 0.999 < bills.pop() <= 1.0
    without = mechanism(dpx.Budget(epsilon=1.0, delta=1e-13, steps=1)).noise_multiplier
    assert made.noise_multiplier < without
    large = dpx.Budget(epsilon=1.0, delta=1e-13, steps=1, numbers=LARGEST_RELEASE)
    assert mechanism(large).noise_multiplier == without


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_beyond_the_budget_are_refused(compiled):
    made = mechanism(dpx.Budget(epsilon=1.0, delta=1e-5, steps=1, numbers=14))
    begin = jax.jit(made.init) if compiled else made.init
    with pytest.raises(ValueError, match="at most the 14 numbers of the dpx.Budget.*got 15"):
        begin(PARAMS)
    with pytest.raises(ValueError, match="at most the 14 numbers of the dpx.Budget.*got 15"):
        made.check_and_release((PARAMS,), mechanism().init(PARAMS), PARAMS, jnp.int32(2))
    begin({"w": PARAMS["w"]})


def test_what_the_arithmetic_cannot_promise_is_said():
    made = mechanism(5.0)
    report = dpx.privacy_report(made, 10, delta=1e-20)
    words = " ".join(str(report).split())
    assert "the noise has finitely many values" in words and "no noise, or too little" not in words
    least = json.loads(report.to_json())["arithmetic"]["least delta"]
    assert 1e-19 < least < 1e-17 and math.isfinite(dpx.epsilon(made, 10, delta=least))
    assert dpx.epsilon(made, 10, delta=least / 1.5) == math.inf
    none = dpx.privacy_report(mechanism(0.0), 3, delta=1e-5)
    assert "no noise, or too little" in str(none).replace("\n  ", " ") and "least delta" not in none.arithmetic
    with pytest.raises(
        ValueError, match=r"finitely many values.*4294967296 numbers. Delta must be at least about \de-1"
    ):
        mechanism(dpx.Budget(epsilon=2.0, delta=1e-20, steps=10_000), BIG)
    with pytest.raises(ValueError, match="alone costs 0.0003.*Allow a larger epsilon"):
        mechanism(dpx.Budget(epsilon=1e-4, delta=1e-12, steps=10_000), BIG)
    with pytest.raises(ValueError, match="Delta must be at least"):
        dpx.plan_noise(examples=10**6, epsilon=1.0, delta=1e-22, epochs=1, batch_sizes=[1000])
    assert mechanism(dpx.Budget(epsilon=2.0, delta=1e-20, steps=100, numbers=1000), BIG).noise_multiplier < 1


def test_plans_are_for_the_numbers():
    budget: dict = dict(examples=10**5, epsilon=1.0, delta=1e-13, epochs=1)
    noises = [dpx.plan_noise(**budget, batch_sizes=[1000], numbers=n).runs[0].noise_multiplier for n in (1000, 2**32)]
    assert noises[0] < noises[1]
    made = mechanism(
        dpx.Budget(epsilon=1.0, delta=1e-13, steps=100, numbers=1000),
        dpx.PoissonSampling(examples=10**5, batch_size=1000),
    )
    assert made.noise_multiplier == pytest.approx(noises[0], rel=1e-3)


def test_an_example_that_moves_far_costs_no_more_than_before():
    """A small p0 bounds the tail that is moved by four deviations: 4.30673 was the cost of noise up to 11.35."""
    noise = np.append(np.full(399, 5.0), 0.5)
    found = accounting.schedule_epsilon(noise, sampling_rate=0.01, delta=1e-6, relation="replace_one", buckets=64)
    assert found.upper < 4.30673


@pytest.mark.parametrize("noise, delta", [(0.335, 1e-3), (0.7, 1e-5), (2.0, 1e-9)])
def test_fewer_numbers_never_cost_more(noise, delta):
    """So a state costs at most what the budget does, whose noise is found for 2^32 numbers."""
    sampling = dpx.PoissonSampling(examples=40, batch_size=8)
    event = sampling.event(np.full(3, noise))
    most = profile_of_run(event, relation="zero_out")
    for numbers in (1, 2, 10, 1000, 10**6, 10**9):
        fewer = profile_of_run(event, relation="zero_out", numbers=numbers)
        assert fewer.epsilon(delta) <= most.epsilon(delta)
        assert fewer.delta(1.0) <= most.delta(1.0)


@pytest.mark.parametrize(
    ("known", "drawn", "billed_for"),
    [(10, [10], 10), (10, [1001], 1001), (10, [1], 0), (10, [], 0), (0, [5], 0), (10, [2**31 + 10, 2**31], 0)],
)
def test_numbers_that_are_not_heard_of_are_the_most(known, drawn, billed_for):
    """Jax has traced the release before, in part: fewer numbers than are known, or none, are billed as 2^32."""
    before = ReleaseState.empty_record().with_fields(numbers=known)

    def release():
        for numbers in drawn:
            report_release_size([(numbers,)])
        return PARAMS, before

    _, after = release_and_record_draws(release, budget=None)
    assert int(after.numbers) == billed_for
