"""What a record is, is read from its fields: no printed word decides anything."""

import inspect

import attrs
import dp_accounting
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import DpEvent

import dpx
from dpx.gradients.private_updates import _fingerprint_of_mechanism
from dpx.states.record import fingerprint, identity_of
from tests.mechanisms import PARAMS

SAMPLINGS = (
    dpx.PoissonSampling(examples=40, batch_size=8),
    dpx.PoissonSampling(examples=40, batch_size=8, most_rows=16),
    dpx.PoissonSampling(examples=40, batch_size=8, weights=np.arange(40.0)),
    dpx.FixedSizeSampling(examples=40, batch_size=8),
    dpx.ShuffledEpochs(examples=40, batch_size=8),
    dpx.sampling.FixedOrder(examples=40, batch_size=8),
    dpx.sampling.RandomAllocation(examples=40, steps_per_epoch=5),
    dpx.sampling.CyclicPoissonSampling(examples=40, batch_size=8, bands=2),
    dpx.FullBatch(examples=40),
)


def made(sampling, clip_norm=1.0):
    return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(3))


def marks():
    """Everything by which states, batches, chunks and runs are told apart, for every sampling and two clip norms."""
    found = []
    for mechanism in (*map(made, SAMPLINGS), made(SAMPLINGS[0], 2.0)):
        chunk = _fingerprint_of_mechanism(mechanism, PARAMS, mechanism.init(PARAMS))
        found.append((*mechanism.fingerprints.tolist(), int(chunk), fingerprint(mechanism.event(7))))
    return found


def wordless(monkeypatch):
    """Every record prints alike."""
    records = {kind for sampling in SAMPLINGS for kind in type(sampling).__mro__ if kind.__module__.startswith("dpx")}
    events, more = set(), [DpEvent]
    while more:
        kind = more.pop()
        events.add(kind)
        more += kind.__subclasses__()
    for kind in records | events | {dpx.Mechanism}:
        for name in ("__repr__", "__str__"):
            monkeypatch.setattr(kind, name, lambda self: "a record")


def test_no_printed_word_decides(monkeypatch):
    before = marks()
    assert len(set(before)) == len(before)
    wordless(monkeypatch)
    assert repr(SAMPLINGS[0]) == repr(SAMPLINGS[3]) == "a record"
    assert marks() == before
    first, *others = map(made, SAMPLINGS)
    state = first.init(PARAMS)
    for other in others:
        with pytest.raises(ValueError, match="another sampling"):
            dpx.epsilon(other, state, delta=1e-3)
    renamed = first.replace(stages=("words",))
    assert _fingerprint_of_mechanism(renamed, PARAMS, state) == _fingerprint_of_mechanism(first, PARAMS, state)
    with pytest.warns(UserWarning, match="the state has taken no step"):
        assert dpx.epsilon(renamed, state, delta=1e-3) == 0


def test_a_stored_run_continues_with_other_words(tmp_path, monkeypatch):
    data, run = np.ones((40, 2), np.float32), {"steps": 2, "delta": 1e-3, "accountant": "rdp", "checkpoints": tmp_path}

    def fit(mechanism, **changes):
        optimizer = dpx.chain(mechanism, optax.sgd(1.0))
        return dpx.fit(lambda params, x: jnp.sum(params * x), optimizer, np.zeros(2), data, **run | changes)

    fit(made(SAMPLINGS[0]), steps=1)
    wordless(monkeypatch)
    assert fit(made(SAMPLINGS[0]).replace(stages=("words",))).steps == 2
    with pytest.raises(ValueError, match="one: the mechanism .*To continue this run"):
        fit(made(SAMPLINGS[1]), steps=3)


def test_an_identity_is_of_plain_values():
    assert identity_of(SAMPLINGS[3]) == ("FixedSizeSampling", ("examples", 40), ("batch_size", 8))
    gaussian = dp_accounting.GaussianDpEvent(np.float64(2.0))
    assert identity_of(gaussian) == ("GaussianDpEvent", ("noise_multiplier", 2.0))
    assert identity_of(gaussian, without="noise_multiplier") == ("GaussianDpEvent",)
    assert identity_of(np.zeros(3)) != identity_of(np.zeros((1, 3))) != identity_of(np.zeros((1, 3), np.int64))
    assert fingerprint([1, "2"]) == fingerprint((1, "2")) != fingerprint((1, 2))
    assert 2**31 <= fingerprint(b"text") < 2**32
    for value in (len, object(), inspect, attrs):
        with pytest.raises(ValueError, match=r"a method identity\(\) or be a dataclass"):
            identity_of(value)
