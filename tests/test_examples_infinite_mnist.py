"""Deformed digits: an index decides its image, however it is asked for, and users' rows are read from them."""

import numpy as np
import pytest

import dpx
from examples import infinite_mnist
from examples.infinite_mnist import DeformedImages

BASE = np.zeros((3, 12, 10, 1), np.uint8)
BASE[0, 3:9, 4:6], BASE[1, 2:10, 5], BASE[2, 4:8, 2:8] = 255, 255, 255


def test_an_index_decides_its_image(monkeypatch):
    images = DeformedImages(BASE, 250_000, seed=1)
    assert images.shape == (250_000, 12, 10, 1) and len(images) == 250_000
    monkeypatch.setattr(infinite_mnist, "CHUNK", 4)
    rows = np.array([[249_999, 4], [5, 4]])
    together = images[rows]
    assert together.shape == (2, 2, 12, 10, 1) and together.dtype == np.uint8
    for place, row in np.ndenumerate(rows):
        np.testing.assert_array_equal(together[place], images[int(row)])
    np.testing.assert_array_equal(images[3:9], images[np.arange(3, 9)])
    np.testing.assert_array_equal(images[-1], images[249_999])
    np.testing.assert_array_equal(images[:3], BASE)
    assert len({image.tobytes() for image in images[:60]}) == 60
    assert not np.array_equal(images[7], DeformedImages(BASE, 250_000, seed=2)[7])


def test_images_are_small_deformations():
    images = DeformedImages(BASE, 600)
    for number in range(3):
        mean, base = images[number::3].astype(float).mean(0), BASE[number].astype(float)
        assert np.corrcoef(mean.ravel(), base.ravel())[0, 1] > 0.6
        sums = images[number::3].reshape(200, -1).sum(1) / base.sum()
        assert 0.7 < sums.mean() < 1.3 and sums.std() > 0.05  # strokes of several thicknesses


def test_no_numbers_leave_the_image():
    numbers = np.zeros((3, 2 * 120 + 7), np.float32)
    np.testing.assert_array_equal(infinite_mnist.deformed(BASE, numbers), BASE)
    shifted = np.zeros((3, 2 * 120 + 7), np.float32)
    shifted[:, -3] = 1 / infinite_mnist.SHIFT  # every place reads the row below it
    np.testing.assert_array_equal(infinite_mnist.deformed(BASE, shifted)[:, :-1], BASE[:, 1:])


def test_users_read_their_rows():
    images, labels = DeformedImages(BASE, 40), np.arange(40) % 3
    users = dpx.UserData((images, labels), np.arange(40) // 8, most=4)
    (found, own), included = users[2]
    np.testing.assert_array_equal(found, images[16:24:2])
    assert own.tolist() == labels[16:24:2].tolist() and included.all() and len(users) == 5


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="base must be uint8"):
        DeformedImages(BASE.astype(np.float32), 10)
    with pytest.raises(ValueError, match="base must be uint8"):
        DeformedImages(BASE[:0], 10)
    with pytest.raises(ValueError, match="examples must be at least 1 and seed at least 0, got 0 and 0"):
        DeformedImages(BASE, 0)
    with pytest.raises(IndexError, match=r"rows must be in \[0, 10\)"):
        DeformedImages(BASE, 10)[10]
