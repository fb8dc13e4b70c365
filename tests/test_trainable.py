"""Trainable layers: masks and paths, in every container; what is frozen never moves, whatever stands behind it."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpx
from dpx.coordinates import random_freeze, standardized, trainable
from dpx.mechanism.guards import trained_mask

SAMPLING = dpx.PoissonSampling(examples=100, batch_size=4)
KEY = jax.random.key(5)
LORA = {"layer": {"kernel": False, "lora_a": True}, "bias": False}


def in_path(path):
    return "lora" in path


def params():
    return {"layer": {"kernel": jnp.ones((2, 3)), "lora_a": jnp.ones((2, 1))}, "bias": jnp.ones(3)}


def dp_sgd(**options):
    return dpx.dp_sgd(**{"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": SAMPLING, "key": KEY} | options)


def run(optimizer, tree, steps=3):
    """The parameters and the state after some steps, on gradients of 1."""
    grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape), p.dtype), tree)
    state, update = (
        jax.jit(optimizer.init)(tree),
        jax.jit(functools.partial(optimizer.update, included=np.ones(4, bool))),
    )
    for _ in range(steps):
        updates, state = update(grads, state, tree)
        tree = optax.apply_updates(tree, updates)
    return tree, state


def adamw():
    """Everything that moves a parameter without a gradient: decay, momentum, averages."""
    masked = optax.add_decayed_weights(0.3, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 0, tree))
    return optax.trace(0.9), optax.ema(0.9), masked, optax.adamw(0.1, weight_decay=0.5)


FREEZE = random_freeze(freeze_rate=0.5, every=2, key=KEY)
COMPOSED = {
    "mask": lambda: dpx.in_coordinates(dp_sgd(), trainable(mask=LORA)),
    "path, replaced": lambda: dpx.in_coordinates(dp_sgd(), trainable(mask=in_path)).replace(stages=("mine",)),
    "random freeze around": lambda: dpx.in_coordinates(dp_sgd(), FREEZE, trainable(mask=in_path)),
    "random freeze within": lambda: dpx.in_coordinates(dpx.in_coordinates(dp_sgd(), FREEZE), trainable(mask=in_path)),
    "standardized around": lambda: dpx.in_coordinates(dp_sgd(), standardized(), trainable(mask=LORA)),
    "calibrated": lambda: frozen_and_calibrated(noise_multiplier=dpx.Budget(epsilon=8.0, delta=1e-3, steps=3)),
}


@dpx.accounting.accepts_budget
def frozen_and_calibrated(*, noise_multiplier: Any):
    return dpx.in_coordinates(dp_sgd(noise_multiplier=noise_multiplier), trainable(mask=in_path))


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.long_cases("random freeze within", "calibrated")
def test_what_is_frozen_stays_bit_for_bit_whatever_stands_behind(name, promoting):
    before = params()
    optimizer = dpx.chain(COMPOSED[name](), *adamw())
    after, state = run(optimizer, before)
    np.testing.assert_array_equal(after["bias"], before["bias"])
    np.testing.assert_array_equal(after["layer"]["kernel"], before["layer"]["kernel"])
    assert (after["layer"]["lora_a"] != 1).any()
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.transforms) if leaf.ndim)
    assert numbers == 4 * before["layer"]["lora_a"].size  # trace, average, two moments: none of a frozen parameter
    if name == "calibrated":
        assert 7.9 < dpx.epsilon(optimizer, state, delta=1e-3) <= 8


def test_the_transforms_do_to_the_trained_what_they_do_alone(promoting):
    """The same run, on the trainable layers alone: the same parameters and states."""
    whole, state = run(dpx.chain(dpx.in_coordinates(dp_sgd(), trainable(mask=LORA)), *adamw()), params())
    alone, alone_state = run(dpx.chain(dp_sgd(), *adamw()), {"lora_a": params()["layer"]["lora_a"]})
    np.testing.assert_allclose(whole["layer"]["lora_a"], alone["lora_a"], rtol=1e-6)
    for found, expected in zip(jax.tree.leaves(state), jax.tree.leaves(alone_state), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_masks_of_a_step_do_not_stop_decay():
    """As the docstring of `chain` says; and without a frozen parameter, the state is that of optax.chain."""
    mechanism = dpx.in_coordinates(dp_sgd(noise_multiplier=0.0), FREEZE)
    assert all(jax.tree.leaves(trained_mask(mechanism, params())))
    optimizer = dpx.chain(mechanism, optax.add_decayed_weights(0.1), optax.scale(-1.0))
    after, state = run(optimizer, params(), steps=1)
    assert all((leaf != 1).all() for leaf in jax.tree.leaves(after))
    plain = optax.chain(optax.add_decayed_weights(0.1), optax.scale(-1.0)).init(params())
    assert jax.tree.structure(state.transforms) == jax.tree.structure(plain)


class Pair(NamedTuple):
    kernel: Any
    lora: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    kernel: Any
    lora: Any


CONTAINERS = {
    "dict": lambda k, a: {"kernel": k, "lora": a},
    "NamedTuple": Pair,
    "dataclass": Record,
    "nnx.State": lambda k, a: nnx.State({"kernel": nnx.Param(k), "lora": nnx.Param(a)}),
    "list": lambda k, a: [{"kernel": k}, {"lora": a}],
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.long_cases("list", "NamedTuple")
def test_every_container(container, promoting):
    tree = CONTAINERS[container](jnp.ones(2), jnp.ones(3))
    for mask in (CONTAINERS[container](False, True), in_path):
        mechanism = dpx.in_coordinates(dp_sgd(), trainable(mask=mask))
        assert jax.tree.leaves(trained_mask(mechanism, tree)) == [False, True]
    optimizer = dpx.chain(mechanism, optax.add_decayed_weights(0.5))
    kernel, lora = jax.tree.leaves(run(optimizer, tree, steps=1)[0])
    assert (kernel == 1).all() and (lora != 1).all()


def test_the_paths_are_readable():
    seen = []
    mechanism = dpx.in_coordinates(dp_sgd(), trainable(mask=lambda path: seen.append(path) is None))
    mechanism.init({"encoder": [Pair(jnp.ones(2), Record(jnp.ones(1), jnp.ones(1)))]})
    assert set(seen) == {"encoder/0/kernel", "encoder/0/lora/kernel", "encoder/0/lora/lora"}


def test_the_pipeline_says_what_is_frozen_only_where_something_is():
    assert trainable(mask=in_path).name.endswith("trainable layers: those whose path the given function accepts")
    many = {str(number): number != 3 for number in range(10)}
    assert trainable(mask=many).name.endswith("0, 1, 2, 4, 5, 6 and 3 more")
    assert trainable(mask={"a": True}).undo == ""
    frozen = dpx.chain(COMPOSED["mask"](), optax.identity())
    assert frozen.stages[-2:] == ("zeros for the other layers, which optax transforms do not see", "optax transforms")
    assert dpx.chain(dp_sgd(), optax.identity()).stages[-1] == "optax transforms"
