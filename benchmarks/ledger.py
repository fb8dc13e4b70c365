"""What it costs to choose releases by earlier ones: the prices of filters, and runs that end by private validation.

`python -m benchmarks.ledger` writes the prices into results/ledger.md, and with `--data /usr/share/datasets` the runs
into results/ledger_fashion_mnist.md. In an empty folder of --runs, all runs are made anew.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report

DELTA, EPSILON, SEEDS = 1e-5, 2.0, range(5)
# Sampling rate, noise multiplier, steps.
RUNS = ((0.01, 1.0, 1000), (0.017, 1.2, 1000), (0.05, 2.0, 1000), (0.1, 3.0, 1000), (0.004, 0.7, 2000))
PARTS = (1, 2, 5, 10, 20)
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
TRAIN, EXAMPLES, BATCH, STEPS, LOOKS = 54_000, 60_000, 1024, 600, 20
RATES = (2.0, 0.5)  # of the first and of the second run
PATIENCE = 3  # looks without a better accuracy


def prices() -> str:
    """Epsilon of runs that end after a share of their steps: fixed in advance, by the ledger, and by Renyi filters."""
    import dp_accounting
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    from dpx.accounting.cost import profile_of_run
    from dpx.accounting.filters import NOTHING, PrivacyFilter, Spent, credit_for_untaken_steps
    from dpx.accounting.flat_event import from_event

    rows = []
    for rate, sigma, steps in RUNS:
        step = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
        whole = profile_of_run(SelfComposedDpEvent(step, steps), relation="zero_out", curve=True)
        tried = PrivacyFilter(whole.epsilon(DELTA), DELTA)
        paid = tried.charge(whole, NOTHING)
        accountant = dp_accounting.rdp.RdpAccountant().compose(SelfComposedDpEvent(step, steps))
        order = accountant.get_epsilon_and_optimal_order(DELTA)[1]
        for share in SHARES:
            made = round(share * steps)
            run = SelfComposedDpEvent(step, made)
            left = from_event(SelfComposedDpEvent(step, steps - made)).losses("zero_out") if made < steps else {}
            back = credit_for_untaken_steps(left, (tried.limits.delta - paid.delta) / 8)
            spent = Spent(paid.precision - back.precision, paid.delta + back.delta)
            one = dp_accounting.rdp.RdpAccountant([order]).compose(run).get_epsilon(DELTA)
            fixed = profile_of_run(run, relation="zero_out").epsilon(DELTA)
            cells = [fixed, tried.epsilon_of(spent), one, of_pairs(step, made)]
            odometer = tried.odometer(paid)
            rows.append([f"q {rate:g}, noise {sigma:g}", f"{made} of {steps}", *(f"{x:.3f}" for x in cells)])
            rows[-1].append(f"{odometer:.3f}" if made == steps else "")
    columns = ["run", "steps made", "fixed in advance (PLD)", "ledger", "Renyi filter of one order"]
    return report.grid([*columns, "filter of (epsilon, delta) pairs", "odometer of the ledger"], rows)


def in_parts() -> str:
    """Epsilon of a run that is made of shorter ones, of which each may follow from what those before it released."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    from dpx.accounting.cost import profile_of_run
    from dpx.accounting.filters import NOTHING, PrivacyFilter, Spent

    rows = []
    for rate, sigma, steps in RUNS:
        step, cells = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), []
        for parts in PARTS:
            part = profile_of_run(SelfComposedDpEvent(step, steps // parts), relation="zero_out", curve=True)
            epsilon, before = profile_of_run(SelfComposedDpEvent(step, steps), relation="zero_out").epsilon(DELTA), 0.0
            cells = cells or [epsilon]
            while epsilon > 1.0005 * before:  # of a budget that this uses up
                tried, spent, before = PrivacyFilter(epsilon, DELTA), NOTHING, epsilon
                for _ in range(parts):
                    paid = tried.charge(part, spent)
                    spent = Spent(spent.precision + paid.precision, spent.delta + paid.delta)
                epsilon = tried.epsilon_of(spent)
            cells.append(epsilon)
        rows.append([f"q {rate:g}, noise {sigma:g}, {steps} steps", *(f"{epsilon:.3f}" for epsilon in cells)])
    return report.grid(["run", "fixed in advance (PLD)", *(f"{parts} part{'s'[: parts - 1]}" for parts in PARTS)], rows)


def of_pairs(step: Any, made: int) -> float:
    """Theorem 1 of Whitehouse et al. 2023, for steps of the best delta each, half of the delta for all of them."""
    from dpx.accounting.cost import event_profile

    profile, best = event_profile(step, curve=True), math.inf
    for share in (0.1, 0.3, 0.5, 0.8):
        each = profile.epsilon(share * DELTA / made)
        variance = made * each**2
        best = min(best, math.sqrt(2 * math.log(1 / ((1 - share) * DELTA)) * variance) + variance / 2)
    return best


def trained(data: Any, seed: int, folder: Path, stops: bool) -> dict[str, Any]:
    """A run of the whole budget on all examples; or one that private validation may end, and a second one then."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import dpx

    ledger = dpx.PrivacyLedger(folder / f"seed{seed}-{stops}.jsonl", epsilon=EPSILON, delta=DELTA)
    images = data.train_images.reshape(EXAMPLES, -1).astype(np.float32) / 255 - 0.5
    order = np.random.default_rng(seed).permutation(EXAMPLES)  # public
    used, kept = (order[:TRAIN], order[TRAIN:]) if stops else (order, order[:0])
    part = "training" if stops else None
    test = data.test_images.reshape(len(data.test_images), -1).astype(np.float32) / 255 - 0.5
    sampling = dpx.PoissonSampling(examples=len(used), batch_size=BATCH)

    def key(number: int) -> Any:
        return dpx.secret_key(2**64 + 1000 * seed + 100 * stops + number)  # public, as the data are

    def loss(params, example):
        x, label = example
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], label)

    def right(params, x, labels):
        return np.argmax(x @ np.asarray(params["w"]) + np.asarray(params["b"]), axis=1) == labels

    def run(number: int, params: Any, callbacks: Any) -> Any:
        noise = 1.0005 * ledger.least_noise(
            lambda noise: sampling.event(np.full(STEPS, noise)), numbers=7850, part=part
        )
        mechanism = dpx.dp_sgd(clip_norm=0.5, noise_multiplier=noise, sampling=sampling, key=key(number))
        options: dict[str, Any] = {
            "steps": STEPS,
            "delta": DELTA,
            "evaluate_every": STEPS // LOOKS,
            "callbacks": callbacks,
        }
        options |= {"ledger": ledger, "words": f"run {number}", "part": part}
        optimizer = dpx.chain(mechanism, optax.sgd(RATES[number - 1], momentum=0.9))
        return dpx.fit(loss, optimizer, params, (images[used], data.train_labels[used]), **options), noise

    begin = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}
    if not stops:
        result, noise = run(1, begin, [])
        accuracy = float(right(result.params, test, data.test_labels).mean())
        return {"accuracy": accuracy, "steps": [STEPS], "noise": [noise], "epsilon": ledger.epsilon}
    metric = dpx.statistics.PrivateMetric(
        lambda params: right(params, images[kept], data.train_labels[kept]),
        noise_multiplier=dpx.Budget(epsilon=0.9 * EPSILON, delta=DELTA / 2, steps=2 * LOOKS),
        key=key(50),
        ledger=ledger,
        part="validation",
    )
    seen = [(metric(begin), begin)]  # of both runs
    made, noises, params = [], [], begin
    for number in (1, 2):
        looks: list[float] = []

        def look(progress: Any, looks: list[float] = looks) -> bool:
            looks.append(metric(progress.params))
            seen.append((looks[-1], progress.params))
            return len(looks) - 1 - looks.index(max(looks)) >= PATIENCE

        result, noise = run(number, params, [look])
        params = max(seen, key=lambda pair: pair[0])[1]
        made, noises = [*made, result.steps], [*noises, noise]
        if result.steps == STEPS:
            break  # the budget is used up
    accuracy = float(right(params, test, data.test_labels).mean())
    return {"accuracy": accuracy, "steps": made, "noise": noises, "epsilon": ledger.epsilon}


def compared(folder: Path, runs: Path) -> str:
    """The table of Fashion-MNIST."""
    from examples.data import load

    data, rows = load("fashion_mnist", folder), []
    found = {stops: [trained(data, seed, runs, stops) for seed in SEEDS] for stops in (False, True)}
    for stops, each in found.items():
        accuracies = [one["accuracy"] for one in each]
        mean, error = statistics.mean(accuracies), statistics.stdev(accuracies) / math.sqrt(len(accuracies))
        name = "private validation may end it, and a second run follows" if stops else "fixed plan"
        steps = "; ".join(" + ".join(map(str, one["steps"])) for one in each)
        noise = "; ".join(" + ".join(f"{x:.2f}" for x in one["noise"]) for one in each)
        cells = [name, f"{100 * mean:.2f}% +- {100 * error:.2f}", " ".join(f"{100 * x:.2f}" for x in accuracies)]
        rows.append([*cells, steps, noise, f"{max(one['epsilon'] for one in each):.3f}"])
    columns = ["training", "test accuracy", "each", "steps", "noise multipliers", "epsilon of the ledger, at most"]
    return report.grid(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder that has fashion-mnist/")
    parser.add_argument("--runs", type=Path, help="an empty folder for the ledgers")
    given = parser.parse_args()
    if given.data:
        title = f"Linear classifier of Fashion-MNIST at epsilon {EPSILON:g}, {len(SEEDS)} seeds"
        with tempfile.TemporaryDirectory() as folder:
            tables = {title: compared(given.data, given.runs or Path(folder))}
        facts: dict[str, Any] = {"delta": DELTA, "seeds": len(SEEDS), "batch_size": BATCH, "learning_rates": RATES}
        print(written("ledger_fashion_mnist", facts, tables, NOTES_OF_RUNS))
    else:
        tables = {
            "Epsilon at delta 1e-5 of a run that ends early": prices(),
            "Epsilon at delta 1e-5 of consecutive runs": in_parts(),
        }
        print(written("ledger", {"delta": DELTA}, tables, NOTES))


def written(name: str, facts: dict[str, Any], tables: dict[str, str], notes: list[str]) -> str:
    return report.write(
        name, report.heading("benchmarks.ledger", ("jax", "dp-accounting"), **facts), tables, notes=notes
    )


NOTES = [
    "The ledger's column is for a run that was planned for all steps and charged before it began, and then ended "
    "where a reader wished. The Renyi filter has the order that is best for the whole run.",
    "The filter of pairs is Theorem 1 of Whitehouse et al. 2023, with a pair of the same delta for each step. It "
    "is made for few releases: of a step on a small batch, a pair at a tiny delta says little.",
    "The odometer bounds every moment of the whole run at once.",
    "The ledger charges consecutive runs one by one, so each may choose its noise, batch size and steps from what "
    "was released before. It counts each as a Gaussian. A short run on small batches is far from one, so many short "
    "runs cost more here than by the Renyi filter of the first table, which counts step by step.",
]
NOTES_OF_RUNS = [
    f"Validation: {EXAMPLES - TRAIN:,} of the {EXAMPLES:,} examples, a public part of their own, whose accuracy is "
    f"released after every {STEPS // LOOKS} of at most {STEPS} steps; {PATIENCE} looks without a better one end "
    "the run, the best one is kept, and what was given back pays for a second run at a quarter of the learning "
    "rate. The fixed plan trains on all examples.",
]


if __name__ == "__main__":
    main()
