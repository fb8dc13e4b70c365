"""The privacy contract: every mechanism x every line. A property is tested here or not claimed.

Variants of a mechanism are left to `make long` (`like` of a case).

The lines are those of `dpx.audit.check_contract`, which knows nothing of a mechanism but what it does. The facts of a
case (tests/mechanisms.py), worked out by hand, say more: the clip norm, the noise on every coordinate, the bill.
`test_the_line_of_a_broken_mechanism_fails` (tests/test_audit_contract.py) breaks every line.
"""

import contextlib
import functools
import types
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

import dpx
from dpx import catalog, keys
from dpx.audit.contract import LINES, inputs, require_equal_jaxprs
from dpx.audit.contract.noise import NUMBERS, _require_noise_never_repeats
from dpx.audit.contract.subject import STEPS, NotChecked, Violation
from dpx.audit.contract.trial import MechanismUnderTest
from dpx.audit.stand_ins import with_quick_noise
from dpx.mechanism import masks
from dpx.papers.dice_sgd.cost import ERROR
from dpx.sampling.varying import RandomAllocationDpEvent
from dpx.states.reading import read_run_facts, release_state
from dpx.sums.rounding import ETA, as_pair
from dpx.xla.place import full_precision
from tests import broken
from tests.compiling import EMITTERS
from tests.mechanisms import ALL, MECHANISMS, PARAMS, POISSON, Case, case_of_method

DRAWS = 1000  # at which `check_contract` sees every fault of tests/broken.py
RESTS = {  # lines that cannot be checked without facts: the words that the report gives as the reason
    "dice_sgd": {"noise": "the event counts more", "cost": "ErrorFeedbackDpEvent"},
    "dice_sgd automatic, shuffled": {"noise": "the event counts more", "cost": "ErrorFeedbackDpEvent"},
    "clip, then project": {"noise": "the event counts more", "cost": "ProjectedGaussianDpEvent"},
    # tests/test_sparse_embeddings.py has the sums of `ada_fest` by brute force, and the noise of its step.
    "ada_fest": {"adjacent": "on the sums", "divisor": "not a linear function"},
    "frequent_rows": {"adjacent": "on the sums", "divisor": "not a linear function"},
    "signs": {"adjacent": "on the sums", "divisor": "not a linear function", "noise": "line `secrecy` alone sees its"},
}


class TrialForUsers(MechanismUnderTest):
    """The programs that the bound is tested on are compiled as XLA compiles for a user: tests/compiling.py."""

    def compile_over_rows(self, of_one):
        return jax.jit(jax.vmap(of_one, (0, None)), compiler_options=EMITTERS)


def test_the_bound_is_tested_as_xla_compiles_for_a_user():
    assert TrialForUsers.compile_over_rows is not MechanismUnderTest.compile_over_rows


@functools.cache
def trial(case: Case) -> MechanismUnderTest:
    """The mechanism of a case on trial, also on the paths that only dpx's own tests know."""
    found = TrialForUsers(case.mechanism, PARAMS, draws=DRAWS, seed=11, rebuild=case.make)
    found.problems[0].paths.update({name: jax.jit(with_quick_noise(path)) for name, path in more_paths(case).items()})
    return found


def more_paths(case: Case) -> dict:
    mechanism = case.mechanism

    def encoded_in_parts(grads, state, included):
        with mock.patch("dpx.sums.clipped_sum.SEGMENT_NUMBERS", 2 * sum(p.size for p in PARAMS.values())):
            return mechanism.update(grads, state, PARAMS, included=included)

    def in_chunks(grads, state, included):
        step, sums = dpx.private_updates_in_chunks(inputs.linear_loss, mechanism), None
        for rows in (slice(0, 1), slice(1, 4), slice(4, None)):
            chunk = dpx.Batch(jax.tree.map(lambda g, rows=rows: g[rows], grads), included[rows])
            sums = step.add(PARAMS, chunk, state, sums)
        assert sums is not None
        return step.release(PARAMS, sums, state)

    paths = {}
    if case.name in ("dp_sgd", "dice_sgd", "adaptive_clipping"):  # a sum, two sums, and one unlike the parameters
        paths["chunks"] = in_chunks
    if not (mechanism.supports_ghost_norms or mechanism.encode_whole_batch):
        paths["in parts"] = encoded_in_parts
    return paths


def raveled(tree) -> np.ndarray:
    return inputs.flattened_leaves(tree)


def norms(tree) -> np.ndarray:
    """The norm of every row."""
    return np.linalg.norm(inputs.flattened_leaves(tree, 1), axis=1)


def deviation(case: Case, step: int) -> float:
    """The standard deviation of the noise on the sum."""
    of_error = ERROR if case.withheld is not None else 0.0  # for the rounding of the error that is fed back
    return case.multiplier(step) * case.clip(step) * (1 + ETA + of_error)


# The facts of a case.


def facts_of_bounded(case: Case):
    """|contribution| <= C(t)(1 + 1e-6) for any gradient; a non-finite example contributes zero. Line 1."""
    found = trial(case)
    rows = found.with_loud(found.hostile[0])
    seen = {name: rows[name] for name in PARAMS if name not in case.frozen}
    finite = np.isfinite(inputs.flattened_leaves(seen, 1)).all(1)
    for step in STEPS:
        for sums in found.contributions_by_path(step).values():
            released = norms(sums if case.withheld is None else sums[0])
            np.testing.assert_array_less(released, case.clip(step) * (1 + 1e-6) + 1e-45)
            assert case.withheld is None or (norms(sums[1]) <= case.withheld * (1 + 1e-6)).all()
            assert not norms(sums)[~finite].any()


def scales(case: Case, state) -> np.ndarray:
    """What multiplies the sum and the noise on every coordinate; 0 where it is frozen."""
    if case.scale:
        return raveled(case.scale(state))
    return raveled({name: np.full(p.shape, name not in case.frozen, np.float32) for name, p in PARAMS.items()})


def facts_of_noise(case: Case):
    """The noise that leaves has the deviation sigma(t) C(t) / B on every coordinate that can carry gradient. Line 5.

    That it is drawn so is the line of the contract. One example moves the sum by C(t) at most, so a change of the sum
    by one unit is made up for by noise of 1 / (sigma(t) C(t)).
    """
    found = trial(case)
    for step in STEPS if case.linear else ():
        state, release = found.state_after(step), found.release(step)
        noised = exchange_by_hand(case, step)
        carries = np.abs(release.exchange).max(0) > 0
        noise = release.noise[: release.updates]
        np.testing.assert_allclose(noise @ release.exchange, noise @ noised, rtol=1e-4, atol=1e-5 * noise.max())
        if case.scale is None or case.lift == 1:  # else several changes of the noise make up for one of the sums
            np.testing.assert_allclose(release.exchange[:, carries], noised[:, carries], rtol=1e-4, atol=1e-5)
        fed_back = raveled(case.fed_back(state)) if case.fed_back else np.zeros(len(noise))
        np.testing.assert_allclose(release.offset[: release.updates], fed_back, rtol=1e-4, atol=1e-6)
        if case.lift == 1 or case.scale:
            expected = scales(case, state) * deviation(case, step) / case.mechanism.sampling.divisor
            np.testing.assert_allclose(np.linalg.norm(noise, axis=1), expected, rtol=1e-5)
            moving = scales(case, state) > 0
            gradient = raveled(case.gradient(sums_of(case, step)))
            assert case.clips_frozen or np.count_nonzero(gradient) <= np.count_nonzero(moving)
            assert not found.noise(step)[:, : release.updates][:, ~moving].any()
            assert carries.sum() >= np.count_nonzero(moving)


def exchange_by_hand(case: Case, step: int) -> np.ndarray:
    """The noise that makes up for one unit of each number of the sums: that of `case.noised`, divided by sigma C."""
    found = trial(case)
    like = found.shapes_of_sums[0]
    size = sum(leaf.size for leaf in jax.tree.leaves(like))
    units = inputs.unflatten_vectors(np.eye(size, dtype=np.float32), like)
    noised = jax.vmap(lambda total: case.noised(total, found.state_after(step)))(units)
    columns = inputs.flattened_leaves(noised, 1).T / deviation(case, step)
    return np.pad(columns, ((0, 0), (0, found.traced.numbers - size)))


def sums_of(case: Case, step: int):
    """The sums of some gradients that are clipped."""
    of_each = tuple(as_pair(total).high for total in trial(case).contributions_by_path(step)["update"])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: inputs.RANDOM].sum(0), of_each)


def facts_of_resume(case: Case):
    """The mechanism, made again from the same key, is the same program, with the same noise. Line 5."""
    made_again = case._replace(name=f"{case.name}, made again")
    assert made_again.mechanism is not case.mechanism
    again = MechanismUnderTest(made_again.mechanism, PARAMS, draws=DRAWS, seed=11)
    require_equal_jaxprs(trial(case).program_of_update, again.trace_update(state=trial(case).state_after(0)))


def facts_of_cost(case: Case):
    """event(t) bills exactly the multipliers worked out by hand, in events that are written by hand. Line 6.

    The state of a run costs what its number of steps does, also when the mechanism is built again.
    """
    mechanism = case.mechanism
    np.testing.assert_allclose(trial(case).multipliers[:12], [case.multiplier(t) for t in range(12)], rtol=1e-6)
    for steps in (0, 1, 2, 5, 12):
        if case.event is None:
            expected = event_by_hand(mechanism.sampling, [case.multiplier(t) for t in range(steps)])
            billed = singles(mechanism.sampling.event(trial(case).multipliers[:steps]))
            assert len(singles(trial(case).event(steps))) == len(expected)
        else:
            expected, billed = singles(case.event(steps)), singles(trial(case).event(steps))
        assert len(billed) == len(expected)
        for one, other in zip(billed, sorted(expected, key=in_order), strict=True):
            assert flat(one) == pytest.approx(flat(other), rel=1e-6)
    state = jax.tree.map(np.asarray, trial(case).state_after(4))  # as from a checkpoint
    planned = dpx.epsilon(mechanism, 4, delta=1e-5, numbers=read_run_facts(state).numbers)
    assert dpx.epsilon(case.make(mechanism.key), state, delta=1e-5) == planned
    counted = sum(float(np.float32(case.multiplier(t))) ** -2 for t in range(4))
    assert float(release_state(state).precision[0]) == pytest.approx(counted, rel=1e-6)


def event_by_hand(sampling, multipliers: list[float]) -> list[dp_accounting.DpEvent]:
    """What the releases under the samplings of tests/mechanisms.py cost, one by one, from nothing of dpx."""
    gaussian = dp_accounting.GaussianDpEvent
    if sampling == dpx.PoissonSampling(examples=1000, batch_size=8):
        return [dp_accounting.PoissonSampledDpEvent(0.008, gaussian(sigma)) for sigma in multipliers]
    if sampling == dpx.FixedSizeSampling(examples=100, batch_size=8):  # neighbors differ by two clip norms
        return [dp_accounting.SampledWithoutReplacementDpEvent(100, 8, gaussian(sigma / 2)) for sigma in multipliers]
    ordered = dpx.sampling.FixedOrder(examples=20, batch_size=8)
    if sampling in (dpx.ShuffledEpochs(examples=20, batch_size=8), ordered):  # one takes part in one of three steps
        return [gaussian(min(multipliers[start : start + 3])) for start in range(0, len(multipliers), 3)]
    if sampling == dpx.sampling.RandomAllocation(examples=20, steps_per_epoch=3):
        epochs = [sorted(multipliers[start : start + 3]) for start in range(0, len(multipliers), 3)]
        return [RandomAllocationDpEvent(tuple((sigma, 1) for sigma in epoch), 3) for epoch in epochs]
    if sampling == dpx.PoissonSampling(examples=1000, batch_size=8, most_rows=10):
        return [TruncatedSubsampledGaussianDpEvent(1000, 0.008, 10, sigma) for sigma in multipliers]
    if sampling == dpx.PoissonSampling(examples=1000, batch_size=8, weights=1.0 + np.arange(1000) % 3):
        return [dp_accounting.PoissonSampledDpEvent(24 / 1999, gaussian(sigma)) for sigma in multipliers]
    if sampling == dpx.sampling.CyclicPoissonSampling(examples=1000, batch_size=8, bands=3):
        least = [min(multipliers[start : start + 3]) for start in range(0, len(multipliers), 3)]
        return [dp_accounting.PoissonSampledDpEvent(0.024, gaussian(sigma)) for sigma in least]
    assert sampling == dpx.FullBatch(examples=8)
    return [gaussian(sigma) for sigma in multipliers]


def singles(event) -> list[dp_accounting.DpEvent]:
    """The releases of an event one by one, whatever it groups them into."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return []
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sorted((one for part in event.events for one in singles(part)), key=in_order)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return singles(event.event) * event.count
    return [event]


def in_order(event) -> list:
    return sorted(map(str, flat(event))), list(flat(event).values())


def flat(event) -> dict:
    """An event tree as {path: number}."""
    if isinstance(event, dp_accounting.DpEvent):
        parts = {field.name: getattr(event, field.name) for field in attrs.fields(type(event))}
    elif isinstance(event, list | tuple):
        parts = dict(enumerate(event))
    else:
        return {(): event} if isinstance(event, int | float) else {(repr(event),): 1}
    return {
        (type(event).__name__, name, *path): leaf for name, part in parts.items() for path, leaf in flat(part).items()
    }


def facts_of_secrecy(case: Case):
    """Unreleased state may enter later releases: only an event of its own can bill that. Line 7."""
    state = trial(case).state_after(2)
    if case.event is None:
        assert jax.tree.structure(dpx.publishable_state(state)) == jax.tree.structure(state)


def facts_of_padding(case: Case):
    """A batch of no rows is a step of pure noise on every path. Line 3."""
    found = trial(case)
    if case.name not in ("dp_sgd", "dice_sgd", "adaptive_clipping", "dp2_sgd", "ada_dpigu, top third"):
        return
    state, none = found.state_after(1), np.zeros(0, bool)
    rows = inputs.normal_gradients(PARAMS, 3, rows=0)
    zeros = inputs.zeros_like(found.shapes_of_sums)
    noise = jax.jit(with_quick_noise(case.mechanism.release))(zeros, state, PARAMS)
    for path in found.problems[0].paths.values():
        inputs.require_close(path(rows, state, none), noise)


FACTS = {
    "bounded": facts_of_bounded,
    "padding": facts_of_padding,
    "noise": facts_of_noise,
    "resume": facts_of_resume,
    "cost": facts_of_cost,
    "secrecy": facts_of_secrecy,
}

# A mechanism at a time, because all of its lines use what it compiles.
LINES_OF_CASES = [
    pytest.param(line, case, id=f"{line}-{case.name}" + " from_catalog" * case.from_catalog, marks=[group, *long])
    for case in MECHANISMS
    for group in [pytest.mark.xdist_group(case.name)]
    for line in LINES
    for long in [[pytest.mark.long] if case.like and line not in case.quick else []]
]


@pytest.mark.parametrize(("line", "case"), LINES_OF_CASES)
def test_contract(line, case):
    check(line, case)


def check(line: str, case: Case):
    """A line of the contract, and the facts of the case about it. A line may rest only where RESTS says so."""
    with full_precision():
        _check(line, case)


def _check(line: str, case: Case):
    reason = RESTS.get(case.name, {}).get(line)
    if reason is None:
        try:
            LINES[line](trial(case))
        except NotChecked as error:
            pytest.fail(
                f"the line {line} of {case.name} cannot be checked: {error}. If the last step of the method is not a "
                "linear function of the noisy sum, such as a sign, leave it to the user's dpx.chain (CONTRIBUTING.md)",
                pytrace=False,
            )
    else:
        with pytest.raises(NotChecked, match=reason):
            LINES[line](trial(case))
    if line in FACTS:
        FACTS[line](case)


# 9
@pytest.mark.parametrize(
    "key",
    [
        None,
        0,
        np.zeros(2, np.uint32),
        jnp.zeros(3),
        jnp.zeros(3, jnp.uint32),
        jax.random.split(jax.random.key(0), 2),
        jax.random.key(0, impl="unsafe_rbg"),
    ],
)
def test_no_default_key(key):
    with pytest.raises(TypeError, match="key"):
        dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=POISSON)  # type: ignore
    with pytest.raises(ValueError, match="key"):
        dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=POISSON, key=key)


def test_named_streams_are_apart():
    key = jax.random.key(3)
    streams = [
        keys.stream(key, name, step)
        for name in ("noise", "sampling", "random_freeze", "example")
        for step in (None, 0, 1)
    ]
    data = [tuple(np.asarray(jax.random.key_data(stream))) for stream in streams]
    assert len(set(data)) == len(data)
    raw = jax.random.key_data(key)  # an old-style key is the same key
    assert jax.random.key_data(keys.stream(raw, "noise")).tolist() == jax.random.key_data(streams[0]).tolist()


@pytest.mark.long
def test_facts_see_what_frozen_coordinates_take():
    """Without the second mask of AdaDPIGU, frozen coordinates count in the norm, which harms nobody's privacy."""
    case = next(case for case in MECHANISMS if case.name == "ada_dpigu")
    without = case._replace(name="no second mask", make=lambda key: no_second_mask(case.make(key)))
    with pytest.raises(AssertionError):
        facts_of_noise(without)


def no_second_mask(mechanism: dpx.Mechanism) -> dpx.Mechanism:
    standardized = dpx.coordinates.standardized(variance_decay=0.5, stability=0.05)

    def encode(grad, state):
        important = state.coordinates[0]
        mean = jax.tree.map(lambda a: a + 0.1, important.inner.mean)  # as where frozen coordinates are averaged too
        once = standardized.encode(masks.apply_mask(grad, important.mask), important.inner._replace(mean=mean))
        return jax.tree.map(lambda g, z: jnp.where(important.step < 3, g, z), grad, once)

    return mechanism.replace(encode=encode)


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_facts_see_other_noise(factor):
    """Also more noise than is billed, which `check_contract` allows."""
    scheduled = next(case for case in MECHANISMS if case.name == "scheduled")

    def make(key):
        mechanism = scheduled.make(key)

        def release(sums, state, params):
            noisy, after = mechanism.release(sums, state, params)
            exact = jax.tree.map(lambda s: s / mechanism.sampling.divisor, as_pair(sums[0]).high)
            return jax.tree.map(lambda n, e: e + factor * (n - e), noisy, exact), after

        return mechanism.replace(release=release)

    with pytest.raises(AssertionError):
        facts_of_noise(scheduled._replace(name=f"{factor} of the noise", make=make))


# A line of the catalog of which the tests know nothing else.


def signs(*, clip_norm: float, noise_multiplier: float, sampling, key) -> dpx.Mechanism:
    """DP-SGD that moves every coordinate by the sign of its released gradient."""
    base = dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    return dpx.chain(base, optax.scale_by_sign())


@functools.cache
def signs_case(change=None) -> Case:
    case = case_of_method(catalog.CatalogEntry(signs, {"clip_norm": 0.7}))
    if change is None:
        return case
    chained = case._replace(name="signs", make=lambda key: dpx.chain(change(key), optax.scale_by_sign()))
    return chained._replace(noised=lambda total, state: total)


@pytest.mark.parametrize("size", [1.0, 1e-44])
def test_noise_that_repeats_is_seen_but_not_where_a_gpu_keeps_few_bits_of_it(size):
    """Rows that repeat. Denormal numbers, which a CPU has as 0, have two bits here."""
    rng = np.random.default_rng(0)
    rows = np.tile(rng.standard_normal((len(NUMBERS) // 2, 8)), (2, 1)) * size

    class Draws:
        words, count = np.zeros((1, 2), np.uint32), 8

        def public_floats_of_empty_steps(self, *given):
            return rows

        def __call__(self, step):
            return rng.standard_normal((8, 8))

    release = types.SimpleNamespace(updates=8, offset=np.zeros(8))
    of_one = types.SimpleNamespace(noise_multiplier=1.0)
    fake: Any = types.SimpleNamespace(
        noise=Draws(), mechanism=of_one, state_after=lambda step: None, release=lambda step: release
    )
    with pytest.raises(Violation, match="share noise") if size == 1 else contextlib.nullcontext():
        _require_noise_never_repeats(fake, fake.release(0))


@pytest.mark.long
def test_a_line_of_the_catalog_is_held_to_the_contract():
    for line in LINES:
        check(line, signs_case())


@pytest.mark.parametrize("line", RESTS["signs"])
@pytest.mark.long_cases("noise")
def test_a_last_step_that_is_not_linear_is_left_to_the_chain(line):
    with pytest.raises(
        pytest.fail.Exception, match=f"the line {line} of new cannot .* leave it to the user's dpx.chain"
    ):
        check(line, signs_case()._replace(name="new"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (broken.no_clip, "bounded"),
        (broken.no_clip, "adjacent"),
        (broken.two_thirds_of_the_noise, "secrecy"),
        (broken.one_noise_for_all_steps, "noise"),
        (broken.last_step_is_free, "cost"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.long_cases("no_clip-bounded", "one_noise", "two_thirds")
def test_a_broken_line_of_the_catalog_fails(change, line):
    with pytest.raises(Violation):
        LINES[line](trial(signs_case(change)))


def test_docs_list_the_catalog():
    """docs/methods.md is what `python -m dpx.catalog` writes."""
    assert (Path(__file__).parents[1] / "docs" / "methods.md").read_text() == catalog.methods_page()


@pytest.mark.parametrize("case", ALL)
def test_the_stated_bound_is_the_largest_contribution(case):
    state = trial(case).state_after(0)
    bound = jnp.stack(jax.tree.leaves(jax.jit(case.mechanism.bound)(state)))
    contribute = jax.jit(lambda grad: case.mechanism.contribute(grad, state)[1:])
    for scale in (0.0, 1.0, 2.0**50):
        norms, factors = contribute(jax.tree.map(lambda p, scale=scale: jnp.full(p.shape, scale), PARAMS))
        pairs = zip(jax.tree.leaves(norms), jax.tree.leaves(factors[0]), strict=True)
        shares = jnp.stack([jnp.abs(norm * factor) for norm, factor in pairs]) / bound
        assert (shares <= 1 + 1e-6).all()
    np.testing.assert_allclose(shares[shares > 0], 1, rtol=1e-6)  # a group that is frozen contributes 0
