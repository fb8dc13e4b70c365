"""No exception shows a key or data, in whatever argument of whatever function they stand by mistake.

Messages go into logs, and logs are shared.
"""

import inspect
import operator
import tempfile
import traceback
import warnings
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import GaussianDpEvent

import dpx
from dpx.fitting.progress import Metrics
from dpx.values import described

WORDS = np.array([2654435769, 2135587861], np.uint32)
NUMBER = 123456.789
WORD = "Zanzibar"
SHOWN = [
    WORD.lower(),
    "2654435769",
    "2135587861",
    "9e3779b9",
    "7f4a7c15",
    "123456.7",
    "47f12065",
]  # also in hexadecimal
MISPLACED = {
    "typed key": jax.random.wrap_key_data(WORDS, impl="threefry2x32"),
    "keys": jax.random.wrap_key_data(np.stack([WORDS, WORDS]), impl="threefry2x32"),
    "raw key": jnp.asarray(WORDS),
    "NumPy key": WORDS,
    "data": np.full((3, 2), NUMBER, np.float32),
    "JAX data": jnp.full(3, NUMBER, jnp.float32),
    "table": np.array([[NUMBER, WORD]] * 3, object),  # as frame.to_numpy() of pandas makes it
    "words": np.array([WORD] * 3),
    "records": np.array([(NUMBER, WORD)] * 3, [("x", "f8"), ("y", "U8")]),
    "tree": {"x": np.full(4, NUMBER), "key": WORDS},
}
KEY = jax.random.key(3)
SAMPLING = dpx.PoissonSampling(examples=40, batch_size=4)
BATCH = dpx.Batch(np.ones((4, 3), np.float32), np.ones(4, bool))
PARAMS = {"w": np.ones(3, np.float32)}
MECHANISM = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=KEY)
STATE = MECHANISM.init(PARAMS)


def loss(params, x):
    return jnp.sum(params["w"] * x)


# Arguments by their names; functions that need others say them in `CALLS`.
GIVEN = {
    "accountant": "rdp",
    "batch": BATCH,
    "batch_size": 4,
    "budget": dpx.Budget(epsilon=1.0, delta=1e-5, steps=3, accountant="rdp"),
    "build": lambda noise_multiplier: MECHANISM,
    "candidates": [(MECHANISM, 3)],
    "clip_norm": 1.0,
    "configurations": [0.1],
    "coordinates": dpx.coordinates.top_fraction(fraction=0.5),
    "data": np.ones((40, 3), np.float32),
    "delta": 1e-5,
    "epsilon": 1.0,
    "event": MECHANISM.event(1),
    "every": 1,
    "example": np.ones(3, np.float32),
    "examples": 40,
    "feedback_norm": 0.1,
    "fraction": 0.5,
    "init_value": 1.0,
    "initial_clip_norm": 1.0,
    "inner": MECHANISM,
    "keep": 0.5,
    "key": KEY,
    "kind": "hadamard",
    "correct": np.ones(40, bool),
    "high": 1.0,
    "loss": loss,
    "low": 0.0,
    "mask": True,
    "mechanism": MECHANISM,
    "metric": lambda params: np.ones(40),
    "name": "name",
    "noise_multiplier": 1.0,
    "number": 1,
    "optimizer": MECHANISM,
    "params": PARAMS,
    "public_grads": jax.tree.map(lambda p: np.ones((4, *p.shape), np.float32), PARAMS),
    "quantile": 0.5,
    "rank": 2,
    "run": MECHANISM,
    "sampling": SAMPLING,
    "score": lambda params: 0.0,
    "score_on": "public",
    "seed": 3,
    "size": None,
    "state": STATE,
    "steps": 3,
    "steps_or_state": 3,
    "train": lambda trial: None,
    "trials": 2,
    "tree": PARAMS,
    "update_of_unit": lambda params, x: params,
    "updates": jax.tree.map(lambda p: np.ones((4, *p.shape), np.float32), PARAMS),
    "users": list(range(40)),
    "value": 1.0,
}


def public_functions():
    yield from ((name, getattr(dpx, name)) for name in dpx.__all__ if callable(getattr(dpx, name)))
    modules = (dpx.accounting, dpx.audit, dpx.coordinates, dpx.keys, dpx.mechanisms, dpx.methods, dpx.schedules)
    for module in (*modules, dpx.statistics, dpx.tuning):
        for name, value in vars(module).items():
            if (
                callable(value)
                and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
                and name in getattr(module, "__all__", [name])
                and not name.startswith("_")
            ):
                yield f"{module.__name__}.{name}", value
    for record in (dpx.PoissonSampling, dpx.ShuffledEpochs, dpx.FixedSizeSampling, dpx.FullBatch):
        made = record(examples=40) if record is dpx.FullBatch else record(examples=40, batch_size=4)
        for name in ("draw", "draw_ahead", "take", "batches"):
            yield f"{record.__name__}.{name}", getattr(made, name)
    yield "Mechanism.init", MECHANISM.init
    yield "Mechanism.update", MECHANISM.update
    yield "Mechanism.replace", MECHANISM.replace
    yield "step", dpx.private_updates(loss, MECHANISM)
    yield "compiled step", jax.jit(dpx.private_updates(loss, MECHANISM))


# Functions that would run for long if the misplaced argument is none that they read.
LONG = ("fit", "check", "dpx.audit.check_contract", "dpx.audit.one_run", "dpx.audit.lower_bound", "dpx.tuning.search")
FUNCTIONS = dict(public_functions())


SLOW = {"dpx.audit.check_contract": ("params", "rebuild")}  # whose misplaced value only the checks read


def calls(function, long):
    """(name, positional and named arguments) for every argument that may be misplaced."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = {p.name: GIVEN.get(p.name) for p in plain if p.default is p.empty or (long and p.name == "steps")}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield parameter.name, needed, True
        elif parameter.kind is not parameter.VAR_KEYWORD:
            yield parameter.name, needed, False


def raised(function, *arguments, **named):
    """The text of the exception as a terminal or a log shows it; empty if there is none."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = function(*arguments, **named)
            if inspect.isgenerator(made):
                next(made)
    except Exception as error:
        return "".join(traceback.format_exception(error)) + "".join(str(one.message) for one in warned)
    return "".join(str(one.message) for one in warned)


def leaks(text):
    return [shown for shown in SHOWN if shown in text.lower()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_misplaced_key_or_data_is_shown(name):
    function, found = FUNCTIONS[name], []
    for argument, needed, many in calls(function, name in LONG):
        for kind, value in MISPLACED.items() if argument not in SLOW.get(name, ()) else ():
            if many:
                positional = [one for other, one in needed.items() if other != argument]
                text = raised(function, *positional, value)
            else:
                text = raised(function, **(needed | {argument: value}))
            found += [(argument, kind, shown, text.strip().splitlines()[-1][:200]) for shown in leaks(text)]
    assert not found


@pytest.mark.parametrize(
    "seed", [2654435769 << 100, -2135587861, 2654435769.5, "2654435769", b"2654435769", [2654435769], WORDS]
)
def test_a_wrong_seed_or_key_is_not_shown(seed):
    """A seed is as secret as the key."""
    text = raised(dpx.secret_key, seed) + raised(dpx.keys.require_key, seed)
    assert "seed must be" in text and "key must be" in text
    assert str(2654435769 << 100) not in text and not leaks(text)


def test_keys_are_no_parameters():
    with pytest.raises(ValueError, match="parameters and gradients must be numbers, got PRNG keys"):
        MECHANISM.init({"w": MISPLACED["typed key"]})


def test_misplaced_arguments_in_a_swapped_order():
    data, wrong = np.full((40, 3), NUMBER, np.float32), MISPLACED["typed key"]
    swapped = [
        raised(SAMPLING.take, data, STATE, wrong),
        raised(SAMPLING.batches, wrong, data, STATE),
        raised(dpx.chain, wrong),
        raised(dpx.chain, MECHANISM, wrong),
        raised(dpx.fit, loss, PARAMS, data, wrong),
        raised(dpx.fit, loss, data, PARAMS, MECHANISM, key=KEY, steps=1, delta=1e-5),
        raised(dpx.PoissonSampling, examples=wrong, batch_size=data),
        raised(optax.apply_updates, PARAMS, MECHANISM.update) and raised(dpx.epsilon, MECHANISM, wrong, delta=1e-5),
    ]
    assert all(swapped) and not leaks("".join(swapped))


PLACES = {
    "compose": lambda wrong: dpx.compose_runs(wrong, shared_batches=False),
    "compose a pair": lambda wrong: dpx.compose_runs((wrong, 3), shared_batches=False),
    "compose a state": lambda wrong: dpx.compose_runs((MECHANISM, wrong), shared_batches=False),
    "compose three": lambda wrong: dpx.compose_runs((MECHANISM, 3, wrong), shared_batches=False),
    "compose shared_batches": lambda wrong: dpx.compose_runs((MECHANISM, 3), shared_batches=wrong),
    "chain": dpx.chain,
    "chain behind": lambda wrong: dpx.chain(MECHANISM, wrong),
    "in_coordinates": lambda wrong: dpx.in_coordinates(MECHANISM, wrong),
    "private_updates": lambda wrong: dpx.private_updates(wrong, MECHANISM),
    "private_updates_from": lambda wrong: dpx.private_updates_from(wrong, MECHANISM),
    "accumulate": lambda wrong: dpx.private_updates_in_chunks(wrong, MECHANISM),
    "explain": lambda wrong: dpx.explain_norms(wrong, MECHANISM, PARAMS, BATCH),
    "the state of a step": lambda wrong: dpx.private_updates(loss, MECHANISM)(PARAMS, BATCH, wrong),
    "the state of a chunk": lambda wrong: dpx.private_updates_in_chunks(loss, MECHANISM).add(PARAMS, BATCH, wrong),
    "the unit of draws": lambda wrong: SAMPLING.draw_ahead(KEY, STATE, 1, unit=wrong),
    "the unit of users": lambda wrong: dpx.UserData(np.ones((40, 3)), list(range(40)), unit=wrong),
    "the unit of a report": lambda wrong: dpx.privacy_report(MECHANISM, 3, delta=1e-5, unit=wrong),
}


@pytest.mark.parametrize("kind", MISPLACED)
@pytest.mark.parametrize("place", PLACES)
def test_misplaced_arguments_are_refused_in_words(place, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="must"):
            PLACES[place](MISPLACED[kind])


@pytest.mark.parametrize("unit", ["", 3, None])
def test_a_unit_must_have_a_name(unit):
    with pytest.raises(ValueError, match="unit must be the name of what epsilon protects"):
        SAMPLING.draw_ahead(KEY, STATE, 1, unit=unit)


@pytest.mark.parametrize("value", [3, 2.5, -np.inf, None, True, np.float32(2), "pld"])
def test_numbers_and_words_are_described_as_they_are(value):
    assert described(value) == repr(value)


def test_other_values_are_described_by_their_types():
    said = {kind: described(value) for kind, value in MISPLACED.items()}
    assert said["typed key"] == "an array key<fry>[]" and said["data"] == "an array float32[3, 2]"
    assert said["tree"] == "a dict of length 2" and described(loss) == "the function loss"
    assert described(int) == "the type int" and described(object()) == "a object"
    assert said["words"] == "an array <U8[3]" and described(MISPLACED["words"][0]) == "an element of an array of <U8"
    assert described("x" * 999) == repr("x" * 100)


def printed():
    """Results whose fields hold arrays, with NUMBER in each array that is as secret as the data."""
    data, params = np.full((40, 3), NUMBER, np.float32), {"w": np.full(3, NUMBER, np.float32)}
    key = MISPLACED["typed key"]
    unreleased = dpx.gradients.Unreleased(data[:, 0], data[:, 0], {"aux": data})
    report = dpx.privacy_report(MECHANISM, 3, delta=1e-5)
    bill = dpx.accounting.best_of((MECHANISM, 3), trials=2, score_on="public")
    yield dpx.fitting.Progress(3, 0.5, params, STATE, Metrics(accuracy=0.75), NUMBER, unreleased, data[:, 0] > 0)
    yield dpx.fitting.FitResult(params, STATE, 3, 0.5, 1e-5, report, [{"step": 3, "unreleased_loss": NUMBER}])
    yield dpx.gradients.PrivateUpdates(params, STATE, unreleased)
    yield dpx.Batch(data, np.ones(40, bool))
    yield dpx.tuning.SearchResult({"lr": 0.25}, params, 0.5, 3, 0.5, 1e-5, bill, report)
    yield dpx.tuning.Trial({"lr": 0.25}, MECHANISM, key, None)
    yield SAMPLING.draw(key, 0)
    yield SAMPLING.draw_ahead(key, STATE, steps=3)
    yield report


def test_results_are_printed_in_a_line_without_elements_of_arrays():
    for result in printed():
        text = repr(result)
        assert type(result).__name__ in text and "\n" not in text and len(text) < 400, text
        assert not leaks(text) and "[[" not in text, text
    progress, run, *_ = map(repr, printed())
    assert "epsilon=0.5" in progress and "'accuracy': 0.75" in progress and "not private" in progress
    assert "steps=3" in run and "float32" in repr(dpx.Batch(np.zeros((4, 3), np.float32), None))
    assert f"{len(jax.tree.leaves(STATE))} arrays of " in run


def test_a_mask_of_optax_that_does_not_fit_names_that_of_dpx():
    masked = dpx.chain(MECHANISM, optax.masked(optax.adam(0.1), {leaf: {} for leaf in PARAMS}))
    with pytest.raises(ValueError, match="different types") as caught:
        masked.init(PARAMS)
    assert "write dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask))" in caught.value.__notes__[-1]


def test_a_wrong_keyword_of_a_method_names_the_nearest():
    with pytest.raises(TypeError, match=r"dp_sgd\(\) got an unexpected argument 'clip_nrom', did you mean 'clip_norm'"):
        dpx.dp_sgd(clip_nrom=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=KEY)
    for build in (dpx.dp_sgd, dpx.statistics.release_mean):
        with pytest.raises(TypeError, match=r"'epsilon', which belongs in noise_multiplier=dpx.Budget\(epsilon="):
            build(epsilon=1.0)
    with pytest.raises(AttributeError, match="no attribute 'FixedOrder'; there is dpx.sampling.FixedOrder"):
        dpx.FixedOrder  # noqa: B018
    with pytest.raises(TypeError, match=r"d2p2_sgd\(\) missing a required argument: 'kind' \(kind='gaussian', 'orth"):
        dpx.methods.d2p2_sgd(noise_multiplier=1.0, sampling=SAMPLING, key=KEY)


def test_names_and_values_that_are_nearly_right_say_what_there_is():
    progress = next(printed())
    with pytest.raises(AttributeError, match=r"no 'private_metric'; metrics: \['accuracy'\]"):
        progress.private_metric  # noqa: B018
    with pytest.raises(AttributeError, match=r"no 'html': report.save\(\"report.html\"\) writes it"):
        REPORT.html  # noqa: B018
    with pytest.raises(AttributeError, match="no 'accuracy'; each row of its history has the metrics"):
        [one for one in printed() if isinstance(one, dpx.fitting.FitResult)][0].accuracy  # noqa: B018
    with pytest.raises(KeyError, match=r"no metric is called 'loss'; there are \['accuracy'\]"):
        progress.metrics["loss"]
    with pytest.raises(ValueError, match="users must be the owner of each example, .* got one string"):
        dpx.UserData(np.zeros((4, 3)), "user", most=2)
    with pytest.raises(ValueError, match=r"folder must not be a file, which report.save\(path\) writes"):
        dpx.privacy_report(MECHANISM, 3, delta=1e-5).write("report.html")
    with pytest.raises(
        ValueError,
        match=r"metric must be a function of \(params\), got the function .*: missing a required argument: 'x'",
    ):
        dpx.statistics.PrivateMetric(lambda params, x: x, noise_multiplier=1.0, key=KEY)


OF_OTHERS = {  # an argument of another library, or of another function, in a call of dpx: what the message says of it
    "'l2_norm_clip', which is clip_norm here": lambda: dpx.dp_sgd(l2_norm_clip=1.0),
    r"'seed', which is key = dpx.secret_key\(seed\) here": lambda: dpx.dp_sgd(seed=3),
    r"'lot_size', which is batch_size, and belongs in sampling=dpx.PoissonSampling\(": lambda: dpx.dp_sgd(lot_size=4),
    r"which is .*, and belongs in dpx.fit\(microbatch_size=": lambda: dpx.dp_sgd(num_microbatches=4),
    "'num_epochs', which is epochs here": lambda: dpx.fit(loss, MECHANISM, PARAMS, [], num_epochs=2),
    r"belongs in dpx.dp_sgd\(noise_multiplier=dpx.Budget\(eps": lambda: dpx.fit(loss, MECHANISM, PARAMS, [], epsilon=2),
    r"batch_size = rate \* examples here": lambda: dpx.PoissonSampling(examples=9, sample_rate=0.1),
    "'n', which is examples here, and 'size'": lambda: dpx.PoissonSampling(n=9, size=3),
    "'batch_size', did you mean 'batch_sizes'": lambda: dpx.plan_noise(examples=9, epsilon=1.0, batch_size=3),
    "dpx.accounting.dp_sgd_epsilon takes them": lambda: dpx.epsilon(noise_multiplier=0.8, batch_size=4, delta=1e-5),
    "'epsilon', which is what it returns$": lambda: dpx.epsilon(MECHANISM, 3, epsilon=1.0),
    "argument 'clip_norm', but it normalizes every gradient": lambda: dpx.methods.d2p2_sgd(
        clip_norm=1.0, sampling=SAMPLING
    ),
    r"'seed', which is key = .* here$": lambda: dpx.coordinates.random_freeze(seed=0),
    "argument 'batch_size'; its arguments are examples, steps": lambda: dpx.sampling.RandomAllocation(batch_size=3),
    "'steps', which is argument 2 here, steps_or_state$": lambda: dpx.epsilon(MECHANISM, steps=3, delta=1e-5),
    "'num_steps', which is argument 2 here, steps_or": lambda: dpx.privacy_report(MECHANISM, num_steps=3, delta=1e-5),
    r"is argument 2 here, steps_or_state = sampling.steps\(epochs=": lambda: dpx.epsilon(
        MECHANISM, epochs=3, delta=1e-5
    ),
    "missing required arguments: 'noise_multiplier', 'sampling', 'key'$": lambda: dpx.dp_sgd(clip_norm=1.0),
    "'private_metric', which is evaluate_private here": lambda: dpx.fit(loss, MECHANISM, PARAMS, [], private_metric=3),
    r"'shuffle', which belongs in dpx.dp_sgd\(sampling=": lambda: dpx.fit(loss, MECHANISM, PARAMS, [], shuffle=True),
    r"which belongs in dpx.fit\(evaluate=...\) if it is p": lambda: dpx.fit(
        loss, MECHANISM, PARAMS, [], validation_data=3
    ),
    r"'key' \(strategy=dpx.strategies.lambda_cgd\(": lambda: dpx.mechanisms.correlated_noise(clip_norm=1.0),
    r"'steps', which is the length of shape here$": lambda: dpx.accounting.calibrate_schedule([1.0], steps=3),
    "'schedule', which belongs in a mechanism's noise_": lambda: dpx.plan_noise(examples=9, schedule=lambda step: 1.0),
    "takes its arguments by name: epsilon, delta, steps": lambda: dpx.Budget(1.0, 1e-5),
    r"takes loss, optimizer, params, data by position.* data=\(x, y\)$": lambda: dpx.fit(
        loss, MECHANISM, PARAMS, [], KEY
    ),
    r"'coordinates', which belongs in dpx.in_coordinates\(mechanism, coordinates\)$": lambda: dpx.dp_sgd(coordinates=3),
    r"'users', which is data = dpx.UserData\(data, users\) here$": lambda: dpx.fit(users=3),
    "'owners', which is users here$": lambda: dpx.UserData(owners=3),
    r"'stop', which is callbacks = \[a function that returns True to end the run\] here$": lambda: dpx.fit(stop=3),
    r"'resume', which is checkpoints = folder \(the same call again continues": lambda: dpx.fit(resume=True),
    "'loss', but it runs the mechanism alone .dpx.audit.one_run is for": lambda: dpx.audit.lower_bound(loss=loss),
    r"'epochs', which is steps = sampling.steps\(epochs=...\) here$": lambda: dpx.accounting.calibrate(epochs=3),
    r"'epochs', which is steps = sampling.steps\(epochs=...\) here or in its budget$": lambda: dpx.tuning.search(
        epochs=3
    ),
    r"clip_norm=...\); give its result to dpx.in_coor": lambda: dpx.coordinates.random_freeze(clip_norm=3),
    "'batch_size', which belongs in dpx.dp_sgd.sampling=": lambda: dpx.fit(batch_size=3),
    "'sampling', which belongs in dpx.dp_sgd.sampling=": lambda: dpx.fit(sampling=SAMPLING),
    "'stop'; its arguments are examples, batch_size": lambda: dpx.PoissonSampling(stop=3),
    r"by name; it returns a function of \(params, batch, state\)$": lambda: dpx.private_updates(
        loss, MECHANISM, PARAMS
    ),
    r"'params'; it returns a function of \(params, batch, s": lambda: dpx.private_updates(
        loss, MECHANISM, params=PARAMS
    ),
    "'steps_or_state', 'delta' .*; a run of dpx.fit has run.report": lambda: dpx.privacy_report(MECHANISM),
    "'event' .event=lambda noise: sampling.event": lambda: owned().least_noise(),
    "'steps', which belongs in event: .*lambda noise: sampling": lambda: owned().least_noise(steps=3),
    "'steps', which is the length of multipliers here$": lambda: SAMPLING.event(steps=3),
    "'target_quantile', which belongs in dpx.mechanisms.adaptive_clipping": lambda: dpx.dp_sgd(target_quantile=0.5),
    "'indicator_noise', .*=batch_size / 20": lambda: dpx.mechanisms.adaptive_clipping(),
    "'feedback_norm', .*=clip_norm removes": lambda: dpx.mechanisms.dice_sgd(),
    "'bands', .*bands=8": lambda: dpx.methods.band_mf_sgd(),
    "'warmup', .*warmup: the number of steps": lambda: dpx.methods.ada_dpigu(),
    "'accumulation_steps', which is microbatch_size =": lambda: dpx.fit(accumulation_steps=8),
    "correct by position.*; correct is predictions == labels$": lambda: dpx.statistics.release_accuracy([1], [1]),
}


@pytest.mark.parametrize("words", OF_OTHERS)
def test_an_unknown_argument_is_named_with_what_it_is_here(words):
    with pytest.raises(TypeError, match=words):
        OF_OTHERS[words]()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: dpx.fit(MECHANISM, loss, PARAMS, []),
            "optimizer looks like the loss and loss looks like the optimizer",
        ),
        (
            lambda: dpx.fit(loss, PARAMS, MECHANISM, []),
            "fit takes loss, optimizer, params, data, and what was given as",
        ),
        (lambda: dpx.explain_norms(loss, MECHANISM, BATCH, PARAMS), "given as params looks like the batch"),
        (lambda: dpx.epsilon(3, MECHANISM, delta=1e-5), "given as steps_or_state looks like the optimizer"),
    ],
)
def test_swapped_arguments_are_noted(call, words):
    with pytest.raises(ValueError, match="must be") as raised:
        call()
    assert words in raised.value.__notes__[0]


REPORT = dpx.privacy_report(MECHANISM, 3, delta=1e-5)
HURRIED = {
    "steps must be a whole number of at least 1, got 1000.0: write steps=1000": lambda: dpx.Budget(
        epsilon=1.0, delta=1e-5, steps=1e3
    ),
    r"such as dpx.PoissonSampling\(examples=..., batch_size=...\), got 0.1": lambda: dpx.dp_sgd(
        clip_norm=1.0, noise_multiplier=1.0, sampling=0.1, key=KEY
    ),
    "got <class 'list'>: give its parts one after another": lambda: dpx.chain([MECHANISM, optax.sgd(0.1)]),
    "got <class 'function'>: call it, because a mechanism is its result": lambda: dpx.private_updates(loss, dpx.dp_sgd),
    "data must be all examples, because the sampling draws the batches, got a dpx.Batch": lambda: SAMPLING.take(
        BATCH, KEY, STATE
    ),
    "must be a dpx Mechanism, which has an event .*ReleaseState": lambda: dpx.epsilon(STATE, 3, delta=1e-5),
    "steps_or_state must be a whole number of steps or an optimizer state, got '3'": lambda: dpx.epsilon(
        MECHANISM, "3", delta=1e-5
    ),
    "steps_or_state must be a whole number of steps or an optimizer state, got a list": lambda: dpx.epsilon(
        MECHANISM, [3, 4], delta=1e-5
    ),
    "event must be a DpEvent, such as optimizer.event.steps., got a Mechanism$": lambda: dpx.accounting.event_epsilon(
        MECHANISM, delta=1e-5
    ),
    "path must be given to report.save, because this returns the text, got 'a.html'": lambda: REPORT.to_html("a.html"),
    "got a list of length 2: give the runs of a list one after another, as .runs": lambda: dpx.compose_runs(
        [(MECHANISM, 3), (MECHANISM, 3)]
    ),
    "configurations must be a list of at least one, such as": lambda: dpx.tuning.search(
        **{"train": lambda trial: None} | SEARCH | {"configurations": {"rate": [0.1]}, "optimizer": lambda c, key: c}
    ),
    "call fit outside of jit, because it compiles its own steps": lambda: jax.jit(
        lambda params: dpx.fit(loss, MECHANISM, params, np.ones((40, 3)), steps=3, delta=1e-5).params
    )(PARAMS),
    r"event must be a function from a noise multiplier .*np.full.steps, noise.., got a PoissonSampling": lambda: (
        owned().least_noise(SAMPLING)
    ),
    r"event must be a function from a noise multiplier to an event.* got 1.0$": lambda: owned().least_noise(float),
    "posterior must be True or False, got 'no'": lambda: dpx.coordinates.random_freeze(
        freeze_rate=0.5, every=1, posterior="no", key=KEY
    ),
    "squares must be True or False, got 0": lambda: dpx.coordinates.importance_mask(keep=0.5, warmup=1, squares=0),
    "relative must be True or False, got None": lambda: dpx.coordinates.standardized(relative=None),
    "public_stop must be True or False, got the function len: what ends a run belongs in": lambda: dpx.fit(
        loss, MECHANISM, PARAMS, np.ones((40, 3)), steps=3, delta=1e-5, public_stop=len
    ),
    r"It is optimizer.init\(params\) at first": lambda: SAMPLING.take(np.ones((40, 3)), KEY, 0),
    "a run of dpx.fit has run.report and run.epsilon": lambda: dpx.privacy_report(REPORT, 3, delta=1e-5),
    r"in a search also dpx.tuning.NoisySum\(noise": lambda: dpx.accounting.best_of(
        (MECHANISM, 3), trials=2, score_on="private"
    ),
    ": give private metrics to evaluate_private": lambda: dpx.fitting.progress.metrics_by_name({"private_metric": 1.0}),
}


@pytest.mark.parametrize("words", HURRIED)
def test_what_is_written_in_a_hurry_is_answered_with_what_to_write(words):
    with pytest.raises(ValueError, match=words):
        HURRIED[words]()


def test_names_of_other_libraries_lead_to_those_of_dpx():
    for place, words in {
        "DPSGD": "; there is dpx.dp_sgd$",
        "Trainable": "; there is dpx.coordinates.trainable$",
        "get_epsilon": "; there is dpx.epsilon$",
        "PrivacyEngine": r": write a mechanism, such as dpx.dp_sgd\(...\), and give it to dpx.fit",
        "zebra": "no attribute 'zebra'$",
        "folder": "no attribute 'folder'$",  # of an internal module
        "Ledger": "; there is dpx.PrivacyLedger$",
        "least_noise": "; there is dpx.PrivacyLedger.least_noise$",
        "coordinates.lora": "; dpx.coordinates.trainable.mask. trains the adapters",
        "tuning.tune": "; there is dpx.tuning.search$",
        "mechanisms.strategies": "; there is dpx.strategies$",
        "methods.random_freeze": "; there is dpx.coordinates.random_freeze, dpx.methods.random_freeze_sgd$",
        "methods.band_mf": "; there is dpx.methods.band_mf_sgd$",
        "methods.adaptive_clipping": "; there is dpx.mechanisms.adaptive_clipping$",
        "strategies.banded": "; there is dpx.strategies.banded_inverse_square_root, dpx.strategies.banded_square_root$",
        "accounting.compute_epsilon": "; there is dpx.epsilon of a mechanism, and dpx.accounting.dp_sgd_epsilon",
        "accounting.RDPAccountant": "; there is dpx.epsilon",
        "statistics.release_median": "; there is dpx.statistics.release_quantiles",
        "tuning.zebra": "; it has NoisySum, SearchResult, Trial, search$",
        "schedules.cosine": "; it has every, growing_mu",
    }.items():
        with pytest.raises(AttributeError, match=f"'dpx.*{words}"):
            operator.attrgetter(place)(dpx)


def test_calls_of_methods_name_their_arguments():
    for call, words in {
        SAMPLING.event: r"PoissonSampling.event\(\) missing a required argument: 'multipliers'",
        SAMPLING.take: r"PoissonSampling.take\(\) missing required arguments: 'data', 'key', 'state'",
        REPORT.save: r"PrivacyReport.save\(\) missing a required argument: 'path'",
        MECHANISM.init: r"Mechanism.init\(\) missing a required argument: 'params'",
        owned().least_noise: r"PrivacyLedger.least_noise\(\) missing a required argument: 'event'",
        lambda: REPORT.save(3): "expected str, bytes or os.PathLike object, not int|argument should be a str",
    }.items():
        with pytest.raises(TypeError, match=words):
            call()
    assert [*inspect.signature(SAMPLING.event).parameters] == ["multipliers"]


@pytest.mark.parametrize("given", [1.3, "noise", None, np.ones((2, 2)), np.full(3, -1.0), np.full(3, np.nan)])
def test_an_event_takes_one_multiplier_for_each_step(given):
    sizes = {"examples": 40, "batch_size": 4}
    samplings = [SAMPLING, dpx.FullBatch(examples=40), dpx.sampling.RandomAllocation(examples=40, steps_per_epoch=10)]
    samplings += [dpx.FixedSizeSampling(**sizes), dpx.ShuffledEpochs(**sizes), dpx.sampling.FixedOrder(**sizes)]
    for sampling in (*samplings, dpx.sampling.CyclicPoissonSampling(**sizes, bands=2)):
        with pytest.raises(ValueError, match=r"one noise multiplier for each step, such as np.full\(100, 1.3\), got"):
            sampling.event(given)
        assert sampling.event([1, 1]) == sampling.event(np.ones(2))


@pytest.mark.parametrize("share", [Fraction(1, 2), Decimal("0.5"), jnp.float32(0.5), np.array(0.5), 0.5])
def test_a_share_may_be_a_number_of_any_type(share):
    parts = (
        dpx.coordinates.top_fraction(fraction=share),
        dpx.coordinates.random_freeze(freeze_rate=share, every=2, key=dpx.secret_key(4)),
    )
    made = dpx.in_coordinates(MECHANISM, *parts)
    assert "a share of 0.5" in str(made)
    grads = {"w": jnp.ones((4, 3))}
    updates, _ = made.update(grads, made.init(PARAMS), PARAMS, included=np.ones(4, bool))
    assert int(jnp.count_nonzero(updates["w"])) == 1


@pytest.mark.parametrize("read", [lambda x: float(x), lambda x: np.asarray(x).sum(), lambda x: 1.0 if x > 0 else 2.0])
def test_a_loss_that_reads_traced_numbers_is_told_to_compute_with_jax(read):
    with pytest.raises(jax.errors.JAXTypeError) as raised:
        dpx.private_updates(lambda params, x: read(jnp.sum(params["w"] * x)), MECHANISM)(PARAMS, BATCH, STATE)
    assert "compute with jax.numpy in place of numpy, float()" in raised.value.__notes__[-1]


SEARCH = {"configurations": [0.1], "score": len, "optimizer": MECHANISM, "key": KEY, "trials": 2, "score_on": "public"}
BUDGET = GIVEN["budget"]
OF_ONE_NOISE = {  # a function of the noise multiplier that ignores it would have any answer
    "make": lambda: dpx.accounting.calibrate(lambda noise: built(BUDGET), steps=3, epsilon=1.0, delta=1e-5),
    "make ": lambda: dpx.accounting.accepts_budget(lambda *, noise_multiplier: MECHANISM)(noise_multiplier=BUDGET),
    "event": lambda: owned().least_noise(lambda noise: MECHANISM.event(3)),
}


def built(noise_multiplier, key=KEY):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=SAMPLING, key=key)


def owned():
    return dpx.PrivacyLedger(f"{tempfile.mkdtemp()}/ledger.jsonl", epsilon=2.0, delta=1e-5)


@pytest.mark.parametrize("name", OF_ONE_NOISE)
def test_a_noise_multiplier_that_is_not_used_is_refused(name):
    with pytest.raises(ValueError, match=f"{name.strip()} must use the noise multiplier that it is given"):
        OF_ONE_NOISE[name]()


def test_a_noise_multiplier_that_is_kept_within_bounds_is_used():
    assert owned().least_noise(lambda noise: GaussianDpEvent(max(noise, 2.5))) <= 2.5
    with pytest.raises(ValueError, match="must allow some noise multiplier"):
        owned().least_noise(lambda noise: GaussianDpEvent(min(noise, 0.2)))


OF_ANOTHER_FORM = {  # a function with other arguments, refused before it is called
    r"optimizer must be a function of \(configuration, key\) that builds .* lambda rate, key: dpx.chain": {},
    r"optimizer must be a function of \(configuration, key\), got .*: missing a required argument: 'x'": {
        "optimizer": lambda configuration, key, x: MECHANISM
    },
    r"optimizer must be a function of \(configuration, key\), got .*: too many positional": {"optimizer": lambda c: c},
    r"optimizer must be a function of \(configuration, key, noise_multiplier=...\), got 3": {
        "optimizer": 3,
        "budget": GIVEN["budget"],
    },
    r"train must be a function of \(trial\), got .*: missing required arguments: 'b', 'c'": {
        "train": lambda a, b, c: 0
    },
    r"score must be a function of \(params, key\), got": {"score": lambda p: 0, "score_on": MECHANISM.event(1)},
}


@pytest.mark.parametrize("words", OF_ANOTHER_FORM)
def test_a_search_refuses_functions_of_another_form(words):
    with pytest.raises(ValueError, match=words):
        dpx.tuning.search(**{"train": lambda trial: None} | SEARCH | OF_ANOTHER_FORM[words])


def test_what_belongs_to_one_batch_says_where_it_comes_from():
    rows = jax.tree.map(lambda leaf: jnp.ones((4, *leaf.shape)), PARAMS)
    with pytest.raises(ValueError, match=r"give included=batch.included, of a batch that the sampling drew"):
        MECHANISM.update(rows, STATE, PARAMS)
    mixed = {"x": np.ones((4, 3)), "labels": np.ones(5), "z": np.ones((4, 2))}
    words = r"on axis 0; got shapes labels \[5\], x \[4, 3\], z \[4, 2\]. Are these parameters, in the place of data"
    with pytest.raises(ValueError, match=words):
        dpx.private_updates(loss, MECHANISM)(PARAMS, dpx.Batch(mixed, None), STATE)


def test_check_setup_tells_missing_values_from_a_loss_that_makes_nan():
    data = np.where(np.arange(4)[:, None] < 3, np.ones((4, 3), np.float32), np.nan)
    sampling = dpx.FullBatch(examples=4)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=KEY)
    said = [
        dpx.check_setup(of, mechanism, PARAMS, dpx.Batch(data, None))["finite"].words
        for of in (loss, lambda params, x: loss(params, x) * jnp.log(jnp.sum(0 * x)))
    ]
    missing = "1 of these rows hold NaN or infinity: give missing values a number first (docs/recipes.md)"
    assert all(missing in words for words in said) and "of 4 rows, 4 have a loss" in said[1]
    assert "loss or its" not in said[0] and "data of 3 of these rows are finite: the loss or its derivative" in said[1]


def test_an_error_of_the_loss_tells_the_shapes_of_an_example():
    data = np.full((4, 3), NUMBER, np.float32)
    batch, users = dpx.Batch({"x": data}, None), dpx.Batch((data[:, None], np.ones((4, 1), bool)), None)
    sampling = dpx.FullBatch(examples=4)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=KEY)
    for build, called in ((dpx.private_updates, "loss"), (dpx.private_updates_from, "update")):
        with pytest.raises(TypeError) as caught:
            build(lambda params, example: params["w"] @ np.ones((7, 2)), mechanism)(
                PARAMS, batch, mechanism.init(PARAMS)
            )
        assert f"dpx: the {called} was called with one example: x float32[3]" in caught.value.__notes__
    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        step = dpx.private_updates(lambda params, user: np.asarray(user[0]).sum(), mechanism)
        step(PARAMS, users, mechanism.init(PARAMS))
    (note,) = [note for note in caught.value.__notes__ if note.startswith("dpx:")]
    assert "0 float32[1, 3], 1 bool[1]" in note and "docs/loops.md#users-instead-of-examples" in note
    assert not leaks(note)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([[NUMBER] * 3] * 40, "convert lists of numbers to arrays"),
        (np.full((40, 3), NUMBER, object), "give .astype(numpy.float32) of the columns of numbers"),
        ({"x": np.full((40, 3), NUMBER), 1: np.ones(40)}, "keys of a dict must be of one type"),
    ],
)
def test_data_that_are_no_arrays(data, words):
    state = MECHANISM.init(PARAMS)
    said = [
        raised(SAMPLING.take, data, KEY, state),
        raised(dpx.fit, loss, MECHANISM, PARAMS, data, steps=1, delta=1e-5),
    ]
    said += [raised(dpx.private_updates(loss, MECHANISM), PARAMS, dpx.Batch(data, None), state)]
    for text in said:
        assert words in text and not leaks(text.splitlines()[-1]) and len(text.splitlines()[-1]) < 400, text


def test_user_data_are_printed_without_data():
    users = dpx.UserData(np.full((6, 2), NUMBER), [WORD, WORD, "b", "b", "b", "c"], unit="patient")
    assert repr(users) == "UserData(3 of unit 'patient', at most 3 rows each)"
    wanted = pytest.raises(ValueError, match=r"Draw from dpx.UserData\(..., unit='patient'\)")
    with wanted, pytest.warns(UserWarning, match="the state has taken no step"):
        dpx.privacy_report(MECHANISM, MECHANISM.init(PARAMS).with_fields(unit=2**31), delta=1e-5, unit="patient")
