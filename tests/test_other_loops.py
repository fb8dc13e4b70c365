"""The loops of docs/other_loops.md run as they stand, and end with the bits of `dpx.fit`."""

import importlib.metadata
import importlib.util
import re
import tempfile

import jax
import numpy as np
import pytest

import dpx
from dpx.audit.setup import static_findings
from tests.problems import ROOT, as_a_user

PAGE = (ROOT / "docs" / "other_loops.md").read_text()
HEAD, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
SECTIONS = {section.splitlines()[0]: section for section in SECTIONS}


def code_of(text):
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return code


def require_installed(code):
    """Skips the test if a package that the code imports is not there."""
    for name in set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def run(heading, *, before="", **given):
    """The names of one loop, after those of the first lines of the page. before: the line that it ends before, and ""
    for none. given: names that replace some of the first."""
    names: dict = {}
    code = code_of(SECTIONS[heading]).partition(before or "\0")[0]
    require_installed(code)
    if heading.startswith("Hugging") and int(importlib.metadata.version("transformers").split(".")[0]) > 4:
        pytest.skip("transformers has no Flax models from version 5 on")
    with as_a_user():
        exec(code_of(HEAD), names)
        names |= given
        exec(code, names)
    return names


class Counted:
    """The rows of the page, which count how often they are read."""

    def __init__(self):
        inputs = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
        self.inputs, self.labels, self.read = inputs, (inputs[:, 0] > 0).astype(np.int32), 0

    def __len__(self):
        return 400

    def __getitem__(self, number):
        self.read += 1
        return self.inputs[number], self.labels[number]


def assert_same_as_fit(names, loss, params, **options):
    with as_a_user():
        run = dpx.fit(loss, names["optimizer"], params, names["data"], key=names["key"], **options)
    assert run.steps == dpx.accounting.steps_taken(names["opt_state"]) == names["budget"].steps
    assert run.epsilon == dpx.epsilon(names["optimizer"], names["opt_state"], delta=1e-4) <= 3.0
    assert jax.tree.all(jax.tree.map(np.array_equal, names["trained"], run.params))


LOOPS = [heading for heading in SECTIONS if not heading.startswith("tunix")]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("heading", LOOPS)
def test_a_loop_has_the_bits_of_fit(heading):
    names = run(heading)
    assert_same_as_fit(names, names["loss"], names["params"], with_key=True)
    example = jax.tree.map(lambda leaf: leaf[0], names["data"])
    with as_a_user():
        found = static_findings.find_constant_keys(names["loss"], names["params"], example, with_key=True)
        constant = lambda params, example: names["loss"](params, example, jax.random.key(0))  # noqa: E731
        repeats = static_findings.find_constant_keys(constant, names["params"], example, with_key=False)
    assert found.severity == "ok" and repeats.severity == "warning"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_tunix_resumes_without_reading_twice():
    counted, last = Counted(), "trainer = made(max_steps=6)"
    names = run("tunix: PeftTrainer", before=last, data=counted)
    counted.read, nnx = 0, names["nnx"]
    with as_a_user():
        exec(last + code_of(SECTIONS["tunix: PeftTrainer"]).partition(last)[2], names)
    batches = names["sampling"].batches(np.arange(400), names["key"], names["optimizer"].init(names["trained"]))
    rows = [int(batch.included.sum()) for batch in batches]
    assert sum(rows[3:]) <= counted.read < 1.5 * sum(rows[3:]) < sum(rows)  # some are read again, to compare them

    names["folder"] = tempfile.mkdtemp()
    model = names["made"](6).model
    graph, params, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(params, example):
        return names["loss_of_batch"](nnx.merge(graph, params, rest), **names["inputs_of"](example))

    names["data"] = counted.inputs, counted.labels
    assert_same_as_fit(names, loss, nnx.as_pure(params))
    config = names["peft_trainer"].TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=2)
    trainer = names["PrivateTrainer"](model, names["optimizer"], config)
    trainer.with_loss_fn(names["loss_of_batch"]).with_gen_model_input_fn(names["inputs_of"])
    with pytest.raises(ValueError, match="must be a dpx Mechanism"):
        trainer.train([(counted.inputs[:4], counted.labels[:4])])


def of_linen(x):
    from flax import linen

    return linen.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": jax.random.key(0)})


def of_keras(x):
    import keras

    layer = keras.layers.Dropout(0.5)
    layer.build(x.shape)
    return layer.stateless_call([], [v.value for v in layer.non_trainable_variables], x, training=True)[0]


def of_haiku(x):
    import haiku

    return haiku.transform(lambda x: haiku.dropout(haiku.next_rng_key(), 0.5, x)).apply({}, jax.random.key(0), x)


def of_equinox(x):
    import equinox

    return equinox.nn.Dropout(0.5)(x, key=jax.random.key(0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropped", [of_linen, of_keras, of_haiku, of_equinox])
def test_a_dropout_that_repeats_is_found(dropped, monkeypatch):
    """As each library writes it, with the random state that it keeps or that a closure holds."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    require_installed(f"import {dropped.__name__.removeprefix('of_').replace('linen', 'flax')}")
    with as_a_user():
        found = static_findings.find_constant_keys(
            lambda w, x: (w * dropped(x)).sum(), np.ones(4, "f"), np.ones(4, "f"), with_key=False
        )
    assert found.severity == "warning" and "same ones, such as one dropout mask" in found.words


def linen_norm(x):
    from flax import linen

    norm = linen.BatchNorm(use_running_average=False)
    return norm.apply(norm.init(jax.random.key(0), x), x, mutable=["batch_stats"])[0]


def keras_norm(x):
    import keras

    norm = keras.layers.BatchNormalization()
    norm.build((None, *x.shape))
    return norm.stateless_call(norm.trainable_variables, norm.non_trainable_variables, x[None], training=True)[0]


def haiku_norm(x):
    import haiku

    norm = haiku.transform_with_state(lambda x: haiku.BatchNorm(True, True, 0.99)(x, is_training=True))
    return norm.apply(*norm.init(jax.random.key(0), np.ones(x.shape, "f")), None, x)[0]


def equinox_norm(x, mode="batch"):
    import equinox

    norm, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(4, axis_name="pixels", mode=mode)
    return jax.vmap(norm, (0, None), (0, None), axis_name="pixels")(x, state)[0]


def equinox_norm_of_averages(x):
    return equinox_norm(x, "ema")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [linen_norm, keras_norm, haiku_norm, equinox_norm, equinox_norm_of_averages])
def test_a_batch_norm_that_keeps_no_averages_is_found(norm, monkeypatch):
    """As each library computes them, of an example of six pixels."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    require_installed(f"import {norm.__name__.split('_')[0].replace('linen', 'flax')}")
    with as_a_user():
        closed = jax.make_jaxpr(lambda w, x: (w * norm(x) ** 3).sum())(np.ones(4, "f"), np.ones((6, 4), "f"))
    (found,) = static_findings.find_lost_averages(closed, np.ones(4, "f"))
    assert found.severity == "warning" and found.numbers == {"averages": 2}


def test_the_lines_are_counted():
    """The page's table: the lines of each program, and those that it marks. The step of tunix has ten."""
    rows = re.findall(r"^\| \[.*?\]\(#(.*?)\) \| (\d+) \| (\d+) \|$", HEAD, re.MULTILINE)
    counts = []
    for section in SECTIONS.values():
        lines = [line for line in code_of(section).splitlines() if line.strip()]
        counts.append((len(lines), sum(line.endswith("# dpx") for line in lines)))
    assert [(int(lines), int(added)) for _, lines, added in rows] == counts
    step = code_of(SECTIONS["tunix: PeftTrainer"]).split("def _train_step")[1].split("\nclass ")[0]
    assert sum(bool(line.strip()) for line in step.splitlines()[1:]) == 10
