"""The example of federated averaging: its split, its loss without padding, and a run from the command line."""

import json

import jax
import numpy as np
import pytest

from examples import data, federated, models

TINY = (
    "--dataset digits --users 40 --pool 4 --most 8 --steps 2 --batch-size 20 --local-steps 2 --epsilon 3 6 --seed 1"
).split()


def test_a_run_from_the_command_line(tmp_path, capsys):
    assert federated.main([*TINY, "--output-dir", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "The 1437 images of digits belong to 40 users, who have" in page and "unit of privacy: one user" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "%" in line]
    assert [float(row[0].strip("| ")) for row in rows] == pytest.approx([3, 6], rel=1e-3)
    report = json.loads((tmp_path / "privacy_report_6.json").read_text())
    assert report["unit"] == "one user" and report["epsilon"]["pld"] <= 6 and report["steps"] == 2
    assert "PoissonSampling(examples=40, batch_size=20" in report["sampling"]
    assert "user" in report["caveats"][0]


def test_users_have_unequal_sizes_and_tastes():
    given = federated.parser().parse_args(["--users", "40", "--concentration", "0.2"])
    labels = data.load("digits").train_labels
    owners = federated.split(labels, given)
    counts = np.histogram2d(owners, labels, (40, 10))[0]
    sizes = counts.sum(axis=1)
    assert len(owners) == len(labels) and sizes[:5].mean() > 3 * sizes[-20:].mean()
    assert np.mean(counts.max(axis=1) / sizes) > 0.4  # the most frequent label; 0.1 without tastes
    np.testing.assert_array_equal(owners, federated.split(labels, given))


def test_the_loss_does_not_see_padding():
    model = models.Model(lambda key: np.ones((4, 5), np.float32), lambda params, image: image.reshape(-1) @ params)
    params = model.init(jax.random.key(0))
    images, labels = np.random.default_rng(0).random((5, 2, 2, 1), np.float32), np.arange(5, dtype=np.int32)
    user = (images, labels), np.arange(5) < 3
    alone = (images[:3], labels[:3]), np.ones(3, bool)
    found, expected = (federated.mean_loss(params, one, model) for one in (user, alone))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
