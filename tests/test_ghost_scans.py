"""Ghost norms through scans, checkpoints and slices: the numbers of per-example gradients, in the expected ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import dpx
from dpx.gradients.ghost import hooks
from dpx.xla.jaxprs import walk_equations
from dpx.xla.place import tracing_for_place
from tests.ghost import (
    WAYS,
    assert_agrees,
    clipped_sums,
    integers,
    key,
    mechanism,
    noiseless,
    normal,
    random_like,
    score,
    ways,
    zoo,
)

SIZE, BF16 = 4, 4e-2
ZOO, row, animal, layer, module = zoo(SIZE)


def tanh_layer(h, w):
    return jnp.tanh(h @ w), None


# stacked layers


row("stack", "outer")(lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w)[0], normal(1, 3, 4, 4), 4))
row("stack_of_few_positions", "gram")(
    lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w)[0], 0.2 * normal(1, 3, 40, 40), 3, 40)
)
row("stack_of_many_positions", "product")(
    lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w)[0], normal(1, 3, 4, 4), 30, 4)
)
row("stack_in_reverse", "outer")(
    lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w, reverse=True)[0], normal(1, 3, 4, 4), 4)
)
row("stack_unrolled", "outer")(
    lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w, unroll=2)[0], normal(1, 5, 4, 4), 4)
)
row("stack_of_one", "outer")(lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w)[0], normal(1, 1, 4, 4), 4))


@jax.custom_vjp
def unit_gradient(w):
    return w


unit_gradient.defvjp(lambda w: (w, None), lambda _, g: (g / (1e-3 + jnp.linalg.norm(g)),))


@animal("gradient gram")
def gradient_of_unit_length_in_each_iteration():
    def repeated(w):  # a loop that is the same for all examples
        return lax.scan(lambda w, _: (unit_gradient(w), None), w, None, length=2)[0]

    def apply(p, x):
        x = lax.scan(lambda h, _: (jnp.tanh(h @ unit_gradient(p["w"])), None), x, None, length=3)[0]
        return lax.scan(lambda h, _: (jnp.tanh(h @ repeated(p["v"])), None), x, None, length=2)[0] @ p["u"]

    return layer(apply, {name: normal(i, 40, 40) for i, name in enumerate("wvu")}, 3, 40)


@animal("product small")
def kernels_made_in_each_iteration():
    """Of a slice, of slices of two loops, and of a layer that several iterations take; a bias is small."""

    def normalized(w):
        return w / jnp.linalg.norm(w, axis=0, keepdims=True)

    def nested(h, rows):
        h = lax.scan(lambda h, w: (jnp.tanh(h @ normalized(w * rows[0, 0, 0])), None), h, rows)[0]
        return lax.scan(lambda h, _: (jnp.tanh(h @ normalized(rows[0])), None), h, None, length=2)[0], None

    def apply(p, x):
        x = lax.scan(lambda h, w: (jnp.tanh(h @ normalized(w) + normalized(w)[:1]), None), x, p["w"], reverse=True)[0]
        x = lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ (w * jax.nn.sigmoid(w))), None)), x, p["remat"])[0]
        x = lax.scan(lambda h, w: (jnp.tanh(h @ unit_gradient(w)), None), x, p["unit"])[0]
        x = lax.scan(
            lambda h, b: (h + b[0] * jnp.sum(b[1]) * (1.0 + b[2]), None), x, (p["b"], p["c"], jnp.arange(3.0))
        )[0]
        x = lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ p["w"][i % 2]), x)
        return lax.scan(nested, x, p["nested"])[0]

    sizes = {"nested": (2, 3, 8, 8), "b": (3, 1, 8), "c": (3, 2)}
    return layer(
        apply,
        {name: normal(i, *sizes.get(name, (3, 8, 8))) for i, name in enumerate(("w", "remat", "unit", *sizes))},
        9,
        8,
    )


@animal("outer")
def stack_along_another_axis_flipped():
    def apply(w, x):
        return lax.scan(tanh_layer, x, jnp.flip(jnp.moveaxis(w, 1, 0), 0))[0]

    return layer(apply, normal(1, 4, 3, 4), 4)


row("stack_in_part", "outer")(lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w[1:4])[0], normal(1, 6, 4, 4), 4))


@animal("outer")
def stack_in_two_halves():
    def apply(w, x):
        return lax.scan(tanh_layer, lax.scan(tanh_layer, x, w[:2])[0], w[2:], reverse=True)[0]

    return layer(apply, normal(1, 5, 4, 4), 4)


row("stack_in_a_scan_and_by_index", "outer")(
    lambda: layer(lambda w, x: jnp.tanh(lax.scan(tanh_layer, x, w[:2])[0] @ w[3]) @ w[2], normal(1, 5, 4, 4), 4)
)


@animal("outer small")
def stacks_with_biases_and_data():
    """Each layer has data of its own, and a bias that all share."""

    def apply(p, x):
        def body(h, row):
            w, b, more = row
            h = jnp.tanh(h @ w["w"] + b + p["all"]) + more
            return h, h[:2]

        h, rows = lax.scan(body, x[0], (p["layers"], p["biases"], x))
        return jnp.concatenate([h, rows.reshape(-1)])

    params = {"layers": {"w": normal(1, 3, 4, 4)}, "biases": normal(2, 3, 4), "all": normal(3, 4)}
    return layer(apply, params, 3, 4)


@animal("gram")
def stack_of_heads():
    def body(h, w):
        return jnp.tanh(jnp.einsum("thk,dhk->td", jnp.einsum("td,dhk->thk", h, w[0]), w[1])), None

    params = normal(1, 3, 20, 2, 10), normal(2, 3, 20, 2, 10)
    return layer(lambda w, x: lax.scan(body, x, w)[0], params, 3, 20)


@animal("product")
def stack_of_convolutions():
    def body(h, w):
        return jnp.tanh(lax.conv(h, w, (1, 1), "SAME")), None

    return layer(lambda w, x: lax.scan(body, x, w)[0], normal(1, 2, 3, 3, 3, 2), 1, 3, 5, 4)


@animal("rows")
def stack_of_tables():
    def loss(tables, t):
        return score(lax.scan(lambda h, row: (jnp.sin(h) + row[0][row[1]], None), jnp.zeros(3), (tables, t))[0])

    return loss, normal(1, 2, 5, 3), integers(2, 5, SIZE, 2)


row("slice_used_twice", "shared")(
    lambda: layer(lambda w, x: lax.scan(lambda h, v: (jnp.tanh(h @ v) @ v.T, None), x, w)[0], normal(1, 3, 4, 5), 2, 4)
)


@animal("shared")
def two_scans_of_one_stack():
    def apply(w, x):
        return lax.scan(tanh_layer, lax.scan(tanh_layer, x, w)[0], w, reverse=True)[0]

    return layer(apply, normal(1, 3, 4, 4), 2, 4)


@animal("outer")
def scan_in_a_scan():
    def outer(h, w):
        return lax.scan(tanh_layer, h, w)[0], None

    return layer(lambda w, x: lax.scan(outer, x, w)[0], normal(1, 2, 3, 4, 4), 4)


@animal("shared product small")
def time_in_a_stack():
    """A stack of recurrent layers: in the scan over the layers is a scan over time."""

    def recurrent(x, p):
        def step(h, row):
            h = jnp.tanh(row @ p["in"] + h @ p["over"] + p["b"])
            return h, h

        return lax.scan(step, jnp.zeros(4), x)[1] + jnp.tanh(x @ p["in"]), None

    params = {"in": normal(1, 2, 4, 4), "over": normal(2, 2, 4, 4), "b": normal(3, 2, 4)}
    return layer(lambda p, x: lax.scan(recurrent, x, p)[0], params, 3, 4)


@animal("outer")
def stack_that_comes_back_to_nobody():
    """As `nnx.scan` returns the state of its modules."""

    def body(carry, w):
        h, total = carry
        return (jnp.tanh(h @ w), total + jnp.sum(w)), w

    return layer(lambda w, x: lax.scan(body, (x, jnp.float32(0)), w)[0][0], normal(1, 3, 4, 4), 4)


@animal("outer")
def stack_that_the_next_iteration_needs():
    def body(carry, w):
        h, last = carry
        return (h + last, jnp.tanh(h @ w)), None

    return layer(lambda w, x: lax.scan(body, (x, x), w)[0][0], normal(1, 3, 4, 4), 4)


@animal("outer product")
def functions_of_the_slices_of_a_stack():
    """What a body makes of them, with a mask from outside, and of a parameter that all iterations share."""

    def apply(p, x):
        mask = jnp.tril(jnp.ones((3, 3))) * 0.5

        def body(h, w):
            return jnp.tanh(h @ (w[0] * mask) + h @ (0.5 * w[1]) + h @ (0.5 * p["b"])), None

        return lax.scan(jax.checkpoint(body), x, (p["a"], p["c"]))[0]

    return layer(apply, {"a": normal(1, 9, 3, 3), "b": normal(2, 3, 3), "c": normal(3, 9, 3, 3)}, 3)


# slices at the place of the iteration


def indexed(w, x, places, axis=0, **options):
    def body(h, i):
        return jnp.tanh(h @ lax.dynamic_index_in_dim(w, i, axis, keepdims=False)), None

    return lax.scan(body, x, places, **options)[0]


row("slices_by_index", "outer")(lambda: layer(lambda w, x: indexed(w, x, jnp.arange(3)), normal(1, 3, 4, 4), 4))
row("slices_by_index_of_some", "gram")(
    lambda: layer(lambda w, x: indexed(w, x, jnp.arange(3) + 1, reverse=True), 0.2 * normal(1, 5, 40, 40), 3, 40)
)
row("slices_by_index_from_the_end_along_another_axis", "outer")(
    lambda: layer(lambda w, x: indexed(w.astype(jnp.float32), x, 2 - jnp.arange(3), 1), normal(1, 4, 3, 4), 4)
)


@animal("outer")
def slices_by_index_in_a_fori_loop():
    return layer(lambda w, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w[i]), x), normal(1, 3, 4, 4), 4)


@animal("outer")
def slices_by_a_counter_in_reverse():
    def apply(w, x):
        def body(carry, row):
            i, h = carry
            return (i + 1, jnp.tanh(h @ w[i] + row)), None

        return lax.scan(body, (jnp.int32(-3), x[0]), x, reverse=True)[0][1]

    return layer(apply, normal(1, 3, 4, 4), 3, 4)


@animal("gram")
def slices_by_index_of_the_outer_scan():
    def apply(w, x):
        def outer(h, i):
            return lax.scan(lambda h, row: (jnp.tanh(h @ w[i] + row), None), h, x)[0], None

        return lax.scan(outer, x[0], jnp.arange(3))[0]

    return layer(apply, 0.2 * normal(1, 3, 40, 40), 2, 40)


row("slices_by_index_that_repeat", "product")(
    lambda: layer(lambda w, x: indexed(w, x, jnp.array([0, 1, 1])), normal(1, 2, 4, 4), 4)
)
row("slices_by_index_in_pairs", "product")(
    lambda: layer(
        lambda w, x: lax.scan(
            lambda h, i: (jnp.tanh(jnp.tanh(h @ jnp.take(w, 2 * i, axis=0)) @ w[2 * i + 1]), None), x, jnp.arange(2)
        )[0],
        normal(1, 4, 4, 4),
        4,
    )
)
row("slices_by_index_beyond_the_end", "product")(
    lambda: layer(lambda w, x: indexed(w, x, jnp.arange(3) + 1), normal(1, 3, 4, 4), 4)
)


# parameters that all iterations share


row("shared_by_iterations", "product")(
    lambda: layer(
        lambda w, x: lax.scan(lambda h, row: (jnp.tanh(row @ w + h), None), jnp.zeros(4), x)[0], normal(1, 3, 4), 9, 3
    )
)


@animal("gram")
def shared_by_few_iterations():
    def apply(w, x):
        return lax.scan(lambda h, row: (jnp.tanh(h @ w.T + row), None), x[0], x)[0]

    return layer(apply, 0.2 * normal(1, 40, 40), 2, 2, 40)


@animal("shared")
def shared_by_iterations_and_used_after():
    def apply(w, x):
        return lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[0], x)[0] @ w.T

    return layer(apply, normal(1, 4, 4), 3, 4)


@animal("shared")
def shared_by_iterations_of_two_scans():
    def apply(w, x):
        h = lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[0], x)[0]
        return lax.scan(lambda h, row: (jnp.tanh(w @ h) * row, None), h, x[:2])[0]

    return layer(apply, normal(1, 4, 4), 3, 4)


@animal("rows")
def table_in_a_scan():
    def loss(table, t):
        return score(lax.scan(lambda h, i: (jnp.sin(h) + table[i].sum(0), None), jnp.zeros(3), t)[0])

    return loss, normal(1, 5, 3), integers(2, 5, SIZE, 4, 2)


@animal("product")
def shared_by_iterations_in_iterations():
    def apply(w, x):
        def outer(h, rows):
            return lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), h, rows)[0], None

        return lax.scan(outer, x[0, 0], x)[0]

    return layer(apply, normal(1, 4, 4), 2, 5, 4)


@animal("product")
def convolution_of_iterations_in_iterations():
    def apply(w, x):
        def inner(h, row):
            return jnp.tanh(lax.conv(h, w, (1, 1), "SAME") + row), None

        return lax.scan(lambda h, rows: lax.scan(inner, h, rows), x[0, 0], x)[0]

    return layer(apply, normal(1, 2, 2, 3, 2), 2, 3, 1, 2, 5, 4)


# rematerialisation


@animal("outer")
def remat_in_a_scan():
    def apply(w, x):
        return lax.scan(jax.checkpoint(tanh_layer, prevent_cse=False), x, w)[0]

    return layer(apply, normal(1, 3, 4, 4), 4)


@animal("outer")
def remat_with_a_policy_around_a_scan():
    policy = jax.checkpoint_policies.dots_saveable
    apply = jax.checkpoint(lambda w, x: lax.scan(tanh_layer, x, w)[0], policy=policy)
    return layer(apply, normal(1, 3, 4, 4), 4)


row("remat_of_a_tied_weight", "shared")(
    lambda: layer(jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T), normal(1, 3, 4), 2, 3)
)


@animal("outer")
def remat_of_a_router():
    """Only the sign of the router's sum counts. So its gradient is 0, but the experts after it have one."""

    def body(x, p):
        return jnp.sign(jnp.sum(x @ p["router"])) * jnp.tanh(x @ p["one"]) + x @ p["other"], None

    params = {name: normal(i, 2, 4, 4) for i, name in enumerate(("router", "one", "other"))}
    return layer(lambda p, x: lax.scan(jax.checkpoint(body), x, p)[0], params, 4)


row("router_of_which_only_the_place_counts", "outer unused")(
    lambda: layer(
        lambda p, x: jnp.where(jnp.argmax(x @ p[0]) < 2, jnp.tanh(x @ p[1]), x), (normal(1, 4, 4), normal(2, 4, 4)), 4
    )
)


@animal("outer")
def dropout_in_a_scan_with_remat():
    def loss(w, example):
        x, dropout_key = example

        def body(h, row):
            w, layer_key = row
            return jnp.tanh(jnp.where(jax.random.bernoulli(layer_key, 0.7, h.shape), h, 0) @ w), None

        return score(lax.scan(jax.checkpoint(body), x, (w, jax.random.split(dropout_key, 3)))[0])

    return loss, normal(1, 3, 8, 8), (normal(2, SIZE, 8), jax.random.split(key(3), SIZE))


# frameworks and models


class Block(linen.Module):
    dtype: object = None

    @linen.compact
    def __call__(self, x, _):
        y = linen.LayerNorm()(x).astype(self.dtype or x.dtype)
        y = linen.Dense(12, dtype=self.dtype, param_dtype=self.dtype or x.dtype)(y)
        y = linen.Dense(6, dtype=self.dtype, param_dtype=self.dtype or x.dtype)(jax.nn.gelu(y))
        return x + y.astype(x.dtype), None


class Stacked(linen.Module):
    block: object = Block
    axis: int = 0
    dtype: object = None

    @linen.compact
    def __call__(self, x):
        over = linen.scan(self.block, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=3)
        return linen.Dense(2)(over(dtype=self.dtype)(x, None)[0])


row("linen_scan", "product small")(lambda: module(Stacked(), 9, 6))
row("linen_scan_along_axis_1_with_remat", "outer small")(
    lambda: module(Stacked(linen.remat(Block, prevent_cse=False), axis=1), 6)
)
row("linen_scan_in_bfloat16", "product small", tolerance=BF16)(lambda: module(Stacked(dtype=jnp.bfloat16), 9, 6))


@animal("gram small", tolerance=BF16)
def stack_of_bfloat16_parameters():
    def loss(p, x):
        def body(h, row):
            return h + jnp.tanh(h @ row["w"] + row["b"][None]), None

        return score(lax.scan(jax.checkpoint(body), x, p)[0])

    params = {"w": 0.1 * normal(1, 3, 40, 40), "b": normal(2, 3, 40)}
    return loss, *jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, normal(3, SIZE, 3, 40)))


@animal("outer small")
def linen_remat_scan():
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x + linen.Dense(6)(jnp.tanh(x))

    return module(linen.remat_scan(Layer, lengths=(2, 2))(), 6)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.RMSNorm(6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return x + self.out(jnp.tanh(self.norm(x)))


def nnx_stack(forward):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return NnxBlock(rngs)

    graph, state = nnx.split(make(nnx.Rngs(0)))
    return layer(lambda state, x: forward(nnx.merge(graph, state), x), random_like(state), 6)


@animal("outer small")
def nnx_scan():
    scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return nnx_stack(lambda model, x: scan(lambda block, x: block(x))(model, x))


@animal("outer small")
def nnx_scan_with_remat():
    scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return nnx_stack(lambda model, x: scan(nnx.remat(lambda block, x: block(x)))(model, x))


@animal("product small")
def mixture_of_experts():
    """Two of four experts for each position, with the weights of a router."""

    def body(x, p):
        weights, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        gates = jnp.sum(jax.nn.one_hot(chosen, 4) * weights[..., None], -2)
        hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, p["up"]))
        return x + jnp.einsum("teh,ehd,te->td", hidden, p["down"], gates) + p["b"][None], None

    params = {"router": normal(1, 2, 4, 4), "up": normal(2, 2, 4, 4, 5), "down": normal(3, 2, 4, 5, 4)}
    params["b"] = normal(4, 2, 4)
    return layer(lambda p, x: lax.scan(body, x, p)[0], params, 7, 4)


row("experts_that_the_data_picks", "rows")(
    lambda: (lambda w, e: score(e[0] @ w[e[1]]), normal(1, 3, 4, 5), (normal(2, SIZE, 6, 4), integers(3, 3, SIZE)))
)


@animal("product")
def grouped_query_attention():
    """Four heads for queries, two for keys and values."""

    def body(x, p):
        q = jnp.einsum("td,dghk->tghk", x, p["q"])
        k, v = (jnp.einsum("td,dgk->tgk", x, p[name]) for name in "kv")
        shares = jax.nn.softmax(jnp.einsum("tghk,sgk->ghts", q, k))
        return x + jnp.einsum("ghts,sgk,ghkd->td", shares, v, p["out"]), None

    params = {"q": normal(1, 2, 4, 2, 2, 3), "k": normal(2, 2, 4, 2, 3), "v": normal(3, 2, 4, 2, 3)}
    params["out"] = normal(4, 2, 2, 2, 3, 4)
    return layer(lambda p, x: lax.scan(body, x, p)[0], params, 6, 4)


# slices by a loop in Python


@animal("outer")
def loop_over_slices():
    def apply(w, x):
        for each in w:
            x = jnp.tanh(x @ each)
        return x

    return layer(apply, normal(1, 3, 4, 4), 4)


@animal("outer")
def unstacked():
    def apply(w, x):
        for each in jnp.unstack(w, axis=1):
            x = jnp.tanh(x @ each)
        return x

    return layer(apply, normal(1, 4, 3, 4), 4)


@animal("outer")
def keys_and_values_of_one_array():
    def apply(w, x):
        keys, values = jnp.split(w, [4], axis=-1)
        return jnp.tanh(x @ keys) @ values

    return layer(apply, normal(1, 4, 10), 4)


@animal("gram")
def loop_over_slices_along_another_axis():
    def apply(w, x):
        for number in (2, 0):
            x = jnp.tanh(x @ w.astype(jnp.float32)[:, number].T)
        return x

    return layer(apply, 0.2 * normal(1, 40, 4, 40), 3, 40)


@animal("outer small")
def loop_over_layers():
    def apply(p, x):
        for number in range(3):
            one = jax.tree.map(lambda leaf, number=number: leaf[number], p)
            x = jnp.tanh(x @ one["w"] + one["b"])
        return x

    return layer(apply, {"w": normal(1, 3, 4, 4), "b": normal(2, 3, 4)}, 4)


@animal("outer small")
def loop_over_layers_in_another_order():
    """Each bias is taken from its stack twice."""

    def apply(p, x):
        for number in (2, 0, 1):
            x = jnp.tanh(x @ p["w"][number] + p["b"][number]) * (1 + p["b"][number])
        return x

    return layer(apply, {"w": normal(1, 3, 4, 4), "b": normal(2, 3, 4)}, 4)


row("loop_with_a_slice_used_twice", "shared")(
    lambda: layer(lambda w, x: jnp.tanh(x @ w[0]) @ w[0].T * jnp.tanh(x @ w[1]) @ w[1].T, normal(1, 2, 4, 4), 9, 4)
)


@animal("product")
def loop_over_many_layers():
    def apply(w, x):
        for number in range(8):
            x = x + jnp.tanh(x @ w[number])
        return x

    return layer(apply, normal(1, 8, 4, 4), 3, 4)


# what must keep its per-example gradient


@animal("gradient")
def slice_in_the_carry():
    def body(carry, w):
        h, last = carry
        return (jnp.tanh(h @ w + h @ last), w), None

    return layer(lambda w, x: lax.scan(body, (x, jnp.zeros((4, 4))), w)[0][0], normal(1, 3, 4, 4), 4)


@animal("gradient")
def slice_that_comes_back():
    def apply(w, x):
        h, same = lax.scan(lambda h, v: (jnp.tanh(h @ v), v.T), x, w)
        return h + jnp.sum(same**2)

    return layer(apply, normal(1, 3, 4, 4), 4)


row("stack_as_the_carry", "gradient")(
    lambda: layer(lambda w, x: lax.scan(lambda v, row: (v * 0.9, row @ v), w, x)[1], normal(1, 4, 4), 3, 4)
)


@animal("product")
def stack_used_in_a_scan_and_whole():
    def apply(w, x):
        return lax.scan(tanh_layer, x, w)[0] @ w.reshape(4, 12)

    return layer(apply, normal(1, 3, 4, 4), 4)


@animal("product")
def two_scans_in_other_orders():
    def apply(w, x):
        return lax.scan(tanh_layer, lax.scan(tanh_layer, x, w)[0], jnp.flip(w, 0))[0]

    return layer(apply, normal(1, 3, 4, 4), 4)


@animal("product")
def two_scans_that_overlap():
    def apply(w, x):
        return lax.scan(tanh_layer, lax.scan(tanh_layer, x, w[:3])[0], w[2:])[0]

    return layer(apply, normal(1, 5, 4, 4), 4)


row("stack_with_steps", "product")(
    lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w[::2])[0], normal(1, 5, 4, 4), 4)
)


@animal("gradient")
def stack_in_a_scan_that_repeats():
    def apply(w, x):
        return lax.scan(lambda h, row: (lax.scan(tanh_layer, h + row, w)[0], None), x[0], x)[0]

    return layer(apply, normal(1, 2, 4, 4), 3, 4)


@animal("outer")
def slice_in_a_branch():
    def body(h, w):
        return lax.cond(h[0] > 0, lambda: jnp.tanh(h @ w), lambda: h), None

    return layer(lambda w, x: lax.scan(body, x, w)[0], normal(1, 3, 4, 4), 4)


@animal("rows")
def blocks_that_iterations_read():
    def apply(w, t):
        def body(h, i):
            return jnp.tanh(h + lax.dynamic_slice_in_dim(w, i, 2).sum(0)), None

        return lax.scan(body, jnp.zeros(3), t)[0]

    return lambda w, t: score(apply(w, t)), normal(1, 9, 3), integers(2, 3, SIZE, 2)


@animal("product")
def kernel_shared_by_iterations():
    def apply(w, x):
        return lax.scan(lambda h, _: (jnp.tanh(lax.conv(h, w, (1, 1), "SAME")), None), x, length=2)[0]

    return layer(apply, normal(1, 2, 2, 3, 2), 1, 2, 4, 4)


row("loop_over_slices_that_overlap", "product")(
    lambda: layer(lambda w, x: jnp.tanh(x @ w[0:2].reshape(8, 4).T) @ w[1:3].reshape(8, 4), normal(1, 3, 4, 4), 4)
)
row("places_in_every_iteration", "product")(
    lambda: layer(
        lambda p, x: lax.scan(lambda h, _: (jnp.tanh(h * p["a"][:3] + p["b"][:3]), None), x, length=3)[0],
        {"a": normal(1, 20, 4), "b": normal(2, 20, 4)},
        *(3, 4),
    )
)
row("stack_of_longer_tables", "outer")(
    lambda: layer(lambda w, x: lax.scan(lambda h, v: (jnp.tanh(h - v[:3]), None), x, w)[0], normal(1, 2, 5, 4), 3, 4)
)
row("function_of_a_stack_before_its_scan", "product")(
    lambda: layer(lambda w, x: lax.scan(tanh_layer, x, 0.5 * w)[0], normal(1, 3, 4, 4), 4)
)
row("function_of_two_slices", "product")(
    lambda: layer(
        lambda w, x: lax.scan(lambda h, v: (jnp.tanh(h @ (v[0] * v[1])), None), x, w)[0],
        (normal(1, 3, 4, 4), normal(2, 3, 4, 4)),
        4,
    )
)
row("kernel_of_a_slice_and_of_what_iterations_share", "outer product")(
    lambda: layer(
        lambda p, x: lax.scan(lambda h, v: (jnp.tanh(h @ jnp.concatenate([v, p["b"]], 1)), None), x, p["a"])[0],
        {"a": normal(1, 3, 4, 2), "b": normal(2, 4, 2)},
        4,
    )
)
row("scan_without_iterations", "gradient")(
    lambda: layer(lambda w, x: lax.scan(tanh_layer, x, w[:0])[0], normal(1, 3, 4, 4), 4)
)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.long_cases(
    *"""
    dropout_in_a_scan_with_remat experts_that functions_of_the_slices grouped_query_attention
    kernel_shared_by_iterations keys_and_values linen_ loop_over_many_layers loop_over_slices_along
    loop_over_slices_that loop_with_a_slice_used_twice mixture_of_experts nnx_scan remat_in_a_scan remat_of_a_tied
    remat_with_a_policy router_of scan_in_a_scan scan_without shared_by_few shared_by_iterations_and
    shared_by_iterations_in shared_by_iterations_of slice_in_a_branch slices_by_index_in slices_by_index_of
    stack_along stack_in_a_scan_and_by_index stack_in_reverse stack_in_two_halves stack_of_bfloat16
    stack_of_convolutions stack_of_heads stack_of_longer stack_of_many stack_of_one stack_of_tables stack_unrolled
    stack_with_steps stacks_with_biases table_in_a_scan time_in_a_stack two_scans_of_one_stack
    places_in_every slice_used_twice two_scans_in_other two_scans_that unstacked
    """.split()
)
def test_equals_per_example_gradients(name):
    make, expected, tolerance = ZOO[name]
    loss, params, batch = make()
    found = ways(loss, params, batch)
    assert set(found.values()) == expected
    assert_agrees(loss, params, batch, norms=("ghost",), tolerance=tolerance)


SLICED = (
    "stack",
    "stack_in_reverse",
    "stack_in_two_halves",
    "stack_along_another_axis_flipped",
    "loop_over_slices",
    "unstacked",
)


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.long_cases("stack_along_another_axis_flipped", "stack_in_", "unstacked")
def test_a_mask_reaches_every_slice(name):
    loss, params, batch = ZOO[name][0]()
    masked = dpx.coordinates.random_freeze(freeze_rate=0.4, every=1, key=key(3))
    made = noiseless(dpx.in_coordinates(mechanism(), masked))
    assert set(ways(loss, params, batch, made=made).values()) == {WAYS["outer"]}
    assert_agrees(loss, params, batch, norms=("ghost",), made=made)


@pytest.mark.parametrize("name", ["stack", "stack_of_few_positions", "stack_of_many_positions", "slice_used_twice"])
def test_norms_are_never_below_the_true_ones_and_hardly_above(name):
    loss, params, batch = ZOO[name][0]()
    found = clipped_sums(loss, params, batch, "ghost").unreleased.norms
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, batch))
        grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(*exact)
        true = np.linalg.norm(np.asarray(grads).reshape(SIZE, -1), axis=1)
    assert np.all(np.asarray(found) >= true * (1 - 1e-6)) and np.all(np.asarray(found) <= true * (1 + 1e-3))


@pytest.mark.parametrize("remat", [False, True])
def test_no_array_is_as_large_as_the_gradients_of_all_examples(remat):
    params, batch = normal(1, 6, 64, 64), normal(2, 32, 2, 64)
    one = jax.checkpoint(tanh_layer) if remat else tanh_layer
    step = dpx.private_updates(lambda w, x: score(lax.scan(one, x, w)[0]), mechanism(), norms="ghost")
    traced = jax.make_jaxpr(lambda w, x: step(w, dpx.Batch(x, None), mechanism().init(w)).updates)(params, batch)
    largest = max(v.aval.size for equation in walk_equations(traced.jaxpr) for v in equation.outvars)
    assert largest <= max(params.size, 6 * batch.size) < len(batch) * params.size / 10


def test_a_part_under_checkpoint_is_computed_again():
    """What a checkpoint drops, such as the hidden numbers here, is not kept for the backward pass."""

    def loss(p, x, block):
        return score(lax.scan(lambda h, w: (block(h, w), None), x, p)[0])

    def block(h, w):
        return h + jnp.tanh(jnp.sin(jnp.tanh(jnp.sin(jnp.tanh(jnp.sin(jnp.tanh(h @ w)))))))

    def stacked(block):
        def of(w, x):
            made = mechanism()
            step = dpx.private_updates(lambda w, x: loss(w, x, block), made, norms="ghost")
            return step(w, dpx.Batch(x, None), made.init(w)).updates

        traced = jax.make_jaxpr(of)(normal(1, 6, 8, 8), normal(2, 4, 8))
        return sum(v.aval.shape == (6, 4, 8) for equation in walk_equations(traced.jaxpr) for v in equation.outvars)

    assert stacked(jax.checkpoint(block)) <= stacked(block) - 3


def test_explain_says_which_slices():
    loss, params, batch = ZOO["stack"][0]()
    explained = dpx.explain_norms(loss, mechanism(), params, dpx.Batch(batch, None), norms="ghost")
    assert explained.rows[0][1:] == (WAYS["outer"], "of each of 3 slices")


@pytest.mark.parametrize("devices", [1, 8])
def test_layers_that_a_loop_indexes_share_their_kernels(devices):
    """With starts that are values; on several devices with constants, because XLA would gather what is sharded."""
    loss, params, batch = ZOO["loop_over_many_layers"][0]()
    step = dpx.private_updates(loss, mechanism(), norms="ghost")

    def private(params, batch):
        return step(params, dpx.Batch(batch, None), mechanism().init(params)).updates

    def slices_of(primitive, jaxpr):
        found = [equation for equation in walk_equations(jaxpr) if equation.primitive.name == primitive]
        return sum(equation.invars[0].aval.shape == (8, 4, 4) for equation in found)

    with tracing_for_place(devices=devices):
        traced = jax.make_jaxpr(private)(params, batch).jaxpr
    by_values, by_constants = (slices_of(primitive, traced) for primitive in ("dynamic_slice", "slice"))
    assert (by_values, by_constants > 1) == ((8, False) if devices == 1 else (0, True))


@pytest.mark.parametrize("name", ["stack", "stack_of_few_positions"])
def test_the_norms_of_small_slices_are_computed_at_once_where_a_matrix_unit_rounds(name, monkeypatch):
    """There a loop of small kernels takes longer. Gram matrices that are large stay in a loop."""
    loss, params, examples = ZOO[name][0]()
    made, batch = mechanism(), dpx.Batch(examples, None)

    def found():
        step = dpx.private_updates(loss, made, norms="ghost", platform="tpu")
        closed = jax.make_jaxpr(step)(params, batch, made.init(params))
        loops = sum(one.primitive.name == "scan" for one in walk_equations(closed.jaxpr))
        return loops, jax.jit(step)(params, batch, made.init(params))

    with tracing_for_place(platform="tpu"):
        few, at_once = found()
        monkeypatch.setattr(hooks, "AT_ONCE", 4)
        many, in_a_loop = found()
    assert few == many - 1
    np.testing.assert_allclose(at_once.unreleased.norms, in_a_loop.unreleased.norms, rtol=1e-5)
    np.testing.assert_allclose(at_once.updates, in_a_loop.updates, rtol=1e-3, atol=1e-9)
