"""The norm of G = A^T B without, or by way of, G; for one example, in float32.

A is (K, T, I), what went into a layer, and B is (K, T, O), the gradient of what came out: K groups, T positions.
`scale`, (K, I, O), multiplies G.
"""

import jax
import jax.numpy as jnp

EXACT = jax.lax.Precision.HIGHEST


def outer(a: jax.Array, b: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """One position: |a b^T| = |a| |b|, and |scale * a b^T|^2 = (a a)^T (scale scale) (b b)."""
    (a, size_a), (b, size_b) = unit(a[:, 0]), unit(b[:, 0])
    squares_a, squares_b = a * a, b * b
    if scale is None:
        squared = jnp.sum(jnp.sum(squares_a, -1) * jnp.sum(squares_b, -1))
    else:
        squared = jnp.einsum("ki,kio,ko->", squares_a, scale * scale, squares_b, precision=EXACT)
    return size_a * size_b * jnp.sqrt(squared)


def gram(a: jax.Array, b: jax.Array) -> jax.Array:
    """|G|^2 = sum_st (a_s . a_t)(b_s . b_t).

    The sum can cancel, so a bound on its rounding error is added: the norm is not underestimated.
    """
    (a, size_a), (b, size_b) = unit(a), unit(b)
    grams_a = jnp.einsum("kti,ksi->kts", a, a, precision=EXACT)
    grams_b = jnp.einsum("kto,kso->kts", b, b, precision=EXACT)
    diagonals = jnp.diagonal(grams_a, 0, 1, 2) * jnp.diagonal(grams_b, 0, 1, 2)
    rounding = jnp.finfo(jnp.float32).eps * jnp.sum(jnp.sum(jnp.sqrt(diagonals), -1) ** 2)
    return size_a * size_b * jnp.sqrt(jnp.maximum(jnp.sum(grams_a * grams_b), 0) + rounding)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """G itself, (K, I, O)."""
    return jnp.einsum("kti,kto->kio", a, b, precision=EXACT)


def rows(row: jax.Array, b: jax.Array) -> jax.Array:
    """G adds b_t, (T, O), to row `row[t]`, and nothing where that is negative. No term is negative, so nothing cancels.

    |G|^2 = sum_t |sum of the b_s in the row of t|^2 / how many t are in that row.
    """
    same = (row[:, None] == row[None, :]) & (row >= 0)[:, None]
    same = same.astype(jnp.float32)
    totals = jnp.matmul(same, jnp.where((row >= 0)[:, None], b, 0), precision=EXACT)
    return frobenius(totals / jnp.sqrt(jnp.maximum(jnp.sum(same, -1), 1))[:, None])


def frobenius(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x))


def unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x = unit * size with entries of at most 1, so that squares neither vanish nor overflow."""
    size = jnp.max(jnp.abs(x), initial=0)
    return x / jnp.maximum(size, jnp.finfo(jnp.float32).tiny), size
