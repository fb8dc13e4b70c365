"""Texts from a model: every token is drawn from what the model says, at a temperature."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

AT_ONCE = 64  # texts that are written together


def write_texts(
    graphdef: nnx.GraphDef,
    params: Any,
    tokenizer: Any,
    *,
    count: int,
    length: int,
    key: jax.Array,
    temperature: float = 1.0,
    prompt: str = "",
) -> list[str]:
    """`count` texts of at most `length` tokens each. A text ends where the model writes the start token again.

    prompt: PUBLIC words that every text begins with. key: a PRNG key, (), which nothing else uses.
    temperature: above 0; less than 1 makes likely tokens more likely.
    Texts that only depend on a private model, on public prompts and on the key cost nothing more: they are
    post-processing. No keys and values are kept, so each token costs a pass over the sequence.
    Raises ValueError for numbers outside their range, and for a prompt that fills the length.
    """
    begin = [tokenizer.start, *tokenizer.encode(prompt)]
    if count < 1 or temperature <= 0 or len(begin) > length:
        said = f"count {count}, temperature {temperature}, {len(begin) - 1} tokens of a prompt and length {length}"
        raise ValueError(
            f"count must be at least 1, temperature above 0, the prompt shorter than the length; got {said}"
        )

    texts: list[str] = []
    keys = jax.random.split(key, -(-count // AT_ONCE))
    for number in range(len(keys)):
        for row in np.asarray(_batch_of(graphdef, tuple(begin), length, temperature, params, keys[number]))[:, 1:]:
            ends = np.flatnonzero(row == tokenizer.start)
            texts.append(tokenizer.decode(row[: ends[0]] if len(ends) else row))
    return texts[:count]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _batch_of(graphdef, begin: tuple[int, ...], length: int, temperature: float, params, key) -> jax.Array:
    """Tokens int32 (AT_ONCE, length + 1), which begin with `begin`."""
    model = nnx.merge(graphdef, params)
    tokens = jnp.zeros((AT_ONCE, length + 1), jnp.int32).at[:, : len(begin)].set(jnp.asarray(begin)[None])

    def add(tokens, place):
        logits = jax.vmap(model)(tokens[:, :-1])[:, place - 1] / temperature
        drawn = jax.random.categorical(jax.random.fold_in(key, place), logits)
        return tokens.at[:, place].set(drawn.astype(jnp.int32)), None

    return jax.lax.scan(add, tokens, jnp.arange(len(begin), length + 1))[0]
