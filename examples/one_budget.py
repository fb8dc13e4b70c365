"""One budget for all that is done with a table: features scaled, a model trained, looked at, stopped, trained again.

`python -m examples.one_budget` prints the ledger as one page. The table has several rows of each user and missing
values; epsilon is for a user with all of their rows. Users whose number ends in 0 or 1 are for validation: the rule is
public, so the releases of one part cost the users of the other nothing.
"""

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import dpx

LOW, HIGH, MOST = [0.0, 0.0], [110.0, 2e5], 4  # public bounds of both features, and rows of a user that count


def table(people: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Made by chance: features (rows, 2), where one of ten incomes is missing; labels (rows,); the user of each row."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(people), rng.integers(1, MOST + 1, people))
    age, income = rng.normal(45, 15, len(users)), rng.gamma(2.0, 2e4, len(users))
    labels = (age / 15 + income / 2e4 + rng.normal(0, 0.7, len(users)) > 5).astype(np.int32)
    income[rng.random(len(users)) < 0.1] = np.nan
    return np.stack([age, income], axis=1), labels, users


def loss(params, item):
    """Of one user: the mean over their rows."""
    (features, labels), included = item
    losses = optax.sigmoid_binary_cross_entropy(features @ params["w"] + params["b"], labels.astype(jnp.float32))
    return jnp.sum(losses * included) / jnp.maximum(included.sum(), 1)


def run(ledger: dpx.PrivacyLedger, people: int, steps: int, every: int) -> float:
    """Two runs and all around them. Returns the last accuracy that was released."""
    features, labels, users = table(people)
    validation = users % 10 < 2
    kept = ~validation
    scaling = dpx.statistics.standardize(
        dpx.UserData(features[kept], users[kept], most=MOST),
        low=LOW,
        high=HIGH,
        noise_multiplier=20.0,
        key=dpx.secret_key(),
        ledger=ledger,
        part="training",
    )
    data = dpx.UserData((np.asarray(scaling(features[kept])), labels[kept]), users[kept], most=MOST)
    held = np.asarray(scaling(features[validation]))
    sampling = dpx.PoissonSampling(examples=len(data), batch_size=len(data) / 10)

    def right(params):
        found = held @ np.asarray(params["w"]) + np.asarray(params["b"]) > 0
        return dpx.UserData(found == labels[validation], users[validation], most=MOST)

    metric = dpx.statistics.PrivateMetric(
        right,
        complete=False,  # how many rows there are is private
        noise_multiplier=15.0,
        key=dpx.secret_key(),
        words="accuracy",
        ledger=ledger,
        part="validation",
    )
    params, accuracies = {"w": jnp.zeros(2), "b": jnp.zeros(())}, [0.0]

    def no_better(progress) -> bool:
        accuracies.append(metric(progress.params))
        return accuracies[-1] <= max(accuracies[:-1]) + 0.01

    for words, share in (("first run", 1.5), ("second run, with what is left", 1.001)):
        least = ledger.least_noise(lambda noise: sampling.event(np.full(steps, noise)), numbers=3, part="training")
        noisy = {"clip_norm": 1.0, "noise_multiplier": share * least, "sampling": sampling, "key": dpx.secret_key()}
        optimizer = dpx.chain(dpx.dp_sgd(**noisy), optax.sgd(0.5))
        result = dpx.fit(
            loss,
            optimizer,
            params,
            data,
            steps=steps,
            delta=ledger.terms.delta,
            evaluate_every=every,
            callbacks=[no_better],
            ledger=ledger,
            words=words,
            part="training",
        )
        params = result.params
    return accuracies[-1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=200, help="of each run, at most")
    parser.add_argument("--every", type=int, default=20, help="steps from one look at the validation users to the next")
    parser.add_argument("--ledger", type=Path, help="a file; a new one in a temporary folder by default")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = given.ledger or Path(folder) / "ledger.jsonl"
        ledger = dpx.PrivacyLedger(path, epsilon=3.0, delta=1e-5, unit="user")
        accuracy = run(ledger, given.people, given.steps, given.every)
        print(f"accuracy {accuracy:.3f}, with noise\n\n{ledger}")


if __name__ == "__main__":
    main()
