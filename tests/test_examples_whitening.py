"""The whitened features: functions of one image and of public images, and nothing else."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from examples import data, frontier, patches, runs, train, whitening
from examples.random_images import random_images


@pytest.fixture
def few(monkeypatch):
    """Small numbers of public images and filters, so that the tests are fast."""
    monkeypatch.setattr(whitening, "RANDOM_COUNT", 60)
    for name, value in {"FILTERS": 8, "COMPONENTS": 12, "SAMPLE": 300}.items():
        monkeypatch.setattr(patches, name, value)


def test_random_images_are_a_function_of_the_seed():
    images = random_images(6, 9, 12, 3, seed=1)
    assert images.shape == (6, 9, 12, 3) and images.dtype == np.uint8
    np.testing.assert_array_equal(images, random_images(6, 9, 12, 3, seed=1))
    assert (images != random_images(6, 9, 12, 3, seed=2)).mean() > 0.2
    assert len(np.unique(images)) > 100 and (images[3:] == 0).mean() > 0.3  # objects on black
    with pytest.raises(ValueError, match="at least 1"):
        random_images(0, 9, 9)


def test_whitening_makes_public_features_uncorrelated():
    rng = np.random.default_rng(0)
    public = rng.normal(size=(4000, 5)) @ rng.normal(size=(5, 5)) + 3
    found = whitening.whitening_of(public)
    white = (public - found.mean) @ found.matrix
    covariance = np.cov(public.T, bias=True)
    ridged = covariance + whitening.RIDGE * np.trace(covariance) / 5 * np.eye(5)
    np.testing.assert_allclose(found.matrix @ found.matrix.T, np.linalg.inv(ridged), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-3)
    scaled = found(np.vstack([public[:3], found.mean])).reshape(4, 5)
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), np.sqrt([5, 5, 5, 0]), rtol=2e-3)


def test_patch_features_are_means_of_positive_similarities(few):
    public = np.abs(np.random.default_rng(0).normal(size=(40, 5, 5, 3))).astype(np.float32)
    made = patches.patches_of(public)
    planes = public[:2]
    computed = np.asarray(jax.jit(lambda planes: made(planes))(planes)).reshape(2, 3, 3, 8)
    for cell, rows in ((0, slice(0, 1)), (2, slice(2, 4))):  # four positions a side in three cells: 1, 1 and 2
        found = []
        for y in range(4)[rows]:
            window = np.concatenate([planes[1, y + down, right] for down in range(2) for right in range(2)])
            white = (window - made.mean) @ made.whiten
            found.append(np.maximum(white / np.linalg.norm(white) @ made.filters, 0))
        np.testing.assert_allclose(computed[1, cell, 0], np.mean(found, 0), atol=1e-5)


def test_views_are_moved_and_mirrored():
    image = jax.numpy.arange(1, 13).reshape(1, 3, 4, 1)
    same, moved, mirror, both = whitening.views_of(image, ((0, 0), (2, 1)), mirrored=True)[:, 0, :, :, 0]
    np.testing.assert_array_equal(same, image[0, :, :, 0])
    np.testing.assert_array_equal(moved, [[10, 11, 12, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mirror, same[:, ::-1])
    np.testing.assert_array_equal(both[0], [11, 10, 9, 0])
    assert len(whitening.views_of(image, whitening.SHIFTS, mirrored=False)) == 2


def test_a_description_is_the_mean_of_the_views(few):
    public = random_images(20, 16, 16)
    views = whitening.views_of(public[:3], whitening.SHIFTS, mirrored=True)
    alone = whitening.description(public, mirrored=False, shifts=[(0, 0)], progress=False)
    together = whitening.description(public, mirrored=True, progress=False)(public[:3])
    assert together.dtype == np.float16
    np.testing.assert_allclose(np.mean([alone(np.asarray(view)) for view in views], 0), together, atol=2e-3)


def test_features_of_an_image_depend_on_no_other_private_image(few, tmp_path):
    digits = data.load("digits")
    found, again = (
        whitening.with_whitening(
            dataclasses.replace(digits, train_images=digits.train_images[rows], train_labels=digits.train_labels[rows]),
            whitening.RANDOM,
            tmp_path,
            progress=False,
        )
        for rows in (range(6), [0, 7, 8, 9])
    )
    assert found.train_images.dtype == np.float16 and found.train_images.shape == (6, 1, 1, 8)
    np.testing.assert_allclose(found.train_images[0], again.train_images[0], atol=4e-3)
    assert not np.allclose(found.train_images[1], again.train_images[1], atol=2e-2)


def test_the_same_handwriting_is_not_public():
    for name in ("mnist5k", "mnist:3.0.1", "emnist/letters", "mnist_corrupted/identity"):
        with pytest.raises(ValueError, match="other people"):
            whitening.public_images("random_images+mnist5k", dataclasses.replace(data.load("digits"), name=name))
    with pytest.raises(ValueError, match="must not be private ones, but 4000 of 4000 of mnist5k are in mine"):
        whitening.public_images("random_images+mnist5k", dataclasses.replace(data.load("mnist5k"), name="mine"))
    with pytest.raises(ValueError, match="whitening must be one of"):
        whitening.public_images("fashion_mnist", data.load("digits"))


@pytest.mark.long
def test_the_recipe_can_be_changed(few, tmp_path, capsys, undrawn):
    words = ["--dataset", "digits", "--recipe", "best", "--epochs", "0.5", "--quiet", "--cache-dir", str(tmp_path)]
    assert train.main([*words]) == 2 and "--recipe needs --epsilon" in capsys.readouterr().err
    folder = tmp_path / "run"
    assert train.main([*words, "--epsilon", "3", "--seed", "1", "--output-dir", str(folder)]) == 0
    stored = json.loads((folder / "result.json").read_text())["config"]
    assert stored["epochs"] == 0.5 and stored["features"] == "whitened" and stored["learning_rate"] == 1.46
    assert stored["batch_size"] == round(1437 * 8192 / 60000) and stored["model"] == "linear_from_zero"


def test_the_table_of_the_frontier(tmp_path):
    rows = frontier.rows_of(["digits"])
    made = runs.Runs(tmp_path)
    assert frontier.table(made, rows) == ""
    for seed, accuracy in enumerate((0.5, 0.6)):
        folder = made.folder_of(frontier.name_of(rows[2], seed))
        folder.mkdir()
        result = {"accuracy": accuracy, "epsilon": 1.9999, "noise_multiplier": 3.0, "steps": 9, "seconds": 2.0}
        (folder / "result.json").write_text(json.dumps({"result": result, "versions": {"dpx": "0"}}))
    text = frontier.table(made, rows)
    assert "| **55.00** (50.00, 60.00) | 1.9999 | 3.0000 | 9 | 2 | 89.34 DPSUR (b)" in text
    assert "--learning-rate 20.89 " in text and "--features whitened" in text
