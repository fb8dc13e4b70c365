"""DP-FEST and DP-AdaFEST by brute force: what is counted, chosen and released, also by the step for large tables."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.papers import sparse_embeddings
from dpx.states.reading import release_state
from dpx.sums.clipped_sum import sum_contributions
from dpx.sums.rounding import ETA
from dpx.xla.jaxprs import walk_equations
from tests.ghost import integers, noiseless, normal

KEY = jax.random.key(5)
POISSON = dpx.PoissonSampling(examples=1000, batch_size=8)
OPTIONS = dict(threshold=2.0, most_rows=4, reads_norm=1.5, reads_share=0.3, clip_norm=0.5, sampling=POISSON, key=KEY)
C_GRADIENT, C_READS = 0.5 * 0.7**0.5, 0.5 * 0.3**0.5
V, D = 20, 3


def is_table(path):
    return path.startswith("tables")


def params(rows=V):
    return {"tables": {"a": normal(1, rows, D), "b": normal(2, 7, 2)}, "w": normal(3, D, 2)}


def loss(params, vectors, example):
    hidden = vectors["a"].sum(0) @ params["w"]
    return jnp.sum(jnp.cos(hidden) * vectors["b"]) + jnp.sum(example["x"] * hidden)


def of_table(params, example):
    """The loss as a loss of whole tables, where an index outside reads zeros."""
    tables, indices = params["tables"], rows(example)
    outside = jax.tree.map(lambda table, at: jnp.where(at < 0, len(table), at), tables, indices)
    vectors = jax.tree.map(lambda table, at: table.at[at].get(mode="fill", fill_value=0), tables, outside)
    return loss({"w": params["w"]}, vectors, example)


def rows(example):
    return {"a": example["a"], "b": example["b"]}


def batch(size, count=V):
    """Rows that are read twice by an example, and indices outside of the tables."""
    examples = {"a": integers(4, count + 4, size, 4) - 2, "b": integers(5, 7, size), "x": 0.1 * normal(6, size, 2)}
    return dpx.Batch(examples, jnp.arange(size) % 5 > 0)


def dense(updates, like):
    tables = jax.tree.map(lambda table, row: row.added_to(jnp.zeros_like(table)), like["tables"], updates["tables"])
    return updates | {"tables": tables}


def test_contributions_are_the_clipped_gradient_and_the_clipped_reads():
    made = noiseless(dpx.methods.ada_fest(noise_multiplier=1.0, tables=is_table, **OPTIONS))
    some, given = batch(8), params()
    grads = jax.jit(jax.vmap(jax.grad(of_table), (None, 0)))(given, some.examples)
    (sums,), _ = jax.jit(functools.partial(sum_contributions, made))(grads, made.init(given), some.included)
    expected = {"a": np.zeros(V), "b": np.zeros(7)}
    for a, b, counts in zip(some.examples["a"], some.examples["b"], some.included, strict=True):
        read = {"a": {int(i) for i in a if 0 <= i < V}, "b": {int(b)}}
        factor = min(1.0, 1.5 / np.sqrt(len(read["a"]) + 1)) * bool(counts)
        for table, places in read.items():
            expected[table][list(places)] += factor * C_READS / 1.5
    for table, reads in expected.items():
        np.testing.assert_allclose(sums.high["reads"][f"tables/{table}"], reads, rtol=1e-4, atol=1e-6)
    flat = np.concatenate([np.asarray(leaf).reshape(8, -1) for leaf in jax.tree.leaves(grads)], 1)
    factors = np.minimum(1, C_GRADIENT / np.linalg.norm(flat, axis=1)) * np.asarray(some.included)
    found = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(sums.high["gradient"])])
    np.testing.assert_allclose(found, factors @ flat, rtol=1e-4, atol=1e-6)


def test_the_most_read_rows_are_updated_and_no_other():
    made = dpx.coordinates.frequent_rows(threshold=0.5, most_rows=3, reads_scale=2.0)
    table = 1 + jnp.abs(normal(1, 6, 2))
    released = {
        "gradient": {"t": table, "b": jnp.ones(2)},
        "reads": {"t": 2 * jnp.array([0.4, 0.9, -3.0, 0.6, 0.5, 0.8])},
    }
    found, _ = made.decode(released, (), released["gradient"])
    np.testing.assert_array_equal(found["t"], table * jnp.array([0, 1, 0, 1, 0, 1.0])[:, None])
    np.testing.assert_array_equal(found["b"], 1)
    few = {"t": released["reads"]["t"] - 0.5}
    np.testing.assert_array_equal(
        (made.decode(released | {"reads": few}, (), None)[0]["t"] != 0).any(1), [0, 1, 0, 0, 0, 1]
    )


@pytest.mark.parametrize(("size", "microbatch"), [(8, None), (8, 3), (220, None)])
@pytest.mark.long_cases("220", "8-None")
def test_the_step_for_large_tables_is_the_method(size, microbatch):
    """Without noise, also with padding, several blocks of rows, and microbatches."""
    options, given = OPTIONS | {"noise_multiplier": 0.0}, params()
    step = dpx.coordinates.row_updates(loss, rows=rows, microbatch_size=microbatch, **options)
    of_all = dpx.private_updates(of_table, dpx.methods.ada_fest(tables=is_table, **options))
    state = step.optimizer.init(given)
    found, expected = (jax.jit(one)(given, batch(size), state) for one in (step, of_all))
    assert {len(each.rows) for each in found.updates["tables"].values()} == {4}
    for leaf, other in zip(*map(jax.tree.leaves, (dense(found.updates, given), expected.updates)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-6)
    assert int(state.inner.numbers) == 4 * (D + 2) + V + 7 + 2 * D
    assert int(found.state.inner.numbers) == int(state.inner.numbers) + 1  # of 27 counts, which need 14 pairs
    same = expected.state.inner.with_fields(numbers=found.state.inner.numbers)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found.state.inner, same))
    np.testing.assert_allclose(found.unreleased.losses, expected.unreleased.losses, rtol=1e-5)


def test_a_hostile_example_is_not_counted():
    made = dpx.coordinates.row_updates(loss, rows=rows, noise_multiplier=0.0, **OPTIONS | {"threshold": 0.0})
    step, states, (examples, included, _) = jax.jit(made), made.optimizer.init(params()), batch(8)
    without = step(params(), dpx.Batch(examples, included.at[1].set(False)), states).updates
    for huge in (np.nan, np.inf, 3e38):
        hostile = examples | {"x": examples["x"].at[1].set(huge)}
        found = step(params(), dpx.Batch(hostile, included), states).updates
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), found, without)


def test_noise_of_counts_and_of_chosen_rows(ungridded):
    """An empty batch: sigma C (1 + ETA) / B on each chosen row and parameter, independent of the count that chose."""
    count, chosen = 4000, 1500
    options = OPTIONS | {"most_rows": chosen, "threshold": 2.0, "reads_norm": 1.0}
    step = dpx.coordinates.row_updates(lambda p, v, e: jnp.sum(v), rows=lambda e: e, noise_multiplier=1.3, **options)
    given = {"tables": jnp.zeros((count, 3)), "w": jnp.zeros(4000)}
    empty = dpx.Batch(jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, bool))
    updates, state, _ = jax.jit(step)(given, empty, step.optimizer.init(given))
    at, values = updates["tables"]
    # The counts have the deviation 1.3 / sqrt(0.3): a share of 0.2 passes, in the order of their counts.
    deviation = 1.3 / np.sqrt(0.3) * (1 + ETA)
    share = 0.5 * math.erfc(2.0 / deviation / math.sqrt(2))
    passed = int(np.sum(np.asarray(at) < count))
    assert abs(passed / count - share) < 4 * np.sqrt(share / count)
    assert len(set(np.asarray(at[:passed]).tolist())) == passed and not np.any(np.asarray(values)[passed:])
    expected = 1.3 * 0.5 * (1 + ETA) / 8
    values = np.asarray(values)[:passed]
    for numbers in (values, np.asarray(updates["w"])):
        assert abs(numbers.std() / expected - 1) < 4 / np.sqrt(2 * numbers.size)
        assert abs(numbers.mean()) < 4 * expected / np.sqrt(numbers.size)
    order = np.arange(passed) - (passed - 1) / 2
    assert np.all(np.abs(order @ values) < 4.5 * expected * np.linalg.norm(order))
    of_places = np.isin(np.arange(values.size), np.asarray(at))  # a shared stream would give both one number
    assert abs(values.ravel()[of_places].mean()) < 4.5 * expected / np.sqrt(of_places.sum())
    after = jax.jit(step)(given, empty, state).updates["tables"].rows
    assert not np.array_equal(at, after)


def test_working_rows():
    """A row that an example reads twice counts once, and a chosen row that nobody reads has no sum."""
    read = sparse_embeddings.RowsRead.from_indices(jnp.array([[3, 3, 5, -1], [5, 9, 0, 5]]), 9)
    np.testing.assert_array_equal(read.rows, [0, 3, 5, 9, 9, 9, 9, 9])
    np.testing.assert_array_equal(read.places, [[1, 1, 2, 8], [2, 8, 0, 2]])
    np.testing.assert_array_equal(read.weights, [[0.5, 0.5, 1, 1], [0.5, 1, 1, 0.5]])
    sums = jnp.arange(1.0, 9)
    np.testing.assert_array_equal(read.spread_over_table(sums, 9), [1, 0, 0, 2, 0, 3, 0, 0, 0])
    np.testing.assert_array_equal(read.take_row_sums(sums[:, None], jnp.array([5, 4, 0, 8]))[:, 0], [3, 0, 1, 0])


@pytest.mark.long
def test_no_array_is_as_large_as_the_table():
    given = params(rows=100_000)
    step = dpx.coordinates.row_updates(loss, rows=rows, noise_multiplier=1.0, **OPTIONS)
    traced = jax.make_jaxpr(step)(given, batch(8, 100_000), step.optimizer.init(given))
    largest = max(v.aval.size for equation in walk_equations(traced.jaxpr) for v in equation.outvars)
    assert largest < 1.2 * 100_000 < given["tables"]["a"].size


def test_the_cost_is_that_of_one_gaussian():
    made = dpx.methods.ada_fest(noise_multiplier=1.1, **OPTIONS)
    assert made.event(7) == dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.1, sampling=POISSON, key=KEY).event(7)
    step = dpx.coordinates.row_updates(loss, rows=rows, noise_multiplier=1.1, **OPTIONS)
    assert step.optimizer.event(7) == made.event(7)
    for single in (step.count, step.update):
        assert single.event(1) == made.event(1)


@pytest.mark.long
def test_two_releases_of_odd_sizes_count_all_their_pairs():
    step = sparse_embeddings.row_updates(
        lambda params, vectors, example: jnp.sum(vectors * params["w"][0]) + params["w"][1],
        rows=lambda example: example,
        noise_multiplier=1.0,
        **(OPTIONS | {"most_rows": 1}),
    )
    params = {"tables": jnp.zeros((3, 1)), "w": jnp.ones(2)}
    given = dpx.Batch(jnp.zeros((8, 2), jnp.int32), jnp.ones(8, bool))
    updated = step(params, given, step.optimizer.init(params)).state
    assert int(release_state(updated).numbers) == 2 * (2 + 2)  # of 3 counts, and of 1 row and 2 other numbers


def test_public_rows_are_the_rows_of_a_table():
    """The gradient by the rows of the list is that by the table, in these rows; the others are read as they are."""
    table, public = normal(1, 9, 2), np.array([1, 4, 5, 8])
    examples = integers(2, 9, 6, 5)
    made = noiseless(dpx.dp_sgd(clip_norm=0.3, noise_multiplier=1.0, sampling=POISSON, key=KEY))

    def of_list(few, row):
        indices, otherwise = row
        return jnp.sum(jnp.sin(dpx.coordinates.look_up_public_rows(few, public, indices, otherwise)) ** 2)

    step = dpx.private_updates(of_list, made)
    few = table[public]
    (found,) = jax.jit(step)(few, dpx.Batch((examples, table[examples]), None), made.init(few)).updates
    grads = jax.vmap(jax.grad(lambda few, t: jnp.sum(jnp.sin(table.at[public].set(few)[t]) ** 2)), (None, 0))(
        few, examples
    )
    (expected,), _ = sum_contributions(made, grads, made.init(few), jnp.ones(6, bool))
    np.testing.assert_allclose(found, expected.high, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("public", [[1, 1], [2, 1], np.uint32([2, 1]), [0.0, 1.0], [1, 2, 3]])
def test_a_list_that_is_none_is_refused(public):
    with pytest.raises(ValueError, match="public must be a sorted list of 2 different whole numbers"):
        dpx.coordinates.look_up_public_rows(jnp.ones((2, 3)), np.array(public), jnp.zeros(1, int), jnp.zeros((1, 3)))


def test_a_model_without_tables_is_refused():
    made = dpx.methods.ada_fest(noise_multiplier=1.0, **OPTIONS)
    with pytest.raises(ValueError, match=r"tables must accept the path of an array with rows.*got \['b'\]"):
        made.init({"b": jnp.ones(3)})


def test_a_loss_without_ghost_norms_is_refused():
    """The sums of its tables could round by the places of rows, which other examples move."""

    def closes_over(params, vectors, example):
        @jax.custom_vjp
        def same(x):
            return x

        same.defvjp(lambda x: (x, None), lambda _, g: (g * example["x"][0],))
        return loss(params, jax.tree.map(same, vectors), example)

    step = dpx.coordinates.row_updates(closes_over, rows=rows, noise_multiplier=1.0, **OPTIONS)
    with pytest.raises(ValueError, match="loss must be one that ghost norms follow, got one where a custom derivative"):
        jax.eval_shape(step, params(), batch(8), step.optimizer.init(params()))
