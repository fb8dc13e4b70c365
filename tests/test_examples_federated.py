"""The task of users: its split, its loss, whose gradient is the update, and the command that makes its page."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from examples import data, federated, models
from examples.config import Config
from examples.tasks import TASKS, users

TINY = (
    "--dataset digits --users 40 --pool 4 --most 8 --epochs 1 --batch-size 20 --local-steps 2 --epsilon 3 --seed 1"
).split()
MODEL = models.Model(lambda key: np.ones((4, 5), np.float32), lambda params, image: image.reshape(-1) @ params)


@pytest.mark.filterwarnings("ignore:one owner has more than a tenth")  # of 40 users, who are drawn as different ones
def test_a_run_from_the_command_line(tmp_path, capsys, undrawn):
    assert federated.main([*TINY, "--output-dir", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "The 1437 images of digits belong to 40 users, who have" in page and "unit of privacy: one user" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "%" in line]
    assert [float(row[0].strip("| ")) for row in rows] == pytest.approx([3], rel=1e-3)
    (file,) = tmp_path.glob("*/privacy_report.json")
    report = json.loads(file.read_text())
    assert report["unit"] == "one user" and report["epsilon"]["pld"] <= 3 and report["steps"] == 2
    assert "PoissonSampling(examples=40, batch_size=20" in report["sampling"]
    assert "user" in report["caveats"][0]


def test_every_run_has_a_seed_of_its_own():
    seeds = [federated.seed_of(number, seed) for number in range(3) for seed in range(3)]
    assert len(set(seeds)) == 9 and seeds == [federated.seed_of(n, s) for n in range(3) for s in range(3)]
    assert federated.seed_of(0, None) != federated.seed_of(0, None)


def test_users_have_unequal_sizes_and_tastes():
    given = users.OPTIONS | {"users": 40, "concentration": 0.2}
    labels = data.load("digits").train_labels
    owners = users.split(labels, given)
    counts = np.histogram2d(owners, labels, (40, 10))[0]
    sizes = counts.sum(axis=1)
    assert len(owners) == len(labels) and sizes[:5].mean() > 3 * sizes[-20:].mean()
    assert np.mean(counts.max(axis=1) / sizes) > 0.4  # the most frequent label; 0.1 without tastes
    np.testing.assert_array_equal(owners, users.split(labels, given))


def user(included: int):
    rng = np.random.default_rng(0)
    return (rng.random((5, 2, 2, 1), np.float32), np.arange(5, dtype=np.int32)), np.arange(5) < included


def test_the_loss_does_not_see_padding():
    params = MODEL.init(jax.random.key(0))
    (images, labels), _ = user(3)
    alone = (images[:3], labels[:3]), np.ones(3, bool)
    found, expected = (federated_mean(params, one) for one in (user(3), alone))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def federated_mean(params, one):
    return users.mean_loss(params, one, MODEL)


def test_its_gradient_is_the_update_and_its_value_the_loss():
    params = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    value, update = jax.value_and_grad(users.federated_loss(MODEL, steps=3, learning_rate=0.5))(params, user(3))
    moved = params
    for _ in range(3):
        moved = moved - 0.5 * jax.grad(federated_mean)(moved, user(3))
    np.testing.assert_allclose(update, params - moved, rtol=1e-5, atol=1e-7)
    assert float(value) == pytest.approx(float(federated_mean(params, user(3))), rel=1e-5)


def test_the_mechanism_bounds_the_whole_update_of_a_user():
    """One user of ten times the data and local steps moves the sum by no more than the clip norm."""
    sampling = dpx.FullBatch(examples=1)
    mechanism = dpx.dp_sgd(clip_norm=0.01, noise_multiplier=0.0, sampling=sampling, key=jax.random.key(0))
    step = dpx.private_updates(users.federated_loss(MODEL, steps=9, learning_rate=5.0), mechanism)
    params = jnp.zeros((4, 5))
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], user(5))
    updates, _, _ = jax.jit(step)(params, dpx.Batch(one, None), mechanism.init(params))
    assert float(jnp.linalg.norm(updates)) == pytest.approx(0.01, rel=1e-4)


def test_deformed_images_are_kept_and_owned(tmp_path):
    options = {"users": 30, "deformed": 300, "pool": 4, "most": 8, "size_power": 0.0}
    config = Config(
        dataset="random:28x28x1x10", task="users", task_options=options, model="linear", epsilon=1.0, seed=0
    )
    first, again = (TASKS["users"].build(config, None, tmp_path, False) for _ in range(2))
    assert first.examples == 30 and len(list(tmp_path.iterdir())) == 1 and first.fingerprint == again.fingerprint
    (images, labels), included = again.train[0]
    assert images.shape == (8, 7, 7, 1) and images.dtype == np.uint8 and included.any() and labels.shape == (8,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"users": 0}, "users must be a whole number of at least 1, got 0"),
        ({"local_steps": 2.5}, "local_steps must be a whole number of at least 1, got 2.5"),
        ({"concentration": 0.0}, "concentration must be a finite number of at least 1e-09"),
        ({"deformed": -1}, "deformed must be a whole number of at least 0"),
        ({"pool": 3}, r"pool must divide the images' height and width \(8, 8\), got 3"),
        ({"mostly": 3}, "task 'users' has no option mostly; its options: users,"),
    ],
)
def test_misuse_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        config = Config(dataset="digits", task="users", task_options=change, epsilon=1.0, seed=0)
        TASKS["users"].build(config, None, "unused", False)
