"""Federated averaging with user-level privacy, on real digits that are split among users of unequal size and taste.

At every step, each user takes part with the same probability, makes some local steps of gradient descent on their own
images, and sends the change of the model. A change is clipped to a norm that adapts, and the noisy mean moves the
model: McMahan et al. 2018 (https://arxiv.org/abs/1710.06963), Andrew et al. 2021 (https://arxiv.org/abs/1905.03871).
Epsilon protects all images of one user together.
"""

import argparse
import secrets
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from examples import data, models


def split(labels: np.ndarray, given: argparse.Namespace) -> np.ndarray:
    """The owner of each image, int (N,): sizes by a power law, and users prefer some labels (Hsu et al. 2019).

    An image goes to a user with a probability that is proportional to the user's size and taste for its label. A user
    who gets no image takes no part. The split is made up, so its seed is fixed and public.
    """
    rng = np.random.default_rng(0)
    sizes = np.arange(1, given.users + 1) ** -given.size_power
    tastes = rng.dirichlet(np.full(labels.max() + 1, given.label_concentration), given.users)
    chances = sizes[:, None] * tastes / (sizes @ tastes)  # (users, classes), and each class sums to 1
    return np.array([rng.choice(given.users, p=chances[:, label]) for label in labels])


def train(given: argparse.Namespace, model: models.Model, dataset: data.Dataset, seed: int):
    """The trained parameters, the optimizer and its state; `given` is the command line."""
    images, test_images = shrink(dataset.train_images, given.pool), shrink(dataset.test_images, given.pool)
    users = dpx.UserData((images, dataset.train_labels), split(dataset.train_labels, given), most=given.most)
    sampling = dpx.PoissonSampling(examples=len(users), batch_size=given.batch_size)
    key, budget = dpx.secret_key(seed), dpx.Budget(epsilon=given.epsilon, delta=given.delta, steps=given.steps)

    def mean_loss(params, user):
        (images, labels), included = user
        logits = jax.vmap(model.apply, (None, 0))(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(losses, where=included) / jnp.sum(included, dtype=jnp.float32)

    def update_of_one(params, user):
        def local_step(moved, _):
            grads = jax.grad(mean_loss)(moved, user)
            return jax.tree.map(lambda p, g: p - given.local_learning_rate * g, moved, grads), None

        moved, _ = jax.lax.scan(local_step, params, length=given.local_steps)
        return jax.tree.map(jnp.subtract, params, moved)

    mechanism = dpx.mechanisms.adaptive_clipping(
        initial_clip_norm=given.clip_norm,
        quantile=given.quantile,
        indicator_noise=given.batch_size / 20,
        noise_multiplier=budget,
        sampling=sampling,
        key=key,
    )
    optimizer = dpx.chain(mechanism, optax.sgd(given.server_learning_rate, given.server_momentum))
    update = jax.jit(dpx.private_update(update_of_one, optimizer))
    params = model.init(dpx.keys.stream(key, "init"))
    state = optimizer.init(params)
    for batch in sampling.batches(users, key, state):
        updates, state, _ = update(params, batch, state)
        params = optax.apply_updates(params, updates)
    return params, optimizer, state
