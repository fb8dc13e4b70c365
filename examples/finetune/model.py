"""A decoder language model in Flax NNX, whose parts are those of Llama, of Gemma or of GPT-2, with LoRA where wanted.

It takes one sequence without a batch axis, and has no dropout and no state. Its own names are the same for the three
families, and every kernel is (inputs, outputs); `checkpoints` knows the names and the axes of the files.

Sources: Llama, https://arxiv.org/abs/2302.13971; Gemma, https://arxiv.org/abs/2403.08295; GPT-2, Radford et al. 2019;
rotary embeddings, https://arxiv.org/abs/2104.09864; grouped-query attention, https://arxiv.org/abs/2305.13245; RMSNorm,
https://arxiv.org/abs/1910.07467; LoRA, https://arxiv.org/abs/2106.09685.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

FAMILIES = ("llama", "gemma", "gpt2")
ADAPTED = ("query", "value")  # the layers that LoRA adapts, as in its paper
_normal = nnx.initializers.normal(0.02)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a decoder.

    family: "llama" (RMSNorm, rotary positions, silu-gated hidden layer), "gemma" (the same with scales 1 + w, a
        gelu-gated hidden layer and embeddings times sqrt(width)), or "gpt2" (LayerNorm, a table of positions, gelu,
        biases).
    heads, kv_heads: of queries, and of keys and values; each of the latter serves heads / kv_heads of the former.
    head_width: numbers of a head. hidden: numbers of a hidden layer. positions: the longest sequence.
    tied: whether the embeddings give the logits too. lora_rank: 0 is no LoRA.
    Raises ValueError for numbers below 1, and for heads that do not fit.
    """

    family: str = "llama"
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    positions: int
    theta: float = 10_000.0
    epsilon: float = 1e-5
    tied: bool = True
    lora_rank: int = 0

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {FAMILIES}, got {self.family!r}")
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_width", "hidden", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be at least 0, got {self.lora_rank}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.rotary and self.head_width % 2:
            raise ValueError(f"head_width must be even, because positions turn pairs; got {self.head_width}")
        if self.family == "gpt2" and (self.kv_heads != self.heads or self.heads * self.head_width != self.width):
            raise ValueError(f"gpt2 needs kv_heads = heads and heads * head_width = width; got {self}")

    @property
    def rotary(self) -> bool:
        return self.family != "gpt2"


class Dense(nnx.Module):
    """(length, inputs) -> (length, outputs), with the low-rank product beside the kernel where `rank` is not 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, rank: int = 0, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_normal(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None
        small = nnx.initializers.normal(inputs**-0.5)
        self.lora_a = nnx.Param(small(rngs.lora(), (inputs, rank))) if rank else None
        self.lora_b = nnx.Param(jnp.zeros((rank, outputs))) if rank else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...]
        if self.bias is not None:
            y = y + self.bias[None]
        if self.lora_a is not None and self.lora_b is not None:
            y = y + x @ self.lora_a[...] @ self.lora_b[...]
        return y


class Norm(nnx.Module):
    """RMSNorm, with scales w or, for Gemma, 1 + w; LayerNorm for GPT-2. In float32. (length, width) to the same."""

    def __init__(self, sizes: Architecture):
        self.family, self.epsilon = sizes.family, sizes.epsilon
        self.scale = nnx.Param(jnp.zeros(sizes.width) if sizes.family == "gemma" else jnp.ones(sizes.width))
        self.bias = nnx.Param(jnp.zeros(sizes.width)) if sizes.family == "gpt2" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        full = x.astype(jnp.float32)
        if self.bias is not None:
            full = full - full.mean(-1, keepdims=True)
        full = full * jax.lax.rsqrt((full**2).mean(-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        full = full * (scale + 1 if self.family == "gemma" else scale)[None]
        full = full if self.bias is None else full + self.bias[None].astype(jnp.float32)
        return full.astype(x.dtype)


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """(length, heads, head_width) with each pair (i, i + half) turned by position * theta^(-i / half)."""
    length, _, width = x.shape
    half = width // 2
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * theta ** (
        -jnp.arange(half, dtype=jnp.float32)[None] / half
    )
    cosine, sine = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


class Attention(nnx.Module):
    """Attention with grouped queries. seen: bool (length or 1, length), what a position reads; by default, itself and
    those before it."""

    def __init__(self, sizes: Architecture, rngs: nnx.Rngs):
        self.sizes = sizes
        outer, inner = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        ranks = {name: sizes.lora_rank if name in ADAPTED else 0 for name in ("query", "key", "value")}
        bias = not sizes.rotary
        self.query = Dense(sizes.width, outer, bias=bias, rank=ranks["query"], rngs=rngs)
        self.key = Dense(sizes.width, inner, bias=bias, rank=ranks["key"], rngs=rngs)
        self.value = Dense(sizes.width, inner, bias=bias, rank=ranks["value"], rngs=rngs)
        self.out = Dense(outer, sizes.width, bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        sizes, length = self.sizes, len(x)
        layers = self.query, self.key, self.value
        query, key, value = (layer(x).reshape(length, -1, sizes.head_width) for layer in layers)
        if sizes.rotary:
            query, key = rotated(query, sizes.theta), rotated(key, sizes.theta)
        grouped = query.reshape(length, sizes.kv_heads, -1, sizes.head_width)
        scores = jnp.einsum("qkgd,skd->kgqs", grouped, key).astype(jnp.float32) * sizes.head_width**-0.5
        seen = jnp.tril(jnp.ones((length, length), bool)) if seen is None else seen
        shares = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1).astype(x.dtype)
        return self.out(jnp.einsum("kgqs,skd->qkgd", shares, value).reshape(length, -1))


class Hidden(nnx.Module):
    """The hidden layer: gated for Llama and Gemma, plain for GPT-2."""

    def __init__(self, sizes: Architecture, rngs: nnx.Rngs):
        self.family, plain = sizes.family, sizes.family == "gpt2"
        self.gate = None if plain else Dense(sizes.width, sizes.hidden, bias=False, rngs=rngs)
        self.up = Dense(sizes.width, sizes.hidden, bias=plain, rngs=rngs)
        self.down = Dense(sizes.hidden, sizes.width, bias=plain, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x), approximate=True))
        gate = self.gate(x)
        gate = jax.nn.silu(gate) if self.family == "llama" else jax.nn.gelu(gate, approximate=True)
        return self.down(gate * self.up(x))


class Block(nnx.Module):
    def __init__(self, sizes: Architecture, rngs: nnx.Rngs):
        self.attention_norm, self.attention = Norm(sizes), Attention(sizes, rngs)
        self.hidden_norm, self.hidden = Norm(sizes), Hidden(sizes, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.hidden(self.hidden_norm(x))


class Decoder(nnx.Module):
    """Tokens int32 (length,) -> logits float32 (length, vocabulary) of the next token.

    rngs: with the streams "params" and "lora". Raises ValueError for a sequence that is longer than the positions.
    """

    def __init__(self, sizes: Architecture, rngs: nnx.Rngs):
        self.sizes = sizes
        self.embedding = nnx.Param(_normal(rngs.params(), (sizes.vocabulary, sizes.width)))
        self.places = None if sizes.rotary else nnx.Param(_normal(rngs.params(), (sizes.positions, sizes.width)))
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = Norm(sizes)
        self.head = None if sizes.tied else Dense(sizes.width, sizes.vocabulary, bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if len(tokens) > self.sizes.positions:
            raise ValueError(f"a sequence must have at most {self.sizes.positions} tokens, got {len(tokens)}")
        table = self.embedding[...]
        x = table[tokens]
        if self.sizes.family == "gemma":
            x = x * jnp.asarray(self.sizes.width**0.5, x.dtype)
        if self.places is not None:
            x = x + self.places[...][: len(tokens)]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return (x @ table.T if self.head is None else self.head(x)).astype(jnp.float32)


def is_lora(path: str) -> bool:
    """Whether `dpx.coordinates.trainable` should train the parameter, in a run with LoRA."""
    return "lora_" in path


def fresh(sizes: Architecture, key: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
    """The module without its parameters, and random parameters. `nnx.merge(graphdef, params)` is the module."""
    return jax.jit(lambda key: nnx.split(Decoder(sizes, nnx.Rngs(key))))(key)  # one program, not one for each shape
