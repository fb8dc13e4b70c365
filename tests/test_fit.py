"""`dpx.fit`: the loop by hand, within its budget, and continued bit for bit."""

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import random
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import catalog
from dpx.fitting import step as fitting_step
from dpx.fitting.facts import fingerprint_of_loss
from dpx.reports.report import report_sections
from dpx.states.record import set_run_plan
from tests import kills
from tests.mechanisms import PARAMS as MECHANISM_PARAMS
from tests.mechanisms import case_of_method
from tests.problems import cross_entropy as loss
from tests.problems import cut_at, dp_sgd, same

RANDOM = np.random.default_rng(0)
LABELS = np.arange(60) % 2
DATA = ((RANDOM.normal(size=(60, 3)) + 2 * LABELS[:, None]).astype(np.float32), LABELS)
PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
SAMPLING = dpx.PoissonSampling(examples=60, batch_size=12)
BUDGET = dpx.Budget(epsilon=4.0, delta=1e-5, steps=8, accountant="rdp")
pytestmark = pytest.mark.usefixtures("no_thread_is_left")
NAMES = ("SENSITIVE", "lock", "run.json", "history.json")  # beside the checkpoints


def mechanism_loss(params, x):
    return jnp.sum(params["scale"] * jnp.tanh(x @ params["kernel"] + params["bias"]))


def made(noise_multiplier=BUDGET, *, seed=5, sampling=SAMPLING, clip_norm=1.0, transform=None):
    key = dpx.secret_key(seed)
    mechanism = dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    return dpx.chain(mechanism, transform or optax.sgd(0.5, momentum=0.9))


def accuracy(params):
    return {"accuracy": jnp.mean((DATA[0] @ params["w"] + params["b"][None]).argmax(-1) == LABELS)}


def fit(optimizer=None, **options):
    return dpx.fit(loss, optimizer or made(), PARAMS, DATA, **({"evaluate": accuracy, "evaluate_every": 3} | options))


def by_hand(optimizer, key, steps):
    """The loop of docs/loops.md, with one `take` a step."""
    gradient = jax.jit(dpx.private_updates(loss, optimizer))
    budget = optimizer.budget
    params, state = PARAMS, set_run_plan(optimizer.init(PARAMS), steps if budget is None else budget.steps)
    for _ in range(steps):
        updates, state, _ = gradient(params, SAMPLING.take(DATA, key, state), state)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.fixture(scope="module")
def whole():
    return fit()


# the run


def test_the_report_says_what_was_trained():
    """Its names are checked before the first step, and no cost of a search is that of another run."""
    run = fit(name="a model, May", dataset="patients of 2024", tuning="public")
    rows = dict(report_sections(run.report)[0].rows)
    assert rows["run"] == "a model, May" and rows["data"] == "patients of 2024, 60 records"
    assert run.report.title == "Privacy report of a model, May" and "on public data" in run.report.tuning
    search = dpx.accounting.best_of((made(), 8), trials=2, score_on="public")
    for wrong, said in [
        ({"name": "two\nlines"}, "name must be one line of printable"),
        ({"dataset": ""}, "dataset must be one line of printable"),
        ({"tuning": "no"}, "tuning must be"),
        ({"tuning": search}, "tuning must be .* one more release"),
    ]:
        with pytest.raises(ValueError, match=said):
            fit(**wrong, callbacks=[lambda progress: pytest.fail("a step was made")])


def test_it_is_the_loop_by_hand(whole):
    optimizer = made()
    same((whole.params, whole.state), by_hand(optimizer, optimizer.key, 8))
    assert whole.steps == 8 and whole.delta == 1e-5
    assert whole.epsilon == pytest.approx(dpx.epsilon(optimizer, 8, delta=1e-5, accountant="rdp"), rel=1e-4)
    assert whole.epsilon <= 4.0
    assert whole.report.steps == 8 and whole.report.epsilon["rdp"] == whole.epsilon
    assert [row["step"] for row in whole.history] == [3, 6, 8]
    for row in whole.history:
        assert set(row) == {"step", "epsilon", "accuracy", "unreleased_loss"}
        assert row["epsilon"] == whole.epsilon
    assert whole.history[-1]["accuracy"] == accuracy(whole.params)["accuracy"] > 0.6


def test_batches_of_another_key():
    optimizer, other = made(), dpx.secret_key(6)
    result = fit(optimizer, key=other, steps=2)
    same((result.params, result.state), by_hand(optimizer, other, 2))


def test_the_arrays_of_the_caller_stay_and_a_step_is_compiled_once(monkeypatch):
    compiled, build = [], fitting_step.compiled_step
    spied = lambda *args, **options: compiled.append(build(*args, **options)) or compiled[-1]  # noqa: E731
    monkeypatch.setattr("dpx.fitting.loop.compiled_step", spied)
    params = {"w": np.zeros((3, 2), np.float32), "b": jnp.asarray([0.0, 0.0])}
    average = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    kinds = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    meshes = [jax.make_mesh((1,), ("data",), axis_types=(kind,)) for kind in kinds]
    for sharding in (None, *(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")) for mesh in meshes)):
        seen = []
        dpx.fit(
            loss,
            made(transform=average),
            params,
            DATA,
            steps=4,
            sharding=sharding,
            evaluate_every=1,
            callbacks=[seen.append],
        )
        assert [program._cache_size() for program, _ in compiled[-1].programs.values()] == [1]
        assert not params["b"].is_deleted()
        kept = jax.tree.leaves([(progress.params, progress.state) for progress in seen])
        assert not any(leaf.is_deleted() for leaf in kept)  # a callback may keep them
        assert [progress.step for progress in seen] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["dp_sgd", "d2p2_sgd", "random_freeze_sgd", "ada_dpigu", "dice_sgd"])
@pytest.mark.long_cases("d2p2_sgd", "random_freeze_sgd")
def test_a_compiled_step_holds_no_key(name):
    """So that what is stored of it is no secret, and two seeds share it."""
    entry = next(entry for entry in catalog.METHODS if entry.name == name)
    batch = dpx.Batch(np.ones((12, 4), np.float32), np.ones(12, bool))
    texts = []
    for key in map(dpx.secret_key, (5, 6)):
        optimizer = dpx.chain(case_of_method(entry).make(key), optax.sgd(0.5))
        carry = fitting_step.first_carry(MECHANISM_PARAMS, optimizer, None)
        step = fitting_step.compiled_step(
            mechanism_loss, optimizer, lambda params, state: params, carry, None, {}, whole=False
        )
        program, closed_over = step.compile_for_shapes((carry, batch))
        assert len(closed_over) > 0
        texts.append(program.lower(closed_over, carry, batch).as_text())
    assert texts[0] == texts[1]


def test_callbacks_see_the_run_and_can_end_it(tmp_path):
    optimizer, seen = made(), []

    def watch(progress):
        seen.append(progress)
        return np.equal(progress.step, 4)  # a bool of numpy ends the run too

    result = fit(optimizer, evaluate_every=2, callbacks=[watch, lambda progress: None], checkpoints=tmp_path)
    assert result.steps == 4 and [progress.step for progress in seen] == [2, 4]
    last = seen[-1]
    same((last.params, last.state), (result.params, result.state))
    expected = dpx.epsilon(optimizer, 8, delta=1e-5, accountant="rdp")  # a stop may depend on releases
    assert last.epsilon == result.epsilon == pytest.approx(expected, rel=1e-4)
    assert result.report.steps == 8
    losses = last.unreleased.losses[np.asarray(last.unreleased_included)]
    assert last.unreleased_loss == pytest.approx(float(losses.mean()))
    assert last.metrics == {"accuracy": result.history[-1]["accuracy"]}
    public = dpx.publishable_state(last)
    assert public.unreleased_loss is public.unreleased is public.unreleased_included is None
    again = fit(optimizer, steps=4, checkpoints=tmp_path)  # a shorter plan, made after the stop
    assert again.steps == 4 and again.epsilon == result.epsilon and again.report.steps == 8
    assert fit(optimizer, evaluate_every=2, checkpoints=tmp_path).steps == 8  # the run continues
    with pytest.raises(ValueError, match="a callback must return None, or a bool .*; got 'no end'"):
        fit(optimizer, steps=1, callbacks=[lambda progress: "no end"])


def test_a_shorter_plan_that_is_made_after_a_stop_costs_the_longer_one(tmp_path):
    """What the first call released may have decided the second. A budget would be the plan of both."""
    given = {"delta": 1e-5, "accountant": "rdp", "checkpoints": tmp_path, "evaluate_every": 1}
    fit(made(2.0), steps=5, callbacks=[lambda progress: True], **given)
    again = fit(made(2.0), steps=2, **given)
    assert again.steps == 2 and again.report.steps == 5
    assert again.epsilon == dpx.epsilon(made(2.0), 5, delta=1e-5, accountant="rdp", numbers=8)


def test_options_reach_the_gradient():
    def noisy(params, example, key):
        return loss(params, example) + 0 * jax.random.normal(key), {"label": example[1]}

    seen = []
    optimizer = made()
    result = dpx.fit(
        noisy, optimizer, PARAMS, DATA, steps=2, with_key=True, has_aux=True, norms="vmap", callbacks=[seen.append],
        loss_at=lambda params, state: jax.tree.map(lambda leaf: leaf + state.inner.step.astype(leaf.dtype), params),
        evaluate=lambda params: float(params["b"].sum()),
    )  # fmt: skip
    assert seen[-1].unreleased.aux["label"].shape == seen[-1].unreleased_included.shape
    assert result.history[-1]["metric"] == pytest.approx(float(result.params["b"].sum()) + 4, abs=1e-4)


def test_a_batch_in_chunks(whole):
    seen = []
    result = fit(chunk_size=8, callbacks=[seen.append])
    for one, two in zip(jax.tree.leaves(result.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
    assert result.epsilon == whole.epsilon and result.steps == 8
    losses = [row["unreleased_loss"] for row in result.history]
    assert losses == pytest.approx([row["unreleased_loss"] for row in whole.history], abs=1e-5)
    assert seen[-1].unreleased is seen[-1].unreleased_included is None


def test_the_progress_bar(capsys):
    fit(steps=3, progress=True)
    said = capsys.readouterr().err
    assert "3/3" in said and "(not private)" in said and "accuracy" in said


# the budget


def test_no_step_beyond_the_budget(tmp_path):
    with pytest.raises(ValueError, match="steps must be at most the 8 of the mechanism's budget, got 9"):
        fit(steps=9)
    optimizer = made(2.0)
    result = fit(optimizer, steps=2, delta=1e-6, accountant="rdp", checkpoints=tmp_path)
    assert result.epsilon == pytest.approx(dpx.epsilon(optimizer, 2, delta=1e-6, accountant="rdp"), rel=1e-4)
    rest = dict(delta=1e-6, accountant="rdp", checkpoints=tmp_path)
    assert fit(optimizer, epochs=0.6, **rest).steps == 3
    assert fit(optimizer, steps=3, **rest).steps == 3  # without a budget, a run may grow
    with pytest.raises(ValueError, match="steps must be at least the 3 that the stored run has taken, got 2"):
        fit(optimizer, steps=2, **rest)
    with pytest.raises(ValueError, match="delta was 1e-06, now 1e-05"):
        fit(optimizer, steps=4, **rest | {"delta": 1e-5})


# checkpoints


def test_an_interrupted_run_continues_bit_for_bit(whole, tmp_path, monkeypatch):
    with cut_at(5):
        fit(checkpoints=tmp_path / "run", checkpoint_every=4)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*NAMES, "4", "5"}
    drawn, draw = [], dpx.PoissonSampling.draw
    spied = lambda self, key, step, **options: drawn.append(step) or draw(self, key, step, **options)  # noqa: E731
    monkeypatch.setattr(dpx.PoissonSampling, "draw", spied)
    others = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}  # not those that the run began with
    result = dpx.fit(loss, made(), others, DATA, evaluate=accuracy, evaluate_every=3, checkpoints=tmp_path / "run")
    assert drawn == [5, 6, 7]
    same((result.params, result.state), (whole.params, whole.state))
    assert result.history == whole.history
    again = fit(checkpoints=str(tmp_path / "run"))
    assert drawn == [5, 6, 7] and again.history == whole.history and again.epsilon == whole.epsilon


@pytest.fixture
def open_umask():
    """Files and folders get all the modes that their makers ask for."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder):
    """What others can read without entering a folder that is closed to them."""
    if folder.stat().st_mode & 0o077:
        return [folder, *(path for path in folder.rglob("*") if path.stat().st_mode & 0o077)]
    return []


@pytest.mark.usefixtures("open_umask")
def test_only_the_owner_can_read_the_files(tmp_path, monkeypatch):
    """From the moment that they exist: nothing is closed later."""
    replaced, replace, mkdir = [], os.replace, os.mkdir

    def look(part, path):
        replaced.append(os.stat(part).st_mode & 0o777)
        replace(part, path)

    monkeypatch.setattr(os, "replace", look)
    monkeypatch.setattr(Path, "chmod", lambda *arguments: pytest.fail("open until now"))
    fit(checkpoints=tmp_path / "runs" / "one", steps=2)
    assert set(replaced) == {0o600} and not open_to_others(tmp_path / "runs" / "one")
    modes = [(tmp_path / "runs" / "one" / name).stat().st_mode & 0o777 for name in NAMES]
    assert modes == [0o600] * 4
    monkeypatch.undo()
    mkdir(tmp_path / "two", 0o755)
    (tmp_path / "two" / "run.json.part").touch(0o666)  # of a process that was killed
    fit(checkpoints=tmp_path / "two", steps=2)
    assert not open_to_others(tmp_path / "two")
    assert (tmp_path / "two" / "run.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["evaluate", pytest.param("callback", marks=pytest.mark.long)])
def test_a_run_cut_in_an_evaluation_repeats_it(whole, tmp_path, where):
    calls = []

    def interrupted(seen):
        calls.append(seen)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return accuracy(seen) if where == "evaluate" else None

    options = {"evaluate": interrupted} if where == "evaluate" else {"callbacks": [interrupted]}
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoints=tmp_path, checkpoint_every=5, **options)
    assert len(calls) == 2
    result = fit(checkpoints=tmp_path, **options)
    assert len(calls) == 4 and result.history == whole.history  # the second of three was made again
    same(result.params, whole.params)


def test_a_run_begins_once(tmp_path):
    """Before the first checkpoint too: the same noise on other parameters could be subtracted."""
    with cut_at(0, RuntimeError):
        fit(checkpoints=tmp_path)
    others = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    result = dpx.fit(loss, made(), others, DATA, steps=1, checkpoints=tmp_path)
    same(result.params, by_hand(made(), made().key, 1)[0])


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_killed_run_continues_bit_for_bit(tmp_path):
    """Two kills at random moments; `python -m tests.kills` makes twenty (benchmarks/results/kills.md).

    In `make test`, tests/test_processes.py kills a run of two processes.
    """
    chance, steps = random.Random(3), 12
    receiver, sender = multiprocessing.Pipe(duplex=False)
    kills.run(None, steps, sender)
    expected = [receiver.recv() for _ in range(steps + 1)][-1]
    for _ in range(2):
        assert kills.killed(tmp_path / "run", steps, chance).last < steps
    remaining, found = kills.finished(tmp_path / "run", steps)
    assert found == expected and remaining[-1] == steps and remaining[0] > 1
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == kills.LINES


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_killed_run_of_correlated_noise_continues_bit_for_bit(tmp_path):
    """Killed before step 8, at the earliest at step 4: later noise cancels that of steps before the checkpoint."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    kills.run(None, 8, sender, correlated=True)
    expected = [receiver.recv() for _ in range(9)][-1]
    assert 4 <= kills.killed(tmp_path / "run", 8, random.Random(3), correlated=True).last < 8
    remaining, found = kills.finished(tmp_path / "run", 8, correlated=True)
    assert found == expected and remaining[-1] == 8 and remaining[0] > 1


OTHERS = {
    "the mechanism .'clip to norm 1', now 'clip to norm 0.5'.; .*x clip norm'.. To continue this "
    "run, pass what it was made with; for another run, take another folder and another key": lambda: made(
        clip_norm=0.5
    ),
    "the key of the noise; the key of the batches; accountant was rdp, now tightest. To continue it, make its key "
    "again: dpx.secret_key.seed., with": lambda: made(2.0, seed=6),
    "the mechanism .*deviation 2 x clip norm', now .*deviation 2.0001 x clip norm'.; accountant": lambda: made(2.0001),
    "sampling was .*batch_size=12., now .*batch_size=6.": lambda: made(
        2.0, sampling=dpx.PoissonSampling(examples=60, batch_size=6)
    ),
    "accountant was rdp, now tightest; the optimizer, its learning rate, or the sh": lambda: made(
        2.0, transform=optax.sgd(0.5)
    ),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    fit(made(2.0), steps=1, delta=1e-5, accountant="rdp", checkpoints=folder)
    return folder


@pytest.mark.parametrize("said", OTHERS)
def test_another_run_is_refused_and_loses_nothing(stored, said):
    before = {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"holds another one: .*{said}"):
        fit(OTHERS[said](), steps=2, delta=1e-5, checkpoints=stored)
    assert {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()} == before


def test_another_loss_is_refused(stored):
    """It would make steps again, with the noise that they had, but with other sums."""

    def masked(mask):
        return lambda params, example: loss(params, (example[0] * mask, example[1]))

    def dropped(seed):
        key = jax.random.key(seed)
        return lambda params, example: masked(jax.random.normal(key, (3,)))(params, example)

    def with_other_names(parameters, row):
        features, label = row
        logits = features @ parameters["w"] + parameters["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    @jax.custom_vjp
    def scaled(x):
        return x

    def fingerprint(loss):
        options = {"with_key": False, "has_aux": False}
        return fingerprint_of_loss(loss, optimizer, lambda params, state: params, carry, DATA, options)

    optimizer = made(2.0)
    carry = fitting_step.first_carry(PARAMS, optimizer, None)
    scaled.defvjp(lambda x: (x, None), lambda rest, g: (2 * g,))
    others = [
        masked(np.ones(3, "f")),
        masked(np.zeros(3, "f")),
        dropped(1),
        dropped(2),
        lambda *given: scaled(loss(*given)),
    ]
    assert fingerprint(loss) == fingerprint(with_other_names) and len({*map(fingerprint, [loss, *others])}) == 6
    run = {"steps": 3, "delta": 1e-5, "accountant": "rdp", "checkpoints": stored}
    with pytest.raises(ValueError, match="another one: the loss or the model. To continue"):
        dpx.fit(others[0], optimizer, PARAMS, DATA, **run)


def test_folders_of_earlier_versions_are_refused(stored, tmp_path):
    """By the name of their version: a run without a record, with another one, and with other code for the same one."""
    folder = shutil.copytree(stored, tmp_path / "earlier")
    known = json.loads((folder / "run.json").read_text())
    facts, now = known["facts"], importlib.metadata.version("dpx-jax")
    assert facts["version of dpx"] == now
    before = facts | {"version of dpx": "0.1.7"}
    for earlier, said in [
        (facts, f"one of dpx {now}, but .* holds a run of dpx of an unknown version"),
        ({"facts": before | {"record of the releases": "step, precision"}}, f"dpx {now}, .* a run of dpx 0.1.7, whose"),
        (known | {"facts": before}, f"version of dpx was 0.1.7, now {now}"),
    ]:
        (folder / "run.json").write_text(json.dumps(earlier | {"reach": 1}))
        for anywhere in (False, True):
            with pytest.raises(ValueError, match=said):
                options = {"delta": 1e-5, "accountant": "rdp", "on_other_devices": anywhere}
                fit(made(2.0), steps=1, checkpoints=folder, **options)


def test_other_folders_are_refused(stored, tmp_path, monkeypatch):
    run = dict(optimizer=made(2.0), steps=2, delta=1e-5, accountant="rdp")
    with pytest.raises(ValueError, match="one: the key of the batches. To"):
        fit(**run, key=dpx.secret_key(9), checkpoints=stored)
    with pytest.raises(ValueError, match="norms was 'auto', now 'vmap'; chunk_size was None, now 8"):
        fit(**run, norms="vmap", chunk_size=8, checkpoints=stored)
    with pytest.raises(ValueError, match="parameters was 8 numbers, now 4 numbers"):
        dpx.fit(lambda params, example: params.sum(), params=np.zeros(4), data=DATA, **run, checkpoints=stored)
    shutil.copytree(stored, tmp_path / "renamed")
    (tmp_path / "renamed" / "1").rename(tmp_path / "renamed" / "2")
    with pytest.raises(ValueError, match="checkpoint 2 in .* holds a state after 1 steps"):
        fit(**run, checkpoints=tmp_path / "renamed")
    shutil.copytree(stored, tmp_path / "emptied")
    for step in ("0", "1", "2"):
        shutil.rmtree(tmp_path / "emptied" / step, ignore_errors=True)
    with pytest.raises(ValueError, match="holds no checkpoint, but its run may have taken steps up to 1: starting"):
        fit(**run, checkpoints=tmp_path / "emptied")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="must be a new folder or one from fit, but .* holds .'notes'."):
        fit(**run, checkpoints=tmp_path / "folder")
    with pytest.raises(ValueError, match="checkpoints must be a directory, got the file"):
        fit(**run, checkpoints=tmp_path / "folder" / "notes")
    facts = json.loads((stored / "run.json").read_text())["facts"]
    assert facts["version of jax"] == jax.__version__ and "secret" not in str(facts)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match="pip install orbax-checkpoint"):
        fit(**run, checkpoints=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_another_schedule_is_refused(tmp_path):
    """It would make steps again, with the noise that they had, but with other sums or another scale."""

    def until(step, clip_norm, **options):
        table = np.where(np.arange(8) < step, np.float32(1.0), np.float32(clip_norm))
        return made(2.0, clip_norm=lambda t: jnp.asarray(table)[t], **options)

    rest = {"delta": np.float32(1e-5), "checkpoints": tmp_path}  # a NumPy number, which JSON cannot hold
    fit(until(4, 1e-3), steps=1, **rest)
    assert fit(until(4, 1e-3), steps=2, **rest).steps == 2
    for changed in (until(4, 1e-2), until(3, 1e-3), until(4, 1e-3, transform=optax.sgd(0.4, momentum=0.9))):
        with pytest.raises(ValueError, match="one: the optimizer, its learning rate, or a schedule. To"):
            fit(changed, steps=3, **rest)


# misuse

BAD = {
    "loss must be a function, got 3": dict(loss=3),
    "must be a dpx Mechanism": dict(optimizer=optax.sgd(0.1)),
    "a dpx Mechanism, which must come first": dict(optimizer=optax.chain(optax.clip(1.0), made())),
    "params must be a pytree of float arrays, got act PjitFunction. Of a result of fit": dict(
        params={"w": np.zeros(2), "act": jnp.tanh}
    ),
    "params must be a pytree of float arrays, got int32": dict(params=jnp.arange(3)),
    "params must be a pytree of float arrays, got no array": dict(params={}),
    "but params hold 60 rows: params come before data; are they swapped": dict(params=DATA, data=PARAMS),
    "data must hold the 60 examples of the sampling, got 50": dict(data=(DATA[0][:50], LABELS[:50])),
    "steps must be a whole number of at least 1, got -1": dict(steps=-1),
    "steps must be a whole number of at least 1, got 2.5": dict(steps=2.5),
    "steps and epochs must not both be given, got 3 and 1": dict(steps=3, epochs=1),
    "epochs must be a finite number above 0": dict(epochs=0),
    "steps must be at most the 8 of the mechanism's budget, got 10": dict(epochs=2),
    "steps or epochs must be given, because the mechanism has no dpx.Budget": dict(optimizer=made(2.0), delta=1e-5),
    "delta must be given, because the mechanism has no dpx.Budget": dict(optimizer=made(2.0), steps=3),
    "optimizer must be a mechanism with optax transforms": dict(optimizer=dp_sgd(SAMPLING), steps=3, delta=1e-5),
    "delta must be": dict(delta=2.0),
    "accountant": dict(accountant="guess"),
    "key must be a jax PRNG key": dict(key=3),
    "evaluate must be a function": dict(evaluate={"accuracy": 1.0}),
    "evaluate_every must be a whole number of at least 1, got 0": dict(evaluate_every=0),
    "callbacks must be a list of functions": dict(callbacks=print),
    "each of the callbacks must be a function of .progress., got None": dict(callbacks=[None]),
    "checkpoint_every must be a whole number of at least 1, got 0": dict(checkpoint_every=0),
    "loss_at must be a function": dict(loss_at=3),
    "norms must be": dict(norms="none"),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_input(said, tmp_path):
    arguments = dict(loss=loss, params=PARAMS, data=DATA, optimizer=made()) | BAD[said]
    with pytest.raises(ValueError, match=said):
        dpx.fit(**arguments, checkpoints=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_models_are_no_parameters():
    from flax import linen, nnx

    with_keys = nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # which stores its stream of keys
    for model, message in (
        (linen.Dense(2), "float arrays, got Dense. Of a result of fit"),
        (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "arrays, got the module Linear. Split it: .* nnx.split"),
        (with_keys, "arrays, got the module Dropout. Split it: .* nnx.split"),
        (nnx.state(with_keys), "float arrays, got rngs/count/value uint32, rngs/key/value key<fry>. .* nnx.split"),
    ):
        with pytest.raises(ValueError, match="params must be a pytree of " + message) as raised:
            dpx.fit(loss, made(), model, DATA)
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("found", [np.zeros(2), {"accuracy": "high"}, {"epsilon": 1.0}, {3: 1.0}, None])
@pytest.mark.long_cases("found0", "found1", "found2")
def test_evaluations_are_numbers(found):
    with pytest.raises(ValueError, match="evaluate must return a number|names of evaluate must be strings"):
        fit(evaluate=lambda params: found, evaluate_every=1)


# ------------------------------------------------------------------ The plot


def test_the_plot_shows_what_may_be_shared():
    """The loss of the batches is drawn only if it is asked for, and its panel says that it is not private."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    rows = [{"step": step, "epsilon": 0.1 * step, "accuracy": 0.5, "unreleased_loss": 7.25} for step in (3, 6)]
    report = dpx.privacy_report(made(2.0), 6, delta=1e-5)
    result = dpx.fitting.FitResult({}, (), 6, 0.6, 1e-5, report, rows)
    panels = result.plot(figure=figure()).axes
    assert [axes.get_ylabel().split()[0] for axes in panels] == ["accuracy", "epsilon"]
    assert panels[1].lines[0].get_xydata().tolist() == [[3, 0.1 * 3], [6, 0.1 * 6]]
    assert panels[1].lines[0].get_drawstyle() == "steps-pre"  # between two evaluations never below the bill
    assert not any(7.25 in line.get_ydata() for axes in panels for line in axes.lines)
    shown = result.plot(unreleased=True, figure=figure()).axes
    assert len(shown) == 3 and 7.25 in shown[2].lines[0].get_ydata() and "NOT private" in shown[2].get_title()
    budget = dpx.Budget(epsilon=0.75, delta=1e-5, steps=6)
    aimed = result._replace(report=dataclasses.replace(report, budget=budget), history=[])
    assert aimed.plot(figure=figure()).axes[0].lines[1].get_ydata()[0] == 0.75


def test_a_private_metric_is_released_at_every_look(tmp_path):
    """Its budget has a step for each; a run that continues repeats the releases of the steps that it repeats."""
    budget, calls = dpx.Budget(epsilon=4.0, delta=1e-5, steps=3), []

    def right(params):
        calls.append(1)
        return (DATA[0] @ params["w"] + params["b"][None]).argmax(-1) == LABELS

    def metric(budget=budget):
        return dpx.statistics.PrivateMetric(right, noise_multiplier=budget, key=dpx.secret_key(88))

    whole, first, second, third = (metric() for _ in range(4))
    result = fit(evaluate_private=whole)
    values = [row["private_metric"] for row in result.history]
    assert [row["step"] for row in result.history] == [3, 6, 8] and len(calls) == 3 and len({*values}) == 3
    assert all(0 < abs(row["private_metric"] - row["accuracy"]) < 0.5 for row in result.history)
    assert any("evaluate_private" in caveat for caveat in result.report.caveats)
    kept: dict = {"checkpoints": tmp_path, "evaluate_every": 3, "checkpoint_every": 4}
    with pytest.raises(RuntimeError):
        fit(evaluate_private=first, callbacks=[stop_at_six], **kept)
    again = fit(evaluate_private=second, **kept)
    assert [row["private_metric"] for row in again.history] == values
    # What both programs released costs what it costs in one, however often the run is continued.
    assert first.epsilon(delta=1e-5) == second.epsilon(delta=1e-5) == whole.epsilon(delta=1e-5)
    fit(evaluate_private=second, **kept)
    assert second.epsilon(delta=1e-5) == whole.epsilon(delta=1e-5)
    fit(evaluate_private=third, **kept)
    with pytest.raises(ValueError, match="all 3 calls of its run were made by another program"):
        third.epsilon(delta=1e-5)
    for wrong, words in (
        (metric(dpx.Budget(epsilon=4.0, delta=1e-5, steps=2)), "a step for each call, steps=3, got 2"),
        (right, "evaluate_private must be"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(evaluate_private=wrong)


def test_a_private_metric_counts_what_a_killed_program_released(tmp_path):
    """It looked at every step, and its rows after the last checkpoint are lost. The next one looks at others, and ends
    before it has repeated them all."""

    def metric(**other):
        given = {"noise_multiplier": 9.0, "key": dpx.secret_key(89)} | other
        return dpx.statistics.PrivateMetric(lambda params: LABELS > 0, **given)

    first, second, alone = metric(), metric(), metric()
    kept: dict = {"checkpoints": tmp_path, "checkpoint_every": 4}
    with pytest.raises(RuntimeError):
        fit(evaluate_private=first, evaluate_every=1, callbacks=[stop_at_six], **kept)
    fit(evaluate_private=second, evaluate_every=5, callbacks=[lambda progress: True], **kept)
    for number in range(8):  # those that the first one planned; of the 6 that it made, the second repeats one
        alone({"w": np.float32(number)})
    assert len(second.released) == 1 and len(first.released) == 6
    assert first.epsilon(delta=1e-5) == second.epsilon(delta=1e-5) == alone.epsilon(delta=1e-5)
    for other in ({"key": dpx.secret_key(90)}, {"noise_multiplier": 99.0}):
        with pytest.raises(ValueError, match="evaluate_private must have the key and the noise"):
            fit(evaluate_private=metric(**other), evaluate_every=5, callbacks=[lambda progress: True], **kept)


def test_a_private_metric_that_ends_the_run_costs_all_looks():
    """A stop that waits for luck is no release of fewer numbers. Fewer count if public information alone stops."""

    def metric(noise=9.0):
        return dpx.statistics.PrivateMetric(lambda params: LABELS > 0, noise_multiplier=noise, key=dpx.secret_key())

    def costs(metric, **options):
        fit(evaluate_private=metric, evaluate_every=1, callbacks=[lambda progress: progress.step == 3], **options)
        return metric.epsilon(delta=1e-5)

    budget = dpx.Budget(epsilon=4.0, delta=1e-5, steps=9)
    of_three, of_eight = metric(), metric()
    for number in range(8):
        of_three(np.float32(number % 3))
        of_eight(np.float32(number))
    ended = metric()
    assert costs(ended) == of_eight.epsilon(delta=1e-5)
    assert ended.epsilon(delta=1e-5) < costs(ended, optimizer=made(seed=6))  # another run
    assert costs(metric(), public_stop=True) == of_three.epsilon(delta=1e-5)
    limited = metric(budget)
    assert 0.99 * 4 < costs(limited, public_stop=True) == costs(limited) <= 4.0
    for number in range(2):  # with the 5 looks that the run did not make, and its 3, more than the budget allows
        limited(np.float32(number))
    assert limited.epsilon(delta=1e-5) <= 4.0
    assert costs(metric(dataclasses.replace(budget, public_stop=True)), public_stop=True) < 3.0


def test_a_private_metric_of_other_values_is_another_release(tmp_path, monkeypatch):
    """A killed program measured one thing, and the next one, with the same key, another: all releases count."""

    def metric(size):
        given = {"noise_multiplier": 9.0, "key": dpx.secret_key(91)}
        return dpx.statistics.PrivateMetric(lambda params: np.arange(50) < size, **given)

    first, second, alone = metric(20), metric(30), metric(30)
    kept: dict = {"checkpoints": tmp_path, "checkpoint_every": 4, "evaluate_every": 1}
    with pytest.raises(RuntimeError):
        fit(evaluate_private=first, callbacks=[stop_at_six], **kept)
    monkeypatch.setattr(dpx.statistics.released, "_ANSWERED", {})  # the next program
    fit(evaluate_private=second, **kept)
    for number in range(len(first.released) + len(second.released)):
        alone({"w": np.float32(number)})
    assert first.epsilon(delta=1e-5) < second.epsilon(delta=1e-5) == alone.epsilon(delta=1e-5)
    with pytest.raises(ValueError, match="pass a PrivateMetric as evaluate_private"):
        fit(evaluate=second)


def stop_at_six(progress):
    if progress.step == 6:
        raise RuntimeError
