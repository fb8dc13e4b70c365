"""Texts from a language model: beam search, of which greedy decoding is the case of one beam."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH = 64  # sequences that the model reads at once


def generator(
    apply: Callable[[Any, jax.Array], jax.Array],
    *,
    end: int,
    avoid: int | None = None,
    beams: int = 1,
    penalty: float = 0.8,
):
    """(params, prompts int32 (N, length), starts int (N,)) -> the best continuation of each, a list of token ids.

    apply: (params, tokens (length,)) -> logits (length, vocabulary). A prompt has `starts` tokens and anything behind
    them; its continuation stops before `end`, or at `length`, and never has the token `avoid`. Finished continuations
    are ranked by log-probability divided by (tokens + 1)^penalty. Every token costs a pass over the
    whole sequence, because no keys are kept.
    """

    @jax.jit
    def next_scores(params, tokens, place):
        logits = jax.vmap(apply, (None, 0))(params, tokens)
        row = jnp.take_along_axis(logits, (place - 1)[:, None, None], axis=1)[:, 0]
        if avoid is not None:
            row = row.at[:, avoid].set(-jnp.inf)
        return jax.lax.top_k(jax.nn.log_softmax(row), beams + 1)

    def scores(params, tokens, places):
        found = []
        for first in range(0, len(tokens), BATCH):
            rows, their = tokens[first : first + BATCH], places[first : first + BATCH]
            more = BATCH - len(rows)
            padded = np.pad(rows, ((0, more), (0, 0))), np.pad(their, (0, more), constant_values=1)
            values, ids = next_scores(params, *padded)
            found.append((np.asarray(values)[: len(rows)], np.asarray(ids)[: len(rows)]))
        return (np.concatenate(parts) for parts in zip(*found, strict=True))

    def generate(params, prompts: np.ndarray, starts: np.ndarray) -> list[list[int]]:
        length, count = prompts.shape[1], len(prompts)
        live = [[(0.0, list(prompt[:start]))] for prompt, start in zip(prompts, starts, strict=True)]
        done: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
        while any(live):
            owners = [one for one in range(count) for _ in live[one]]
            tokens = np.full((len(owners), length), end, np.int32)
            beam_of = [beam for some in live for beam in some]
            for row, (_, ids) in enumerate(beam_of):
                tokens[row, : len(ids)] = ids
            places = np.array([len(ids) for _, ids in beam_of], np.int32)
            values, chosen = scores(params, tokens, places)
            grown: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
            for row, owner in enumerate(owners):
                score, ids = beam_of[row]
                for value, token in zip(values[row], chosen[row], strict=True):
                    grown[owner].append((score + float(value), [*ids, int(token)]))
            for one in range(count):
                best = sorted(grown[one], reverse=True)[: beams + 1]
                live[one] = []
                for rank, (score, ids) in enumerate(best):
                    written = len(ids) - starts[one]
                    if ids[-1] == end or len(ids) == length:
                        if rank < beams:
                            text = ids[starts[one] : -1] if ids[-1] == end else ids[starts[one] :]
                            done[one].append((score / (written + 1) ** penalty, text))
                    elif len(live[one]) < beams:
                        live[one].append((score, ids))
                if len(done[one]) >= beams:
                    live[one] = []
        return [max(some)[1] for some in done]

    return generate
