"""The printed pipeline is true and can be read: `str(mechanism)` of every mechanism of tests/mechanisms.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.audit.stand_ins import drawing_normals_by
from dpx.papers.d2p2_sgd.projections import projection_coordinates
from dpx.sums.rounding import ETA
from tests.mechanisms import ALIGNED, ALL, MECHANISMS, PARAMS, PER_LAYER_RANK, Case

KEY = jax.random.key(7)  # of every case's mechanism
NAMES = [case.name for case in MECHANISMS]
BY_HAND = [case.name for case in MECHANISMS if not case.from_catalog]
NUMBER = r"([0-9.e+-]+)(?: \(at step 0 of a schedule\))?"
MULTIPLIER = re.compile(rf"add noise of standard deviation {NUMBER} x clip norm")
EMBEDDED = re.compile(rf"{NUMBER} x {NUMBER} to the embedding, and {NUMBER} x {NUMBER} to the residual")


def printed(name: str) -> list[str]:
    """The stages of a case, as `str(mechanism)` shows them."""
    text = str(case_of(name).mechanism)
    return [line.strip().removeprefix("-> ") for line in text.split("drawn by")[0].splitlines()[1:] if line.strip()]


def case_of(name: str) -> Case:
    return MECHANISMS[NAMES.index(name)]


def release_of_unit_noise(case: Case):
    """(updates, state) of the release of sums of 0 at step 0, where every noise that is drawn is 1."""
    mechanism = case.mechanism

    @jax.jit
    def release(grad):
        state = mechanism.init(PARAMS)
        encoded = mechanism.encode(grad, state)
        factors = mechanism.clip_factors(mechanism.norm(encoded), state)
        sums = tuple(jax.tree.map(jnp.zeros_like, encoded) for _ in factors)
        return jax.tree.map(lambda x: x / (1 + ETA), mechanism.release(sums, state, PARAMS)[0]), state

    with drawing_normals_by(lambda key, step, tree: jax.tree.map(lambda x: jnp.ones(x.shape), tree)):
        return release(jax.tree.map(jnp.zeros_like, PARAMS))


def constant(coordinates: dpx.coordinates.Coordinates, state) -> dict:
    """The update that 1 in every encoded coordinate is decoded to."""
    encoded = coordinates.encode(PARAMS, state)
    return coordinates.decode(jax.tree.map(lambda x: jnp.ones(x.shape), encoded), state, PARAMS)[0]


def lifted(**options):
    return jax.jit(lambda state: constant(dpx.coordinates.random_projection(key=KEY, **options), state.coordinates[0]))


@jax.jit
def lifted_sum(state):
    stream = dpx.keys.stream(KEY, "projection of the sum")
    return constant(projection_coordinates(12, None, "gaussian", 1, stream, bounded=True), state.projection)


# The update of noise 1 in the units that are printed, where it is not 1 in every coordinate of the gradient.
UNITS = {
    "adaptive_clipping": lambda state: jax.tree.map(lambda p: jnp.full(p.shape, 0.4), PARAMS),  # the clip norm
    "gaussian projection": lifted(rank=12, kind="gaussian"),
    "clip, then project": lifted_sum,
    "d2p2_sgd": lifted(rank=8, kind="orthonormal"),
    "d2p2_sgd, count sketch": lifted(rank=8, kind="countsketch"),
    "dp2_sgd": lifted(rank=8, kind="gaussian"),
    "dp2_sgd, per layer": lifted(rank=PER_LAYER_RANK, kind="orthonormal"),
}


def units(case: Case, state):
    if case.name in UNITS:
        return UNITS[case.name](state)
    ones = {name: jnp.full(p.shape, float(name not in case.frozen)) for name, p in PARAMS.items()}
    return (
        ones
        if case.scale is None
        else jax.tree.map(lambda s, o: np.asarray(s, np.float32) * o, case.scale(state), ones)
    )


@pytest.mark.parametrize("case", [one for one in ALL if one.id in BY_HAND and one.id != "gep_sgd"])
def test_the_printed_multiplier_is_that_of_the_noise(case):
    updates, state = release_of_unit_noise(case)
    (line,) = [line for line in printed(case.name) if "add noise" in line]
    (multiplier,) = map(float, MULTIPLIER.findall(line))
    deviation = multiplier * case.clip(0) / case.mechanism.sampling.divisor
    for found, unit in zip(jax.tree.leaves(updates), jax.tree.leaves(units(case, state)), strict=True):
        np.testing.assert_allclose(found, deviation * np.asarray(unit), rtol=1e-4, atol=1e-6)


def test_the_printed_noise_of_an_embedding_is_that_of_each_part():
    updates, _ = release_of_unit_noise(case_of("gep_sgd"))
    (found,) = EMBEDDED.findall("\n".join(printed("gep_sgd")))
    numbers = [float(number) for number in found]
    embedding, residual = numbers[0] * numbers[1], numbers[2] * numbers[3]
    assert numbers == pytest.approx([1.3, 2 / 0.6**0.5, 1.3, 0.5 / 0.4**0.5], rel=1e-5)
    for update, basis in zip(jax.tree.leaves(updates), jax.tree.leaves(ALIGNED), strict=True):
        np.testing.assert_allclose(update, (residual + embedding * np.asarray(basis.sum(0))) / 8, rtol=1e-4)


FIRST_WORDS = set(
    "add after clip divide draw freeze keep lift mask move normalize project release split sum zeros".split()
)
KINDS = {"gaussian", "orthonormal", "subset", "countsketch", "hadamard", "optax"}


@pytest.mark.parametrize("name", BY_HAND)
def test_every_line_is_a_phrase(name):
    lines = printed(name)
    assert len(set(lines)) == len(lines)
    for line in lines:
        assert line.split()[0] in FIRST_WORDS | KINDS, line
        assert not re.search(r"[{}<>\[\]]|None|True|False|lambda|undo (freeze|mask|keep|train)", line), line
        assert len(line) < 220, line


@pytest.mark.parametrize("name", ["random_freeze_sgd", "ranked_freeze_sgd", "trainable", "ada_dpigu", "dp_sgd"])
def test_only_what_is_undone_is_printed_as_undone(name):
    after = printed(name)[printed(name).index("divide by the expected batch size 8") + 1 :]
    assert after == {
        "random_freeze_sgd": ["mask the released gradient"],
        "ranked_freeze_sgd": ["mask the released gradient"],
        "trainable": ["zeros for the other layers, which optax transforms do not see"],
        "ada_dpigu": ["after 3 steps mask the released gradient; undo the standardization; mask again"],
        "dp_sgd": [],
    }.get(name)


def test_adaptive_clipping_prints_both_releases():
    assert printed("adaptive_clipping")[2:4] == [
        "add noise of standard deviation 2.22999 x clip norm",
        "release the noisy count of examples below the clip norm, with noise of standard deviation 0.8",
    ]


def test_groups_print_the_clip_norm_of_the_whole():
    assert printed("per layer")[:3] == [
        "clip each group to its own norm: bias 0.2, kernel 0.5, scale 0.1",
        "sum over the batch",
        "add noise of standard deviation 1.3 x clip norm, which is 0.547723, the root of the sum of their squares",
    ]


def test_what_bounds_an_example_is_printed_where_it_happens():
    lines = printed("normalized trainable per layer")
    assert [line.split()[0] for line in lines[:3]] == ["keep", "normalize", "clip"]
    scheduled = {"w": lambda step: 3.0 + step, "b": 4.0}
    mechanism = dpx.dp_sgd(clip_norm=scheduled, noise_multiplier=1.0, sampling=dpx.FullBatch(examples=8), key=KEY)
    assert "x clip norm, which is 5 (at step 0 of a schedule), the root" in str(mechanism)


def test_a_mechanism_with_other_stages_can_be_wrapped():
    """The stages of somebody's own mechanism need not name the sum."""
    own = case_of("dp_sgd").mechanism.replace(stages=("my own mechanism",))
    assert dpx.mechanisms.normalized(own).stages == ("normalize to g / (|g| + 0.01)", "my own mechanism")
    projected = dpx.mechanisms.clip_then_project(own, rank=12, kind="subset")
    assert projected.stages[0].startswith("project the sum") and projected.stages[-1].startswith("lift")
