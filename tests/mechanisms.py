"""Every mechanism of dpx, for tests/test_contract.py.

A new line of dpx/catalog.py joins by itself. A case by hand, in MECHANISMS, says more of it: what its noise must be on
every coordinate, after whatever decodes the release.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import catalog, strategies
from dpx.papers.correlated_noise.cost import CorrelatedGaussianDpEvent, CyclicBandedDpEvent
from dpx.papers.d2p2_sgd.cost import ProjectedGaussianDpEvent
from dpx.papers.d2p2_sgd.projections import projection_coordinates
from dpx.papers.dice_sgd.cost import ErrorFeedbackDpEvent

PARAMS = {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3), "scale": jnp.ones(())}
POISSON = dpx.PoissonSampling(examples=1000, batch_size=8)
EPOCHS = dpx.ShuffledEpochs(examples=20, batch_size=8)
TRUNCATED = dpx.PoissonSampling(examples=1000, batch_size=8, most_rows=10)
WEIGHTED = dpx.PoissonSampling(examples=1000, batch_size=8, weights=1.0 + np.arange(1000) % 3)
CYCLIC = dpx.sampling.CyclicPoissonSampling(examples=1000, batch_size=8, bands=3)
ORDERED = dpx.sampling.FixedOrder(examples=20, batch_size=8)
ALLOCATED = dpx.sampling.RandomAllocation(examples=20, steps_per_epoch=3)
# The lines of DP-SGD that `make test` checks under a sampling that a method with all lines has, and under other ones.
OF_A_SAMPLING = ("resume", "cost", "sampling", "secrecy")
OF_A_DIVISOR = ("divisor", *OF_A_SAMPLING)
OF_A_METHOD = ("noise", *OF_A_DIVISOR)


class Case(NamedTuple):
    """make: (key) -> Mechanism. clip, multiplier: (step) -> float, worked out by hand, not read from the mechanism.

    frozen: the leaves of PARAMS that get no update.
    withheld: with a second sum, that of what is kept from the release: its bound for one example.
    fed_back: (state) -> what a release adds to the sum and the noise.
    event: (steps) -> DpEvent, where it is not the sampling's own.
    scale: (state) -> tree like PARAMS, where the sum and the noise are not released as they are: what multiplies both.
    gradient: (sums) -> the part of them that becomes the update.
    clips_frozen: what is frozen counts in the norm.
    lift: undoing a projection lengthens or shortens a sum at most so many times; its noise is standard over all draws.
    noised: (sum, state) -> what the noise is added to.
    linear: the update is a linear function of the noisy sum, known from the fields above. Else the noise is checked by
            exchanging it for sums, before it is decoded.
    from_catalog: made from a line of dpx/catalog.py, of which nothing else is known.
    like: a case of the same code, with other options or another sampling. `make test` checks all of that one, and the
          lines `quick` of this one; `make long` checks the others.
    """

    name: str
    make: Callable[[jax.Array], dpx.Mechanism]
    clip: Callable[[int], float] = lambda step: 0.7
    multiplier: Callable[[int], float] = lambda step: 1.3
    frozen: tuple[str, ...] = ()
    withheld: float | None = None
    fed_back: Callable[[Any], Any] | None = None
    event: Callable[[int], Any] | None = None
    scale: Callable[[Any], Any] | None = None
    gradient: Callable[[Any], Any] = lambda sums: sums[0]
    clips_frozen: bool = False
    lift: float = 1.0
    noised: Callable[[Any, Any], Any] = lambda total, state: total
    linear: bool = True
    from_catalog: bool = False
    like: str = ""
    quick: tuple[str, ...] = ()

    @property
    def mechanism(self) -> dpx.Mechanism:
        return _mechanism(self)


@functools.cache
def _mechanism(case: Case) -> dpx.Mechanism:
    return case.make(jax.random.key(7))


def _dp_sgd(key, sampling: Any = POISSON, clip_norm: Any = 0.7, noise_multiplier: Any = 1.3) -> dpx.Mechanism:
    return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)


def _scheduled(key, sampling: Any = POISSON) -> dpx.Mechanism:
    return _dp_sgd(
        key,
        sampling,
        optax.linear_schedule(1.0, 0.5, 10),
        optax.exponential_decay(2.0, transition_steps=1, decay_rate=0.9),
    )


def _method(name: str, **options: Any) -> Callable[[jax.Array], dpx.Mechanism]:
    """(key) -> the method, with clip norm 0.7, noise multiplier 1.3 and Poisson samples where nothing else is given."""
    build = getattr(dpx.methods, name, None) or getattr(dpx.mechanisms, name)
    usual = {"clip_norm": 0.7, "noise_multiplier": 1.3, "sampling": POISSON}
    usual = {name: value for name, value in usual.items() if name in inspect.signature(build).parameters}
    return lambda key: build(**(usual | options), key=key)


def _under(name: str, sampling: Any, quick: tuple[str, ...] = OF_A_DIVISOR) -> Case:
    """The schedules under another sampling: what an example contributes, and the noise on the sum, do not know it."""
    return Case(
        name,
        lambda key: _scheduled(key, sampling),
        lambda t: 1 - 0.05 * min(t, 10),
        lambda t: 2 * 0.9**t,
        like="scheduled",
        quick=quick,
    )


def _dice(name, sampling, *, outer, reset_every=None, stability=None, like="") -> Case:
    """clip norm 0.7, feedback norm 0.02."""

    options = {"outer_clip_norm": outer, "reset_every": reset_every, "stability": stability, "sampling": sampling}
    make = _method("dice_sgd", feedback_norm=0.02, **options)

    def fed_back(state):
        error = jax.tree.map(jnp.add, *state.unreleased_error)
        step = int(state.release.step)
        size = float(optax.tree.norm(error))
        factor = 0.02 / max(size, 0.02) if stability is None else 0.02 / (size + 0.02)
        return jax.tree.map(lambda e: e * (0 if reset_every and step % reset_every == 0 else factor), error)

    def event(steps):
        if steps == 0:
            return dp_accounting.NoOpDpEvent()
        return ErrorFeedbackDpEvent(
            noise_multiplier=1.3,
            error_shift=(outer - 0.7) / 0.7,
            feedback_shift=2 * 0.02 * 8 / 0.7,
            steps=steps,
            reset_every=reset_every,
            sampling=sampling,
        )

    return Case(name, make, withheld=min(outer - 0.7, 1e15), fed_back=fed_back, event=event, like=like)


PER_LAYER = {"kernel": 0.5, "bias": 0.2, "scale": 0.1}
TRAINABLE = dpx.coordinates.trainable(mask={"kernel": True, "bias": False, "scale": True})

DYNAMIC = {"clip_norm": 1.1, "noise_multiplier": 2.5, "rho_mu": 3.0, "rho_c": 2.0, "steps": 8}
COOLING = optax.linear_schedule(0.0, 0.7, 4)


def _ada_dpigu(**options) -> Callable[[jax.Array], dpx.Mechanism]:
    """Three steps of warm-up, so that the contract sees both phases."""
    return _method("ada_dpigu", warmup=3, variance_decay=0.5, stability=0.05, **options)


def _masked(state):
    return state.coordinates[0].mask


def _restored(state):
    """The scale that standardization under an importance mask is undone with."""
    importance = state.coordinates[0]
    if importance.step < 3:
        return importance.mask
    scale = jax.tree.map(lambda v: jnp.sqrt(v) + 0.05, importance.inner.variance)
    size = optax.tree.norm(scale) / math.sqrt(sum(p.size for p in PARAMS.values()))
    return jax.tree.map(lambda m, s: jnp.where(m, s / size, 0), importance.mask, scale)


def _mean(state):
    importance = state.coordinates[0]
    return jax.tree.map(
        lambda m, a: jnp.where(m & (importance.step >= 3), a, 0), importance.mask, importance.inner.mean
    )


def _fresh_gaussians(steps):
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    one = ProjectedGaussianDpEvent(1.3, 0.008, rank=12, blocks=1)
    return dp_accounting.SelfComposedDpEvent(one, steps) if steps > 1 else one


def _projected_sum(total, state):
    stream = dpx.keys.stream(jax.random.key(7), "projection of the sum")
    return projection_coordinates(12, None, "gaussian", 1, stream, bounded=True).encode(total, state.projection)


def _d2p2(name: str, rank: Any, kind: str, like="") -> Case:
    make = _method("d2p2_sgd", rank=rank, kind=kind, noise_multiplier=2.0, power=0.5, every=2)
    return Case(name, make, lambda t: 1.0, lambda t: 2 * (t // 2 + 1) ** -0.5, lift=math.sqrt(2), like=like)


PER_LAYER_RANK = {"kernel": 8, "bias": 2, "scale": 1}


def _dp2(name: str, rank: Any, kind: str, lift: float, like="") -> Case:
    return Case(name, _method("dp2_sgd", rank=rank, kind=kind, sampling=EPOCHS), lambda t: 1.0, lift=lift, like=like)


BANDED = strategies.optimized(bands=3, steps=12)


def _remembered(*weights):
    """What the noise of the last steps adds to an update, the nearest first, of batches of 8."""

    def fed_back(state):
        ring, step = state.unreleased_noise, int(state.inner.step)
        rows = [(step - 1 - j) % len(weights) for j in range(len(weights))]
        return jax.tree.map(
            lambda high, low: sum(w * (high[r] + low[r]) for w, r in zip(weights, rows, strict=True)) / 8, *ring
        )

    return fed_back


def _turns(steps):
    """A coin of a group moves three releases by c, so the norm of c times the clip norm."""
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    norm = math.sqrt(sum(c * c for c in BANDED.coefficients))
    one = CyclicBandedDpEvent(1.3 / norm, 0.024, 3, BANDED.coefficients)
    return dp_accounting.SelfComposedDpEvent(one, -(-steps // 3)) if steps > 3 else one


def _in_order(steps):
    """An example takes part in every third step, so it moves row t of C G by the sum of 0.6^(t - 3 i)."""
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    rows = [sum(0.6 ** (t - 3 * i) for i in range(t // 3 + 1)) for t in range(steps)]
    moved = math.sqrt(sum(row * row for row in rows))
    return CorrelatedGaussianDpEvent(1.3, moved, steps, (1.0,), (1.0, -0.6))


ALIGNED = {  # two of the coordinates
    "kernel": jnp.zeros((2, 4, 3)).at[0, 1, 2].set(1.0),
    "bias": jnp.zeros((2, 3)).at[1, 0].set(1.0),
    "scale": jnp.zeros(2),
}


def _gep_scale(state):
    """The noise: residual clip norm / sqrt(1 - share), and embedding clip norm / sqrt(share) inside the subspace."""
    inside, outside = 2 / math.sqrt(0.6), 0.5 / math.sqrt(0.4)
    return jax.tree.map(lambda v: jnp.sqrt(outside**2 + inside**2 * v.sum(0)), state.coordinates[0].basis)


MECHANISMS = [
    Case("dp_sgd", _dp_sgd),
    Case("scheduled", _scheduled, lambda t: 1 - 0.05 * min(t, 10), lambda t: 2 * 0.9**t),
    Case("full batch", lambda key: _dp_sgd(key, dpx.FullBatch(examples=8)), like="dp_sgd", quick=OF_A_DIVISOR),
    Case(
        "fixed size",
        lambda key: _dp_sgd(key, dpx.FixedSizeSampling(examples=100, batch_size=8)),
        like="dp_sgd",
        quick=OF_A_DIVISOR,
    ),
    _under("shuffled", EPOCHS, OF_A_SAMPLING),
    _under("truncated", TRUNCATED),
    _under("weighted", WEIGHTED),
    _under("cyclic", CYCLIC, OF_A_SAMPLING),
    _under("ordered", ORDERED, OF_A_SAMPLING),
    _under("allocated", ALLOCATED),
    Case("per layer", lambda key: _dp_sgd(key, clip_norm=PER_LAYER), lambda t: math.sqrt(0.25 + 0.04 + 0.01)),
    Case(
        "normalized",
        lambda key: dpx.mechanisms.normalized(_dp_sgd(key, clip_norm=1.0)),
        lambda t: 1.0,
        like="normalized, small clip",
    ),
    Case("normalized, small clip", lambda key: dpx.mechanisms.normalized(_dp_sgd(key), stability=1e-6)),
    Case("trainable", lambda key: dpx.in_coordinates(_dp_sgd(key), TRAINABLE), frozen=("bias",)),
    Case(
        "normalized trainable per layer",
        lambda key: dpx.mechanisms.normalized(
            dpx.in_coordinates(_dp_sgd(key, clip_norm={"kernel": 0.5, "bias": 1.0, "scale": 0.1}), TRAINABLE),
            stability=0.1,
        ),
        lambda t: math.sqrt(0.25 + 1 + 0.01),
        frozen=("bias",),
        like="trainable",
    ),
    Case(
        "dynamic_dp_sgd",
        _method("dynamic_dp_sgd", **DYNAMIC),
        lambda t: 1.1 * 2 ** (-(t + 1) / 8),
        lambda t: 2.5 * 3 ** (-(t + 1) / 8),
        like="scheduled",
        quick=OF_A_METHOD,
    ),
    Case(
        "dynamic_dp_sgd per epoch",
        _method("dynamic_dp_sgd", **DYNAMIC, every=3, sampling=EPOCHS),
        lambda t: 1.1 * 2 ** (-(t // 3 * 3 + 1) / 8),
        lambda t: 2.5 * 3 ** (-(t // 3 * 3 + 1) / 8),
        like="scheduled",
    ),
    Case(
        "d2p_sgd",
        _method("d2p_sgd", noise_multiplier=2.0, power=0.5, every=2),
        lambda t: 1.0,
        lambda t: 2 * (t // 2 + 1) ** -0.5,
        like="scheduled",
        quick=OF_A_METHOD,
    ),
    _dice("dice_sgd", POISSON, outer=1.0, reset_every=3),
    _dice("dice_sgd automatic, shuffled", EPOCHS, outer=math.inf, stability=0.05, like="dice_sgd"),
    Case("random_freeze_sgd", _method("random_freeze_sgd", freeze_rate=COOLING, every=2), scale=_masked),
    Case(
        "posterior freeze, a mask a step",
        lambda key: dpx.in_coordinates(
            _scheduled(key), dpx.coordinates.random_freeze(freeze_rate=COOLING, every=1, posterior=True, key=key)
        ),
        lambda t: 1 - 0.05 * min(t, 10),
        lambda t: 2 * 0.9**t,
        scale=_masked,
        clips_frozen=True,
        like="random_freeze_sgd",
    ),
    Case(
        "ranked_freeze_sgd",
        _method("ranked_freeze_sgd", freeze_rate=0.6, every=2),
        scale=_masked,
        like="random_freeze_sgd",
        quick=OF_A_METHOD,
    ),
    Case("ada_dpigu", _ada_dpigu(keep=optax.linear_schedule(0.5, 1.0, 10)), scale=_restored, fed_back=_mean),
    Case("ada_dpigu, top third", _ada_dpigu(example_keep=0.3), scale=_restored, fed_back=_mean, like="ada_dpigu"),
    Case(
        "adaptive_clipping",
        _method("adaptive_clipping", initial_clip_norm=0.4, indicator_noise=0.8),
        lambda t: 1.0,
        scale=lambda state: jax.tree.map(
            lambda p: jnp.full(p.shape, state.clip_norm / math.sqrt(1 - (1.3 / 1.6) ** 2)), PARAMS
        ),
        gradient=lambda sums: sums[0]["gradient"],
    ),
    Case(
        "gaussian projection",
        lambda key: dpx.in_coordinates(
            _dp_sgd(key), dpx.coordinates.random_projection(rank=12, kind="gaussian", key=key)
        ),
        lift=2.5,
        like="dp2_sgd",
    ),
    Case(
        "clip, then project",
        lambda key: dpx.mechanisms.clip_then_project(_dp_sgd(key), rank=12, kind="gaussian"),
        event=_fresh_gaussians,
        lift=2.5,
        noised=_projected_sum,
    ),
    _d2p2("d2p2_sgd", 8, "orthonormal"),
    _d2p2("d2p2_sgd, count sketch", 8, "countsketch", like="d2p2_sgd"),
    _dp2("dp2_sgd", 8, "gaussian", lift=3.0),
    _dp2("dp2_sgd, per layer", PER_LAYER_RANK, "orthonormal", lift=math.sqrt(3 / 2), like="dp2_sgd"),
    Case(
        "gep_sgd",
        _method("gep_sgd", basis=ALIGNED, embedding_clip_norm=2.0, residual_clip_norm=0.5, embedding_share=0.6),
        lambda t: 1.0,
        scale=_gep_scale,
        lift=1.1,
    ),
    Case(
        "band_mf_sgd",
        _method("band_mf_sgd", bands=3, steps=12, sampling=CYCLIC),
        fed_back=_remembered(*(-c for c in BANDED.coefficients[1:])),
        event=_turns,
    ),
    Case(
        "lambda_cgd",
        _method("lambda_cgd", correlation=0.6, sampling=ORDERED),
        fed_back=_remembered(-0.6),
        event=_in_order,
    ),
    Case("chained", lambda key: dpx.chain(_dp_sgd(key), optax.identity()), like="dp_sgd"),
]

COORDINATES_BY_HAND = {  # the cases above that they are in
    "trainable": "trainable",
    "random_freeze": "random_freeze_sgd",
    "ranked_freeze": "ranked_freeze_sgd",
    "importance_mask": "ada_dpigu",
    "standardized": "ada_dpigu",
    "gradient_embedding": "gep_sgd",
    "random_projection": "dp2_sgd",
}
COORDINATES_OF_A_METHOD = {
    "top_fraction": "tp_topk_sgd",
    "random_directions": "zeroth_order_sgd",
    "frequent_rows": "ada_fest",
}
MECHANISMS_BY_HAND = {"normalized", "clip_then_project"}
SAMPLINGS_BY_HAND = {
    *("PoissonSampling", "FullBatch", "FixedSizeSampling", "ShuffledEpochs", "RandomAllocation"),
    *("CyclicPoissonSampling", "FixedOrder"),
}


def arguments_of(entry: catalog.CatalogEntry, key: jax.Array, sampling: Any = POISSON) -> dict[str, Any]:
    """All arguments that a line of the catalog needs: its own, and those of the contract."""
    if entry.samplings:
        sampling = {"cyclic": CYCLIC, "ordered": ORDERED}[entry.samplings[0]]
    of_the_contract = {"noise_multiplier": 1.3, "sampling": sampling, "steps": 8, "basis": ALIGNED, "bands": 3}
    of_the_contract |= {"key": key, "mechanism": _dp_sgd(key, clip_norm=entry.arguments.get("clip_norm", 1.0))}
    return entry.arguments | {name: of_the_contract[name] for name in of_the_contract if name in entry.build_parameters}


def case_of_method(entry: catalog.CatalogEntry, sampling: Any = POISSON) -> Case:
    """A case for a method, or a mechanism, of which nothing is known but its line in the catalog.

    Without a `clip_norm`, its bound must be 1. What has another bound, or schedules of its own, needs a case by hand.
    """
    clip_norm = entry.arguments.get("clip_norm", 1.0)

    def make(key):
        return entry.build(**arguments_of(entry, key, sampling))

    return Case(entry.name, make, lambda step: clip_norm, linear=False, from_catalog=True)


def case_of_coordinates(entry: catalog.CatalogEntry) -> Case:
    def make(key):
        return dpx.in_coordinates(_dp_sgd(key), entry.build(**arguments_of(entry, key)))

    like = COORDINATES_OF_A_METHOD.get(entry.name, "")
    return Case(entry.name, make, linear=False, from_catalog=True, like=like)


def case_of_sampling(entry: catalog.CatalogEntry) -> Case:
    sizes = {"examples": 24, "batch_size": 8}
    sampling = entry.build(**{name: sizes[name] for name in sizes if name in entry.build_parameters})
    return Case(
        entry.name,
        lambda key: _dp_sgd(key, sampling),
        event=lambda steps: sampling.event(np.full(steps, np.float32(1.3), np.float64)),
        from_catalog=True,
    )


def cases_of_the_catalog() -> list[Case]:
    """A case for every line of the catalog that has none by hand."""
    by_hand = {case.name.split(",")[0] for case in MECHANISMS}
    return [
        *[case_of_method(entry) for entry in catalog.METHODS if entry.name not in by_hand],
        *[case_of_method(entry) for entry in catalog.MECHANISMS if entry.name not in MECHANISMS_BY_HAND],
        *[case_of_coordinates(entry) for entry in catalog.COORDINATES if entry.name not in COORDINATES_BY_HAND],
        *[case_of_sampling(entry) for entry in catalog.SAMPLINGS.values() if entry.name not in SAMPLINGS_BY_HAND],
    ]


assert {case.like for case in MECHANISMS} - {""} <= {case.name for case in MECHANISMS if not case.like}
assert set(COORDINATES_BY_HAND.values()) <= {case.name for case in MECHANISMS if not case.like or case.quick}
MECHANISMS += cases_of_the_catalog()
ALL = [  # for tests of one property of every mechanism
    pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.like else []) for case in MECHANISMS
]
