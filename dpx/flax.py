"""Prepares Flax NNX modules for per-example gradients. Flax is imported only when used, so dpx does not require it."""

from typing import Any

from dpx.values import require_whole

SMALLEST = 4  # features in a group, unless the layer has only one group


def replace_batch_norm(module: Any, *, groups: int = 32) -> Any:
    """Copies an NNX module with `nnx.GroupNorm` in place of every `nnx.BatchNorm`, so that no row affects another.

    The new layers keep the names, scales, biases, epsilons and dtypes of the old ones, but not their statistics. Layers
    that share a BatchNorm share its GroupNorm. GroupNorm treats axis 0 as the batch, as BatchNorm does, so the loss
    passes a batch of one: `model(image[None])[0]`. A pretrained model needs further training, because the scales of its
    activations change. To keep public statistics instead, see docs/flax.md.

    module: an `nnx.Module`, which is not changed. groups: int, at least 1, the most groups of a layer. Each layer gets
        the largest number of groups that divides its features and leaves at least four in each, or one group. (A group
        of one feature, without pixels, would always be normalized to zero.)

    Raises ValueError for any other kind of module, if `groups` is below 1, and if features are not on the last axis, as
    GroupNorm requires. Wu and He 2018, https://arxiv.org/abs/1803.08494.

        >>> from flax import nnx
        >>> layers = nnx.Linear(5, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        >>> made = dpx.flax.replace_batch_norm(nnx.Sequential(*layers))
        >>> type(made.layers[1]).__name__, made.layers[1].num_groups
        ('GroupNorm', 2)
    """
    from flax import nnx

    require_whole("groups", groups)
    if not isinstance(module, nnx.Module):
        raise ValueError(f"module must be an nnx.Module, got {type(module).__name__}")

    def replace_node(path: Any, norm: Any) -> Any:
        if not isinstance(norm, nnx.BatchNorm):
            return norm
        if norm.axis != -1:
            raise ValueError(f"the features of a BatchNorm must be on axis -1 for GroupNorm, got axis {norm.axis}")
        features = norm.num_features
        number = max(n for n in range(1, groups + 1) if features % n == 0 and (n == 1 or features // n >= SMALLEST))
        same = ("epsilon", "dtype", "param_dtype", "use_bias", "use_scale", "use_fast_variance", "promote_dtype")
        made = nnx.GroupNorm(features, number, rngs=nnx.Rngs(0), **{name: getattr(norm, name) for name in same})
        made.scale, made.bias = norm.scale, norm.bias
        return made

    return nnx.recursive_map(replace_node, nnx.clone(module))
