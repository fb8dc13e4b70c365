"""The privacy contract: every mechanism x every line. A property is tested here or not claimed.

Each line is a check that a broken mechanism must fail: `test_broken_mechanisms_fail` runs them on mechanisms broken on
purpose. Statistical checks have fixed keys; their false-alarm rate is stated where they stand.
"""

import functools
import itertools
import math
from pathlib import Path
from unittest import mock

import attrs
import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import catalog, keys
from dpx._contributions import sum_contributions
from dpx.coordinates import _masks as masks
from dpx.gradients import ghost
from tests.compiling import EMITTERS
from tests.mechanisms import MECHANISMS, PARAMS, POISSON, Case, case_of_method

as_for_a_user = functools.partial(jax.jit, compiler_options=EMITTERS)  # for the bound itself: tests/compiling.py
STEPS = (0, 1, 4)
DRAWS = 4000
ROWS = 6


def gradients(seed: int, scale: float = 1.0, examples: int = ROWS):
    """Per-example gradients in the shape of PARAMS, with the examples on axis 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: np.asarray(scale * rng.normal(size=(examples, *p.shape)), np.float32), PARAMS)


@functools.cache
def paths(case: Case):
    """The ways to a private gradient: (per-example gradients, state, included) -> (updates, state)."""
    mechanism = case.mechanism

    def stacked(grads, state, included):
        return mechanism.update(grads, state, PARAMS, included=included)

    def loss(params, example):  # its gradient with respect to the parameters is the example itself
        return sum(jax.tree.leaves(jax.tree.map(lambda p, g: jnp.sum(p * g), params, example)))

    def in_microbatches(grads, state, included):
        updates, state, _ = dpx.private_grad(loss, mechanism, microbatch_size=4)(
            PARAMS, dpx.Batch(grads, included), state
        )
        return updates, state

    def encoded_in_parts(grads, state, included):
        with mock.patch("dpx._microbatching.SEGMENT_NUMBERS", 2 * sum(p.size for p in PARAMS.values())):
            return stacked(grads, state, included)

    def by_ghost_norms(grads, state, included):
        gradient = dpx.private_grad(product_loss, mechanism, clipping="ghost", microbatch_size=4)
        updates, state, _ = gradient(PARAMS, dpx.Batch(product_example(grads), included), state)
        return updates, state

    def in_chunks(grads, state, included):
        step, sums = dpx.accumulate(loss, mechanism), None
        for rows in (slice(0, 1), slice(1, 4), slice(4, None)):
            chunk = dpx.Batch(jax.tree.map(lambda g, rows=rows: g[rows], grads), included[rows])
            sums = step.add(PARAMS, chunk, state, sums)
        assert sums is not None
        return step.release(PARAMS, sums, state)

    ways = [stacked, by_ghost_norms if mechanism.supports_ghost_norms else in_microbatches]
    if case.name in ("dp_sgd", "dice_sgd", "adaptive_clipping"):  # a sum, two sums, and one unlike the parameters
        ways.append(in_chunks)
    if not (mechanism.supports_ghost_norms or mechanism.encode_whole_batch):
        ways.append(encoded_in_parts)
    return [jax.jit(path) for path in ways]


def product_loss(params, example):
    """Its gradient is the gradient in the example, as products that ghost norms follow: A^T B with A = 1."""
    ones, grad = example
    return sum(
        jax.tree.leaves(jax.tree.map(lambda p, a, g: jnp.sum((a @ as_matrix(p)) * as_matrix(g)), params, ones, grad))
    )


def product_example(grads):
    """[B, ...] gradients as a batch for `product_loss`."""
    ones = jax.tree.map(lambda p: jnp.eye(as_matrix(p).shape[0]), PARAMS)
    rows = len(jax.tree.leaves(grads)[0])
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), ones), jax.tree.map(
        lambda g: g.astype(jnp.float32), grads
    )


def as_matrix(leaf):
    return leaf if leaf.ndim == 2 else leaf.reshape(1, -1)


@functools.cache
def adapted_state(case: Case, step: int):
    """The state after `step` releases of some data."""
    if step == 0:
        return case.mechanism.init(PARAMS)
    return paths(case)[0](gradients(100 + step), adapted_state(case, step - 1), np.ones(ROWS, bool))[1]


def everyone(grads):
    return np.ones(len(jax.tree.leaves(grads)[0]), bool)


def all_but(*missing: int):
    return np.array([row not in missing for row in range(ROWS)])


@functools.cache
def sums_of(case: Case):
    mechanism = case.mechanism
    return jax.jit(lambda grads, state: sum_contributions(mechanism, grads, state, everyone(grads))[0])


@functools.cache
def each_alone(case: Case):
    """The sums of every example alone, (examples, ...) -> (examples, ...), on every path."""
    mechanism, included = case.mechanism, np.ones(1, bool)

    def stacked(grad, state):
        return sum_contributions(mechanism, jax.tree.map(lambda g: g[None], grad), state, included)[0]

    def by_ghost_norms(grad, state):
        batch = product_example(jax.tree.map(lambda g: g[None], grad))
        example = jax.tree.map(lambda x: x[0], batch)
        traced = ghost.trace_loss(lambda *a: (product_loss(*a), None), PARAMS, example)
        plan = ghost.make_plan(traced, mechanism, PARAMS, state, force=True)
        assert isinstance(plan, ghost.Plan) and plan.followed
        return ghost.sum_contributions(plan, mechanism, PARAMS, batch, state, included)[0]

    def in_float32(grads, state):  # which `product_example` would do in a program for every dtype
        return ghost_norms(jax.tree.map(lambda g: np.asarray(g).astype(np.float32), grads), state)

    ghost_norms = as_for_a_user(jax.vmap(by_ghost_norms, (0, None)))
    ways = [as_for_a_user(jax.vmap(stacked, (0, None)))]
    return [*ways, in_float32] if mechanism.supports_ghost_norms else ways


def zero_sums(case: Case, state):
    shapes = jax.eval_shape(sums_of(case), gradients(0), state)
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)


def scales(case: Case, state):
    """What multiplies the sum and the noise on every coordinate; 0 where it is frozen."""
    if case.scale:
        return jax.tree.map(lambda s: np.asarray(s, np.float32), case.scale(state))
    return {name: np.full(p.shape, name not in case.frozen, np.float32) for name, p in PARAMS.items()}


def in_the_sum(case: Case, state, updates):
    """`updates` in the units of the sum; 0 where frozen."""
    divisor = np.float32(case.mechanism.sampling.divisor)
    return jax.tree.map(
        lambda u, s: np.where(s > 0, np.asarray(u) * divisor / np.where(s > 0, s, 1), 0), updates, scales(case, state)
    )


def minus(tree, other):
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), tree, other)


def raveled(tree, batch_axes: int = 0) -> np.ndarray:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*leaf.shape[:batch_axes], -1) for leaf in leaves], axis=-1)


def norm(tree) -> float:
    return float(np.linalg.norm(raveled(tree).astype(np.float64)))


def norms(tree) -> np.ndarray:
    """The norm of every row."""
    return np.sqrt(
        sum(
            np.asarray(leaf, np.float64).reshape(len(leaf), -1) ** 2 @ np.ones(leaf[0].size)
            for leaf in jax.tree.leaves(tree)
        )
    )


def close(left, right, tolerance=1e-6):
    """Whole numbers are equal; others to `tolerance`, relative to the largest of them."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    lefts, rights = jax.tree.map(np.asarray, (jax.tree.leaves(left), jax.tree.leaves(right)))
    largest = max([np.abs(leaf).max(initial=0) for leaf in rights if leaf.dtype.kind == "f"], default=0)
    for one, other in zip(lefts, rights, strict=True):
        exact = other.dtype.kind in "biu"
        np.testing.assert_allclose(one, other, rtol=0 if exact else tolerance, atol=0 if exact else tolerance * largest)


# 1
def check_bounded(case: Case):
    """|contribution| <= C(t)(1 + 1e-6) for any gradient; a non-finite example contributes zero."""
    ordinary = jax.tree.map(lambda g: np.asarray(g[0]), gradients(1, examples=1))
    rows = []
    for value in (0, 1e-30, 1e-6, 0.1, 1, 5e4, 3e38, math.nan, math.inf, -math.inf):
        extreme = jax.tree.map(lambda g, value=value: np.sign(g) * np.float32(value), ordinary)
        # everywhere, or in one leaf among ordinary values
        rows += [extreme] + [ordinary | {name: extreme[name]} for name in PARAMS]
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        with np.errstate(over="ignore"):  # 3e38 is infinite in float16
            grads = jax.tree.map(lambda *g, dtype=dtype: np.stack(g).astype(dtype), *rows)
        seen = [grads[name] for name in PARAMS if name not in case.frozen]
        finite = np.all([np.isfinite(np.asarray(g, np.float32)).reshape(len(rows), -1).all(1) for g in seen], axis=0)
        for alone, step in itertools.product(each_alone(case), STEPS):
            sums = alone(grads, adapted_state(case, step))
            released = norms(sums if case.withheld is None else sums[0])
            np.testing.assert_array_less(released, case.clip(step) * (1 + 1e-6) + 1e-45)
            assert case.withheld is None or (norms(sums[1]) <= case.withheld * (1 + 1e-6)).all()
            assert not norms(sums)[~finite].any()


# 2
def check_adjacent(case: Case):
    """Leaving one example out moves the sum, and so the update times B, by at most C(t), on every path."""
    grads = gradients(2, 3.0)
    grads["kernel"][2] *= 1e6
    for path in paths(case):
        for step in STEPS:
            state = adapted_state(case, step)
            everyone, _ = path(grads, state, all_but())
            if not case.linear:
                assert_sums_adjacent(case, grads, state, case.clip(step))
                continue
            for i in range(ROWS):
                others, _ = path(grads, state, all_but(i))
                assert norm(in_the_sum(case, state, minus(everyone, others))) <= case.clip(step) * case.lift * (
                    1 + 1e-5
                )


def assert_sums_adjacent(case: Case, grads, state, clip_norm: float):
    """`check_adjacent` before the release is decoded."""
    whole = sums_of(case)(grads, state)
    for i in range(ROWS):
        zero = jax.tree.map(lambda g, i=i: np.where(all_but(i).reshape(-1, *[1] * (g.ndim - 1)), g, 0), grads)
        assert norm(minus(whole, sums_of(case)(zero, state))) <= clip_norm * (1 + 1e-5)


# 3
def check_padding(case: Case):
    """Rows that are not included change nothing, anywhere, after adaptation. An empty batch is a step of pure noise."""
    real = gradients(3, examples=ROWS - 2)
    unpadded = paths(case)[0]
    state = adapted_state(case, 1)
    noise, after_noise = jax.jit(case.mechanism.release)(zero_sums(case, state), state, PARAMS)
    for path in paths(case):
        empty, after = path(gradients(3), state, np.zeros(ROWS, bool))
        close((empty, after), (noise, after_noise))
        without_rows, after = path(gradients(3, examples=0), state, np.zeros(0, bool))
        close((without_rows, after), (noise, after_noise))
    for path in paths(case):
        for position in (0, 3, ROWS - 2):
            rows = [*range(position), None, None, *range(position, ROWS - 2)]
            included = np.array([row is not None for row in rows])
            padded = jax.tree.map(
                lambda g, rows=rows: np.stack(
                    [np.full_like(g[0], garbage(i)) if r is None else g[r] for i, r in enumerate(rows)]
                ),
                real,
            )
            state = padded_state = adapted_state(case, 2)
            for _ in range(2):
                updates, state = unpadded(real, state, everyone(real))
                padded_updates, padded_state = path(padded, padded_state, included)
                close(padded_updates, updates)
                close(padded_state, state)


def garbage(position: int) -> float:
    return (math.nan, 1e30, -math.inf)[position % 3]


# 4
def check_additive(case: Case):
    """Plain optax, any microbatching and encoding in parts agree."""
    included = all_but(2)
    for step in STEPS:
        first, *others = [path(gradients(4), adapted_state(case, step), included) for path in paths(case)]
        for other in others:
            close(other, first)


# 5
@functools.cache
def noise_of(case: Case):
    def draw(key, zeros, state):
        return case.make(key).release(zeros, state, PARAMS)[0]

    return jax.jit(jax.vmap(draw, (0, None, None)))


def noise_draws(case: Case, step: int) -> np.ndarray:
    """release(0) at one step under DRAWS keys, in the units of the sum; (DRAWS, coordinates)."""
    state = adapted_state(case, step)
    fed_back = case.fed_back(state) if case.fed_back else jax.tree.map(np.zeros_like, PARAMS)
    updates = noise_of(case)(jax.random.split(jax.random.key(11), DRAWS), zero_sums(case, state), state)
    noise = minus(updates, jax.tree.map(lambda f: np.asarray(f)[None], fed_back))
    frozen = jax.tree.map(lambda n, s: np.any(n[:, s == 0] != 0), noise, scales(case, state))
    assert not any(jax.tree.leaves(frozen))
    return raveled(in_the_sum(case, state, noise), batch_axes=1).astype(np.float64)


def assert_standard(draws: np.ndarray, lift: float = 1.0):
    """Every coordinate has mean 0 and deviation 1. False alarm below 1e-5 a coordinate (4.5 standard errors).

    Lifted, the noise is a scale mixture of normals: its kurtosis is at most 3 lift^2.
    """
    n = len(draws)
    np.testing.assert_array_less(np.abs(draws.mean(0)), 4.5 / math.sqrt(n))
    np.testing.assert_array_less(np.abs(draws.std(0) - 1), 4.5 * math.sqrt((3 * lift**2 - 1) / (4 * n)))


def check_noise(case: Case):
    """std of release(0) is sigma(t) C(t) / B on every coordinate that can carry gradient; independent over all."""
    if not case.linear:
        check_noise_keys(case)
        return
    over_steps = []
    for step in STEPS:
        state, draws = adapted_state(case, step), noise_draws(case, step)
        moving = raveled(scales(case, state)) > 0
        silent, _ = paths(case)[0](gradients(5), state, np.zeros(ROWS, bool))
        loud, _ = paths(case)[0](gradients(5), state, all_but())
        carries = raveled(loud) != raveled(silent)
        assert not carries[~moving].any()
        if not case.clips_frozen:  # what is frozen takes nothing of the clip norm
            summed = raveled(case.gradient(sums_of(case)(gradients(5), state)))
            assert np.count_nonzero(summed) <= np.count_nonzero(moving)
        standard = draws[:, moving] / (case.multiplier(step) * case.clip(step))
        assert_standard(standard, case.lift)
        for wrong in (2 / 3, 3 / 2):
            with pytest.raises(AssertionError):
                assert_standard(standard * wrong, case.lift)
        over_steps.append(standard)
    # across leaves, coordinates and steps: |correlation| below 5.5 standard errors; false alarm below 1e-4 in all
    correlation = np.corrcoef(np.concatenate(over_steps, axis=1), rowvar=False)
    np.testing.assert_array_less(np.abs(correlation - np.eye(len(correlation))), 5.5 * case.lift / math.sqrt(DRAWS))


def check_noise_keys(case: Case):
    """One draw covers the sum at every step, from a key that no other step has. Its size is in `check_secrecy`."""
    drawn = []

    def normal_like(key, tree):
        drawn.append((jax.random.key_data(key).tolist(), jax.tree.map(jnp.shape, tree)))
        return jax.tree.map(jnp.ones_like, tree)

    states = [adapted_state(case, step) for step in STEPS]
    zeros = [zero_sums(case, state) for state in states]
    with mock.patch.object(keys, "normal_like", normal_like), jax.disable_jit():
        for sums, state in zip(zeros, states, strict=True):
            case.mechanism.release(sums, state, PARAMS)
            assert [shapes for _, shapes in drawn[-1:]] == [jax.tree.map(jnp.shape, sums[0])]
    assert len({str(key) for key, _ in drawn}) == len(drawn) == len(STEPS)


def check_resume(case: Case):
    """A state that is stored and restored goes on with the same noise."""
    state = adapted_state(case, 3)
    restored = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
    made_again = case._replace(name=f"{case.name}, made again")
    assert made_again.mechanism is not case.mechanism
    again = paths(made_again)[0](gradients(5), restored, all_but())
    close(again, paths(case)[0](gradients(5), state, all_but()))


# 6
def check_cost(case: Case):
    """event(t) bills exactly the multipliers that release used, and the state counts the releases."""
    mechanism = case.mechanism
    for steps in (0, 1, 2, 5, 12):
        multipliers = [case.multiplier(t) for t in range(steps)]
        expected = singles(case.event(steps)) if case.event else event_by_hand(mechanism.sampling, multipliers)
        billed = singles(mechanism.event(steps))
        assert len(billed) == len(expected)
        for one, other in zip(billed, sorted(expected, key=in_order), strict=True):
            assert flat(one) == pytest.approx(flat(other), rel=1e-6)
    assert dpx.steps_taken(adapted_state(case, 4)) == 4


def event_by_hand(sampling, multipliers: list[float]) -> list[dp_accounting.DpEvent]:
    """What the releases under the samplings of tests/mechanisms.py cost, one by one, from nothing of dpx."""
    gaussian = dp_accounting.GaussianDpEvent
    if sampling == dpx.PoissonSampling(examples=1000, batch_size=8):
        return [dp_accounting.PoissonSampledDpEvent(0.008, gaussian(sigma)) for sigma in multipliers]
    if sampling == dpx.FixedSizeSampling(examples=100, batch_size=8):  # neighbors differ by two clip norms
        return [dp_accounting.SampledWithoutReplacementDpEvent(100, 8, gaussian(sigma / 2)) for sigma in multipliers]
    if sampling == dpx.ShuffledEpochs(
        examples=20, batch_size=8
    ):  # three steps an epoch, in one of which one takes part
        return [gaussian(min(multipliers[start : start + 3])) for start in range(0, len(multipliers), 3)]
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


# 7
def check_secrecy(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Two runs with other data and the same released values differ in nothing that `public_state` hands out.

    The noise of the second run is what makes up for its other sums.
    """
    mechanism = case.mechanism

    @jax.jit
    def release(sums, state, noise):
        with monkeypatch.context() as patch:
            patch.setattr(keys, "normal_like", lambda key, tree: jax.tree.map(lambda t, n: n, tree, noise))
            return mechanism.release(sums, state, PARAMS)

    for step in (2,) if case.linear else (0, 1, 2, 4):
        state = adapted_state(case, step)
        sums = sums_of(case)(gradients(6), state)
        # not linear: so large that a wrong scale shows through the decoding, so small that float32 does not
        shifts = waves(sums, 0.5 if case.linear else 16.0)
        other_sums = jax.tree.map(lambda s, shift: np.asarray(s) + shift, sums, shifts)
        deviation = np.float32(case.multiplier(step) * case.clip(step))
        noised = case.noised(shifts[0], state)
        other_noise = jax.tree.map(lambda s, deviation=deviation: 1 - np.asarray(s) / deviation, noised)
        released, after = release(sums, state, jax.tree.map(np.ones_like, noised))
        other_released, other_after = release(other_sums, state, other_noise)
        close(other_released, released, 1e-5)
        close(dpx.public_state(other_after), dpx.public_state(after), 1e-5)
        if case.event is None:  # unreleased state may enter later releases: only an event of its own can bill that
            assert jax.tree.structure(dpx.public_state(after)) == jax.tree.structure(after)


def waves(tree, size: float):
    """Numbers of about this size, other ones on every coordinate of `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    starts = np.cumsum([0, *[leaf.size for leaf in leaves]])
    return structure.unflatten(
        [
            (size * np.cos(start + np.arange(leaf.size))).astype(np.float32).reshape(leaf.shape)
            for start, leaf in zip(starts, leaves, strict=False)
        ]
    )


# 8
def check_divisor(case: Case):
    """The divisor is the expected batch size: twice the examples, twice the gradient; never the realized size."""
    if not case.linear:
        return  # an update that is decoded has no units to compare
    state = adapted_state(case, 0)
    noise, _ = paths(case)[0](gradients(8), state, np.zeros(ROWS, bool))
    one = gradients(8, 0.01, examples=1)

    def several(copies):
        return jax.tree.map(lambda g: np.concatenate([g] * copies), one)

    contribution, lifted = norm(case.gradient(sums_of(case)(several(ROWS), state))) / ROWS, []
    stacked, other = paths(case)[:2]
    for path, rows, copies in ((stacked, ROWS - 2, ROWS - 2), *itertools.product((stacked, other), [ROWS], (3, ROWS))):
        updates, _ = path(several(rows), state, np.arange(rows) < copies)
        signal = in_the_sum(case, state, minus(updates, noise))
        lifted.append(norm(signal) / copies)
    np.testing.assert_allclose(lifted, lifted[0], rtol=1e-4)
    assert contribution / case.lift * (1 - 1e-4) <= lifted[0] <= contribution * case.lift * (1 + 1e-4)


# 10
def check_branches(case: Case):
    """No conditional and no data-dependent loop stands between raw data and what leaves."""
    for path in paths(case):
        grads, state, included = arguments = gradients(9), adapted_state(case, 0), all_but()
        raw = [True] * len(jax.tree.leaves(grads)) + [False] * len(jax.tree.leaves((state, included)))
        found, _ = branches(jax.make_jaxpr(path.__wrapped__)(*arguments).jaxpr, raw)
        assert not found, found


def branches(jaxpr, raw: list[bool]) -> tuple[set[str], list[bool]]:
    """The conditionals and loops whose course depends on raw inputs, and which outputs depend on them."""
    tainted, found = {v for v, is_raw in zip(jaxpr.invars, raw, strict=True) if is_raw}, set()

    def into(inner, raw):
        more, outputs = branches(getattr(inner, "jaxpr", inner), raw)
        found.update(more)
        return outputs

    def loop(body, constants, carried, rest=()):
        while True:
            outputs = into(body, [*constants, *carried, *rest])
            joined = [a or b for a, b in zip(carried, outputs, strict=False)]
            if joined == carried:
                return outputs
            carried = joined

    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inputs = [not hasattr(v, "val") and v in tainted for v in equation.invars]
        if name == "cond":
            found |= {name} if inputs[0] else set()
            outputs = [any(each) for each in zip(*[into(b, inputs[1:]) for b in params["branches"]], strict=True)]
        elif name == "while":
            ahead, constants = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            outputs = loop(params["body_jaxpr"], inputs[ahead:constants], inputs[constants:])
            found |= {name} if any(into(params["cond_jaxpr"], [*inputs[:ahead], *outputs])) else set()
        elif name == "scan":
            constants, carried = params["num_consts"], params["num_consts"] + params["num_carry"]
            outputs = loop(params["jaxpr"], inputs[:constants], inputs[constants:carried], inputs[carried:])
        else:
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            outputs = into(inner, inputs) if inner is not None else [any(inputs)] * len(equation.outvars)
        tainted |= {v for v, is_raw in zip(equation.outvars, outputs, strict=True) if is_raw}
    return found, [not hasattr(v, "val") and v in tainted for v in jaxpr.outvars]


LINES = [
    check_bounded,
    check_adjacent,
    check_padding,
    check_additive,
    check_noise,
    check_resume,
    check_cost,
    check_divisor,
    check_branches,
]


# what a mechanism compiles is used by all of its lines, in one process
CASES = [
    pytest.param(case, id=case.name + " from_catalog" * case.from_catalog, marks=pytest.mark.xdist_group(case.name))
    for case in MECHANISMS
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.__name__.removeprefix("check_"))
def test_contract(line, case):
    line(case)


@pytest.mark.parametrize("case", CASES)
def test_contract_secrecy(case, monkeypatch):
    check_secrecy(case, monkeypatch)


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


# What is broken, and the lines that must see it.


def _broken(name, change):
    named = {
        _noise_from_the_projection: "gaussian projection",
        _noise_on_another_mask: "random_freeze_sgd",
        _mask_of_the_microbatch: "random_freeze_sgd",
        _importance_without_noise: "ada_dpigu",
        _no_second_mask: "ada_dpigu",
    }
    base = next(case for case in MECHANISMS if case.name == named.get(change, "scheduled"))
    return base._replace(name=name, make=lambda key: change(base.make(key), key))


def _no_clip(m, key):
    return m.replace(weigh=lambda norms, state: (jnp.ones_like(norms),))


def _clip_of_the_next_step(m, key):
    return m.replace(weigh=lambda norms, state: m.weigh(norms, state._replace(step=state.step - 1)))


def _half_noise(m, key):
    return m.replace(release=lambda sums, state, params: _scaled_noise(m, sums, state, params, 0.5))


def _scaled_noise(m, sums, state, params, factor):
    noisy, after = m.release(sums, state, params)
    exact = jax.tree.map(lambda s: s / m.sampling.divisor, sums[0])
    return jax.tree.map(lambda n, e: e + factor * (n - e), noisy, exact), after


def _reused_key(m, key):
    def release(sums, state, params):
        scale = m.release(sums, state, params)  # the right scale would need the schedules: only the key is wrong here
        del scale
        noise = keys.normal_like(jax.random.fold_in(keys.stream(key, "noise"), 0), sums[0])
        deviation = 2 * 0.9 ** state.step.astype(jnp.float32) * (1 - 0.05 * state.step.astype(jnp.float32))
        updates = jax.tree.map(lambda s, n: (s + deviation * n) / m.sampling.divisor, sums[0], noise)
        return updates, state._replace(step=state.step + 1)

    return m.replace(release=release)


def _one_key_for_all_leaves(m, key):
    def release(sums, state, params):
        noise = jax.tree.map(
            lambda s: jax.random.normal(jax.random.fold_in(keys.stream(key, "n"), state.step), s.shape), sums[0]
        )
        deviation = 2 * 0.9 ** state.step.astype(jnp.float32) * (1 - 0.05 * state.step.astype(jnp.float32))
        updates = jax.tree.map(lambda s, n: (s + deviation * n) / m.sampling.divisor, sums[0], noise)
        return updates, state._replace(step=state.step + 1)

    return m.replace(release=release)


def _leaf_without_noise(m, key):
    def release(sums, state, params):
        updates, after = m.release(sums, state, params)
        return updates | {"bias": sums[0]["bias"] / m.sampling.divisor}, after

    return m.replace(release=release)


def _realized_divisor(m, key):
    def update(grads, state, params=None, *, included=None):
        updates, after = m.update(grads, state, params, included=included)
        rows = grads["bias"].shape[0]
        return jax.tree.map(lambda u: u * m.sampling.divisor / max(rows, 1), updates), after

    broken = m.replace()
    return _with_update(broken, update)


def _with_update(m, update):
    class Updated(dpx.Mechanism):
        pass

    broken = tuple.__new__(Updated, (m.init, update))
    broken.__dict__.update(m.__dict__)
    return broken


def _padding_included(m, key):
    return _with_update(
        m, lambda grads, state, params=None, *, included=None: m.update(grads, state, params, included=everyone(grads))
    )


def _bills_less(m, key):
    return m.replace(event=lambda steps: m.event(max(steps - 1, 0)))


def _bills_shifted(m, key):
    return m.replace(
        event=lambda steps: m.sampling.event(np.float32([2 * 0.9 ** (t - 1) for t in range(steps)]).astype(float))
    )


def _counts_nothing(m, key):
    return m.replace(release=lambda sums, state, params: (m.release(sums, state, params)[0], state))


def _leaks_sums(m, key):
    def release(sums, state, params):
        updates, after = m.release(sums, state["inner"], params)
        return updates, {"inner": after, "last": sums}

    return m.replace(
        init=lambda params: {"inner": m.init(params), "last": (jax.tree.map(jnp.zeros_like, params),)},
        weigh=lambda norms, state: m.weigh(norms, state["inner"]),
        release=release,
    )


def _branches(m, key):
    def release(sums, state, params):
        updates, after = m.release(sums, state, params)
        return jax.lax.cond(
            sums[0]["scale"] > 0, lambda u: u, lambda u: jax.tree.map(jnp.zeros_like, u), updates
        ), after

    return m.replace(release=release)


def _noise_from_the_projection(m, key):
    def release(sums, state, params):
        step_key = jax.random.fold_in(keys.stream(key, "projection"), state.step)
        matrix_key = jax.random.fold_in(jax.random.fold_in(step_key, 0), 0)  # of the first group's first block
        noise = jax.random.normal(matrix_key, sums[0][0].shape)
        return [(sums[0][0] + 1.3 * 0.7 * noise) / POISSON.divisor], state._replace(step=state.step + 1)

    inner = dpx.dp_sgd(clip_norm=0.7, noise_multiplier=1.3, sampling=POISSON, key=key).replace(release=release)
    return dpx.in_coordinates(inner, dpx.coordinates.random_projection(rank=12, kind="gaussian", key=key))


def _noise_on_another_mask(m, key):
    def release(sums, state, params):
        updates, after = m.release(sums, state, params)
        silent, _ = m.release(jax.tree.map(jnp.zeros_like, sums), state, params)
        first = jax.tree.map(jnp.zeros_like, params)
        first["kernel"] = first["kernel"].at[:, 0].set(1)
        return jax.tree.map(lambda u, n, f: u - f * n, updates, silent, first), after

    return m.replace(release=release)


def _mask_of_the_microbatch(m, key):
    microbatches = itertools.count()

    def encode(grad, state):
        drawn = jax.random.bits(jax.random.fold_in(key, next(microbatches)), (2,), jnp.uint32)
        return masks.masked(grad, masks.random_mask(drawn, jnp.int32(8), grad))

    return m.replace(encode=encode)


def _importance_without_noise(m, key):
    def release(sums, state, params):
        updates, after = m.release(sums, state, params)
        score = jax.tree.map(lambda s, g: s + jnp.abs(g), state.coordinates[0].score, sums[0])
        return updates, after._replace(coordinates=(after.coordinates[0]._replace(score=score),))

    return m.replace(release=release)


def _no_second_mask(m, key):
    standardized = dpx.coordinates.standardized(variance_decay=0.5, stability=0.05)

    def encode(grad, state):
        important = state.coordinates[0]
        mean = jax.tree.map(lambda a: a + 0.1, important.inner.mean)  # as where frozen coordinates are averaged too
        once = standardized.encode(masks.masked(grad, important.mask), important.inner._replace(mean=mean))
        return jax.tree.map(lambda g, z: jnp.where(important.step < 3, g, z), grad, once)

    return m.replace(encode=encode)


BROKEN = [
    (_no_clip, {check_bounded, check_adjacent}),
    (_clip_of_the_next_step, {check_bounded}),
    (_half_noise, {check_noise}),
    (_reused_key, {check_noise}),
    (_one_key_for_all_leaves, {check_noise}),
    (_leaf_without_noise, {check_noise}),
    (_realized_divisor, {check_divisor, check_additive}),
    (_padding_included, {check_padding, check_additive}),
    (_bills_less, {check_cost}),
    (_bills_shifted, {check_cost}),
    (_counts_nothing, {check_cost}),
    (_leaks_sums, {check_secrecy}),
    (_branches, {check_branches}),
    (_noise_from_the_projection, {check_noise}),
    (_noise_on_another_mask, {check_noise}),
    (_mask_of_the_microbatch, {check_additive}),
    (_importance_without_noise, {check_secrecy}),
    (_no_second_mask, {check_noise}),
]


@pytest.mark.parametrize(("change", "lines"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_broken_mechanisms_fail(change, lines, monkeypatch):
    case = _broken(change.__name__, change)
    for line in lines:
        with pytest.raises(AssertionError):
            line(case, monkeypatch) if line is check_secrecy else line(case)


# A line of the catalog of which the tests know nothing else.


def signs(*, clip_norm: float, noise_multiplier: float, sampling, key) -> dpx.Mechanism:
    """DP-SGD that moves every coordinate by the sign of its released gradient."""
    base = dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    return dpx.chain(base, optax.scale_by_sign())


@functools.cache
def _signs_case(change=None) -> Case:
    case = case_of_method(catalog.Entry(signs, {"clip_norm": 0.7}))
    if change is None:
        return case

    def changed(key):
        base = dpx.dp_sgd(clip_norm=0.7, noise_multiplier=1.3, sampling=POISSON, key=key)
        return dpx.chain(change(base, key), optax.scale_by_sign())

    return case._replace(name=f"signs, {change.__name__}", make=changed)


def _one_step_for_ever(m, key):
    def release(sums, state, params):
        updates, after = m.release(sums, state._replace(step=jnp.int32(0)), params)
        return updates, after._replace(step=state.step + 1)

    return m.replace(release=release)


def test_a_line_of_the_catalog_is_held_to_the_contract(monkeypatch):
    for line in LINES:
        line(_signs_case())
    check_secrecy(_signs_case(), monkeypatch)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_no_clip, check_bounded),
        (_no_clip, check_adjacent),
        (_half_noise, check_secrecy),
        (_one_step_for_ever, check_noise),
        (_bills_less, check_cost),
    ],
    ids=lambda value: value.__name__,
)
def test_a_broken_line_of_the_catalog_fails(change, line, monkeypatch):
    case = _signs_case(change)
    with pytest.raises(AssertionError):
        line(case, monkeypatch) if line is check_secrecy else line(case)


def test_docs_list_the_catalog():
    """docs/methods.md is what `python -m dpx.catalog` writes."""
    assert (Path(__file__).parents[1] / "docs" / "methods.md").read_text() == catalog.table()
