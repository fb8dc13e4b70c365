"""ViT-small: its parameters are those of the checkpoint, the loader checks them, and its numbers are an oracle's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from safetensors.numpy import save_file

import dpx
from examples import models, vit
from examples.config import Config
from examples.tasks import TASKS

TINY = vit.Sizes(layers=2, features=12, heads=3, patch=4, side=8)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    shapes = vit.shapes_of(TINY, 5)
    return {name: np.asarray(rng.normal(0.1, 0.3, shape), np.float32) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(params, tmp_path):
    save_file(params, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def oracle(params, image):
    """The network in NumPy, head by head."""

    def dense(name, x):
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def normalized(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    kernel = params["patch_embed.proj.weight"]
    x = [params["cls_token"][0, 0]]
    for row in (0, 4):
        for column in (0, 4):
            patch = image[row : row + 4, column : column + 4].transpose(2, 0, 1)
            x.append((kernel * patch).sum((1, 2, 3)) + params["patch_embed.proj.bias"])
    x = np.stack(x) + params["pos_embed"][0]
    for layer in range(2):
        query, keys, values = np.split(dense(f"blocks.{layer}.attn.qkv", normalized(f"blocks.{layer}.norm1", x)), 3, 1)
        heads = []
        for head in range(3):
            own = slice(4 * head, 4 * head + 4)
            heads.append(scipy.special.softmax(query[:, own] @ keys[:, own].T / 2, axis=1) @ values[:, own])
        x = x + dense(f"blocks.{layer}.attn.proj", np.concatenate(heads, 1))
        hidden = dense(f"blocks.{layer}.mlp.fc1", normalized(f"blocks.{layer}.norm2", x))
        x = x + dense(f"blocks.{layer}.mlp.fc2", hidden * scipy.special.ndtr(hidden))
    return dense("head", normalized("norm", x))[0]


def test_the_sizes_are_those_of_the_checkpoint():
    shapes = vit.shapes_of(vit.SMALL, 1000)
    assert sum(np.prod(shape) for shape in shapes.values()) == 22_050_664  # as timm counts them
    assert len(shapes) == 152 and shapes["pos_embed"] == (1, 197, 384)


def test_loaded_parameters_give_the_oracles_logits(params, checkpoint):
    model = vit.vit(5, checkpoint, TINY)
    image = np.random.default_rng(1).uniform(-1, 1, (8, 8, 3)).astype(np.float32)
    loaded = model.init(jax.random.key(0))
    np.testing.assert_allclose(jax.jit(model.apply)(loaded, image), oracle(params, image), rtol=2e-4, atol=2e-4)


def test_another_number_of_classes_gets_a_new_head(params, checkpoint):
    loaded = vit.load_vit(checkpoint, 7, TINY)
    assert loaded["head.weight"].shape == (7, 12) and not loaded["head.weight"].any()
    np.testing.assert_array_equal(loaded["norm.bias"], params["norm.bias"])


def test_bad_checkpoints_are_refused(params, tmp_path):
    with pytest.raises(FileNotFoundError, match="huggingface-cli download timm/vit_small"):
        vit.load_vit(tmp_path / "none.safetensors", 5)
    for model, error, said in (
        ("mlp", ValueError, "must be given with a model of vit_small"),
        ("vit_miniature", FileNotFoundError, "none"),
    ):
        options = {"checkpoint": str(tmp_path / "none")}
        config = Config(dataset="random:8x8x3x5", model=model, task_options=options, epsilon=1.0, seed=0)
        with pytest.raises(error, match=said):
            TASKS["images"].build(config, None, tmp_path, False)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not one at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        vit.load_vit(path, 5, TINY)
    for change, said in (
        ({"norm.bias": None}, "missing: norm.bias"),
        ({"dist_token": np.zeros((1, 1, 12), np.float32)}, "not ViT-small's: dist_token"),
        ({"pos_embed": np.zeros((1, 6, 12), np.float32)}, r"pos_embed must have shape \(1, 5, 12\), got \(1, 6, 12\)"),
        ({"norm.weight": np.full(12, np.nan, np.float32)}, "norm.weight must hold finite"),
        ({"norm.weight": np.ones(12, np.int32)}, "norm.weight must hold finite floating point numbers, got int32"),
    ):
        save_file({name: leaf for name, leaf in (params | change).items() if leaf is not None}, path)
        with pytest.raises(ValueError, match=said):
            vit.load_vit(path, 5, TINY)


def test_every_parameter_is_trained_on_images_of_another_size():
    model, image = vit.vit(4, None, TINY), jax.ShapeDtypeStruct((6, 6, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(1))
    label = jax.ShapeDtypeStruct((), jnp.int32)
    sampling = dpx.FullBatch(examples=2)
    optimizer = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(0))
    batch = dpx.Batch(jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), (image, label)), None)
    step = dpx.private_updates(models.loss_of(model), optimizer, norms="ghost")
    updates, _, _ = jax.eval_shape(step, params, batch, jax.eval_shape(optimizer.init, params))
    assert {name: leaf.shape for name, leaf in updates.items()} == vit.shapes_of(TINY, 4)
