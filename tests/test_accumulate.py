"""accumulate: the chunks of a batch make the step of the batch, or no bill. The contract: tests/test_contract.py."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.gradients.private_updates import _clip_bounds, _equal_up_to_rounding
from dpx.states.record import DrawRecord, ReleaseState, fingerprint, unit_fingerprint
from dpx.values import map_nodes_of_type
from tests.mechanisms import ALL, PARAMS
from tests.test_dp_sgd import KEY, SAMPLING, dp_sgd, model
from tests.test_dp_sgd import loss as loss_without_key
from tests.test_gradients import with_dropout as loss

INCLUDED = np.arange(16) % 4 != 1
SIZE = 6


def chunks(step=0, mark=2**16, included=INCLUDED, size=SIZE):
    """The batch of `model` in chunks, the last of which is padded with NaN."""
    _, batch = model()
    rows = math.ceil(16 / size) * size
    padded = jax.tree.map(lambda leaf: np.pad(leaf, ((0, rows - 16), (0, 0)), constant_values=np.nan), batch)
    counts, unit = np.pad(included, (0, rows - 16)), unit_fingerprint("example")
    return [
        dpx.Batch(
            jax.tree.map(lambda leaf, at=at: leaf[at : at + size], padded),
            counts[at : at + size],
            DrawRecord(*map(np.uint32, (step, included.sum(), mark, at, fingerprint(SAMPLING), unit))),
        )
        for at in range(0, rows, size)
    ]


def mechanisms():
    base: Any = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": SAMPLING, "key": KEY}
    return {
        "momentum": dpx.chain(dp_sgd(noise_multiplier=1.0), optax.trace(0.9)),
        "two sums": dpx.methods.dice_sgd(feedback_norm=0.1, outer_clip_norm=2.0, **base),
    }


@pytest.mark.parametrize("name", mechanisms())
@pytest.mark.parametrize("clipping", ["ghost", "vmap"])
@pytest.mark.long_cases("ghost-momentum", "vmap-two sums")
def test_the_chunks_of_a_batch_are_one_step(name, clipping):
    """One noise and one release, the keys of the examples, the record and the bill: as of the whole batch."""
    optimizer, (params, _) = mechanisms()[name], model()
    options: Any = {"norms": clipping, "with_key": True, "has_aux": True}
    step, state, sums = dpx.private_updates_in_chunks(loss, optimizer, **options), optimizer.init(params), None
    add = jax.jit(step.add, donate_argnums=3)
    for chunk in chunks():
        sums = add(params, chunk, state, sums)
    assert sums is not None
    found = jax.jit(step.release)(params, sums, state)
    (whole,) = chunks(size=18)
    expected = jax.jit(dpx.private_updates(loss, optimizer, **options))(params, whole, state)
    chex.assert_trees_all_close(found, expected[:2], rtol=1e-5, atol=1e-6)
    last = jax.tree.map(lambda values: values[12:], expected.unreleased)
    chex.assert_trees_all_close(sums.unreleased, last, rtol=1e-5)  # of the chunk that came last
    assert dpx.accounting.steps_taken(found[1]) == 1
    assert dpx.epsilon(optimizer, found[1], delta=1e-5) == dpx.epsilon(optimizer, expected.state, delta=1e-5)


STEP = dpx.private_updates_in_chunks(loss_without_key, dp_sgd(noise_multiplier=1.0))
ADD, RELEASE = jax.jit(STEP.add), jax.jit(STEP.release)


def at_step(step):
    state = dp_sgd(noise_multiplier=1.0).init(model()[0])
    for _ in range(step):
        state = state.after_release(1.0)
    return state


def epsilon_after(some, added_at=None, released_at=0):
    """What the step of these chunks is billed. added_at: the steps of the states that they are added with."""
    (params, _), sums = model(), None
    for number, chunk in enumerate(some):
        sums = ADD(params, chunk, at_step(added_at[number] if added_at else released_at), sums)
    _, state = RELEASE(params, sums, at_step(released_at))
    return dpx.epsilon(dp_sgd(noise_multiplier=1.0), state, delta=1e-5)


def without_record(some):
    return [chunk._replace(drawn=None) for chunk in some]


ONE, TWO, THREE = chunks()
DISORDER = {
    "left out": lambda: epsilon_after([ONE, TWO]),
    "the first left out": lambda: epsilon_after([TWO, THREE]),
    "twice": lambda: epsilon_after([ONE, TWO, TWO, THREE]),
    "in place of another": lambda: epsilon_after([ONE, ONE, THREE]),
    "in another order": lambda: epsilon_after([ONE, THREE, TWO]),
    "of another key": lambda: epsilon_after([ONE, TWO, chunks(mark=2**16 + 1)[2]]),
    "of another draw": lambda: epsilon_after([ONE, TWO, chunks(included=~INCLUDED)[2]]),
    "of another step": lambda: epsilon_after([ONE, TWO, chunks(step=1)[2]]),
    "all of another step": lambda: epsilon_after(chunks(step=1)),
    "more rows": lambda: epsilon_after([ONE._replace(included=np.ones(SIZE, bool)), TWO, THREE]),
    "more rows in place of fewer": lambda: epsilon_after([ONE, TWO._replace(included=np.zeros(SIZE, bool)), THREE]),
    "clipped at another step": lambda: epsilon_after(without_record(chunks()), added_at=(0, 1, 0)),
    "released at another step": lambda: epsilon_after(without_record(chunks()), added_at=(0, 0, 0), released_at=1),
}


@pytest.mark.parametrize("name", DISORDER)
def test_chunks_in_disorder_have_no_bill(name):
    with pytest.raises(ValueError, match="the state has no known cost"):
        DISORDER[name]()


def test_chunks_in_order_have_one():
    """Those of a draw, at any step; and chunks of the user's own, which are taken as they are."""
    mechanism, numbers = dp_sgd(noise_multiplier=1.0), sum(jnp.size(leaf) for leaf in jax.tree.leaves(model()[0]))
    epsilon_of = functools.partial(dpx.epsilon, mechanism, delta=1e-5, numbers=numbers)
    assert epsilon_after(chunks()) == epsilon_of(1)
    assert epsilon_after(chunks(step=3), released_at=3) == epsilon_of(4)
    assert epsilon_after(without_record([TWO, ONE])) == epsilon_of(1)
    (params, _), state = model(), at_step(0)
    sums = ADD(params, ONE._replace(included=None, drawn=None), state)
    assert (int(sums.unreleased_rows), int(sums.unreleased_count)) == (SIZE, SIZE)


def test_one_example_moves_the_sums_by_the_clip_norm():
    """Whatever its gradient, in whatever chunk; a gradient out of range not at all."""
    (params, _), state = model(), at_step(0)
    before = ADD(params, ONE, state)
    for value in (0.0, 1e-30, 1.0, 1e18, 3e38, math.nan, math.inf):
        hostile = jax.tree.map(lambda leaf, value=value: np.full_like(leaf, value), TWO.examples)
        alone = np.arange(SIZE) == 3
        after = ADD(params, dpx.Batch(hostile, alone, TWO.drawn), state, before)
        moved = jax.tree.map(jnp.subtract, after.unreleased_sums, before.unreleased_sums)
        assert optax.tree.norm(moved) <= 1.5 * (1 + 1e-5), value
        assert math.isfinite(value) or optax.tree.norm(moved) == 0


def test_the_sums_are_not_public():
    sums = ADD(model()[0], ONE, at_step(0))
    shown = dpx.publishable_state(sums)
    assert [name for name, value in shown._asdict().items() if value is not None] == [
        "step",
        "mechanism",
        "clipping",
        "ordered",
    ]
    other = dpx.publishable_state(ADD(model()[0], ONE._replace(included=~ONE.included), at_step(0)))
    chex.assert_trees_all_equal(other, shown)


def test_the_sums_of_another_mechanism_have_no_bill():
    """A notebook in which only the cell of the release runs again, with less noise, or after other coordinates."""
    params, state = model()[0], at_step(0)
    sums = None
    for chunk in (ONE, TWO, THREE):
        sums = ADD(params, chunk, state, sums)
    for other in (dp_sgd(clip_norm=0.01), dpx.in_coordinates(dp_sgd(), dpx.coordinates.top_fraction(fraction=0.5))):
        _, after = dpx.private_updates_in_chunks(loss, other).release(params, sums, other.init(params))
        with pytest.raises(ValueError, match="with the mechanism, the clip norm and the state"):
            dpx.epsilon(other, after, delta=1e-3)


def test_refused():
    (params, batch), state = model(), at_step(0)
    sums = ADD(params, ONE, state)
    refused = {
        "AccumulatedSums": lambda: STEP.release(params, sums.unreleased_sums, state),
        "sums must be": lambda: STEP.add(params, TWO, state, sums.unreleased_sums),
        "or none of them": lambda: STEP.add(params, TWO._replace(drawn=None), state, sums),
        "must be a dpx.Batch": lambda: STEP.add(params, batch, state),
        "included must be bool": lambda: STEP.add(params, ONE._replace(included=np.ones(SIZE)), state),
        "dpx.chain": lambda: dpx.private_updates_in_chunks(loss, optax.sgd(0.1)),
        "microbatch_size": lambda: dpx.private_updates_in_chunks(loss, dp_sgd(), microbatch_size=0),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_sums_that_were_clipped_to_another_norm_have_no_bill():
    """Of another mechanism whose clip norm differs after step 0. A schedule that reads a list stays as it was built."""
    (params, _), state = model(), at_step(1)
    billed, later = (dp_sgd(clip_norm=lambda t, c=c: jnp.where(t == 0, 1.0, c)) for c in (1.0, 400.0))
    one, two = without_record([ONE, TWO])
    step, other = (dpx.private_updates_in_chunks(loss, made, with_key=True, has_aux=True) for made in (billed, later))
    add, more, release = jax.jit(step.add), jax.jit(other.add), jax.jit(step.release)
    sums = add(params, one, state)
    larger = sums._replace(clipping=400 * sums.clipping)  # what the fingerprint of the mechanism does not show
    wrongs = more(params, one, state), more(params, two, state, sums), larger
    for wrong in (*wrongs, add(params, two, state, larger)._replace(clipping=sums.clipping)):
        _, after = release(params, wrong, state)
        with pytest.raises(ValueError, match="the clip norm and the state"):
            dpx.epsilon(billed, after, delta=1e-5)

    norms = [400.0]
    changing = dp_sgd(clip_norm=lambda t: jnp.float32(norms[0]) + 0 * t)
    step = dpx.private_updates_in_chunks(loss, changing, with_key=True, has_aux=True)
    state = changing.init(params)
    sums = jax.jit(step.add)(params, one, state)
    norms[0] = 1.0
    with jax.default_matmul_precision("highest"):  # other settings, with which jax traces the schedule again
        updates, after = jax.jit(step.release)(params, sums, state)
    assert dpx.epsilon(changing, after, delta=1e-5) == dpx.epsilon(changing, 1, delta=1e-5)
    constant = dpx.private_updates_in_chunks(loss, dp_sgd(clip_norm=400.0), with_key=True, has_aux=True)
    expected, _ = constant.release(params, constant.add(params, one, state), state)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)


@pytest.mark.parametrize("case", ALL)
def test_the_clip_norms_of_both_programs_agree(case):
    """No mechanism is refused for the rounding of its schedules, which two programs compute."""
    state = jax.jit(case.mechanism.init)(PARAMS)
    programs = [jax.jit(lambda state, k=k: _clip_bounds(case.mechanism, state) * k) for k in (1.0, 2.0)]
    for step in range(3):
        at = map_nodes_of_type(lambda node, step=step: node._replace(step=jnp.int32(step)), state, ReleaseState)
        one, other = (program(at) for program in programs)
        assert one.shape and bool(_equal_up_to_rounding(one, other / 2)) and not bool(_equal_up_to_rounding(one, other))
