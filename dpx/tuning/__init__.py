"""Searches for hyper-parameters on private data, at a known cost: the best of a random, secret number of trials.

    def optimizer(configuration, key):
        mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=budget, sampling=sampling, key=key)
        return dpx.chain(mechanism, optax.adam(configuration["learning_rate"]))

    def train(trial):
        return dpx.fit(loss, trial.optimizer, params, data)

    configurations = [{"learning_rate": rate} for rate in (1e-3, 1e-2, 1e-1)]
    found = dpx.tuning.search(
        train, configurations=configurations, score=accuracy, optimizer=optimizer, key=key, trials=10, score_on="public"
    )
    found.params, found.configuration, found.epsilon, found.report

The cost covers the winner alone. How many trials there were, all other results, and anything that tells about them
(logs, files, the time that the search took), are as secret as the data. Everything random comes from the key. So the
same program with the same key continues a search that was interrupted: it has the same number of trials, with the same
configurations and keys. A second search, with another key, costs as much again (`dpx.compose_runs`).

With `budget=`, the noise of the trials is calibrated so that the whole search costs at most a total epsilon.

`search.py` has the search, `plan.py` its cost, a trial and a score; `dpx/accounting/selection.py` has the proof.
"""

from dpx.tuning.plan import NoisySum as NoisySum
from dpx.tuning.plan import Trial as Trial
from dpx.tuning.search import SearchResult as SearchResult
from dpx.tuning.search import search as search
