"""dpx: training with differential privacy in JAX, as optax transformations that know their privacy cost.

A training run needs six of the names below:

    key, budget = dpx.secret_key(), dpx.Budget(epsilon=2.0, delta=1e-5, steps=1000)
    sampling = dpx.PoissonSampling(examples=60_000, batch_size=1024)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key)
    optimizer = dpx.chain(mechanism, optax.adam(1e-3))
    result = dpx.fit(loss, optimizer, params, data)                # loss(params, example) for one example
    result.params, result.epsilon, result.report

or, with your own loop (docs/loops.md):

    step, state = jax.jit(dpx.private_updates(loss, optimizer)), optimizer.init(params)
    for batch in sampling.batches(data, key, state):
        updates, state, _ = step(params, batch, state)
        params = optax.apply_updates(params, updates)
    dpx.epsilon(optimizer, state, delta=1e-5)

Mechanisms       Mechanism, dp_sgd, in_coordinates; more in `dpx.methods` (the papers) and `dpx.mechanisms`
Coordinates      `dpx.coordinates`: ways to write a gradient, such as masks and projections
Optimizers       chain: a mechanism followed by optax transforms
Steps            private_updates, private_updates_in_chunks, private_updates_from; explain_norms, augmented;
                 the types that they return are in `dpx.gradients`
Before a run     plan_noise, check_setup
The whole run    fit; more in `dpx.fitting`
Statistics       `dpx.statistics`: means, histograms, quantiles, scales, and metrics of private validation data
Modules          `dpx.flax.replace_batch_norm`
Tuning           `dpx.tuning`: a search for hyper-parameters that counts its privacy cost
Samplings        PoissonSampling, ShuffledEpochs, FixedSizeSampling, FullBatch; Batch; more in `dpx.sampling`
Units            UserData, to sample users instead of examples
Privacy costs    Budget, epsilon, compose_runs; more in `dpx.accounting`
One data set     PrivacyLedger: one budget for everything that is released about it
Reports          privacy_report; attack bounds, curves and plans in `dpx.reports`
Secrets          secret_key, publishable_state; `dpx.keys`
Schedules        `dpx.schedules`, and any optax schedule
Audits           `dpx.audit.check_contract`: tests the privacy contract of any mechanism, including yours

`dpx.catalog` lists all methods, coordinates, mechanisms and samplings; docs/methods.md is its table.
"""

from difflib import get_close_matches
from types import ModuleType
from typing import NoReturn

from dpx import (
    accounting,
    audit,
    coordinates,
    fitting,
    flax,
    gradients,
    keys,
    mechanisms,
    methods,
    reports,
    sampling,
    schedules,
    statistics,
    tuning,
)
from dpx import strategies as strategies
from dpx.accounting import Budget, compose_runs, epsilon
from dpx.audit.setup import check_setup
from dpx.fitting import fit
from dpx.gradients import augmented, explain_norms, private_updates, private_updates_from, private_updates_in_chunks
from dpx.keys import secret_key
from dpx.ledgers import PrivacyLedger
from dpx.mechanism import Mechanism, chain, in_coordinates
from dpx.mechanisms import dp_sgd
from dpx.reports import plan_noise, privacy_report
from dpx.sampling import Batch, FixedSizeSampling, FullBatch, PoissonSampling, ShuffledEpochs, UserData
from dpx.states.reading import publishable_state
from dpx.xla.rows_apart import disable_row_mixing

disable_row_mixing()

__version__ = "0.2.0"

__all__ = [
    "Batch",
    "Budget",
    "FixedSizeSampling",
    "FullBatch",
    "Mechanism",
    "PoissonSampling",
    "PrivacyLedger",
    "ShuffledEpochs",
    "UserData",
    "accounting",
    "audit",
    "augmented",
    "chain",
    "check_setup",
    "compose_runs",
    "coordinates",
    "dp_sgd",
    "epsilon",
    "explain_norms",
    "fit",
    "fitting",
    "flax",
    "gradients",
    "in_coordinates",
    "keys",
    "mechanisms",
    "methods",
    "plan_noise",
    "privacy_report",
    "private_updates",
    "private_updates_from",
    "private_updates_in_chunks",
    "publishable_state",
    "reports",
    "sampling",
    "schedules",
    "secret_key",
    "statistics",
    "tuning",
]


_OF_OTHERS = {
    "PrivacyEngine": ": write a mechanism, such as dpx.dp_sgd(...), and give it to dpx.fit or dpx.private_updates",
    "compute_epsilon": "; there is dpx.epsilon of a mechanism, and dpx.accounting.dp_sgd_epsilon of numbers",
    "dp_adam": ": write dpx.chain(dpx.dp_sgd(...), optax.adam(learning_rate))",
}


def __getattr__(name: str) -> NoReturn:
    """Says in which module of dpx a missing name is, or which name was meant."""
    rooms = [room for room in __all__ if type(globals()[room]) is ModuleType]
    places = [f"{room}.{one}" for room in rooms for one in dir(globals()[room]) if one[0] != "_"]
    here = [place for place in places if place.partition(".")[2] == name]
    short = {one.rpartition(".")[2].lower().replace("_", ""): one for one in (*places, *__all__)}
    near = get_close_matches(name.lower().replace("_", ""), [one for one in short if name[0] != "_"], 1)
    found = _OF_OTHERS.get(name) or "".join(f"; there is dpx.{one}" for one in here or [short[one] for one in near])
    raise AttributeError(f"module 'dpx' has no attribute {name!r}{found}")


def __dir__() -> list[str]:
    """Lists the public names, without the files that define them."""
    return __all__
