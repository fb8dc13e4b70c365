"""The trainer: within its budget, resumable to the bit, and nothing written on bad input."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import dpx
from dpx import catalog, keys
from dpx.sums.total import ETA
from examples import data, fashion_mnist, loop, methods, records, runs, train
from examples.config import Config
from examples.methods import METHODS
from examples.papers import experiments
from examples.tasks import images

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = dict(
    dataset="digits", seed=3, model="linear", noise_multiplier=2.0, batch_size=100, learning_rate=1.0, clip_norm=0.5
)

pytestmark = pytest.mark.usefixtures("undrawn")  # but the plot of the run that all tests share (`whole`) is drawn


def run(folder, *, resume=False, **changes):
    settings: dict[str, Any] = SMALL | {"epochs": 2.0, "momentum": 0.9} | changes
    config = Config(**settings)
    return loop.run(config, output_dir=folder, resume=resume, checkpoint_every=10, evaluate_every=4, progress=False)


def final(folder):
    """Everything in the last checkpoint of a run, as arrays, and the metrics."""
    step, tree = checkpoint(folder)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return step, leaves, records.RunFolder(folder, resume=True).metrics()


def checkpoint(folder):
    """The last checkpoint of a run: its step, parameters and optimizer state."""
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        return manager.latest_step(), manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())


def assert_same_run(folder, other):
    step, leaves, metrics = final(folder)
    other_step, other_leaves, other_metrics = final(other)
    assert step == other_step and metrics == other_metrics
    assert len(leaves) == len(other_leaves)
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        np.testing.assert_array_equal(leaf, other_leaf)


def cut_at(step, monkeypatch):
    """Make the run stop with an error when it draws the batch of this step."""
    draw = dpx.PoissonSampling.draw

    def cut(self, key, at, **options):
        if at == step:
            raise KeyboardInterrupt
        return draw(self, key, at, **options)

    monkeypatch.setattr(dpx.PoissonSampling, "draw", cut)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    folder.chmod(0o755)
    return folder, run(folder)


def test_a_run_writes_its_files(whole):
    folder, result = whole
    assert result.steps == 29 and result.parameters == 650 and 0.5 < result.accuracy <= 1
    mechanism = dpx.dp_sgd(
        clip_norm=0.5,
        noise_multiplier=2.0,
        sampling=dpx.PoissonSampling(examples=1437, batch_size=100),
        key=jax.random.key(0),
    )
    assert result.epsilon == pytest.approx(dpx.epsilon(mechanism, 29, delta=1e-5), rel=1e-4)
    names = {"config.json", "checkpoints", "metrics.jsonl", "accuracy_and_epsilon.png", "result.json"}
    assert {path.name for path in folder.iterdir()} == names | {"privacy_report.json", "privacy_report.md"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 24, 28, 29]
    assert rows[-1]["epsilon"] == result.epsilon and rows[-1]["test_accuracy"] == result.accuracy
    assert (folder / "accuracy_and_epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "privacy_report.json").read_text())["steps"] == 29


def test_only_the_owner_can_read_the_seed_and_the_checkpoints(whole):
    folder = whole[0]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.json")} == {0o600}


def by_hand(config: Config, steps: int):
    """DP-SGD with momentum on the digits, written out: only the drawn rows are ever looked at."""
    dataset, key = data.load("digits"), config.key
    sampling = dpx.PoissonSampling(examples=1437, batch_size=100)
    model = images.model_of(config, dataset)
    params = model.init(keys.stream(key, "init"))
    velocity = jax.tree.map(np.zeros_like, params)

    def loss(params, image, label):
        return -jax.nn.log_softmax(model.apply(params, image))[label]

    gradient = jax.jit(jax.grad(loss))
    for step in range(steps):
        indices, included = sampling.draw(keys.stream(key, "batches"), step)
        assert not included.all()  # there is padding that could be counted
        total = jax.tree.map(np.zeros_like, params)
        for row in indices[included]:
            grad = gradient(params, data.as_float(dataset.train_images[row]), dataset.train_labels[row])
            size = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grad)))
            total = jax.tree.map(lambda t, g, size=size: t + g * min(1, 0.5 / size), total, grad)
        noise = keys.normal_like(keys.stream(keys.stream(key, "mechanism"), "noise"), step, params)
        released = jax.tree.map(lambda t, n: (t + 2.0 * 0.5 * (1 + ETA) * n) / 100, total, noise)
        velocity = jax.tree.map(lambda v, r: 0.9 * v + r, velocity, released)
        params = jax.tree.map(lambda p, v: p - 1.0 * v, params, velocity)
    return params


def test_the_trainer_is_dp_sgd(tmp_path, ungridded):
    """Three steps against a loop by hand, whose clipping, inclusion and divisor are its own."""
    assert run(tmp_path, epochs=0.2).steps == 3
    config = Config(**SMALL, epochs=0.2, momentum=0.9)
    step, tree = checkpoint(tmp_path)
    stored = tree["params"]
    assert step == 3
    expected = by_hand(config, 3)
    moved = jax.tree.map(lambda e, i: np.abs(e - i).max(), expected, by_hand(config, 0))
    assert min(jax.tree.leaves(moved)) > 1e-2
    for leaf, other in zip(jax.tree.leaves(stored), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)


def test_what_is_not_private_is_marked_and_not_in_files_to_share(whole):
    folder, _ = whole
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all([name for name in row if "loss" in name] == ["unreleased_training_loss"] for row in rows)
    assert "seed" not in json.loads((folder / "result.json").read_text())["config"]
    for name in ("privacy_report.json", "result.json"):
        text = (folder / name).read_text()
        assert "training_loss" not in text and '"seed"' not in text


@pytest.mark.parametrize("cut", [7, 26])
@pytest.mark.long_cases("26")
def test_a_resumed_run_is_the_uncut_run_bit_for_bit(whole, tmp_path, monkeypatch, cut):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        cut_at(cut, patched)
        run(tmp_path / "cut")
    result = run(tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "cut", whole[0])
    assert (result.accuracy, result.epsilon, result.steps) == (whole[1].accuracy, whole[1].epsilon, whole[1].steps)


@pytest.mark.long
def test_adam_resumes_bit_for_bit(tmp_path, monkeypatch, promoting):
    changes: dict[str, Any] = dict(optimizer="adam", momentum=0.0, learning_rate=0.01, epochs=1.0)
    run(tmp_path / "whole", **changes)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        cut_at(12, patched)
        run(tmp_path / "cut", **changes)
    run(tmp_path / "cut", resume=True, **changes)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.long
def test_a_killed_process_loses_at_most_the_steps_since_the_last_checkpoint(whole, tmp_path):
    program = f"""
import os, signal, dpx, jax
jax.config.update("jax_numpy_dtype_promotion", "strict")
from examples import loop
from examples.config import Config
draw = dpx.PoissonSampling.draw
def draw_or_die(self, key, step, **options):
    if step == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self, key, step, **options)
dpx.PoissonSampling.draw = draw_or_die
config = Config(epochs=2.0, momentum=0.9, **{SMALL!r})
loop.run(config, output_dir={str(tmp_path / "killed")!r}, checkpoint_every=10, evaluate_every=4, progress=False)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == -9
    step, _, metrics = final(tmp_path / "killed")
    assert step == 10 and metrics[-1]["step"] in (12, 16)  # the batch of step 17 is drawn ahead
    drawn = []
    with pytest.MonkeyPatch.context() as patched:
        draw = dpx.PoissonSampling.draw
        patched.setattr(
            dpx.PoissonSampling,
            "draw",
            lambda self, key, at, **options: drawn.append(at) or draw(self, key, at, **options),
        )
        run(tmp_path / "killed", resume=True)
    assert drawn == list(range(10, 29))
    assert_same_run(tmp_path / "killed", whole[0])


def test_resuming_a_finished_run_changes_nothing(whole):
    before = final(whole[0])
    assert run(whole[0], resume=True).epsilon == whole[1].epsilon
    after = final(whole[0])
    assert before[0] == after[0] and before[2] == after[2]


def test_resuming_with_other_settings_is_refused_and_loses_nothing(whole, monkeypatch):
    folder, _ = whole
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    versions = records.versions()
    with pytest.raises(ValueError, match="another config: clip_norm was 0.5, now 0.6, seed was 3, now 4"):
        run(folder, resume=True, seed=4, clip_norm=0.6)
    with pytest.raises(ValueError, match="is not empty; continue its run with --resume"):
        run(folder)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="another versions: jax was"):
        patched.setattr(records, "versions", lambda: versions | {"jax": "0.0.1"})
        run(folder, resume=True)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="another data: sha256 was"):
        patched.setattr(images, "fingerprint", lambda *arrays: "other")
        run(folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_with_noise_and_epsilon_it_stops_before_overspending(tmp_path):
    result = run(tmp_path / "run", epsilon=0.6)
    mechanism = dpx.dp_sgd(
        clip_norm=0.5,
        noise_multiplier=2.0,
        sampling=dpx.PoissonSampling(examples=1437, batch_size=100),
        key=jax.random.key(0),
    )
    assert 1 < result.steps < 29
    assert (
        dpx.epsilon(mechanism, result.steps, delta=1e-5) <= 0.6 < dpx.epsilon(mechanism, result.steps + 1, delta=1e-5)
    )
    assert final(tmp_path / "run")[0] == result.steps


def test_epsilon_alone_finds_the_noise(tmp_path):
    result = run(tmp_path, noise_multiplier=None, epsilon=2.0, epochs=0.3)
    assert 1.99 < result.epsilon <= 2.0 and result.steps == 4


@pytest.mark.parametrize(
    ("sampling", "batch_size", "steps"),
    [
        ("shuffled", 500, 6),
        ("fixed", 500, 6),
        ("full", None, 2),
        ("allocated", 480, 6),
        ("cyclic", 500, 6),
        ("ordered", 500, 6),
    ],
)
@pytest.mark.long_cases("allocated", "cyclic", "fixed", "full", "ordered", "shuffled")
def test_other_samplings(tmp_path, sampling, batch_size, steps):
    result = run(tmp_path, sampling=sampling, batch_size=batch_size)
    assert result.steps == steps and 0 < result.epsilon < 100


def test_all_bits_of_the_seed_count():
    for seed in (5, 5 + 2**32, 2**64 - 1):
        assert Config(**(SMALL | {"seed": seed})).key == dpx.secret_key(seed)


@pytest.mark.long
def test_another_seed_is_another_run(whole, tmp_path):
    run(tmp_path, seed=4)
    assert not np.array_equal(final(tmp_path)[1][-1], final(whole[0])[1][-1])


BAD = [
    ("--epsilon 2 --clip-norm -1", "clip_norm must be positive and finite, got -1.0"),
    ("--epsilon 2 --clip-norm nan", "clip_norm must be positive and finite, got nan"),
    ("--epsilon 2 --batch-size 0", "batch_size must be at least 1, got 0"),
    ("--epsilon 2 --batch-size 1438", "batch_size must be at most the 1437 training examples, got 1438"),
    ("--epsilon 2 --microbatch-size 0", "microbatch_size must be at least 1, got 0"),
    ("--epsilon 2 --delta 1", "delta must be in (0, 1), got 1.0"),
    ("--epsilon 2 --delta 0", "delta must be in (0, 1), got 0.0"),
    ("--epsilon -2", "epsilon must be positive and finite, got -2.0"),
    ("--noise-multiplier 0", "noise_multiplier must be positive and finite, got 0.0"),
    ("--epochs 3", "epsilon or noise_multiplier must be given"),
    ("--epsilon 2 --epochs 0", "epochs must be positive and finite, got 0.0"),
    ("--epsilon 2 --learning-rate inf", "learning_rate must be positive and finite, got inf"),
    ("--epsilon 2 --momentum 1", "momentum must be in [0, 1), got 1.0"),
    ("--epsilon 2 --per-layer true --method d2p_sgd", "per_layer is an option of dp_sgd, got it with d2p_sgd"),
    ("--epsilon 2 --momentum 0.9 --optimizer adam", "momentum is an option of sgd, got it with adam"),
    ("--epsilon 2 --sampling full --batch-size 5", "batch_size must not be given with sampling full, got 5"),
    ("--epsilon 0.001 --noise-multiplier 1", "does not pay for one step at noise_multiplier 1.0"),
    ("--epsilon 2 --dataset mine.npz", "in NAME.npz (here features:mine), and"),
    ("--epsilon 2 --dataset nosuch", "unknown data set 'nosuch'; known: digits"),
    ("--epsilon 2 --model adadpigu_cnn", "too small for the model 'adadpigu_cnn'"),
    ("--epsilon 2 --seed -1", "seed must be in [0, 2^128), got -1"),
    ("--epsilon 2 --checkpoint-every 0", "checkpoint_every must be at least 1, got 0"),
    ("--epsilon 2 --data-dir /nonexistent", "data_dir must be a directory, got '/nonexistent'"),
    ("--resume", "nothing to resume"),
    ("--resume --recipe best", "--recipe must not be given with --resume"),
    ("--epsilon 2 --recipe best --task text", "--recipe must be given with --task images, got text"),
    (
        "--epsilon 2 --method gep_sgd --public digits",
        "public must be a data set of other people than the private digits, got digits",
    ),
    ("--epsilon 2 --dataset mnist5k --method gep_sgd --public emnist/letters", "people than the private mnist5k"),
    ("--epsilon 2 --method gep_sgd --public nosuch", "unknown data set 'nosuch'"),
    ("--epsilon 2 --method gep_sgd --public-examples 0", "public_examples must be in [1, 4000] for mnist5k, got 0"),
    ("--epsilon 2 --method gep_sgd --public-rank 651", "rank must be a whole number in [1, 500]"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[arguments for arguments, _ in BAD])
@pytest.mark.long_cases("--epsilon 2 --method gep_sgd --public-rank 651")
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, capsys, arguments, said):
    folder = tmp_path / "run"
    dataset = [] if "--dataset" in arguments or "--resume" in arguments else ["--dataset", "digits"]
    assert train.main([*dataset, *arguments.split(), "--output-dir", str(folder), "--quiet"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]
    assert not folder.exists()


def test_public_images_are_not_the_private_ones_under_another_name(monkeypatch, tmp_path):
    digits = data.load("digits")
    monkeypatch.setattr(data, "load", lambda *_: digits)
    with pytest.raises(ValueError, match="public images must not be private ones, but 500 of 500 of mnist5k"):
        run(tmp_path, noise_multiplier=None, epsilon=2.0, method="gep_sgd")


@pytest.mark.parametrize("arguments", ["--sampling sometimes", "--batch-size many", "--model resnet"])
def test_words_that_are_no_values_are_refused(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        train.main(["--dataset", "digits", "--epsilon", "2", *arguments.split()])
    assert "Traceback" not in capsys.readouterr().err


def test_the_command_line_end_to_end_and_its_resumption(tmp_path, capsys):
    folder = ["--output-dir", str(tmp_path / "run"), "--quiet"]
    words = "--dataset digits --noise-multiplier 4 --epochs 1 --model linear".split()
    assert train.main([*words, *folder]) == 0
    said = capsys.readouterr().out
    assert "test accuracy" in said and "at delta 1e-05, 6 steps" in said and str(tmp_path / "run") in said
    assert train.main(["--resume", *folder]) == 0  # the seed was drawn by the system and is taken from the run
    assert capsys.readouterr().out.split(";")[0].split(" in ")[0] == said.split(";")[0].split(" in ")[0]
    assert train.main(["--resume", "--epochs", "2", *folder]) == 2
    assert "epochs was 1.0, now 2.0" in capsys.readouterr().err


SMOKED = {  # these train in tests/test_examples_papers.py, two of them every night
    experiment.config(row, row.grid[0], 0, experiment.smoke, epsilon=1.0).method
    for experiment in experiments().values()
    for row in (experiment.smoked,)
}


@pytest.mark.parametrize("method", sorted(set(METHODS) - SMOKED | {"ada_dpigu", "d2p2_sgd"}))
@pytest.mark.long_cases("d2p_sgd", "dp2_sgd")
def test_every_method_trains(tmp_path, method):
    samplings = METHODS[method].samplings
    result = run(tmp_path, method=method, epochs=0.5, **({"sampling": samplings[0]} if samplings else {}))
    assert result.steps == 7 and 0 < result.epsilon < 100


def test_every_option_has_a_default_and_an_explanation():
    for method in METHODS:
        for name, option in methods.options(method).items():
            assert option.default is not inspect.Parameter.empty, (method, name)
            assert option.help, (method, name)


def test_options_are_those_of_the_builder():
    assert set(methods.options("dynamic_dp_sgd")) == {"rho_mu", "rho_c", "every"}
    assert methods.options("dynamic_dp_sgd")["every"].default == 1
    assert methods.options("dp2_sgd")["kind"].help == "one of gaussian, orthonormal, subset, countsketch, hadamard"
    assert methods.options("random_freeze_sgd")["every"].help.endswith("an epoch in the paper")  # of the coordinates


@pytest.mark.parametrize(
    ("word", "value"),
    [(0.5, 0.5), ("3", 3), ("0.25", 0.25), ("1e-3", 1e-3), ("inf", float("inf")), ("none", None), ("True", True)]
    + [("epoch", 20), ("10%", 30), ("0.1%", 1), ("countsketch", "countsketch")],
)
def test_words_of_options(word, value):
    assert methods.read(word, 300, 20) == value


def test_a_word_may_be_a_schedule():
    assert [float(methods.read("0.2..0.8", 300, 20)(step)) for step in (0, 150, 300, 400)] == pytest.approx(
        [0.2, 0.5, 0.8, 0.8]
    )
    cooled = methods.read("0..0.9@20%", 300, 20)
    assert [float(cooled(step)) for step in (0, 30, 60, 300)] == pytest.approx([0, 0.45, 0.9, 0.9])


@pytest.mark.parametrize("word", ["0..x", "1,5", "ten%", "2 epochs", ""])
def test_words_that_mean_nothing_are_refused(word):
    with pytest.raises(ValueError, match="an option must be a number, a name, FIRST..LAST, SHARE% or epoch, got"):
        methods.read(word, 300, 20)


@pytest.mark.long
def test_a_method_joins_with_its_own_options(tmp_path, monkeypatch, capsys):
    def noisier(*, factor: float = 1.0, clip_norm: float, noise_multiplier: float, sampling, steps: int, key):
        """DP-SGD with too much noise. factor: times the noise."""
        assert steps == 1
        return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=factor * noise_multiplier, sampling=sampling, key=key)

    monkeypatch.setitem(METHODS, "noisier", catalog.Entry(noisier))
    assert methods.options("noisier") == {"factor": methods.Option(1.0, "times the noise")}
    words = "--dataset digits --noise-multiplier 1 --epochs 0.1 --model linear --quiet --seed 1".split()
    epsilons = []
    for number, method in enumerate(["dp_sgd", "noisier", "noisier --factor 2"]):
        folder = tmp_path / str(number)
        assert train.main([*words, "--output-dir", str(folder), "--method", *method.split()]) == 0
        epsilons.append(json.loads((folder / "result.json").read_text())["result"]["epsilon"])
    assert epsilons[0] == epsilons[1] > 1.5 * epsilons[2]
    assert train.main([*words, "--factor", "2", "--output-dir", str(tmp_path / "refused")]) == 2
    assert "method 'dp_sgd' has no option factor; its options: none" in capsys.readouterr().err


def test_the_fashion_mnist_commands_and_table(tmp_path):
    for setting in fashion_mnist.SETTINGS:
        config = fashion_mnist.config_of(setting, 1)
        words = train.command(config).split()
        assert words[:3] == ["python", "-m", "examples.train"]
        assert train.configure(vars(train.parser().parse_args(words[3:]))) == config
    for seed, accuracy in ((0, 0.85), (1, 0.87)):
        folder = tmp_path / f"cnn-seed{seed}"
        folder.mkdir()
        result = dict(accuracy=accuracy, epsilon=1.9999, noise_multiplier=1.5, steps=732, seconds=100.0)
        (folder / "result.json").write_text(json.dumps({"result": result, "versions": {"jax": "0.10.2"}}))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{fashion_mnist.BEGIN}\nold\n{fashion_mnist.END}\nafter\n")
    for _ in range(2):
        fashion_mnist.update(readme, fashion_mnist.table(runs.Runs(tmp_path)))
    text = readme.read_text()
    assert "| CNN | 2 | **86.00%** (85.00%, 87.00%) | 1.9999 | 1.5000 | 732 | 100 |" in text
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| CNN |") == 1 and "jax 0.10.2" in text and "--model adadpigu_cnn" in text
