"""Bills of many kinds of events, recorded: the accountants may be rewritten, but no bill may change unnoticed.

`python -m tests.record_bills` writes every bill anew to tests/data/bills.json. A bill that changed is a decision: see
`git diff tests/data/bills.json` before committing it. A new bill that is higher than the recorded one needs a reason.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import dp_accounting
import jax
import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent

import dpx
from dpx import accounting
from dpx.accounting import arithmetic, schedule_delta, schedule_epsilon
from dpx.accounting.flat_event import from_event
from dpx.papers.d2p2_sgd.cost import ProjectedGaussianDpEvent, event_with_projection
from dpx.papers.dice_sgd.cost import ErrorFeedbackDpEvent
from dpx.sampling import PoissonSampling, RandomAllocation

PATH = Path(__file__).parent / "data" / "bills.json"

Bill = Callable[[], float]


def poisson(rate: float, sigma: float, count: int = 1) -> DpEvent:
    return SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), count)


def fixed(sigma: float, count: int = 1, size: int = 10) -> DpEvent:
    return SelfComposedDpEvent(
        dp_accounting.SampledWithoutReplacementDpEvent(1000, size, GaussianDpEvent(sigma)), count
    )


def scheduled(sigmas, rate: float) -> DpEvent:
    return ComposedDpEvent([poisson(rate, float(sigma)) for sigma in sigmas])


def feedback(error_shift=1.0, noise=4.0, *, sampling, steps=60, reset=None, feedback_shift=2e3) -> DpEvent:
    return ErrorFeedbackDpEvent(noise, error_shift, feedback_shift, steps, reset or steps, sampling)


def asked(event: DpEvent, *, deltas=(), epsilons=(), accountants=("pld",), relations=("add_or_remove",), **options):
    """The bills of an event by every accountant and relation: epsilon at each delta, delta at each epsilon."""
    for accountant, relation in itertools.product(accountants, relations):
        options = dict(options, accountant=accountant, relation=relation)
        for delta in deltas:
            name = f"{accountant}, {relation}, epsilon at {delta:g}"
            yield name, lambda o=options, d=delta: accounting.event_epsilon(event, delta=d, **o)
        for epsilon in epsilons:
            name = f"{accountant}, {relation}, delta at {epsilon:g}"
            yield name, lambda o=options, e=epsilon: accounting.event_delta(event, epsilon=e, **o)


def _gaussians() -> Iterator[tuple[str, Bill]]:
    both: dict = dict(accountants=("pld", "rdp"), relations=("add_or_remove", "zero_out"))
    for sigma, count in ((0.5, 1), (3.0, 1), (2.0, 9), (50.0, 1000)):
        event = SelfComposedDpEvent(GaussianDpEvent(sigma), count)
        for name, bill in asked(event, deltas=(1e-5, 1e-12), epsilons=(1.0,), **both):
            yield f"gaussian {sigma} x {count}: {name}", bill
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(0.5,), relations=("replace_one",)):
            yield f"gaussian {sigma} x {count}: {name}", bill


def _poisson() -> Iterator[tuple[str, Bill]]:
    grid = [(0.01, 1.0, 1000), (0.001, 0.7, 5000), (0.05, 3.0, 400), (0.3, 5.0, 50), (0.01, 0.5, 20), (0.9, 4.0, 3)]
    grid += [(1e-4, 1.0, 100_000), (0.01, 1.1, 1), (1e-3, 1.0, 1), (0.02, 1.54, 2000), (0.01, 1.1, 10_000)]
    for rate, sigma, count in grid:
        label, event = f"poisson {rate} {sigma} x {count}", poisson(rate, sigma, count)
        for name, bill in asked(event, deltas=(1e-3, 1e-5, 1e-9), epsilons=(0.5, 2.0, 8.0), accountants=("pld", "rdp")):
            yield f"{label}: {name}", bill
        for name, bill in asked(event, deltas=(1e-6,), epsilons=(1.0,), relations=("replace_one",)):
            yield f"{label}: {name}", bill
        for name, bill in asked(event, deltas=(1e-11, 1e-20)):
            yield f"{label}: {name}", bill


def _schedules() -> Iterator[tuple[str, Bill]]:
    shapes = {
        "falling 3 to 1, 300": (np.linspace(3, 1, 300), 0.01),
        "rising 1 to 6, 700": (np.geomspace(1, 6, 700), 0.02),
        "wavy 100": (2 + 1.5 * np.sin(np.arange(100)), 0.02),
        "spike": (np.append(np.full(399, 5.0), 0.5), 0.01),
        "unsampled": (np.linspace(20, 60, 200), 1.0),
        "rates": (np.geomspace(3, 1, 200), np.linspace(0.001, 0.02, 200)),
    }
    for label, (sigmas, rate) in shapes.items():
        for relation in ("add_or_remove", "replace_one"):
            options: dict = dict(relation=relation, buckets=64)
            epsilon = functools.cache(
                lambda s=sigmas, q=rate, o=options: schedule_epsilon(s, sampling_rate=q, delta=1e-6, **o)
            )
            delta = functools.cache(
                lambda s=sigmas, q=rate, o=options: schedule_delta(s, sampling_rate=q, epsilon=1.0, **o)
            )
            for (name, interval), end in itertools.product(
                {"epsilon": epsilon, "delta": delta}.items(), ("lower", "upper")
            ):
                yield f"schedule {label}, {relation}, {end} {name}", lambda i=interval, e=end: getattr(i(), e)
        yield (
            f"schedule {label}, rdp",
            lambda s=sigmas, q=rate: schedule_epsilon(s, sampling_rate=q, delta=1e-6, accountant="rdp").upper,
        )
    event = scheduled(np.linspace(3, 1, 1500), 0.01)
    for name, bill in asked(event, deltas=(1e-6,), epsilons=(1.0,), accountants=("pld", "rdp")):
        yield f"1500 distinct steps: {name}", bill


def _mixes() -> Iterator[tuple[str, Bill]]:
    mixes = {
        "two rates and a Gaussian": ComposedDpEvent([poisson(0.02, 1.2, 300), poisson(0.1, 2, 50), GaussianDpEvent(4)]),
        "nested": SelfComposedDpEvent(ComposedDpEvent([poisson(0.01, 1.5), GaussianDpEvent(20), poisson(0.0, 1)]), 7),
        "nothing": dp_accounting.NoOpDpEvent(),
        "no noise": ComposedDpEvent([poisson(0.01, 1.5), dp_accounting.NonPrivateDpEvent()]),
        "noise of 0": ComposedDpEvent([poisson(0.01, 1.5), GaussianDpEvent(0.0)]),
        "Laplace": ComposedDpEvent([dp_accounting.LaplaceDpEvent(2.0), GaussianDpEvent(3.0)]),
    }
    for label, event in mixes.items():
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(0.7,), accountants=("pld", "rdp")):
            yield f"{label}: {name}", bill
    zcdp: dict = dict(accountants=("rdp",))
    for name, bill in asked(dp_accounting.ZCDpEvent(0.1), deltas=(1e-5,), epsilons=(0.7,), **zcdp):
        yield f"zCDP: {name}", bill


def _fixed() -> Iterator[tuple[str, Bill]]:
    options: dict = dict(accountants=("pld", "rdp"), relations=("replace_one",))
    several = ComposedDpEvent([fixed(1.0 + 0.2 * i, 5, 20) for i in range(4)])
    events = {"fixed 2 x 50": fixed(2.0, 50), "fixed 0.6 x 1": fixed(0.6), "fixed, four noises": several}
    for label, event in events.items():
        for name, bill in asked(event, deltas=(1e-5, 1e-8), epsilons=(1.0,), **options):
            yield f"{label}: {name}", bill


def _allocated() -> Iterator[tuple[str, Bill]]:
    epochs, falling = RandomAllocation(examples=1000, steps_per_epoch=20), np.geomspace(2.0, 1.0, 50)
    events = {
        "100 epochs of 1,000 steps": RandomAllocation(examples=1000, steps_per_epoch=1000).event(np.ones(100_000)),
        "an epoch that ends early": epochs.event(np.full(50, 1.5)),
        "falling noise": epochs.event(falling),
        "beside a Gaussian": ComposedDpEvent([epochs.event(np.full(20, 0.7)), GaussianDpEvent(3.0)]),
    }
    for label, event in events.items():
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(1.0,), accountants=("pld", "rdp")):
            yield f"random allocation, {label}: {name}", bill


def _truncated() -> Iterator[tuple[str, Bill]]:
    cut = PoissonSampling(examples=60_000, batch_size=256, most_rows=304)
    events = {
        "2,344 steps": cut.event(np.full(2344, 0.8)),
        "falling noise": cut.event(np.geomspace(2.0, 1.0, 50)),
        "beside a Gaussian": ComposedDpEvent([cut.event(np.full(20, 0.7)), GaussianDpEvent(3.0)]),
    }
    options: dict = dict(accountants=("pld", "rdp"), relations=("zero_out", "replace_one"))
    for label, event in events.items():
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(1.0,), **options):
            yield f"truncated, {label}: {name}", bill


def _projected() -> Iterator[tuple[str, Bill]]:
    events = {
        "gaussian": event_with_projection(GaussianDpEvent(2.0), rank=10),
        "one sampled": ProjectedGaussianDpEvent(0.9, 0.15, 6),
        "sampled": event_with_projection(poisson(0.02, 1.54, 500), rank=1000),
        "blocks": event_with_projection(poisson(0.02, 1.54, 500), rank=1000, blocks=9),
        "beside a Gaussian": ComposedDpEvent(
            [event_with_projection(GaussianDpEvent(3.0), rank=20), GaussianDpEvent(5.0)]
        ),
    }
    for label, event in events.items():
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(1.0,), accountants=("pld", "rdp")):
            yield f"projected, {label}: {name}", bill


def _groups() -> Iterator[tuple[str, Bill]]:
    events = {
        "four of 1,000 steps": from_event(poisson(0.01, 3.0, 1000)).of_records(4),
        "falling noise": from_event(scheduled(np.geomspace(8.0, 4.0, 100), 0.05)).of_records(3),
        "rare numbers": from_event(poisson(0.001, 30.0, 100)).of_records(1000),
    }
    for label, event in events.items():
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(1.0,), accountants=("pld", "rdp")):
            yield f"several records, {label}: {name}", bill


def _mixtures() -> Iterator[tuple[str, Bill]]:
    events = {
        "five": SelfComposedDpEvent(MixtureOfGaussiansDpEvent(1.3, (0.0, 0.7, 2.0), (0.5, 0.3, 0.2)), 5),
        "rare": SelfComposedDpEvent(MixtureOfGaussiansDpEvent(0.8, (0.0, 0.3, 1.0), (0.989, 0.01, 0.001)), 1000),
    }
    for label, event in events.items():
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(1.0,), accountants=("pld", "rdp")):
            yield f"mixture, {label}: {name}", bill


def _feedback() -> Iterator[tuple[str, Bill]]:
    random = dpx.PoissonSampling(examples=50_000, batch_size=1000)
    epochs = dpx.ShuffledEpochs(examples=50_000, batch_size=1000)
    events = {
        "poisson": (feedback(sampling=random), ("pld", "rdp"), "add_or_remove"),
        "poisson, zero out": (feedback(sampling=random), ("pld",), "zero_out"),
        "poisson, reset": (feedback(sampling=random, reset=10), ("pld", "rdp"), "add_or_remove"),
        "poisson, replace": (feedback(sampling=random, noise=20.0), ("pld",), "replace_one"),
        "poisson, unbounded": (
            feedback(math.inf, 50.0, sampling=random, feedback_shift=3.0),
            ("pld",),
            "add_or_remove",
        ),
        "shuffled": (feedback(sampling=epochs, steps=150), ("pld", "rdp"), "zero_out"),
        "shuffled, reset": (feedback(sampling=epochs, steps=150, reset=50), ("pld",), "zero_out"),
        "full": (feedback(noise=9.0, sampling=dpx.FullBatch(examples=10), steps=3), ("pld",), "zero_out"),
        "fixed size": (
            feedback(noise=20.0, sampling=dpx.FixedSizeSampling(examples=50_000, batch_size=1000)),
            ("pld",),
            "replace_one",
        ),
        "noise of 0": (feedback(noise=0.0, sampling=epochs), ("pld", "rdp"), "zero_out"),
    }
    for label, (event, accountants, relation) in events.items():
        for name, bill in asked(event, deltas=(1e-5,), epsilons=(1.0,), accountants=accountants, relations=(relation,)):
            yield f"error feedback, {label}: {name}", bill


def _mechanisms() -> Iterator[tuple[str, Bill]]:
    key = jax.random.key(0)
    sampling = dpx.PoissonSampling(examples=60_000, batch_size=600)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.1, sampling=sampling, key=key)
    yield "dp_sgd: epsilon", lambda: dpx.epsilon(mechanism, 1000, delta=1e-6, accountant="pld")
    yield "dp_sgd: delta", lambda: dpx.accounting.delta(mechanism, 1000, epsilon=1.0, accountant="pld")
    yield (
        "dp_sgd: calibrated",
        lambda: dpx.accounting.calibrate(
            lambda noise: dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key),
            steps=500,
            epsilon=2.0,
            delta=1e-6,
            accountant="pld",
        ),
    )
    yield (
        "a calibrated schedule",
        lambda: (
            accounting.calibrate_schedule(
                np.linspace(3, 1, 100), sampling_rate=0.01, epsilon=2, delta=1e-5, buckets=64
            ).scale
        ),
    )


def _searches() -> Iterator[tuple[str, Bill]]:
    three = (poisson(0.02, 2.0, 500), GaussianDpEvent(3.0), fixed(2.0))
    runs = {"sampled": (poisson(0.02, 1.54, 500),), "of three": three}
    for label, distribution in itertools.product(runs, ("logarithmic", "geometric", "poisson")):
        relation = "replace_one" if label == "of three" else "add_or_remove"
        bill = accounting.best_of(
            *runs[label], trials=10, score_on=GaussianDpEvent(20.0), distribution=distribution, relation=relation
        )
        asking: dict = dict(deltas=(1e-5,), epsilons=(2.0,), accountants=("rdp",), relations=(relation,))
        for name, value in asked(bill.event, **asking):
            yield f"search, {label}, {distribution}: {name}", value


FAMILIES = (
    *(_gaussians, _poisson, _schedules, _mixes, _fixed, _allocated, _truncated),
    *(_projected, _groups, _mixtures, _feedback, _mechanisms, _searches),
)


def bills() -> dict[str, Bill]:
    """Every bill by its name."""
    return dict(itertools.chain.from_iterable(bills_of() for bills_of in FAMILIES))


def main() -> None:
    nothing = arithmetic.finite_precision_cost(0, 0.0)  # the bills are those of exact noise, as in the test
    arithmetic._best_lemma_2 = lambda *_: nothing
    recorded = {name: bill() for name, bill in bills().items()}
    PATH.parent.mkdir(exist_ok=True)
    written = {name: repr(value) if math.isinf(value) else value for name, value in recorded.items()}
    PATH.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
