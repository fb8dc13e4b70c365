"""The benchmarked models in torch, with the same layers as in `benchmarks.models`, for images with channels first."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.problems import CLASSES, check_count


class Positions(nn.Module):
    """A learnt vector added at every position."""

    def __init__(self, length: int, features: int):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(length, features))

    def forward(self, x):
        return x + self.weight


class Attention(nn.Module):
    """Four `nn.Linear` around torch's fused attention: what Opacus can follow, and faster than its own attention."""

    def __init__(self, features: int, heads: int, causal: bool):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(features, features) for _ in range(4))
        self.heads, self.causal = heads, causal

    def forward(self, x):
        def split(x):
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer layer with the normalization first."""

    def __init__(self, features: int, heads: int, causal: bool):
        super().__init__()
        self.attention_norm, self.dense_norm = layer_norm(features), layer_norm(features)
        self.attention = Attention(features, heads, causal)
        self.widen, self.narrow = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(F.gelu(self.widen(self.dense_norm(x)), approximate="tanh"))


class Patches(nn.Module):
    def __init__(self, size: int, features: int):
        super().__init__()
        self.convolution = nn.Conv2d(3, features, size, size)

    def forward(self, image):
        return self.convolution(image).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """Over all axes between the batch and the features, which are the last axis, or axis 1 of images."""

    def forward(self, x):
        return x.mean((2, 3)) if x.dim() == 4 else x.mean(1)


class Residual(nn.Module):
    """The block of a ResNet, with GroupNorm in place of BatchNorm."""

    def __init__(self, features_in: int, features: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(features_in, features, 3, stride, 1, bias=False)
        self.first_norm = group_norm(features)
        self.second = nn.Conv2d(features, features, 3, 1, 1, bias=False)
        self.second_norm = group_norm(features)
        self.shortcut = nn.Identity()
        if features_in != features:
            self.shortcut = nn.Sequential(nn.Conv2d(features_in, features, 1, stride, bias=False), group_norm(features))

    def forward(self, x):
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(self.shortcut(x) + y)


def layer_norm(features: int) -> nn.Module:
    return nn.LayerNorm(features, eps=1e-6)


def group_norm(features: int) -> nn.Module:
    return nn.GroupNorm(8, features, eps=1e-6)


def encoder(layers: int, features: int, heads: int, *, causal: bool = False) -> list[nn.Module]:
    return [*(Layer(features, heads, causal) for _ in range(layers)), layer_norm(features)]


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU()),
        nn.Linear(1000, CLASSES),
    )


def adadpigu_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, 2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2, 0), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, CLASSES)),
    )


def end_to_end_cnn() -> nn.Module:
    def block(features_in, features):
        first, second = nn.Conv2d(features_in, features, 3, 1, 1), nn.Conv2d(features, features, 3, 1, 1)
        return first, nn.Tanh(), second, nn.Tanh(), nn.AvgPool2d(2)

    return nn.Sequential(
        *(*block(3, 32), *block(32, 64), *block(64, 128)),
        *(nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, CLASSES)),
    )


def transformer() -> nn.Module:
    embedding = nn.Sequential(nn.Embedding(1000, 128), Positions(64, 128))
    return nn.Sequential(embedding, *encoder(4, 128, 4), Mean(), nn.Linear(128, CLASSES))


def resnet20() -> nn.Module:
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [Residual(i, o, 1 if i == o else 2) for i, o in zip(widths[:-1], widths[1:], strict=True)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), group_norm(16), nn.ReLU())
    return nn.Sequential(stem, *blocks, Mean(), nn.Linear(64, CLASSES))


def vit_small() -> nn.Module:
    embedding = nn.Sequential(Patches(16, 384), Positions(196, 384))
    return nn.Sequential(embedding, *encoder(12, 384, 6), Mean(), nn.Linear(384, CLASSES))


def gpt2_small() -> nn.Module:
    embedding = nn.Sequential(nn.Embedding(50_257, 768), Positions(256, 768))
    return nn.Sequential(embedding, *encoder(12, 768, 12, causal=True), nn.Linear(768, 50_257, bias=False))


MODELS = {
    "mlp": perceptron,
    "adadpigu_cnn": adadpigu_cnn,
    "end_to_end_cnn": end_to_end_cnn,
    "transformer": transformer,
    "resnet20": resnet20,
    "vit_small": vit_small,
    "gpt2_small": gpt2_small,
}


class Loss(nn.Module):
    """Cross entropy of each example, the mean over its positions if it has any. Opacus sets `reduction`."""

    reduction = "mean"

    def forward(self, logits, labels):
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        losses = losses.unflatten(0, labels.shape).flatten(1).mean(1) if labels.dim() > 1 else losses
        return losses.mean() if self.reduction == "mean" else losses


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    check_count(name, sum(parameter.numel() for parameter in model.parameters()))
    return model
