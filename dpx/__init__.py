"""dpx: training with differential privacy in JAX, as optax transformations that know their privacy cost.

A training run needs six of the names below:

    key, budget = dpx.secret_key(), dpx.Budget(epsilon=2.0, delta=1e-5, steps=1000)
    sampling = dpx.PoissonSampling(examples=60_000, batch_size=1024)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key)
    optimizer = dpx.chain(mechanism, optax.adam(1e-3))
    result = dpx.fit(loss, params, data, optimizer)                # loss(params, example), of one example
    result.params, result.epsilon, result.report

or, with a loop of your own (docs/loops.md):

    gradient, state = jax.jit(dpx.private_grad(loss, optimizer)), optimizer.init(params)
    for batch in sampling.batches(data, key, state):
        updates, state, _ = gradient(params, batch, state)
        params = optax.apply_updates(params, updates)
    dpx.epsilon(optimizer, state, delta=1e-5)

Mechanisms       Mechanism, dp_sgd; more in `dpx.methods` (one paper a file) and `dpx.mechanisms`
Coordinates      Coordinates, in_coordinates; all of them in `dpx.coordinates`
Optimizers       chain
Gradients        private_grad, accumulate, augmented, private_update, PrivateGradient, Unreleased, explain
Before a run     plan, check
The whole run    fit; more in `dpx.fitting`
Tuning           `dpx.tuning`, a search for hyper-parameters with a bill
Samplings        PoissonSampling, ShuffledEpochs, FixedSizeSampling, FullBatch, Batch
Units            UserData, which makes users what is sampled, in place of examples
Budgets          Budget, calibrated, calibrate, max_steps
Privacy costs    epsilon, delta, compose, privacy_report, steps_taken; more in `dpx.accounting`
Secrets          secret_key, public_state; `dpx.keys`
Schedules        `dpx.schedules`, and any optax schedule
Audits           audit.check_contract: the privacy contract for any mechanism, also one of your own

`import dpx.catalog` lists every method, coordinates, mechanism and sampling; docs/methods.md is its table.
"""

from dpx import accounting, audit, coordinates, fitting, keys, mechanisms, methods, schedules, tuning
from dpx.accounting import Budget, calibrate, calibrated, compose, delta, epsilon, max_steps, plan, privacy_report
from dpx.checking import check
from dpx.fitting import fit
from dpx.gradients import PrivateGradient, Unreleased, accumulate, augmented, explain, private_grad, private_update
from dpx.keys import secret_key
from dpx.mechanism import Coordinates, Mechanism, in_coordinates
from dpx.mechanisms import dp_sgd
from dpx.optimizer import chain
from dpx.sampling.batch import Batch
from dpx.sampling.records import FixedSizeSampling, FullBatch, PoissonSampling, ShuffledEpochs
from dpx.sampling.users import UserData
from dpx.states.public import public_state
from dpx.states.reading import steps_taken

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Budget",
    "Coordinates",
    "FixedSizeSampling",
    "FullBatch",
    "Mechanism",
    "PoissonSampling",
    "PrivateGradient",
    "ShuffledEpochs",
    "Unreleased",
    "UserData",
    "accounting",
    "accumulate",
    "audit",
    "augmented",
    "calibrate",
    "calibrated",
    "chain",
    "check",
    "compose",
    "coordinates",
    "delta",
    "dp_sgd",
    "epsilon",
    "explain",
    "fit",
    "fitting",
    "in_coordinates",
    "keys",
    "max_steps",
    "mechanisms",
    "methods",
    "plan",
    "privacy_report",
    "private_grad",
    "private_update",
    "public_state",
    "schedules",
    "secret_key",
    "steps_taken",
    "tuning",
]


def __dir__() -> list[str]:
    """The public names, without the files that hold them."""
    return __all__
