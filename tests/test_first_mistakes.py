"""What a new user does wrong first: each is said in words, and where it is a mistake, before anything is released."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dpx
from dpx import keys
from dpx.coordinates import trainable
from dpx.fitting import loop
from dpx.reports.plan import PlannedSampling, SamplingPlan
from dpx.sums.rounding import FloatPair

ROWS = 12
FULL = dpx.FullBatch(examples=ROWS)
SAMPLING = dpx.PoissonSampling(examples=200, batch_size=20)
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
PARAMS = {"w": jnp.zeros(3)}


def dp_sgd(seed=1, *, noise_multiplier=1.0, sampling=FULL):
    key = dpx.secret_key(2**100 + seed)
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=sampling, key=key)


def loss(params, x):
    return (params["w"] @ x - 1.0) ** 2


def fit(optimizer, data=X, loss=loss, params=PARAMS, **options):
    made = dpx.chain(optimizer, optax.sgd(0.1))
    return dpx.fit(loss, made, params, data, **{"steps": 2, "delta": 1e-5} | options)


# ------------------------------------------------------------------ One key, one run


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(loop, "_TRAINED", {})


def warned(run, words="was used before in this process"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if words in str(each.message)]


def test_a_cell_that_is_run_again_is_warned_of(fresh):
    changed = np.concatenate([0 * X[:1], X[1:]])
    assert not warned(lambda: fit(dp_sgd()))
    (said,) = warned(lambda: fit(dp_sgd(), changed))
    assert "Both have the same noise" in said and str(int(dp_sgd().noise_key)) not in said
    assert not warned(lambda: fit(dp_sgd(2), changed))
    with pytest.raises(ValueError, match="steps"):
        fit(dp_sgd(3), steps=-1)
    with pytest.raises(ValueError, match="loss must return one real number"):
        fit(dp_sgd(3), loss=lambda params, x: params["w"] * x)
    assert not warned(lambda: fit(dp_sgd(3))), "a run that was refused has not trained"


def test_a_run_that_continues_is_not_warned_of(fresh, tmp_path):
    run = functools.partial(fit, checkpoints=tmp_path / "run")
    for steps in (1, 2, 2):
        assert not warned(lambda: run(dp_sgd(), steps=steps))  # noqa: B023
    assert warned(lambda: fit(dp_sgd(), checkpoints=tmp_path / "other"))
    assert warned(lambda: run(dp_sgd(), steps=3)), "the key has trained elsewhere since"
    for file in sorted((tmp_path / "run").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert warned(lambda: run(dp_sgd())), "a new run in the same place is another run"


def test_an_interrupt_says_what_is_saved(tmp_path):
    calls = []

    def evaluate(params):
        calls.append(params)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 0.0

    given = {"evaluate": evaluate, "evaluate_every": 1, "steps": 5}
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(dp_sgd(), checkpoints=tmp_path / "run", checkpoint_every=1, **given)
    assert f"dpx: step 2 of 5 is saved in {tmp_path / 'run'}" in stopped.value.__notes__[-1]
    calls.clear()
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(dp_sgd(), **given)
    assert "no step of the run is saved" in stopped.value.__notes__[-1]
    with pytest.raises(ValueError, match="evaluate must return a number") as failed:
        fit(dp_sgd(), checkpoints=tmp_path / "words", checkpoint_every=1, **given | {"evaluate": lambda params: "good"})
    assert f"dpx: step 0 of 5 is saved in {tmp_path / 'words'}" in failed.value.__notes__[-1]


# ------------------------------------------------------------------ What `fit` sees for nothing


def shifted(params, x):
    return loss(params, x) + jnp.sum(jnp.asarray(X)) * 0


def called(params, x):
    jax.debug.callback(lambda: None)
    return loss(params, x)


@jax.custom_batching.custom_vmap
def centered(x):
    return x


centered.def_vmap(lambda size, batched, x: (x - x.mean(0, keepdims=True), True))


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, dy: (dy * kept[1], dy * centered(kept[0])))


def mixed_behind(params, x):
    """Its backward pass reads the rows of the whole batch."""
    return loss(params, x) + product(x, params["w"])


def averaging(params, x):
    _ = 0.9 * jnp.ones(3) + 0.1 * x
    return loss(params, x)


def constant(params, x):
    return loss(params, x + jax.random.normal(jax.random.key(0), x.shape))


SEEN = {
    "training data": (shifted, PARAMS, "closes over an array of shape .* frozen base, is safe; to end this"),
    "a callback": (called, PARAMS, "debug_callback|debug_print|which can see the whole batch"),
    "a backward pass of its own": (mixed_behind, PARAMS, "custom_vmap_call, which can see the whole batch"),
    "an unused parameter": (loss, {**PARAMS, "b": jnp.zeros(2)}, "the loss does not use b"),
    "averages of a BatchNorm": (averaging, PARAMS, "running averages that nothing keeps"),
    "one dropout mask": (constant, PARAMS, "random numbers from a constant key"),
}


@pytest.mark.parametrize("chunk_size", [None, 6])
@pytest.mark.parametrize("name", SEEN)
@pytest.mark.long_cases(
    "a callback-6",
    "a backward pass of its own-6",
    "an unused parameter-6",
    "one dropout mask-6",
    "an unused parameter-None",
    "training data-6",
    "averages of a BatchNorm-6",
)
def test_fit_says_what_check_setup_finds_in_a_loss(name, chunk_size):
    of, params, words = SEEN[name]
    with pytest.warns(UserWarning, match=words) as caught:
        fit(dp_sgd(), loss=of, params=params, chunk_size=chunk_size)
    assert len([each for each in caught if "check_setup" in str(each.message)]) == 1


def test_no_report_depends_on_rows_that_are_not_finite():
    """They count and contribute nothing, so a report says where to look, whatever the data are. Only the user is told,
    if no row has a finite gradient."""
    missing = np.where(np.arange(3) < 2, X, np.nan)
    fit(dp_sgd(), np.where(np.arange(ROWS)[:, None] < 1, X, np.nan))
    fit(dp_sgd(), missing, lambda params, x: loss(params, jnp.nan_to_num(x)))
    reports = [fit(dp_sgd(), steps=1).report]
    report = dpx.check_setup(loss, dp_sgd(), PARAMS, dpx.Batch(missing, None))
    assert "a number first" in report["finite"].words and report["noise"].words == "no row has a usable gradient"
    with pytest.warns(UserWarning, match="none of 12 examples .* missing values .* do not publish it"):
        reports.append(fit(dp_sgd(), missing, steps=1).report)
    assert str(reports[0]) == str(reports[1]) and "dpx.check_setup" in str(reports[0])
    assert "Nothing measured" not in str(fit(dp_sgd(), evaluate=lambda params: 0.0).report)


class Rows:
    """A source that counts how often it is read."""

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return X[number]


def log_of_0(params, x):
    return loss(params, x) * jnp.log(0 * x[0])


def log_where(params, x):
    return loss(params, x) + jnp.log(x[0]) * params["w"][0]


def root_of_0(params, x):
    """Its loss is finite, and its derivative is not."""
    return jnp.sqrt(jnp.sum((0 * x * params["w"]) ** 2)) + loss(params, x)


def huge(params, x):
    return 1e30 * loss(params, x)


NOISE_ONLY = {
    "the loss": (log_of_0, X, {}, r"none of 24 examples .*\(0 of their losses are finite.*loss or its derivative"),
    "its derivative": (root_of_0, X, {}, r"\(24 of their losses are finite.*jax.grad\(loss\)\(params, example\) shows"),
    "a source": (root_of_0, Rows(), {}, "loss or its derivative makes NaN"),
    "chunks": (root_of_0, X, {"chunk_size": 5}, r"none of 24 examples .*\(24 of"),
    "a late one": (
        loss,
        X,
        {"steps": 9, "rate": 1e36, "evaluate_every": 2},
        "grown too large: lower the learning rate",
    ),
    "a norm beyond float32's squares": (huge, X, {}, "above 2.63"),
}


@pytest.mark.parametrize("name", NOISE_ONLY)
def test_a_run_that_trains_on_nothing_but_noise_is_warned_of_once(name, fresh):
    """Half of the rows are enough for none."""
    of, data, options, words = NOISE_ONLY[name]
    rate, given = options.get("rate", 0.1), {k: v for k, v in options.items() if k != "rate"}
    with pytest.warns(UserWarning, match=words) as caught:
        dpx.fit(of, dpx.chain(dp_sgd(), optax.sgd(rate)), PARAMS, data, delta=1e-5, **{"steps": 4} | given)
    assert [each.filename for each in caught] == [__file__]
    some = jnp.where(jnp.arange(ROWS)[:, None] == 0, X, jnp.nan)
    assert not warned(lambda: fit(dp_sgd(2), some, steps=9), "examples")


@pytest.mark.parametrize("many", [1, 3])
def test_a_run_that_leaves_many_rows_out_is_warned_of_once(many, fresh):
    """From a tenth of a batch; a few rows without a gradient are no news."""
    missing = np.where(np.arange(20)[:, None] % 20 < many, np.nan, np.tile(X[:10], (2, 1)))
    mechanism = dp_sgd(sampling=dpx.FullBatch(examples=20))
    found = warned(
        lambda: fit(mechanism, missing, evaluate=lambda params: 0.0, evaluate_every=1), "examples in the last"
    )
    assert len(found) == (many > 2) and all(
        re.match("only 17 of 20 .* Some rows hold NaN .* first", one) for one in found
    )
    made = warned(
        lambda: fit(dp_sgd(2, sampling=mechanism.sampling), np.isfinite(missing) + 0.0, log_where), "examples"
    )
    assert len(made) == (many > 2) and all("loss or its derivative makes NaN" in one for one in made)


@pytest.mark.parametrize("budget", [None, dpx.Budget(epsilon=8.0, delta=0.1, steps=2)])
def test_a_large_delta_is_warned_of_once(budget):
    def run():
        made = dp_sgd() if budget is None else dp_sgd(noise_multiplier=budget)
        fit(made, delta=0.1, evaluate=lambda params: 0.0, evaluate_every=1)

    assert len(warned(run, "delta = 0.1 is at least 1 / examples")) == 1


def test_a_run_without_noise_is_warned_of(fresh):
    with pytest.warns(UserWarning, match="epsilon is inf at delta=.*: a step adds no noise.* is private") as seen:
        fit(dp_sgd(noise_multiplier=0.0))
    assert [each.filename for each in seen] == [__file__]
    with pytest.warns(UserWarning, match="with exact noise, it would be [0-9.]+, but noise as small"):
        fit(dp_sgd(noise_multiplier=0.1))


@pytest.mark.parametrize(
    "make", [functools.partial(dpx.Budget, steps=2), functools.partial(dpx.plan_noise, examples=9)]
)
def test_a_budget_without_delta_says_what_it_is(make):
    with pytest.raises(ValueError, match="delta must be given: the chance that epsilon fails"):
        make(epsilon=1.0)


# ------------------------------------------------------------------ Errors inside of a loss


def several(params, x):
    return jax.nn.log_softmax(x @ x.T, axis=-1).sum() * params["w"].sum()


def with_a_key(params, x, key):
    return loss(params, x)


def endless(params, x):  # which has no gradient, so it fails after it was traced
    return jax.lax.while_loop(lambda v: v < 10, lambda v: v + 1 + 0 * params["w"][0], x[0])


def paths_of(function):
    mechanism = dp_sgd()
    state, batch = mechanism.init(PARAMS), dpx.Batch({"x": X}, None)

    def of(params, example, *key):
        return function(params, example["x"], *key)

    chunks = dpx.private_updates_in_chunks(of, mechanism)
    yield lambda: dpx.private_updates(of, mechanism)(PARAMS, batch, state)
    yield lambda: jax.jit(dpx.private_updates(of, mechanism, norms="vmap"))(PARAMS, batch, state)
    yield lambda: dpx.private_updates_from(jax.grad(of), mechanism)(PARAMS, batch, state)
    yield lambda: jax.jit(chunks.add)(PARAMS, batch, state)
    yield lambda: fit(mechanism, {"x": X}, of)
    yield lambda: dpx.check_setup(of, mechanism, PARAMS, batch)
    if function is not endless:  # `explain_norms` takes no gradient
        yield lambda: dpx.explain_norms(of, mechanism, PARAMS, batch)


@pytest.mark.parametrize("function", [several, with_a_key, endless])
def test_every_path_notes_what_a_loss_was_called_with(function):
    for path in paths_of(function):
        with pytest.raises((ValueError, TypeError)) as raised:
            path()
        (note,) = [note for note in raised.value.__notes__ if note.startswith("dpx:")]
        assert note.endswith("was called with one example: x float32[3]")
        assert sum("(params, example, key) if with_key=True" in note for note in raised.value.__notes__) == 1


def in_module(layer):
    graph, rest = nnx.split(layer)
    return lambda params, x: loss(params, nnx.merge(graph, rest)(x))


CAUSES = {
    "averages": (in_module(nnx.BatchNorm(3, rngs=nnx.Rngs(0))), X, r"use GroupNorm, .* docs/flax\.md#batchnorm"),
    "stored keys": (in_module(nnx.Dropout(0.5, rngs=nnx.Rngs(0))), X, r"nnx\.reseed\(module, dropout=key\)"),
    "a collection": (lambda params, x: linen.Dense(3).apply(params, x).sum(), X, r"apply\(\{'params': params\}, x\)"),
    "float labels": (lambda params, row: params["w"][row[1]], (X, X[:, 0]), r"integers: labels\.astype\(int\)"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_note_names_the_likely_cause(name):
    of, data, words = CAUSES[name]
    with pytest.raises(Exception) as raised:  # noqa: PT011  # of Flax or of jax
        fit(dp_sgd(), data, of)
    assert sum(re.search(words, note) is not None for note in raised.value.__notes__) == 1
    if name == "averages":
        report = dpx.check_setup(of, dp_sgd(), PARAMS, dpx.Batch(data, None), steps=2, delta=1e-5)
        assert report["running averages"].severity == "error" and re.search(words, str(report))


# ------------------------------------------------------------------ What stands behind a mechanism

HELD = {
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 4),
    "MultiSteps as a transform": lambda: optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation(),
    "apply_every": lambda: optax.chain(optax.sgd(0.1), optax.apply_every(4)),
    "inject": lambda: optax.inject_hyperparams(lambda rate: optax.chain(optax.sgd(rate), optax.apply_every(4)))(0.1),
}
NEEDS = {
    "lbfgs": optax.lbfgs,
    "zoom": lambda: optax.scale_by_zoom_linesearch(5),
    "backtracking": lambda: optax.scale_by_backtracking_linesearch(5),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "polyak": optax.polyak_sgd,
    "momo": optax.contrib.momo,
    "momo_adam": optax.contrib.momo_adam,
}
LATE = {
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "sophia": lambda: optax.contrib.sophia(0.1),
    "of some leaves": lambda: optax.partition({"a": optax.polyak_sgd()}, {"w": "a"}),
}


@pytest.mark.parametrize("name", HELD | NEEDS)
def test_transforms_that_cannot_stand_behind_a_mechanism_are_refused_when_they_are_chained(name, promoting):
    words = "must not hold updates back" if name in HELD else "must compute an update from the released gradient"
    with pytest.raises(ValueError, match=words):
        dpx.chain(dp_sgd(), (HELD | NEEDS)[name]())


@pytest.mark.parametrize("name", LATE)
def test_others_are_refused_before_a_step(name, promoting):
    optimizer = dpx.chain(dp_sgd(), LATE[name]())
    with pytest.raises(ValueError, match="must compute an update from the released gradient"):
        fit(optimizer)


def test_what_holds_updates_back_for_some_leaves_is_refused_by_init():
    optimizer = dpx.chain(dp_sgd(), optax.masked(optax.MultiSteps(optax.sgd(0.1), 4), {"w": True}))
    with pytest.raises(ValueError, match="must not hold updates back"):
        optimizer.init(PARAMS)


def test_multi_steps_around_a_chain_is_refused_in_words():
    wrapped = optax.MultiSteps(dpx.chain(dp_sgd(), optax.sgd(0.1)), 2)
    with pytest.raises(ValueError, match="or wrap it, as optax.MultiSteps does"):
        wrapped.update({"w": jnp.ones((ROWS, 3))}, wrapped.init(PARAMS), PARAMS, included=None)


@pytest.mark.long
def test_other_transforms_of_optax_stand_behind_a_mechanism(promoting):
    grads = {"w": jnp.ones((ROWS, 3))}
    others = optax.contrib.schedule_free_sgd(0.1), optax.adamw(0.1), optax.contrib.prodigy(), optax.contrib.muon(0.1)
    for transform in (*others, optax.masked(optax.adam(0.1), {"w": True}), optax.apply_if_finite(optax.sgd(0.1), 2)):
        optimizer = dpx.chain(dp_sgd(), transform)
        optimizer.update(grads, optimizer.init(PARAMS), PARAMS, included=None)


# ------------------------------------------------------------------ What is no parameter


def of_package(name, **methods):
    """An object of another package, which need not be installed. Its `repr` would show a weight."""
    return type("Variable", (), {"__module__": name, "__repr__": lambda self: "0.123456789", **methods})()


@jax.tree_util.register_pytree_node_class
class EquinoxModule:
    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation

    def tree_flatten(self):
        return (self.weight, self.activation), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


EquinoxModule.__module__ = "equinox._module"
FOREIGN = {
    "equinox": ({"m": EquinoxModule(jnp.ones(3), jnp.tanh)}, r"eqx\.partition\(model, eqx\.is_inexact_array\)"),
    "keras": ([of_package("keras.src.backend", dtype="float32", shape=(3,))], r"\[v\.value for v in"),
    "torch": ({"w": of_package("torch", dtype=np.dtype("float32"), shape=(3,))}, r"tensor\.detach\(\)\.numpy\(\)"),
    "haiku": (of_package("haiku._src.transform"), r"transformed\.init\(key, inputs\)"),
    "pandas": (of_package("pandas.core.frame", iloc=None), r"to_numpy\(numpy\.float32\)"),
    "a function": ({"w": jnp.ones(3), "f": jnp.tanh}, "f PjitFunction. Of a result of fit"),
    "a word": ({"w": "float32"}, "w str. Of a result of fit"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_other_packages_are_refused_in_words(name):
    params, words = FOREIGN[name]
    mechanism, batch = dp_sgd(), dpx.Batch(X, None)
    state = mechanism.init(PARAMS)
    for path in (
        lambda: mechanism.init(params),
        lambda: dpx.chain(mechanism, optax.adam(0.1)).init(params),
        lambda: dpx.private_updates(loss, mechanism)(params, batch, state),
        lambda: dpx.private_updates_in_chunks(loss, mechanism).add(params, batch, state),
        lambda: dpx.explain_norms(loss, mechanism, params, batch),
        lambda: dpx.check_setup(loss, mechanism, params, batch),
        lambda: fit(mechanism, params=params),
    ):
        with pytest.raises(ValueError, match=r"params must be a pytree of float arrays, got .*" + words) as raised:
            path()
        assert "0.1234" not in str(raised.value)


def test_the_arrays_of_an_equinox_module_are_parameters():
    module = EquinoxModule(jnp.zeros(3), None)
    assert fit(dp_sgd(), params=module, loss=lambda m, x: m.weight @ x).steps == 2


@pytest.mark.long
def test_python_numbers_are_parameters():
    params, mechanism = {"w": jnp.zeros(3), "b": 0.5, "c": [1.0, 2.0]}, dp_sgd()

    def of(params, x):
        return (params["w"] @ x - params["b"] * params["c"][0] + params["c"][1]) ** 2

    state, batch = mechanism.init(params), dpx.Batch(X, None)
    found = dpx.private_updates(of, mechanism)(params, batch, state).updates
    assert [leaf.shape for leaf in jax.tree.leaves(found)] == [(), (), (), (3,)]
    assert fit(mechanism, params=params, loss=of).steps == 2
    dpx.explain_norms(of, mechanism, params, batch)
    grads = jax.tree.map(lambda leaf: jnp.ones((ROWS, *jnp.shape(leaf))), params)
    mechanism.update(grads, state, params, included=None)


# ------------------------------------------------------------------ Integers

QUANTISED = {"base": jnp.ones((3, 3), jnp.int8), "flag": jnp.bool_(True), "a": jnp.ones((3, 2)), "b": jnp.ones((2, 3))}


def quantised(params, x):
    frozen = x @ (params["base"].astype(jnp.float32) * jnp.where(params["flag"], 0.5, 1.0))
    return jnp.tanh(frozen + x @ params["a"] @ params["b"]).sum()


def frozen(optimizer=None):
    lora = dpx.in_coordinates(dp_sgd(), trainable(mask=lambda path: path in ("a", "b")))
    return dpx.chain(lora, optax.adamw(0.1))


def test_frozen_integers_are_parameters_on_every_path(promoting, tmp_path):
    optimizer, batch = frozen(), dpx.Batch(X, None)
    state = optimizer.init(QUANTISED)
    chunks = dpx.private_updates_in_chunks(quantised, optimizer)

    @jax.jit
    def on_every_path(state):
        steps = [dpx.private_updates(quantised, optimizer, norms=norms) for norms in ("vmap", "ghost")]
        found = [step(QUANTISED, batch, state).updates for step in steps]
        return [*found, chunks.release(QUANTISED, chunks.add(QUANTISED, batch, state), state)[0]]

    updates = on_every_path(state)
    for other in updates:
        assert {name: leaf.dtype for name, leaf in other.items()} == {n: leaf.dtype for n, leaf in QUANTISED.items()}
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), other, updates[0])
        assert not other["base"].any() and not other["flag"] and other["a"].all()
    for steps in (1, 2):
        run = fit(optimizer, params=QUANTISED, loss=quantised, steps=steps, checkpoints=tmp_path / "run")
    assert run.params["base"].dtype == jnp.int8 and run.params["flag"].dtype == bool
    assert (run.params["base"] == 1).all() and run.params["flag"] and (run.params["a"] != 1).any()
    report = dpx.check_setup(quantised, optimizer, QUANTISED, batch)
    assert report["parameter dtypes"].severity == report["mixing"].severity == "ok"
    dpx.explain_norms(quantised, optimizer, QUANTISED, batch)


def test_trained_integers_are_refused_on_every_path():
    floats = {name: leaf.astype(jnp.float32) for name, leaf in QUANTISED.items()}
    batch, freeze = dpx.Batch(X, None), dpx.coordinates.random_freeze(freeze_rate=0.5, every=2, key=dpx.secret_key(4))
    for mechanism in (dp_sgd(), dpx.chain(dp_sgd(), optax.sgd(0.1)), dpx.in_coordinates(dp_sgd(), freeze)):
        state = mechanism.init(floats)
        for path in (
            lambda m: m.init(QUANTISED),
            lambda m: jax.jit(m.init)(QUANTISED),
            lambda m: dpx.private_updates(quantised, m)(QUANTISED, batch, state),  # noqa: B023
            lambda m: dpx.private_updates_from(lambda p, x: p, m)(QUANTISED, batch, state),  # noqa: B023
            lambda m: dpx.private_updates_in_chunks(quantised, m).add(QUANTISED, batch, state),  # noqa: B023
            lambda m: fit(m, params=QUANTISED, loss=quantised),
        ):
            with pytest.raises(ValueError, match="got base int8, flag bool. Freeze integers by dpx.coordinates.tra"):
                path(mechanism)
    assert dpx.check_setup(quantised, dp_sgd(), QUANTISED, batch)["parameter dtypes"].severity == "error"


# ------------------------------------------------------------------ Without jit, without noise


@pytest.mark.long
def test_a_step_without_jit_is_the_step():
    def stacked(params, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["s"])[0].sum()

    params, batch = {"s": jnp.ones((2, 3, 3))}, dpx.Batch(X, None)
    freeze = dpx.coordinates.random_freeze(freeze_rate=0.5, every=2, key=dpx.secret_key(4))
    mechanism = dpx.in_coordinates(dp_sgd(), freeze)
    state = mechanism.init(params)
    step = dpx.private_updates(stacked, mechanism, microbatch_size=6)
    expected = jax.jit(step)(params, batch, state).updates
    with jax.disable_jit():
        found = step(params, batch, state).updates
        run = fit(dp_sgd())
        dpx.check_setup(loss, dp_sgd(), PARAMS, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found, expected)
    jax.tree.map(np.testing.assert_array_equal, run.params, fit(dp_sgd()).params)


def as_total(tree):
    return FloatPair(tree, jax.tree.map(jnp.zeros_like, tree))


def refuse(*_):
    raise AssertionError("noise is drawn")


def test_a_known_noise_of_0_draws_nothing_and_has_the_same_bits(monkeypatch):
    params = {"w": jnp.zeros((7, 3)), "b": jnp.zeros(5)}
    grads = jax.tree.map(lambda p: 1e-3 * jax.random.normal(jax.random.key(0), (ROWS, *p.shape)), params)
    made = {name: dp_sgd(noise_multiplier=noise) for name, noise in (("none", 0.0), ("zero", lambda t: 0.0 * t))}
    found = {}
    for name, mechanism in made.items():
        with monkeypatch.context() as patch:
            if name == "none":
                patch.setattr("dpx.keys.noise.threefry4x32", refuse)
            update = jax.jit(functools.partial(mechanism.update, included=None))
            found[name] = update(grads, mechanism.init(params), params)
        assert dpx.epsilon(mechanism, found[name][1], delta=1e-5) == np.inf
    jax.tree.map(np.testing.assert_array_equal, found["none"], found["zero"])
    summed = jax.tree.map(lambda g: g.sum(0) / ROWS, grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-9), found["none"][0], summed)
    monkeypatch.setattr("dpx.keys.noise.threefry4x32", refuse)
    key = keys.stream(dpx.secret_key(3), "noise")
    released, rest = keys.release_and_noise(key, 0, as_total, {"x": jnp.arange(11.0) / 3}, 0.0)
    np.testing.assert_array_equal(released["x"], jnp.arange(11.0) / 3)
    assert not rest.high["x"].any()


# ------------------------------------------------------------------ What the last line of a cell shows


def test_plans_are_printed_in_a_line_and_no_key_is_printed():
    plan = dpx.plan_noise(examples=60_000, epsilon=2.0, delta=1e-5, epochs=1, batch_sizes=[4096, 60_000])
    run = PlannedSampling(sampling=FULL, steps=3, noise_multiplier=1.0, epsilon=2.0, rows=ROWS)
    samplings = SamplingPlan(epochs=3, epsilon=2.0, delta=1e-5, runs=(run,))
    for shown, word in ((repr(plan), "batch size 4096"), (repr(samplings), "recommended: ")):
        assert len(shown) < 250 and "\n" not in shown and word in shown
    key = dpx.secret_key(2**127 + 12345678901234567890)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=FULL, key=key)
    words = [str(word) for word in np.asarray(jax.random.key_data(key)).tolist() if word > 10**6]
    terms = dpx.fitting.settings.RunPlan.with_defaults(
        mechanism, key=key, steps=1, epochs=None, delta=1e-5, accountant=None, records=None, public_stop=False
    )
    step = dpx.private_updates(loss, mechanism)
    assert len(repr(step)) < 600
    for shown in (mechanism, terms, step, dpx.compose_runs((mechanism, 3)), mechanism.init(PARAMS)):
        assert words and not any(word in repr(shown) for word in words)


# ------------------------------------------------------------------ Runs of which it is not known what they shared


def test_without_shared_batches_the_larger_bill_counts():
    one, two, three = (dp_sgd(seed, sampling=SAMPLING, noise_multiplier=0.6) for seed in (1, 2, 3))
    given = [((one, 4), (two, 4)), ((one, 4), (two, 3), (three, 2))]
    asked = [lambda bill: bill.epsilon(delta=1e-5), lambda bill: bill.delta(epsilon=0.0), lambda b: b.delta(epsilon=3)]
    larger = set()
    for runs in given:
        unknown = dpx.compose_runs(*runs)
        known = [dpx.compose_runs(*runs, shared_batches=shared) for shared in (True, False)]
        for ask in asked:
            bills = [ask(bill) for bill in known]
            larger.add(bills[0] > bills[1])
            assert max(bills) <= ask(unknown) <= (1.001 if len(runs) == 2 else 2) * max(bills)
        assert len(unknown.others) == {2: 1, 3: 4}[len(runs)]  # for three, also those of two, and one apart
    assert larger == {True, False}, "neither is always dearer"
    alone = dpx.compose_runs((one, 4))
    assert alone.epsilon(delta=1e-5) == dpx.epsilon(one, 4, delta=1e-5)


def test_states_show_which_batches_were_shared():
    mechanisms, states = [dp_sgd(seed, sampling=SAMPLING, noise_multiplier=0.6) for seed in (1, 2)], []
    data = np.ones((200, 3), np.float32)
    for key in (mechanisms[0].key, mechanisms[1].key):
        both = []
        for mechanism in mechanisms:
            state = mechanism.init(PARAMS)
            step = jax.jit(dpx.private_updates(loss, mechanism))
            both.append((mechanism, step(PARAMS, SAMPLING.take(data, key, state), state).state))
        states.append(both)
    shared = dpx.compose_runs(*states[0])
    assert shared.epsilon(delta=1e-5) == dpx.compose_runs(*states[0], shared_batches=True).epsilon(delta=1e-5)
    apart = states[0][0], states[1][1]
    found = dpx.compose_runs(*apart)
    assert found.epsilon(delta=1e-5) == dpx.compose_runs(*apart, shared_batches=False).epsilon(delta=1e-5)
    assert not shared.others and not found.others


def test_what_cannot_be_known_is_refused():
    made = [dp_sgd(seed, sampling=SAMPLING) for seed in range(1, 6)]
    other = dp_sgd(9, sampling=dpx.PoissonSampling(examples=200, batch_size=10))
    for runs, words in (
        ([(m, 2) for m in made], "for more than 4 runs"),
        ([(made[0], 2), (other, 2)], "shared_batches must be False if every run drew .* share a sampling"),
        ([dpx.compose_runs((made[0], 2), (made[1], 2)), (made[2], 2)], "have known batches"),
    ):
        with pytest.raises(ValueError, match=words):
            dpx.compose_runs(*runs)


def test_a_loader_is_told_to_give_its_data():
    class Loader:
        dataset = X

        def __len__(self):
            return 2

    for data in (Loader(), iter([X])):
        with pytest.raises(ValueError, match="give what a loader or an iterator reads"):
            fit(dp_sgd(4), data=data)
