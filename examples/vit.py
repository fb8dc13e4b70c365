"""ViT-small on pretrained parameters: the function, and the loader that checks every name and shape of a checkpoint.

The parameters are a dictionary with the names, shapes and layouts of timm's `vit_small_patch16_224`
(https://huggingface.co/timm/vit_small_patch16_224.augreg_in21k_ft_in1k), so a checkpoint needs no conversion.
Architecture: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929. Images of another size are resized to
224 x 224, as in Bu et al. 2022 (https://arxiv.org/abs/2206.07136), who fine-tune such networks on CIFAR with DP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from examples.models import Model

EPSILON = 1e-6  # of the layer normalizations
GET = """ViT-small's checkpoint {path} is not on this machine. It is `model.safetensors`, 88 MB, of
  https://huggingface.co/timm/vit_small_patch16_224.augreg_in21k_ft_in1k
on a machine with a network: huggingface-cli download timm/vit_small_patch16_224.augreg_in21k_ft_in1k model.safetensors
Any safetensors file with the names and shapes of timm's vit_small_patch16_224 will do, whatever its class head."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the network; the defaults are ViT-small's."""

    layers: int = 12
    features: int = 384
    heads: int = 6
    patch: int = 16
    side: int = 224  # pixels of the square images

    @property
    def tokens(self) -> int:
        """The patches, and the token of the class before them."""
        return (self.side // self.patch) ** 2 + 1


SMALL = Sizes()
SIZES = {"vit_small": SMALL, "vit_miniature": Sizes(layers=1, features=12, heads=3, patch=8, side=32)}


def shapes_of(sizes: Sizes, classes: int) -> dict[str, tuple[int, ...]]:
    """The name and the shape of every parameter. Matrices are (outputs, inputs)."""
    width, block = sizes.features, {}
    for name in ("norm1", "norm2"):
        block |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for name, inputs, outputs in (
        ("attn.qkv", width, 3 * width),
        ("attn.proj", width, width),
        ("mlp.fc1", width, 4 * width),
        ("mlp.fc2", 4 * width, width),
    ):
        block |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    return {
        "cls_token": (1, 1, width),
        "pos_embed": (1, sizes.tokens, width),
        "patch_embed.proj.weight": (width, 3, sizes.patch, sizes.patch),
        "patch_embed.proj.bias": (width,),
        **{f"blocks.{layer}.{name}": shape for layer in range(sizes.layers) for name, shape in block.items()},
        "norm.weight": (width,),
        "norm.bias": (width,),
        "head.weight": (classes, width),
        "head.bias": (classes,),
    }


def random_params(key: jax.Array, classes: int, sizes: Sizes = SMALL) -> dict[str, jax.Array]:
    """First parameters without a checkpoint: matrices and embeddings of standard deviation 0.02."""
    shapes, params = shapes_of(sizes, classes), {}
    for name, own in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        if name.endswith(".bias") or name.startswith("head."):
            params[name] = jnp.zeros(shapes[name])
        elif "norm" in name:
            params[name] = jnp.ones(shapes[name])
        else:
            params[name] = 0.02 * jax.random.truncated_normal(own, -2, 2, shapes[name])
    return params


def load_vit(path: str | Path, classes: int, sizes: Sizes = SMALL) -> dict[str, np.ndarray]:
    """The parameters in a safetensors file, float32; a head for another number of classes is replaced by zeros.

    Raises FileNotFoundError, which says how to get it, for a file that is not there; ValueError for one that is not
    safetensors, and for names, shapes or numbers that are not this network's.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(GET.format(path=path))
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy does not know
        raise ValueError(f"{path}: not a safetensors file of numpy's dtypes: {error}") from error
    expected = shapes_of(sizes, classes)
    heads = ("head.weight", "head.bias")
    if missing := sorted(set(expected) - set(found) - set(heads)):
        raise ValueError(f"{path}: parameters are missing: {_some(missing)}")
    if unknown := sorted(set(found) - set(expected)):
        raise ValueError(f"{path}: parameters that are not ViT-small's: {_some(unknown)}")
    if found.get("head.bias", np.zeros(0)).shape != (classes,):
        found |= {name: np.zeros(expected[name], np.float32) for name in heads}
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ValueError(f"{path}: {name} must have shape {shape}, got {found[name].shape}")
        if not np.issubdtype(found[name].dtype, np.floating) or not np.isfinite(found[name]).all():
            raise ValueError(f"{path}: {name} must hold finite floating point numbers, got {found[name].dtype}")
    return {name: found[name].astype(np.float32) for name in expected}


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def apply(params: Mapping[str, jax.Array], image: jax.Array, sizes: Sizes = SMALL) -> jax.Array:
    """Logits (classes,) of one image, float32 (height, width, 3), with pixels in [-1, 1]."""

    def dense(name, x):
        return jnp.einsum("ti,oi->to", x, params[f"{name}.weight"]) + params[f"{name}.bias"][None]

    def normalized(name, x):
        centered = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + EPSILON)
        return centered * scale * params[f"{name}.weight"][None] + params[f"{name}.bias"][None]

    def attended(name, x):
        split = dense(f"{name}.qkv", x).reshape(len(x), 3, sizes.heads, -1)
        query, keys, values = jnp.moveaxis(split, 1, 0)
        scores = jnp.einsum("qhd,khd->hqk", query, keys) / jnp.sqrt(jnp.float32(query.shape[-1]))
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), values)
        return dense(f"{name}.proj", mixed.reshape(len(x), -1))

    if image.shape[:2] != (sizes.side, sizes.side):
        image = jax.image.resize(image, (sizes.side, sizes.side, 3), "cubic")
    patches = jax.lax.conv_general_dilated(
        image[None],
        params["patch_embed.proj.weight"],
        (sizes.patch, sizes.patch),
        "VALID",
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
    )
    x = patches.reshape(-1, sizes.features) + params["patch_embed.proj.bias"][None]
    x = jnp.concatenate([params["cls_token"][0], x]) + params["pos_embed"][0]
    for layer in range(sizes.layers):
        block = f"blocks.{layer}"
        x = x + attended(f"{block}.attn", normalized(f"{block}.norm1", x))
        hidden = jax.nn.gelu(dense(f"{block}.mlp.fc1", normalized(f"{block}.norm2", x)), approximate=False)
        x = x + dense(f"{block}.mlp.fc2", hidden)
    return dense("head", normalized("norm", x[:1]))[0]


def vit(classes: int, checkpoint: str | Path | None, sizes: Sizes = SMALL) -> Model:
    """The network as a pair of functions; checkpoint None is for tests of the code, not for accuracy."""
    if checkpoint is None:
        return Model(lambda key: random_params(key, classes, sizes), lambda p, image: apply(p, image, sizes))
    params = load_vit(checkpoint, classes, sizes)
    return Model(lambda key: jax.tree.map(jnp.asarray, params), lambda p, image: apply(p, image, sizes))
