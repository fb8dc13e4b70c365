"""Federated averaging with user-level privacy, on real digits that are split among users of unequal size and taste.

At every step, each user takes part with the same probability, makes some local steps of gradient descent on their own
images, and sends the change of the model. A change is clipped to a norm that adapts, and the noisy mean moves the
model: McMahan et al. 2018 (https://arxiv.org/abs/1710.06963), Andrew et al. 2021 (https://arxiv.org/abs/1905.03871).
Epsilon protects all images of one user together.

`python -m examples.federated --epsilon 2 4 8 1000 --seed 0 1 2 > benchmarks/results/federated.md` writes that page. The
seeds are public there, because the data are public.
"""

import argparse
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from examples import data, models

Tree = Any
HEAD = """# Federated averaging

`python -m examples.federated {words}`, {date}.

The {images} images of {name} belong to {users} users, who have {least} to {largest} of them (median {median:g}); at
most {most} of each take part. Every run is billed as if it were the only one. The default settings were chosen by
sixteen trials with two other seeds, on the same test images.

| epsilon of one user | noise multiplier | test accuracy, mean (each seed) |
|---|---|---|"""


def small(images: np.ndarray, pool: int) -> np.ndarray:
    """The means of windows of `pool` x `pool` pixels, float32 in [0, 1]."""
    count, height, width, channels = images.shape
    windows = data.as_float(images).reshape(count, height // pool, pool, width // pool, pool, channels)
    return windows.mean(axis=(2, 4))


def split(labels: np.ndarray, given: argparse.Namespace) -> np.ndarray:
    """The owner of each image, int (N,), in [0, users): sizes by a power law, and every user prefers some labels.

    An image goes to a user with a probability that is proportional to the user's size and taste for its label. A user
    who gets no image takes no part. The split is made up, so its seed is fixed and public.
    """
    rng = np.random.default_rng(0)
    sizes = np.arange(1, given.users + 1) ** -given.size_power
    tastes = sizes[:, None] * rng.dirichlet(np.full(labels.max() + 1, given.concentration), given.users)
    chances = tastes / tastes.sum(axis=0)  # (users, labels): each label's sum is 1
    return np.array([rng.choice(given.users, p=chances[:, label]) for label in labels])


def mean_loss(params: Tree, user: Tree, model: models.Model) -> jax.Array:
    """Over the images of one user, without padding."""
    (images, labels), included = user
    logits = jax.vmap(model.apply, (None, 0))(params, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses, where=included) / jnp.sum(included, dtype=jnp.float32)


def train(users: dpx.UserData, model: models.Model, given: argparse.Namespace, epsilon: float, key: jax.Array):
    """The trained parameters, the optimizer and its state."""

    def update_of_one(params, user):
        def local_step(moved, _):
            grads = jax.grad(mean_loss)(moved, user, model)
            return jax.tree.map(lambda p, g: p - given.local_learning_rate * g, moved, grads), None

        moved, _ = jax.lax.scan(local_step, params, length=given.local_steps)
        return jax.tree.map(jnp.subtract, params, moved)

    sampling = dpx.PoissonSampling(examples=len(users), batch_size=given.batch_size)
    mechanism = dpx.mechanisms.adaptive_clipping(
        initial_clip_norm=given.clip_norm,
        quantile=given.quantile,
        indicator_noise=given.batch_size / 20,
        noise_multiplier=dpx.Budget(epsilon=epsilon, delta=given.delta, steps=given.steps),
        sampling=sampling,
        key=key,
    )
    optimizer = dpx.chain(mechanism, optax.sgd(given.learning_rate, given.momentum))
    update = jax.jit(dpx.private_update(update_of_one, optimizer))
    params = model.init(dpx.keys.stream(key, "init"))
    state = optimizer.init(params)
    for batch in sampling.batches(users, key, state):
        updates, state, _ = update(params, batch, state)
        params = optax.apply_updates(params, updates)
    return params, optimizer, state


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m examples.federated",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--dataset", default="mnist5k", help="a name that examples.train knows")
    add("--epsilon", type=float, nargs="+", default=[4.0], help="user-level budgets, one run each")
    add("--delta", type=float, default=1e-5)
    add("--seed", type=int, nargs="+", help="secret; drawn by the system if not given")
    add("--users", type=int, default=700)
    add("--size-power", type=float, default=0.5, help="the size of user i is proportional to i^-power")
    add("--concentration", type=float, default=0.5, help="of the Dirichlet distribution of a user's labels")
    add("--most", type=int, default=16, help="images of a user that take part")
    add("--pool", type=int, default=2, help="images are made smaller by this factor")
    add("--model", default="linear", choices=models.MODELS)
    add("--steps", type=int, default=40)
    add("--batch-size", type=float, default=150, help="expected number of users of a step")
    add("--clip-norm", type=float, default=0.5, help="at the first step")
    add("--quantile", type=float, default=0.5, help="the share of users whose update is not clipped")
    add("--local-steps", type=int, default=5)
    add("--local-learning-rate", type=float, default=0.5)
    add("--learning-rate", type=float, default=0.5, help="of the server")
    add("--momentum", type=float, default=0.9, help="of the server")
    add("--output-dir", type=Path, default=Path("runs/federated"), help="for the privacy reports")
    return made


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    given = parser().parse_args(words)
    dataset = data.load(given.dataset)
    images, test_images = (small(part, given.pool) for part in (dataset.train_images, dataset.test_images))
    owners = split(dataset.train_labels, given)
    users = dpx.UserData((images, dataset.train_labels), owners, most=given.most)
    model = models.build(given.model, input_shape=images.shape[1:], classes=dataset.classes)
    counts = np.unique(owners, return_counts=True)[1]
    sizes = dict(least=min(counts), median=np.median(counts), largest=max(counts), most=users.most)
    said = dict(words=" ".join(words), date=time.strftime("%Y-%m-%d"), name=given.dataset)
    print(HEAD.format(images=len(images), users=len(users), **sizes, **said), flush=True)
    for run, epsilon in enumerate(given.epsilon):
        accuracies = []
        for seed in given.seed or [secrets.randbits(64)]:
            key = jax.random.fold_in(dpx.secret_key(seed), run)  # because two runs with one key would share their noise
            params, optimizer, state = train(users, model, given, epsilon, key)
            logits = jax.vmap(model.apply, (None, 0))(params, jnp.asarray(test_images))
            accuracies.append(np.mean(np.asarray(logits).argmax(axis=1) == dataset.test_labels))
        report = dpx.privacy_report(optimizer, state, delta=given.delta, unit="user")
        report.write(given.output_dir, name=f"privacy_report_{epsilon:g}")
        each, spent = ", ".join(f"{accuracy:.1%}" for accuracy in accuracies), report.epsilon["pld"]
        print(
            f"| {spent:.4f} | {optimizer.noise_multiplier:.4f} | **{np.mean(accuracies):.1%}** ({each}) |", flush=True
        )
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    print(
        f"\nDelta {given.delta:g}, unit of privacy: {report.unit}, {report.relation}, {report.steps} steps. {versions}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
