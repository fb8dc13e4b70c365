"""`dpx.augmented`: the views of an example are averaged before the clip, without a gradient of any view."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.gradients.one_example import rows_with_keys
from tests.problems import cross_entropy as loss

COPIES, ROWS, CLIP_NORM = 3, 4, 0.3
PARAMS = {"w": jax.random.normal(jax.random.key(5), (6, 3)), "b": jnp.zeros(3)}
BATCH = dpx.Batch(
    (3 * jax.random.normal(jax.random.key(6), (ROWS, 6)), jnp.arange(ROWS) % 3), jnp.array([True, True, True, False])
)
SAMPLING = dpx.PoissonSampling(examples=20, batch_size=ROWS)
MECHANISM = dpx.dp_sgd(clip_norm=CLIP_NORM, noise_multiplier=1e-6, sampling=SAMPLING, key=jax.random.key(7))


def turned(example, key):
    x, label = example
    return x * jax.random.uniform(key, x.shape), label


def loss_and_score(params, example):
    return loss(params, example), {"score": example[0].sum()}


def test_views_are_averaged_and_then_clipped():
    state = MECHANISM.init(PARAMS)
    mean_loss = dpx.augmented(loss_and_score, turned, copies=COPIES)
    examples, keys = rows_with_keys(MECHANISM, state, BATCH.examples, with_key=True)

    @jax.jit
    def grads_of(examples, keys):  # (rows, views) on the first axes
        views = jax.vmap(lambda key: jax.random.split(key, COPIES))(keys)
        views = jax.vmap(jax.vmap(turned, (None, 0)))(examples, views)
        return jax.vmap(jax.vmap(jax.grad(loss), (None, 0)), (None, 0))(PARAMS, views), views[0].sum(2)

    grads, sums = jax.tree.map(np.asarray, grads_of(examples, keys))
    means = jax.tree.map(lambda leaf: leaf.mean(1), grads)
    norms = np.sqrt((means["w"] ** 2).sum((1, 2)) + (means["b"] ** 2).sum(1))
    assert norms.min() > CLIP_NORM
    factors = CLIP_NORM / norms * np.asarray(BATCH.included) / ROWS
    expected, scores = jax.tree.map(lambda leaf: np.tensordot(factors, leaf, 1), means), sums.mean(1)
    gradient = dpx.private_updates(mean_loss, MECHANISM, with_key=True, has_aux=True, norms="ghost")
    updates, _, unreleased = jax.jit(gradient)(PARAMS, BATCH, state)
    jax.tree.map(lambda leaf, other: np.testing.assert_allclose(leaf, other, atol=1e-6), updates, expected)
    np.testing.assert_allclose(unreleased.aux["score"], scores, atol=1e-5)
    np.testing.assert_allclose(unreleased.norms[:3], norms[:3], rtol=1e-5)


def test_ghost_norms_see_views_as_positions():
    mean_loss, width = dpx.augmented(loss, turned, copies=COPIES), 512  # wide, or gradients are cheaper
    params = {"w": jnp.zeros((width, width)), "b": jnp.zeros(width)}
    batch = BATCH._replace(examples=(jnp.zeros((ROWS, width)), BATCH.examples[1]))
    explanation = dpx.explain_norms(mean_loss, MECHANISM, params, batch, with_key=True, norms="ghost")
    assert "Gram matrices" in str(explanation), explanation


@pytest.mark.parametrize("changes", [{"copies": 0}, {"copies": 1.5}, {"loss": None}, {"augment": "flip"}])
def test_bad_arguments_are_refused(changes):
    with pytest.raises(ValueError, match="must be"):
        dpx.augmented(**({"loss": loss, "augment": turned, "copies": 2} | changes))


def test_views_that_use_no_key_are_warned_of():
    mean_loss = dpx.augmented(lambda params, x: x.sum(), lambda x, key: x, copies=2)
    with pytest.warns(UserWarning, match="augment must use the key .* or all 2 views of an example are one"):
        mean_loss(None, jnp.ones(3), jax.random.key(0))
