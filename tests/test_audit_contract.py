"""`check_contract`: every mechanism of tests/broken.py fails at the line that it breaks; sound ones pass all lines.

That it passes on every mechanism of dpx is tests/test_contract.py, which is built on the same lines.
"""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.audit import ContractReport, Line, check_contract
from dpx.audit.contract import cost, inputs, require_equal_jaxprs
from dpx.audit.contract.draws import (
    require_independent_columns,
    require_no_repeated_noise,
    require_standard_normals,
    solve_for_normals,
)
from dpx.audit.contract.subject import NotChecked, Violation
from dpx.audit.contract.trial import MechanismUnderTest
from dpx.audit.stand_ins import quick_noise, replacing_key_functions, without_grid
from dpx.sums.rounding import ETA
from dpx.xla.jaxprs import propagate_marks
from tests.broken import (
    ZOO,
    added_in_a_chain,
    discrete_noise,
    laplace_noise,
    normals,
    sound,
    sound_noise_of_its_own,
    sum_of_one_number,
    sums_in_the_state,
    two_thirds_of_the_noise,
    uniform_noise,
    with_noise,
    with_own_update,
)
from tests.broken import quick as quick_key
from tests.mechanisms import PARAMS


@pytest.mark.parametrize("broken", ZOO, ids=lambda broken: broken.name)
@pytest.mark.long_cases(
    *"""
    clip_norm_of_raw_norms clipped_in_groups discrete_noise dpx_noise_repeats event_of_its_own_kind_and_a_lower_rate
    first_rows_kept half_the_noise_from_step_1000 importance_of_raw_gradients key_of_eight_bits laplace_noise
    layer_without_noise layers_clipped_apart no_noise_at_some_steps no_noise_from_step_50 no_noise_in_16_bits
    no_noise_on_convolutions noise_by_number_of_parameters noise_by_shape noise_divided_twice
    noise_from_the_projection noise_in_tiles noise_keyed_by_params noise_of_256_sizes noise_of_the_drawn_batch
    noise_on_another_mask noise_repeats_after_ noise_scaled_by_params one_key_for_all_leaves
    one_noise_with_other_signs order_dependent_microbatches other_signs_at_every_step projected_after_the_clip
    schedule_shifted_by_a_step sign_of_two_others step_in_bfloat16 sums_of_one_step_in_the_state uniform_noise
    """.split()
)
def test_the_line_of_a_broken_mechanism_fails(broken):
    mechanism, options = broken.make(jax.random.key(7)), {"lines": [broken.line], "draws": 1000}
    report = check_contract(mechanism, params=PARAMS, rebuild=lambda key: broken.make(key), **options)
    assert [line.name for line in report.failures] == [broken.line], report


@pytest.mark.long
def test_docs(promoting):
    """The code of docs/auditing.md about the contract."""
    page = (Path(__file__).parents[1] / "docs" / "auditing.md").read_text()
    section, names = page.split("## Check the contract")[1].split("\n## ")[0], {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, names)


KEY = jax.random.key(7)
MECHANISM = sound(KEY)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mechanism": optax.sgd(1.0)}, "must be a dpx Mechanism"),
        ({"loss": lambda params, example: 0.0}, "must be given together"),
        ({"params": PARAMS, "loss": lambda params, example: 0.0}, "must be given together"),
        ({"params": {"w": np.zeros((40, 40))}}, "1 to 1000 numbers: use smaller layers, got 1600"),
        ({"params": {}}, "got 0"),
        ({"lines": ["bound"]}, "got 'bound'"),
        ({"draws": 10}, "draws must be a whole number of at least 500"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        check_contract(**({"mechanism": MECHANISM} | arguments))


def test_comparisons_need_no_asserts():
    """`python -O` leaves asserts out, and every mechanism had passed."""
    code = compile(Path(inputs.__file__).read_text(encoding="utf-8"), "inputs", "exec", optimize=1)
    exec(code, found := {"__name__": "inputs"})
    one = np.ones(2, np.float32)
    for other in ((one,), 2 * one, np.array([1, 2])):
        with pytest.raises(AssertionError, match="another|apart"):
            found["require_close"](np.ones_like(other) if isinstance(other, np.ndarray) else one, other)


@pytest.mark.parametrize(
    "before", [jnp.ones(2, jnp.bfloat16), np.float16([1]), np.float32([np.inf]), np.float32([np.nan])]
)
def test_comparisons_are_as_strict_behind_other_leaves(before):
    one = np.ones(2, np.float32)
    inputs.require_close((before, one), (before, one))
    with pytest.raises(AssertionError, match="0.01 apart"):
        inputs.require_close((before, 1.01 * one), (before, one))


def test_a_report_is_for_asserts():
    report = ContractReport((Line("bounded", "pass", "a"), Line("cost", "not checked", "b")), 1e-4)
    assert report.passed and report.require() is report and [line.name for line in report.unchecked] == ["cost"]
    failed = ContractReport((*report.lines, Line("noise", "fail", "too small")), 1e-4)
    with pytest.raises(AssertionError, match="fail .*noise .*too small"):
        failed.require()
    assert failed.line("noise").words == "too small"
    with pytest.raises(ValueError, match="got 'sampling'"):
        failed.line("sampling")


@pytest.mark.parametrize(
    ("make", "mu_dtype", "failures", "unchecked"),
    [(sound, None, [], []), (sound, jnp.bfloat16, [], ["noise"]), (two_thirds_of_the_noise, None, ["noise"], [])],
)
@pytest.mark.long
def test_the_noise_behind_an_optimizer(make, mu_dtype, failures, unchecked, promoting):
    """Adam's updates are not linear in the noise, but its average of them is, if it is float32."""
    mechanism = dpx.chain(make(jax.random.key(7)), optax.adam(1e-2, mu_dtype=mu_dtype))
    report = check_contract(mechanism, params=PARAMS, lines=["float32", "noise", "secrecy"], draws=500)
    assert [line.name for line in report.failures] == failures, report
    assert [line.name for line in report.unchecked] == unchecked, report


@pytest.mark.parametrize(("batch_size", "examples", "clip_norm"), [(8, 1000, 0.7), (100, 1500, 1.0)])
@pytest.mark.long_cases("100-")
def test_rounding_in_small_derivatives_is_no_fault(batch_size, examples, clip_norm, promoting):
    """The first step of Adam is almost a sign, so its derivative is the small difference of large numbers."""
    sampling = dpx.PoissonSampling(examples=examples, batch_size=batch_size)
    for noise_multiplier in (0.6, 1.17883):
        options = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "sampling": sampling}
        mechanism = dpx.chain(dpx.dp_sgd(**options, key=jax.random.key(7)), optax.adam(1e-2))
        release = MechanismUnderTest(mechanism, PARAMS, draws=500, seed=0).release(0)
        assert not release.flat and release.uncovered < 1e-5
        np.testing.assert_allclose(
            release.exchange,
            np.eye(len(release.exchange)) / (noise_multiplier * clip_norm * (1 + ETA)),
            atol=0,
            rtol=5e-6,
        )


@pytest.mark.parametrize(
    ("make", "failures"), [(sound, []), (sums_in_the_state, ["noise", "secrecy"])], ids=["sound", "sums in the state"]
)
def test_transforms_that_cut_are_no_fault(make, failures):
    """At most points the clipped updates have no slope, so the derivatives of several points are joined."""
    mechanism = dpx.chain(make(jax.random.key(7)), optax.clip(0.1), optax.sgd(1.0))
    report = check_contract(mechanism, params=PARAMS, lines=["noise", "secrecy"], draws=500)
    assert [line.name for line in report.failures] == failures, report
    assert [line.name for line in report.unchecked] == ([] if failures else ["noise"]), report


KEY = jax.random.key(7)
POISSON, FIXED, SHUFFLED = (
    kind(examples=1000, batch_size=8) for kind in (dpx.PoissonSampling, dpx.FixedSizeSampling, dpx.ShuffledEpochs)
)
CUT = dpx.PoissonSampling(examples=1000, batch_size=8, most_rows=12)
HALF = dpx.PoissonSampling(examples=1000, batch_size=4)
ALLOCATED, LONGER = (dpx.sampling.RandomAllocation(examples=1000, steps_per_epoch=steps) for steps in (125, 250))
WEIGHTS = dpx.PoissonSampling(examples=1000, batch_size=8, weights=np.arange(1, 1001))
ORDERED, WHOLE = dpx.sampling.FixedOrder(examples=1000, batch_size=8), dpx.FullBatch(examples=1000)
CYCLIC, RARER = (dpx.sampling.CyclicPoissonSampling(examples=1000, batch_size=size, bands=3) for size in (8, 4))
FEEDBACK = {"clip_norm": 1.0, "feedback_norm": 1.0, "outer_clip_norm": 1.1, "noise_multiplier": 1.3, "key": KEY}


def plain(sampling, **changes):
    return sound(KEY, sampling=sampling, **changes)


def feedback(sampling, **changes):
    return dpx.methods.dice_sgd(sampling=sampling, **FEEDBACK | changes)


def bands(sampling):
    return dpx.methods.band_mf_sgd(bands=3, steps=100, clip_norm=1.0, noise_multiplier=1.3, sampling=sampling, key=KEY)


def correlated(sampling):
    return dpx.methods.lambda_cgd(correlation=0.6, clip_norm=1.0, noise_multiplier=1.3, sampling=sampling, key=KEY)


def until(mechanism, last):
    return mechanism.replace(event=lambda steps: mechanism.event(min(steps, last)))


@pytest.mark.parametrize(
    ("mechanism", "event", "words"),
    [
        (plain(FIXED), plain(POISSON), "PoissonSampledDpEvent, which is not of the sampling"),
        (plain(POISSON), plain(FIXED), "SampledWithoutReplacementDpEvent, which is not of the sampling"),
        (plain(SHUFFLED), plain(POISSON), "PoissonSampledDpEvent, which is not of the sampling"),
        (plain(POISSON), plain(ALLOCATED), "RandomAllocationDpEvent, which is not of the sampling"),
        (plain(ALLOCATED), plain(POISSON), "PoissonSampledDpEvent, which is not of the sampling"),
        (plain(ALLOCATED), plain(LONGER), "do not count RandomAllocationDpEvent"),
        (plain(CUT), plain(POISSON), "PoissonSampledDpEvent, which is not of the sampling"),
        (plain(POISSON), plain(HALF), "do not count PoissonSampledDpEvent"),
        (plain(WEIGHTS), plain(POISSON), "do not count PoissonSampledDpEvent"),
        (plain(CYCLIC), plain(RARER), "do not count PoissonSampledDpEvent"),
        (plain(WHOLE), plain(ORDERED), "2 steps do not count GaussianDpEvent"),
        (plain(POISSON), plain(ORDERED), "2 steps are counted as 1 releases of noisy numbers"),
        (plain(FIXED), plain(FIXED, noise_multiplier=2.6), "do not count SampledWithoutReplacementDpEvent"),
        (plain(FIXED), plain(WHOLE, noise_multiplier=2.6), "of more noise than the largest multiplier"),
        (plain(FIXED), until(plain(FIXED), 200), "1001 steps do not count"),
        (feedback(POISSON), feedback(HALF), "of another sampling than the one that draws"),
        (feedback(POISSON), feedback(POISSON, noise_multiplier=1.4), "of more noise than the largest multiplier"),
        (feedback(POISSON), until(feedback(POISSON), 12), "100 steps are counted as 12 releases"),
        (bands(CYCLIC), bands(RARER), "of a lower rate than the sampling"),
        (bands(CYCLIC), until(bands(CYCLIC), 100), "1001 steps are counted as 102 releases"),
        (correlated(ORDERED), plain(ORDERED), "2 steps are counted as 1 releases"),
        (bands(CYCLIC), plain(CYCLIC), "moves C G by 1.2|counted as 1 releases"),
        (bands(CYCLIC), plain(RARER), "of a lower rate than the sampling"),
        (correlated(ORDERED), until(correlated(ORDERED), 12), "100 steps are counted as 12 releases"),
    ],
)
def test_an_event_of_other_batches_fails(mechanism, event, words):
    """Also where it has a kind of its own; all of them are as they are billed themselves."""
    trial = MechanismUnderTest(mechanism.replace(event=event.event), PARAMS, draws=500, seed=0)
    with pytest.raises(Violation, match=words):
        cost.check_counted_releases(trial)
    with contextlib.suppress(NotChecked):
        cost.check_counted_releases(MechanismUnderTest(mechanism, PARAMS, draws=500, seed=0))


def no_noise(key):
    return with_noise(sound(key), lambda total, step: jax.tree.map(jnp.zeros_like, total))


def heavy_noise(key):
    def draw(total, step):
        return optax.tree.random_like(quick_key(key, "noise", step), total, jax.random.cauchy, jnp.float32)

    return with_noise(sound(key), draw)


@pytest.mark.parametrize("make", [laplace_noise, uniform_noise, discrete_noise, heavy_noise, no_noise])
@pytest.mark.long_cases("heavy_noise", "uniform_noise")
def test_noise_that_is_not_gaussian_is_soon_seen(make, monkeypatch):
    """Before any draw under other keys, which takes a minute; and the lines that need the noise say why."""
    monkeypatch.setattr(MechanismUnderTest, "noise", property(lambda trial: pytest.fail("draws many times")))
    mechanism = make(KEY) if make in (heavy_noise, no_noise) else make(KEY)
    report = check_contract(mechanism, params=PARAMS, lines=["bounded", "adjacent", "noise"])
    bounded, adjacent, noise = report.lines
    words = "a step of an empty batch has no noise" if make is no_noise else "the noise is not Gaussian"
    assert noise.outcome == "fail" and noise.words.startswith(words), report
    assert bounded.outcome == adjacent.outcome == "not checked" and bounded.words == adjacent.words == noise.words


GAUSSIAN = {
    "behind an optimizer": lambda: dpx.chain(sound_noise_of_its_own(KEY), optax.adam(0.1)),
    "with coordinates": lambda: dpx.in_coordinates(
        sound_noise_of_its_own(KEY), dpx.coordinates.random_projection(rank=12, kind="gaussian", key=KEY)
    ),
    "of another size at other steps": lambda: with_noise(
        sound(KEY), lambda total, step: jax.tree.map(lambda n: n / (1.0 + step), own(total, step))
    ),
    "of one number": lambda: with_noise(
        sound(KEY), lambda total, step: jax.tree.map(lambda n: 0 * n + own(total, step)["scale"], total)
    ),
}


@pytest.mark.parametrize("name", GAUSSIAN)
@pytest.mark.long_cases("with coordinates", "of one number")
def test_gaussian_noise_is_not_soon_refused(name, promoting):
    assert MechanismUnderTest(GAUSSIAN[name](), PARAMS, draws=500, seed=0).obvious_noise_fault == ""


def own(total, step):
    return normals(KEY, step, total)


def test_an_event_without_sampling_needs_a_proof_of_its_own():
    """It costs more than what is drawn."""
    trial = MechanismUnderTest(plain(FIXED).replace(event=plain(WHOLE).event), PARAMS, draws=500, seed=0)
    with pytest.raises(NotChecked, match="GaussianDpEvent is not an event of the sampling"):
        cost.check_counted_releases(trial)


def test_a_step_without_noise_is_not_checked():
    mechanism = sound(jax.random.key(7), noise_multiplier=0.0)
    report = check_contract(mechanism, lines=["adjacent", "noise", "secrecy"])
    assert [line.outcome for line in report.lines] == 3 * ["not checked"]
    assert all("the cost is infinite" in line.words for line in report.lines)


def test_a_run_that_may_not_be_so_long_is_not_billed():
    mechanism = sound(jax.random.key(7), noise_multiplier=lambda step: 5.0 - step)
    (line,) = check_contract(mechanism, lines=["cost"]).lines
    assert (
        line.outcome == "not checked" and "noise_multiplier must be finite and at least 0 at every step" in line.words
    )


@pytest.mark.parametrize("coordinates", [[], [dpx.coordinates.random_projection(rank=12, kind="gaussian", key=KEY)]])
@pytest.mark.long_cases("coordinates1", "coordinates0")
def test_noise_of_a_mechanisms_own(coordinates):
    """Sound noise that does not come from `keys.normals_of_release` passes, also with coordinates of the key."""
    mechanism = sound_noise_of_its_own(KEY)
    for each in coordinates:
        mechanism = dpx.in_coordinates(mechanism, each)
    report = check_contract(mechanism, params=PARAMS, lines=["noise", "secrecy"], draws=500)
    assert not report.failures and not report.unchecked, report


def test_noise_with_a_heavy_tail():
    """Its mean and its variance are those of a standard normal, and its tail is not cut."""
    rng, shape = np.random.default_rng(0), (1000, 20)
    require_standard_normals(rng.normal(size=shape))
    with pytest.raises(Violation, match="the noise is not normal"):
        require_standard_normals(rng.laplace(scale=0.5**0.5, size=shape))


def test_noise_with_a_correlation():
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(1000, 20))
    draws[:, 7] = 0.3 * draws[:, 3] + 0.91**0.5 * draws[:, 7]
    with pytest.raises(Violation, match="has the correlation"):
        require_standard_normals(draws)


def test_noise_with_a_pattern():
    """Two columns of one size and with signs of their own have no correlation; nor have three of which two are free."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(1000, 20))
    require_independent_columns(draws, triples=True)
    same_size = draws.copy()
    same_size[:, 7] = np.abs(draws[:, 3]) * rng.choice([-1, 1], 1000)
    with pytest.raises(Violation, match="two places"):
        require_independent_columns(same_size, triples=True)
    same_sign = draws.copy()
    same_sign[:, 7] = np.abs(draws[:, 7]) * np.sign(draws[:, 3] * draws[:, 5])
    require_independent_columns(same_sign)
    with pytest.raises(Violation, match="three places"):
        require_independent_columns(same_sign, triples=True)


def test_noise_that_repeats():
    """Row 7 of every 10 has a number of the row 5 rows before, on one column; then two rows share four numbers."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(1000, 20))
    require_no_repeated_noise(noise, "repeats")
    one_column, two_rows = noise.copy(), noise.copy()
    one_column[7::10, 3] = -noise[2::10, 3]
    two_rows[900, [1, 4, 5, 9]] = -noise[17, [1, 4, 5, 9]]
    for repeating in (one_column, two_rows):
        with pytest.raises(Violation, match="repeats"):
            require_no_repeated_noise(repeating, "repeats")


def test_noise_that_is_correlated_with_its_coordinates():
    rng = np.random.default_rng(0)
    maps, normals = rng.normal(size=(1000, 5, 3)), rng.normal(size=(1000, 3))
    draws = solve_for_normals(np.einsum("nom,nm->no", maps, normals), maps)
    np.testing.assert_allclose(np.cov(draws, rowvar=False), np.eye(3), atol=0.2)
    with pytest.raises(Violation, match="shares their key"):
        solve_for_normals(np.einsum("nom,nm->no", maps, np.abs(normals) * np.sign(maps[:, 0])), maps)


def test_marks_pass_branches_and_rounds_of_loops():
    def branch(raw, public):
        return jax.lax.cond(raw > 0, lambda: public, lambda: public + 1)

    def rounds(raw, public):
        """In the third round, what was the second number at first."""
        return jax.lax.fori_loop(0, 3, lambda n, numbers: (numbers[1], numbers[2], raw), (public, public, public))[0]

    def count(raw, public):
        return jax.lax.while_loop(lambda number: number < raw, lambda number: number + 1, public)

    for program in (branch, rounds, count):
        closed = jax.make_jaxpr(program)(1.0, 2.0)
        assert propagate_marks(closed, [1, 0], lambda *_: None) == [1] and propagate_marks(
            closed, [0, 0], lambda *_: None
        ) == [0]


def test_a_constant_inside_of_a_function_is_part_of_the_program():
    def made(first):
        numbers = np.arange(first, first + 40)
        return jax.make_jaxpr(jax.jit(lambda x: x + numbers))(numbers)

    require_equal_jaxprs(made(0), made(0))
    with pytest.raises(Violation, match="another program"):
        require_equal_jaxprs(made(0), made(1))


def test_quick_noise_tells_keys_steps_and_places_apart():
    """Else lines that compare steps would not see noise of another step, or noise that is there twice."""
    found = [quick_noise(dpx.keys.stream(jax.random.key(7), name), step, PARAMS) for name in "ab" for step in range(20)]
    numbers = np.concatenate([np.abs(np.ravel(leaf)) for tree in found for leaf in jax.tree.leaves(tree)])
    assert len(np.unique(numbers)) == len(numbers) and 0.9 < numbers.std() * 2 < 1.1


def test_no_trace_of_an_audit_stays_in_a_jitted_release():
    """jax keeps the traces of a jitted function. Else the steps after an audit would have no noise, or no grid."""
    whole = sound(jax.random.key(7))
    jitted = whole.replace(release=jax.jit(whole.release))
    sums, state = (jax.tree.map(jnp.ones_like, PARAMS),), whole.init(PARAMS)
    expected = whole.release(sums, state, PARAMS)[0]
    with replacing_key_functions(release=lambda key, step, total, deviation: total):
        assert all((leaf == 1 / 8).all() for leaf in jax.tree.leaves(jitted.release(sums, state, PARAMS)[0]))
    jax.tree.map(np.testing.assert_array_equal, jitted.release(sums, state, PARAMS)[0], expected)
    jitted = whole.replace(release=jax.jit(lambda *given: whole.release(*given)))
    without_grid(jitted.release)(sums, state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, jitted.release(sums, state, PARAMS)[0], expected)


@pytest.mark.long
def test_what_a_jitted_release_is_given_is_read():
    """jax keeps its trace from one part of the line to the next, and with it the stand-in that was traced."""
    for make, outcome in ((sound, "pass"), (sum_of_one_number, "fail")):
        whole = make(jax.random.key(7))
        report = check_contract(whole.replace(release=jax.jit(whole.release)), params=PARAMS, lines=["bits"])
        assert report.line("bits").outcome == outcome, report
    assert "the high numbers of a sum, and not the low ones" in report.line("bits").words
    mechanism = sound(jax.random.key(7))
    summed = with_own_update(mechanism.replace(release=jax.jit(mechanism.release)), added_in_a_chain)
    assert check_contract(summed, params=PARAMS, lines=["bits"]).line("bits").outcome != "pass"


def test_another_thread_keeps_its_noise_during_an_audit():
    """Of two audits at once, the one that ended last would also have left the stand-in of the other."""
    made, sums = sound(jax.random.key(7)), (jax.tree.map(jnp.ones_like, PARAMS),)
    expected = made.release(sums, made.init(PARAMS), PARAMS)[0]
    with ThreadPoolExecutor(1) as other, replacing_key_functions(release=lambda key, step, total, deviation: total):
        found = other.submit(made.release, sums, made.init(PARAMS), PARAMS).result()[0]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_choice_by_numbers_that_are_not_shown_passes():
    """The counts choose the rows that are updated. If the check gave two of them one noise, rounding would decide."""

    def make(key):
        given = {"clip_norm": 0.7, "noise_multiplier": 1.3, "sampling": MECHANISM.sampling, "key": key}
        return dpx.methods.ada_fest(threshold=0.0, most_rows=3, **given)

    check_contract(make(dpx.secret_key(2**100 + 1)), rebuild=make, lines=["secrecy"], draws=500).require()
