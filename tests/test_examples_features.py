"""Scattering features: kymatio's numbers, one example at a time, cached whole or not at all."""

import importlib
import sys
import types

import numpy as np
import pytest

from examples import data, features


@pytest.fixture
def kymatio_numpy(monkeypatch):
    """kymatio without its 3-D part, which needs a function that SciPy 1.17 no longer has."""
    for name in ("", ".frontend", ".frontend.numpy_frontend"):
        monkeypatch.setitem(sys.modules, f"kymatio.scattering3d{name}", types.ModuleType("absent"))
    for module, name in (("", "HarmonicScatteringEntry3D"), (".frontend.numpy_frontend", "HarmonicScatteringNumPy3D")):
        setattr(sys.modules[f"kymatio.scattering3d{module}"], name, type("Absent", (), {}))
    yield importlib.import_module("kymatio.numpy")
    for name in [name for name in sys.modules if name.split(".")[0] == "kymatio"]:
        del sys.modules[name]


@pytest.mark.parametrize("shape", [(28, 28), (32, 32), (8, 12)])
def test_scattering_is_kymatios(kymatio_numpy, shape):
    images = np.random.default_rng(0).random((3, *shape), dtype=np.float32)
    expected = kymatio_numpy.Scattering2D(J=2, shape=shape)(images)
    computed = features.scattering(*shape)(images)
    assert computed.shape == (3, 81, shape[0] // 4, shape[1] // 4)
    np.testing.assert_allclose(computed, expected, atol=1e-5)


def test_features_are_normalized_for_each_example_alone():
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28, 1), dtype=np.uint8)
    images[0] = 0  # a blank image must not become NaN
    together = features.compute(images, batch_size=2, progress=False)
    assert together.shape == (5, 7, 7, 81) and together.dtype == np.float16 and np.isfinite(together).all()
    alone = features.compute(images[3:4], batch_size=1, progress=False)
    np.testing.assert_allclose(together[3], alone[0], atol=2e-3)
    raw = np.asarray(features.scattering(28, 28)(data.as_float(images[..., 0]))).reshape(5, 27, 147)
    expected = (raw - raw.mean(2, keepdims=True)) / np.sqrt(raw.var(2, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.moveaxis(together, 3, 1).reshape(5, 27, 147), expected, atol=2e-3, rtol=1e-3)


def test_color_images_have_81_channels_a_color():
    images = np.random.default_rng(0).random((2, 32, 32, 3), dtype=np.float32)
    assert features.compute(images, batch_size=2, progress=False).shape == (2, 8, 8, 243)


def test_too_small_images_are_refused():
    with pytest.raises(ValueError, match="4x4"):
        features.scattering(4, 4)


def test_the_cache(tmp_path, monkeypatch):
    digits = data.load("digits")
    images = digits.test_images[:10]
    computed = features.cached(images, "digits", tmp_path, progress=False)
    (file,) = tmp_path.iterdir()

    def not_again(*args, **kwargs):
        raise AssertionError("computed again")

    with monkeypatch.context() as patched:
        patched.setattr(features, "compute", not_again)
        np.testing.assert_array_equal(features.cached(images, "digits", tmp_path), computed)
        with pytest.raises(AssertionError, match="computed again"):
            features.cached(images + np.float32(1e-3), "digits", tmp_path)
        file.write_bytes(file.read_bytes()[:-100])  # cut off
        with pytest.raises(AssertionError, match="computed again"):
            features.cached(images, "digits", tmp_path)
    np.testing.assert_array_equal(features.cached(images, "digits", tmp_path, progress=False), computed)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
