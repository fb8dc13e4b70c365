"""Models of other code bases, as benchmarks/zoo.py has them: their sums are right, and ghost norms follow them."""

import importlib.util

import jax
import numpy as np
import pytest

from benchmarks import zoo
from benchmarks.zoo_models import ANIMALS
from tests.ghost import clipped_sums, mechanism
from tests.problems import as_a_user


def test_there_are_thirty_models_of_ten_code_bases():
    assert len(ANIMALS) == 30 and len({animal.needs[0] for animal in ANIMALS.values()}) == 10


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ANIMALS)
def test_a_model_of_others(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for package in ANIMALS[name].needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with as_a_user():
        loss, params, rows = zoo.made_of(name, 6)
        _, norms = zoo.clipped_mean(loss, params, rows, 1.0)
        clip_norm = float(np.median(norms))
        expected, _ = zoo.clipped_mean(loss, params, rows, clip_norm)
        found = clipped_sums(loss, params, rows, "auto", made=mechanism(clip_norm))
        means = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) / 6, found.updates)
        share = zoo.followed(loss, params, rows)["followed"]
    assert zoo.distance(means, expected) < 1e-4
    np.testing.assert_allclose(found.unreleased.norms, norms, rtol=2e-3)
    assert share >= 0.95
