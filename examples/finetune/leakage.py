"""What the fine-tuned model leaks: canaries with their exposure, and who took part, beside the cost.

A canary is a unit that was made up: a sentence with a random number, again and again in all rows of the unit. The model
is asked how surprised it is by the number, and by other numbers that were drawn in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import dpx
import dpx.audit
from examples.finetune.rows import Rows

if TYPE_CHECKING:
    from examples.finetune.training import Job, Settings

SENTENCE, DIGITS = "The secret number of {name} is {number}. ", 6
REFERENCES = 127  # other numbers, for each canary
MEMBERS = 400  # units that took part and that did not, whose losses are compared
RATES = dpx.reports.attacks.FALSE_POSITIVE_RATES
CANARY, UNRELEASED = "canary/", "unreleased_membership_"


def canaries(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """(name, number) of each canary: uniformly random digits, which depend on nothing else of a run."""
    digits = np.random.default_rng([seed, 1]).integers(0, 10, (count, DIGITS))
    return [(f"user {place}", "".join(map(str, row))) for place, row in enumerate(digits)]


def candidate_rows(sentences: list[str], tokenizer: Any, length: int) -> Rows:
    """A row of `length` tokens for each sentence, which is written again and again."""
    tokens = np.zeros((len(sentences), length + 1), np.int32)
    for row, sentence in enumerate(sentences):
        once = tokenizer.encode(sentence)
        tokens[row] = [tokenizer.start, *(once * (length // len(once) + 1))][: length + 1]
    return Rows(tokens, np.full(len(sentences), length + 1, np.int32), np.array(sentences))


def with_canaries(rows: Rows, chosen: list[tuple[str, str]], tokenizer: Any, most: int) -> Rows:
    """The rows, and a unit with `most` rows for each canary. Raises ValueError for a unit that has a canary's name."""
    if taken := [owner for owner in rows.owners.tolist() if owner.startswith(CANARY)]:
        raise ValueError(f"with canaries, no unit may have a name that begins with {CANARY!r}, got {taken[0]!r}")
    length = rows.tokens.shape[1] - 1
    added = candidate_rows([SENTENCE.format(name=name, number=number) for name, number in chosen], tokenizer, length)
    owners = np.array([CANARY + name for name, _ in chosen])
    repeated = [np.repeat(leaf, most, axis=0) for leaf in (added.tokens, added.sizes, owners)]
    return Rows(*(np.concatenate(pair) for pair in zip(rows, repeated, strict=True)))


def attack(job: Job, params: Any, losses: Callable, settings: Settings, stated: float) -> dict[str, Any]:
    """The exposure of the canaries, and how well the losses of units say who took part, by name.

    The canaries are nobody's, so their losses may be shared. The losses of real units come from private texts, and no
    cost covers what is computed from them: such numbers are called unreleased_*.
    losses: (params, rows) -> the summed losses of rows, and their counts. stated: the epsilon of one unit.
    """
    shown = exposure_of(job, params, losses, settings, stated)
    members = unit_scores(job, params, losses, sample(job.private, MEMBERS, settings.most))
    found = dpx.audit.membership(members, unit_scores(job, params, losses, sample(job.test, MEMBERS, settings.most)))
    rates = {
        f"{UNRELEASED}tpr_at_{rate:g}": value for rate, value in zip(RATES, found.true_positive_rates, strict=True)
    }
    return {
        "exposure": float(shown.exposures.mean()),
        "largest_exposure": float(shown.exposures.max()),
        "exposure_epsilon": shown.epsilon,
        UNRELEASED + "area": found.area,
        UNRELEASED + "advantage": found.advantage,
        "members": found.members,
        "others": found.others,
    } | rates


def exposure_of(job: Job, params: Any, losses: Callable, settings: Settings, stated: float) -> dpx.audit.Exposure:
    """Each canary's sentence with its own number and with others, each written once behind the start token."""
    true = canaries(settings.canaries)
    others = np.random.default_rng([settings.canaries, 2]).integers(0, 10, (len(true), REFERENCES, DIGITS))
    sentences = []
    for (name, number), rows in zip(true, others, strict=True):
        numbers = [number, *("".join(map(str, row)) for row in rows)]
        sentences += [SENTENCE.format(name=name, number=one) for one in numbers]
    length = len(job.tokenizer.encode(max(sentences, key=len)))
    totals, _ = losses(params, candidate_rows(sentences, job.tokenizer, length))
    totals = totals.reshape(len(true), 1 + REFERENCES)
    return dpx.audit.exposure(totals[:, 0], totals[:, 1:], delta=settings.delta, cost=stated)


def sample(rows: Rows, units: int, most: int) -> Rows:
    """The rows that take part of so many units without canaries, spread evenly over the names."""
    names = [name for name in np.unique(rows.owners).tolist() if not name.startswith(CANARY)]
    kept = set(names[:: max(1, len(names) // units)][:units])
    chosen = np.array([owner in kept for owner in rows.owners.tolist()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of few units has a large share of the rows
        items = Rows(*(leaf[chosen] for leaf in rows)).users(most, "unit")
    parts = items.__getitems__(list(range(len(items))))
    (tokens, sizes), included = jax.tree.map(lambda *of: np.stack(of), *parts)
    owners = np.repeat(np.array(sorted(kept)), most)
    return Rows(tokens.reshape(-1, tokens.shape[-1]), np.where(included, sizes, 0).reshape(-1), owners)


def unit_scores(job: Job, params: Any, losses: Callable, rows: Rows) -> np.ndarray:
    """Of each unit, how far training moved the loss of a token down, float64 (units,). The base did not see any."""
    _, owner = np.unique(rows.owners, return_inverse=True)
    (before, counts), (after, _) = losses(job.params, rows), losses(params, rows)
    return np.bincount(owner, before - after) / np.maximum(np.bincount(owner, counts), 1)
