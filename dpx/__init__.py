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
Tuning           `dpx.tuning`: a search for hyperparameters that counts its privacy cost
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
from functools import partial
from inspect import isfunction
from types import ModuleType
from typing import Any, NoReturn

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
from dpx.values import explain_methods, list_first_few
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
    "RDPAccountant": '; there is dpx.epsilon(..., accountant="rdp")',
    "compute_epsilon": "; there is dpx.epsilon of a mechanism, and dpx.accounting.dp_sgd_epsilon of numbers",
    "dp_adam": ": write dpx.chain(dpx.dp_sgd(...), optax.adam(learning_rate))",
    **dict.fromkeys(("lora", "low_rank"), "; dpx.coordinates.trainable(mask) trains the adapters of a model alone"),
    "tune": "; there is dpx.tuning.search",
    **dict.fromkeys(("median", "release_median"), "; there is dpx.statistics.release_quantiles"),
}
_ROOMS = {room.__name__[4:]: room for room in (*map(globals().get, __all__), strategies) if type(room) is ModuleType}
_MOST_PLACES, _MOST_NAMES = 3, 12  # in a message
_ALIKE = 0.75  # how alike two names must be, as for difflib


def _public_names(room: ModuleType) -> list[str]:
    own = [name for name, value in vars(room).items() if getattr(value, "__module__", "").startswith(room.__name__)]
    return getattr(room, "__all__", None) or [name for name in own if name[0] != "_"]


def _public_places() -> dict[str, Any]:
    """Everything public, by where it is: "PoissonSampling", "sampling.FixedOrder"."""
    top = {name: globals()[name] for name in (*__all__, "strategies")}
    shown = {*map(id, top.values())}
    inner = {f"{place}.{one}": vars(room)[one] for place, room in _ROOMS.items() for one in _public_names(room)}
    return top | {place: value for place, value in inner.items() if id(value) not in shown}


def _refuse_name(here: str, name: str) -> NoReturn:
    """Says where a public name is that the module `here` lacks, or which one is meant. here: "" for dpx itself."""
    found = _OF_OTHERS.get(name, "")
    if name[0] != "_" and not found:
        places, wanted = _public_places(), name.lower().replace("_", "")
        short = {one: one.rpartition(".")[2].lower().replace("_", "") for one in places if one != here}
        near = get_close_matches(wanted, short.values(), 1, _ALIKE)
        exact = [one for one in short if one.rpartition(".")[2] == name]
        parts = [
            one for one in short if one.rpartition(".")[0] in (here, "") and len(name) > 4 and wanted in short[one]
        ]
        methods = [
            f"{one}.{name}" for one, kind in places.items() if isfunction(getattr(kind, "__dict__", {}).get(name))
        ]
        chosen = [*exact, *parts] or methods or [one for one in short if short[one] in near]
        found = "; there is " * bool(chosen) + ", ".join(
            f"dpx.{one}" for one in [*dict.fromkeys(chosen)][:_MOST_PLACES]
        )
        if here and not found:
            found = f"; it has {list_first_few(_public_names(_ROOMS[here]), _MOST_NAMES)}"
    raise AttributeError(f"module {f'dpx.{here}'.rstrip('.')!r} has no attribute {name!r}{found}")


def __getattr__(name: str) -> NoReturn:
    _refuse_name("", name)


for _name, _value in _public_places().items():
    if type(_value) is ModuleType and _name in _ROOMS:
        vars(_value)["__getattr__"] = partial(_refuse_name, _name)
    elif isinstance(_value, type):
        explain_methods(_value)


def __dir__() -> list[str]:
    """Lists the public names, without the files that define them."""
    return __all__
