"""The programs of examples/: each runs at its smallest size, and the trainer is DP-SGD within its budget."""

import dataclasses
import functools
import inspect
import json
import math
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import dpx
from dpx import catalog, keys
from dpx.sums.rounding import ETA
from examples import data, demo, fashion_mnist, federated, frontier, loop, methods, records, runs, samplings, train
from examples.config import Config
from examples.methods import METHODS
from examples.optimizers import __main__ as optimizers
from examples.optimizers import problems, transforms
from examples.papers import __main__ as papers
from examples.tasks import images
from tests.problems import dp_sgd, poisson

SMALL: dict[str, Any] = dict(
    dataset="digits", seed=3, model="linear", noise_multiplier=2.0, batch_size=100, learning_rate=1.0, clip_norm=0.5
)
DIGITS = poisson(1437, 100)
SECRET = dpx.secret_key(2**100)

pytestmark = pytest.mark.usefixtures("undrawn", "promoting")  # but the plot of the run that all tests share is drawn


def run(folder, *, resume=False, **changes):
    settings: dict[str, Any] = SMALL | {"epochs": 2.0, "momentum": 0.9} | changes
    config = Config(**settings)
    return loop.run(config, output_dir=folder, resume=resume, checkpoint_every=10, evaluate_every=4, progress=False)


def checkpoint(folder):
    """The last checkpoint of a run: its step, parameters and optimizer state."""
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        return manager.latest_step(), manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


# ------------------------------------------------------------------ every program


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Settings of the comparisons that are small; the file of their runs."""
    task = problems.Task("pixels", lambda: problems.digits("random:4x4x1x2"), 1.0, 8, 1.0, (0.1, 0.01))
    monkeypatch.setitem(problems.TASKS, "mnist", task)
    monkeypatch.setattr(optimizers, "MOST_TRIALS", 2)
    setting = samplings.Setting({"model": "linear_from_zero"}, 1.0, 1.0, 1.0, (0.5, 0.5), 8)
    monkeypatch.setattr(samplings, "MODELS", {"linear": setting})
    monkeypatch.setattr(samplings, "BATCHES", (8,))
    return tmp_path / "runs.jsonl"


class Program(NamedTuple):
    main: Any
    words: str
    said: str


OF_SAMPLINGS = "--models linear --methods poisson --epsilons 2 --seeds 0 --batch-sizes 8 --dataset random:4x4x1x2"
PROGRAMS = {  # examples.finetune is in tests/test_finetune.py
    "demo": Program(train.main, " ".join(demo.ARGUMENTS) + " --epochs 1 --quiet --output-dir OUT", "test accuracy"),
    "papers": Program(papers.main, "--smoke dynamic-table-1 --runs OUT", "dynamic-table-1: its program works"),
    "optimizers": Program(
        optimizers.main,
        "--tasks mnist --optimizers disk-sgd --epsilons 3 --seeds 0 --runs FILE.jsonl --results FILE.md",
        "| DiSK, SGD | 3 | **",
    ),
    "samplings": Program(
        samplings.main, OF_SAMPLINGS + " --runs FILE.jsonl --results FILE.md", "| Poisson sampling | 8 | not run | **"
    ),
    "federated": Program(
        federated.main,
        "--dataset digits --users 40 --pool 4 --most 8 --epochs 1 --batch-size 20 --local-steps 2 --epsilon 3 --seed 1 "
        "--output-dir OUT",
        "unit of privacy: one user",
    ),
}


def called(program: Program, tmp_path: Path, capsys) -> str:
    words = program.words.replace("OUT", str(tmp_path)).replace("FILE", str(tmp_path / "runs")).split()
    assert program.main(words) == 0
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:one owner has more than a tenth")  # of 40 users, who are drawn as different ones
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.long_cases("optimizers", "papers", "samplings")
def test_every_program_works(name, tiny, tmp_path, capsys):
    said = called(PROGRAMS[name], tmp_path, capsys)
    page = tmp_path / "runs.md"
    assert PROGRAMS[name].said in said + (page.read_text() if page.exists() else "")
    if name == "federated":
        (file,) = tmp_path.glob("*/privacy_report.json")
        report = json.loads(file.read_text())
        assert report["unit"] == "one user" and report["epsilon"]["pld"] <= 3 and report["steps"] == 2
        assert "PoissonSampling(examples=40, batch_size=20" in report["sampling"] and "user" in report["caveats"][0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["optimizers", "samplings"])
def test_a_killed_comparison_continues(name, tiny, tmp_path, capsys):
    called(PROGRAMS[name], tmp_path, capsys)
    lines = tiny.read_text().splitlines()
    tiny.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    assert called(PROGRAMS[name], tmp_path, capsys).count("s of CPU") == 1
    again = [json.loads(line) for line in tiny.read_text().splitlines()]
    assert len(again) == len(lines) and again[-1]["accuracy"] == json.loads(lines[-1])["accuracy"]


@pytest.mark.parametrize(("best", "trials"), [(0, 3), (1, 3), (-1, 4), (2, 4), (9, 5), (-9, 5)])
@pytest.mark.parametrize("of", [optimizers, samplings])
def test_trials_climb_to_the_best_rate(tiny, monkeypatch, of, best, trials):
    tried = []

    def run(self, cell, seed, factor, own=0.0):
        tried.append((factor, own))
        assert seed == of.TUNING_SEED
        return {"accuracy": -abs(math.log2(factor) - best) - own}

    monkeypatch.setattr(of.Trainer, "run", run)
    if of is samplings:
        cell = samplings.Cell("linear", "poisson", 8, 2.0)
        factor, each = samplings.Trainer(tiny, data_dir=None, cache_dir=tiny).factor(cell), 1
    else:
        monkeypatch.setattr(optimizers, "MOST_TRIALS", 5)
        factor, own = optimizers.Trainer(tiny).chosen(optimizers.Cell("mnist", "adam-bc", 1.0))
        assert own == transforms.OPTIMIZERS["adam-bc"].own[0]
        each = 2
    assert len(tried) == each * trials and factor == 2.0 ** min(max(best, -3), 4)


@pytest.mark.parametrize("method", samplings.METHODS)
@pytest.mark.long_cases("band-mf", "fixed-order", "random-allocation", "truncated-poisson")
def test_every_method_of_the_samplings_meets_its_budget(method):
    build = samplings.METHODS[method]
    mechanism, own = build(samplings.Sizes(600, 20, 2.0, 0.7), 2.0, clip_norm=1.0, key=SECRET)
    assert 1.9 < dpx.epsilon(mechanism, mechanism.sampling.steps(epochs=2), delta=samplings.DELTA) <= 2.0
    assert bool(own) == (method in ("lambda-cgd", "band-mf"))


def test_every_run_has_a_seed_that_no_other_run_has():
    seeds = [federated.seed_of(number, seed) for number in range(3) for seed in range(3)]
    assert len(set(seeds)) == 9 and seeds == [federated.seed_of(n, s) for n in range(3) for s in range(3)]
    assert federated.seed_of(0, None) != federated.seed_of(0, None)
    for seed in (5, 5 + 2**32, 2**64 - 1):  # all bits of a seed count
        assert Config(**(SMALL | {"seed": seed})).key == dpx.secret_key(seed)


def finished(folder: Path, accuracy: float) -> None:
    """A run with this accuracy, as a table reads it."""
    folder.mkdir()
    result = dict(accuracy=accuracy, epsilon=1.9999, noise_multiplier=1.5, steps=732, seconds=100.0)
    (folder / "result.json").write_text(json.dumps({"result": result, "versions": {"jax": "0.10.2", "dpx": "0"}}))


def test_the_tables_of_the_readme(tmp_path):
    """Their commands are the settings of their runs, and a table is written in place of the one before."""
    for setting in fashion_mnist.SETTINGS:
        config = fashion_mnist.config_of(setting, 1)
        given = shlex.split(train.command(config).replace("\\\n", ""))[3:]
        assert train.configure(vars(train.parser().parse_args(given))) == config
    rows, readme = frontier.rows_of(["digits"]), tmp_path / "README.md"
    assert frontier.table(runs.Runs(tmp_path), rows) == ""
    for seed, accuracy in ((0, 0.85), (1, 0.87)):
        finished(tmp_path / f"cnn-seed{seed}", accuracy)
        finished(runs.Runs(tmp_path).folder_of(frontier.name_of(rows[2], seed)), accuracy)
    readme.write_text(f"before\n{fashion_mnist.BEGIN}\nold\n{fashion_mnist.END}\nafter\n")
    for _ in range(2):
        fashion_mnist.update(readme, fashion_mnist.table(runs.Runs(tmp_path)))
    text = readme.read_text()
    assert "| CNN | 2 | **86.00%** (85.00%, 87.00%) | 1.9999 | 1.5000 | 732 | 100 |" in text and "jax 0.10.2" in text
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and text.count("CNN |") == 1
    text = frontier.table(runs.Runs(tmp_path), rows)
    assert "| **86.00** (85.00, 87.00) | 1.9999 | 1.5000 | 732 | 100 | 89.34 DPSUR (b)" in text
    assert "--learning-rate 14.63 " in text and "--filters 1760" in text


def test_runs_that_are_made_together_are_those_made_alone(tmp_path):
    common: dict = {"dataset": "digits", "epsilon": 4.0, "sampling": "full", "epochs": 3.0, "clip_norm": 0.1}
    common |= {"model": "linear_from_zero", "learning_rate": 4.0, "microbatch_size": 512}
    configs = {f"seed {seed}": Config(**common, seed=seed) for seed in (0, 1)}
    alone, together = (runs.Runs(tmp_path / name, data_dir=None, cache_dir=tmp_path) for name in ("alone", "together"))
    together.make_together(configs)
    for name, one in configs.items():
        found, expected = together.result(name, one), alone.result(name, one)
        assert found["accuracy"] == expected["accuracy"] > 0.5 and found["steps"] == 3
        assert found["noise_multiplier"] == expected["noise_multiplier"]
        assert expected["epsilon"] <= found["epsilon"] <= 4
    assert len({together.result(name, one)["accuracy"] for name, one in configs.items()}) == 2
    with pytest.raises(ValueError, match="sampling must be full for runs that are made together, got 'poisson'"):
        together.make_together({"other": dataclasses.replace(one, sampling="poisson")})


# ------------------------------------------------------------------ the trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    folder.chmod(0o755)
    return folder, run(folder)


def test_a_run_writes_its_files(whole):
    folder, result = whole
    assert result.steps == 29 and result.parameters == 650 and 0.5 < result.accuracy <= 1
    assert result.epsilon == pytest.approx(dpx.epsilon(dp_sgd(DIGITS, 2.0), 29, delta=1e-5), rel=1e-4)
    names = {"config.json", "checkpoints", "metrics.jsonl", "accuracy_and_epsilon.png", "result.json"}
    names |= {f"privacy_report.{kind}" for kind in ("html", "json", "md")}
    assert {path.name for path in folder.iterdir()} == names
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 24, 28, 29]
    assert rows[-1]["epsilon"] == result.epsilon and rows[-1]["test_accuracy"] == result.accuracy
    assert (folder / "accuracy_and_epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert all([name for name in row if "loss" in name] == ["unreleased_training_loss"] for row in rows)
    assert "seed" not in result_of(folder)["config"]
    for name in ("privacy_report.json", "result.json"):  # what is not private is not in files to share
        text = (folder / name).read_text()
        assert "training_loss" not in text and '"seed"' not in text


def test_only_the_owner_can_read_the_seed_and_the_checkpoints(whole):
    folder = whole[0]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.json")} == {0o600}


def by_hand(config: Config, steps: int):
    """DP-SGD with momentum on the digits, written out: only the drawn rows are ever looked at."""
    dataset, key = data.load("digits"), config.key
    model = images.model_of(config, dataset)
    params = model.init(keys.stream(key, "init"))
    velocity = jax.tree.map(np.zeros_like, params)

    def loss(params, image, label):
        return -jax.nn.log_softmax(model.apply(params, image))[label]

    gradient = jax.jit(jax.grad(loss))
    for step in range(steps):
        indices, included = DIGITS.draw(keys.stream(key, "batches"), step)
        assert not included.all()  # there is padding that could be counted
        total = jax.tree.map(np.zeros_like, params)
        for row in indices[included]:
            grad = gradient(params, data.as_float(dataset.train_images[row]), dataset.train_labels[row])
            size = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grad)))
            total = jax.tree.map(lambda t, g, size=size: t + g * min(1, 0.5 / size), total, grad)
        noise = keys.normals_of_release(keys.stream(keys.stream(key, "mechanism"), "noise"), step, params)
        released = jax.tree.map(lambda t, n: (t + 2.0 * 0.5 * (1 + ETA) * n) / 100, total, noise)
        velocity = jax.tree.map(lambda v, r: 0.9 * v + r, velocity, released)
        params = jax.tree.map(lambda p, v: p - 1.0 * v, params, velocity)
    return params


def test_the_trainer_is_dp_sgd(tmp_path, ungridded):
    """Three steps against a loop by hand, whose clipping, inclusion and divisor are its own."""
    assert run(tmp_path, epochs=0.2).steps == 3
    config = Config(**SMALL, epochs=0.2, momentum=0.9)
    step, tree = checkpoint(tmp_path)
    expected = by_hand(config, 3)
    moved = jax.tree.map(lambda e, i: np.abs(e - i).max(), expected, by_hand(config, 0))
    assert step == 3 and min(jax.tree.leaves(moved)) > 1e-2
    for leaf, other in zip(jax.tree.leaves(tree["params"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)


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
    result, epsilon_of = run(tmp_path, epsilon=0.6), functools.partial(dpx.epsilon, dp_sgd(DIGITS, 2.0), delta=1e-5)
    assert 1 < result.steps < 29 and epsilon_of(result.steps) <= 0.6 < epsilon_of(result.steps + 1)
    assert checkpoint(tmp_path)[0] == result.steps


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampling", "batch_size", "steps"),
    [
        ("full", None, 2),
        ("allocated", 480, 6),
        *((name, 500, 6) for name in ("shuffled", "fixed", "cyclic", "ordered")),
    ],
)
def test_other_samplings(tmp_path, sampling, batch_size, steps):
    result = run(tmp_path, sampling=sampling, batch_size=batch_size)
    assert result.steps == steps and 0 < result.epsilon < 100


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long_cases(
    *"""
    ada_ adaptive_clipping band_mf_sgd d2p2_sgd d2p_sgd dice_sgd dp2_sgd dynamic_dp_sgd gep_sgd lambda_cgd
    random_freeze_sgd ranked_freeze_sgd tp_topk_sgd zeroth_order_sgd
    """.split()
)
def test_every_method_trains(tmp_path, method):
    allowed = METHODS[method].samplings
    result = run(tmp_path, method=method, epochs=0.5, **({"sampling": allowed[0]} if allowed else {}))
    assert result.steps == 7 and 0 < result.epsilon < 100


@pytest.mark.long
def test_the_command_line_end_to_end_and_its_resumption(tmp_path, capsys):
    folder = ["--output-dir", str(tmp_path / "run"), "--quiet"]
    words = "--dataset digits --epsilon 2 --epochs 1 --model linear".split()
    assert train.main([*words, *folder]) == 0
    said = capsys.readouterr().out
    assert "test accuracy" in said and "at delta 1e-05, 6 steps" in said and str(tmp_path / "run") in said
    assert 1.99 < result_of(tmp_path / "run")["result"]["epsilon"] <= 2.0
    assert train.main(["--resume", *folder]) == 0  # the seed was drawn by the system and is taken from the run
    assert capsys.readouterr().out.split(";")[0].split(" in ")[0] == said.split(";")[0].split(" in ")[0]
    assert train.main(["--resume", "--epochs", "2", *folder]) == 2
    assert "epochs was 1.0, now 2.0" in capsys.readouterr().err
    for arguments in ("--sampling sometimes", "--batch-size many", "--model resnet"):
        with pytest.raises(SystemExit, match="2"):
            train.main(["--dataset", "digits", "--epsilon", "2", *arguments.split()])
        assert "Traceback" not in capsys.readouterr().err


BAD = {
    "--epsilon 2 --clip-norm -1": "clip_norm must be positive and finite, got -1.0",
    "--epsilon 2 --clip-norm nan": "clip_norm must be positive and finite, got nan",
    "--epsilon 2 --batch-size 0": "batch_size must be at least 1, got 0",
    "--epsilon 2 --batch-size 1438": "batch_size must be at most the 1437 training examples, got 1438",
    "--epsilon 2 --microbatch-size 0": "microbatch_size must be at least 1, got 0",
    "--epsilon 2 --delta 1": "delta must be in (0, 1), got 1.0",
    "--epsilon -2": "epsilon must be positive and finite, got -2.0",
    "--noise-multiplier 0": "noise_multiplier must be positive and finite, got 0.0",
    "--epochs 3": "epsilon or noise_multiplier must be given",
    "--epsilon 2 --epochs 0": "epochs must be positive and finite, got 0.0",
    "--epsilon 2 --momentum 1": "momentum must be in [0, 1), got 1.0",
    "--epsilon 2 --per-layer true --method d2p_sgd": "per_layer is an option of dp_sgd, got it with d2p_sgd",
    "--epsilon 2 --momentum 0.9 --optimizer adam": "momentum is an option of sgd, got it with adam",
    "--epsilon 2 --sampling full --batch-size 5": "batch_size must not be given with sampling full, got 5",
    "--epsilon 0.001 --noise-multiplier 1": "does not pay for one step at noise_multiplier 1.0",
    "--epsilon 2 --dataset mine.npz": "in NAME.npz (here features:mine), and",
    "--epsilon 2 --dataset nosuch": "unknown data set 'nosuch'; known: digits",
    "--epsilon 2 --model adadpigu_cnn": "too small for the model 'adadpigu_cnn'",
    "--epsilon 2 --seed -1": "seed must be in [0, 2^128), got -1",
    "--epsilon 2 --checkpoint-every 0": "checkpoint_every must be at least 1, got 0",
    "--epsilon 2 --data-dir /nonexistent": "data_dir must be a directory, got '/nonexistent'",
    "--epsilon 2 --rank 2": "method 'dp_sgd' has no option rank; its options: none",
    "--resume": "nothing to resume",
    "--resume --recipe best": "--recipe must not be given with --resume",
    "--recipe best": "--recipe needs --epsilon",
    "--epsilon 2 --recipe best --task text": "--recipe must be given with --task images, got text",
    "--epsilon 2 --method gep_sgd --public digits": "a data set of other people than the private digits, got digits",
    "--epsilon 2 --dataset mnist5k --method gep_sgd --public emnist/letters": "people than the private mnist5k",
    "--epsilon 2 --method gep_sgd --public-examples 0": "public_examples must be in [1, 4000] for mnist5k, got 0",
    "--epsilon 2 --method gep_sgd --public-rank 651": "rank must be a whole number in [1, 500]",
}


@pytest.mark.parametrize("arguments", BAD)
@pytest.mark.long_cases("--epsilon 2 --method gep_sgd --public-rank 651")
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, capsys, arguments):
    folder = tmp_path / "run"
    dataset = [] if "--dataset" in arguments or "--resume" in arguments else ["--dataset", "digits"]
    assert train.main([*dataset, *arguments.split(), "--output-dir", str(folder), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and BAD[arguments] in line and not folder.exists()


def test_public_images_are_not_the_private_ones_under_another_name(monkeypatch, tmp_path):
    digits = data.load("digits")
    monkeypatch.setattr(data, "load", lambda *_: digits)
    with pytest.raises(ValueError, match="public images must not be private ones, but 500 of 500 of mnist5k"):
        run(tmp_path, noise_multiplier=None, epsilon=2.0, method="gep_sgd")


def test_options_are_those_of_the_builder(monkeypatch):
    for method in METHODS:
        for name, option in methods.options(method).items():
            assert option.default is not inspect.Parameter.empty and option.help, (method, name)
    assert set(methods.options("dynamic_dp_sgd")) == {"rho_mu", "rho_c", "every"}
    assert methods.options("dp2_sgd")["kind"].help == "one of gaussian, orthonormal, subset, countsketch, hadamard"
    assert methods.options("random_freeze_sgd")["every"].help.endswith("an epoch in the paper")  # of the coordinates

    def noisier(*, factor: float = 1.0, clip_norm: float, noise_multiplier: float, sampling, steps: int, key):
        """DP-SGD with too much noise. factor: times the noise."""

    monkeypatch.setitem(METHODS, "noisier", catalog.CatalogEntry(noisier))
    assert methods.options("noisier") == {"factor": methods.Option(1.0, "times the noise")}


def test_words_of_options():
    words = {0.5: 0.5, "3": 3, "0.25": 0.25, "1e-3": 1e-3, "inf": math.inf, "none": None, "True": True}
    words |= {"epoch": 20, "10%": 30, "0.1%": 1, "countsketch": "countsketch"}
    assert {word: methods.read(word, 300, 20) for word in words} == words
    rising, cooled = methods.read("0.2..0.8", 300, 20), methods.read("0..0.9@20%", 300, 20)
    assert [float(rising(step)) for step in (0, 150, 300, 400)] == pytest.approx([0.2, 0.5, 0.8, 0.8])
    assert [float(cooled(step)) for step in (0, 30, 60, 300)] == pytest.approx([0, 0.45, 0.9, 0.9])
    for word in ("0..x", "1,5", "ten%", "2 epochs", ""):
        with pytest.raises(ValueError, match="an option must be a number, a name, FIRST..LAST, SHARE% or epoch, got"):
            methods.read(word, 300, 20)


@pytest.mark.long
def test_a_task_of_texts_resumes_and_knows_its_options(tmp_path):
    common = dict(task="text", model="bag_mlp", task_options={"bins": 8, "hidden": 2}, batch_size=16, epochs=1.0)
    config = Config(dataset="random:3", seed=1, noise_multiplier=1.0, optimizer="adam", **common)
    folder = dict(output_dir=tmp_path / "run", cache_dir=tmp_path, progress=False)
    first = loop.run(config, **folder)
    again = loop.run(config, resume=True, **folder)
    assert (first.metrics, first.epsilon, first.steps) == (again.metrics, again.epsilon, 4)
    with pytest.raises(ValueError, match="task 'text' has no option lenght; its options: length"):
        Config(**(config.as_dict() | {"task_options": {"lenght": 1}}))


# ------------------------------------------------------------------ the formulas of the optimizers


def released(steps: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((steps, 3)).astype(np.float32)


def along(transform: optax.GradientTransformation, grads: np.ndarray) -> np.ndarray:
    """The updates of some steps, (steps, 3)."""
    params = jnp.zeros(3)
    state, found = transform.init(params), []
    for grad in grads:
        update, state = transform.update(jnp.asarray(grad), state, params)
        params = params + update
        found.append(update)
    return np.stack(found)


def test_the_variance_of_the_noise_is_taken_out():
    ours = along(transforms.without_noise(1e-16, 1.0), released())
    np.testing.assert_allclose(-0.1 * ours, along(optax.adam(0.1), released()), rtol=1e-5)  # Adam, where it is none
    grads = np.full((3, 3), 2.0, np.float32)  # v is 4 at every step
    np.testing.assert_allclose(along(transforms.without_noise(3.0, 0.1), grads), 2.0, rtol=1e-3)  # 2 / sqrt(4 - 3)
    np.testing.assert_allclose(along(transforms.without_noise(9.0, 0.25), grads), 2 / 1.5, rtol=1e-5)  # the floor


def test_the_low_pass_filter():
    ones, signs = np.ones((50, 3), np.float32), np.resize([1.0, -1.0], (200, 1)) * np.ones(3, np.float32)
    np.testing.assert_allclose(along(transforms.low_pass(), ones), 1.0, rtol=1e-5)
    assert np.abs(along(transforms.low_pass(), signs)[-1]).max() < 1e-6  # the highest frequency is removed
    grads = released()
    expected = [grads[0], (0.9 * 0.05 * grads[0] + 0.05 * (grads[0] + grads[1])) / (0.9 * 0.05 + 0.1)]
    np.testing.assert_allclose(along(transforms.low_pass(), grads)[:2], expected, rtol=1e-5)


def test_scales_are_those_of_earlier_releases():
    coordinates, grads = transforms.scaled(stability=0.5), released()
    state = coordinates.init(jnp.zeros(3))
    np.testing.assert_allclose(coordinates.encode(jnp.asarray(grads[0]), state), grads[0], rtol=1e-6)
    restored, state = coordinates.decode(jnp.asarray(grads[0]), state, None)
    np.testing.assert_allclose(restored, grads[0], rtol=1e-6)
    scale = np.abs(grads[0]) + 0.5
    scale /= np.sqrt(np.mean(scale**2))
    np.testing.assert_allclose(coordinates.encode(jnp.asarray(grads[1]), state), grads[1] / scale, rtol=1e-5)


@pytest.mark.long
def test_disk_follows_its_formula():
    def loss(params, example):
        return jnp.sum(jnp.sin(params * example))

    mechanism = dpx.in_coordinates(dp_sgd(poisson(2, 2), 0.0, clip_norm=0.3), transforms.SUMMED)
    optimizer = dpx.chain(mechanism, transforms.disk(optax.sgd(0.1)))
    examples, x = released(2), jnp.asarray([1.0, -2.0, 0.5])
    step = dpx.private_updates(transforms.both_points(loss), optimizer)
    params = {"at": x, "ahead": x}
    kappa, gamma, state = transforms.KAPPA, transforms.GAMMA, optimizer.init(params)
    share, move, m = (1 - kappa) / (kappa * gamma), jnp.zeros(3), jnp.zeros(3)
    for _ in range(4):
        found = step(params, dpx.Batch(jnp.asarray(examples), jnp.ones(2, bool)), state)
        params, state = optax.apply_updates(params, found.updates), found.state
        total = jnp.zeros(3)
        for example in examples:
            grad = share * jax.grad(loss)(x + gamma * move, example) + (1 - share) * jax.grad(loss)(x, example)
            total += grad * jnp.minimum(1, 0.3 / jnp.linalg.norm(grad))
        m = (1 - kappa) * m + kappa * total / 2
        move = -0.1 * m
        x = x + move
        np.testing.assert_allclose(params["at"], x, rtol=1e-5)
        np.testing.assert_allclose(params["ahead"], x + gamma * move, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("coordinates", [transforms.SUMMED, transforms.scaled(1e-3)])
def test_the_contract_holds_in_the_new_coordinates(coordinates):
    mechanism = dpx.in_coordinates(dp_sgd(poisson(40), key=SECRET), coordinates)
    lines = ["bounded", "adjacent", "secrecy"]  # no noise: both points are given one
    params = {"at": jnp.ones(4), "ahead": jnp.ones(4)}
    dpx.audit.check_contract(mechanism, params=params, lines=lines, draws=500).require()
