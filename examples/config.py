"""The configuration of a training run: everything that decides its numbers, checked before the run starts."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import optax

import dpx
from dpx import catalog
from dpx.accounting.checks import Accountant
from dpx.sampling.schemes import Sampling
from examples.methods import METHODS, build, options_of
from examples.models import ACTIVATIONS
from examples.tasks import TASKS
from examples.whitening import PUBLIC

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda learning_rate, momentum: optax.sgd(learning_rate, momentum=momentum or None),
    "adam": lambda learning_rate, momentum: optax.adam(learning_rate),
    "adamw": lambda learning_rate, momentum: optax.adamw(learning_rate),
}
FEATURES = ("none", "scattering", "whitened")
ACCOUNTANTS = ("tightest", "pld", "rdp")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. Two runs with equal configurations on the same data give the same numbers.

    epsilon, noise_multiplier: with epsilon alone, the least noise for the planned steps is found; with the noise
        multiplier alone, the steps are run and paid for; with both, the run stops before epsilon would be overspent.
    epochs: planned, as a multiple of the data set's size.
    batch_size: expected; None is 256, or the whole data set with sampling "full".
    microbatch_size: how many examples are worked on at once; None leaves it to `dpx.private_updates`.
    momentum: of "sgd" only.
    method_options: of the method's builder, by name; values as in `examples.methods.read`.
    task: what is trained (`examples.tasks`). task_options: of the task, by name; those not given have its defaults.
    whitening, filters: with features "whitened", the public images that they are whitened by, and their number of
        filters, of which there are 9 features each; None is 440.
    per_layer: with "dp_sgd", clip the parameters of every layer to a norm of their own, clip_norm / sqrt(layers).
    masked_loss: with "ada_dpigu", the loss, and the model, at the masked parameters.
    public, public_examples, public_rank: with "gep_sgd", the data set whose gradients, public, span the subspace, how
        many of its images, and the dimension of the subspace.
    seed: decides initial parameters, batches and noise. As secret as the training data.
    """

    dataset: str
    seed: int
    method: str = "dp_sgd"
    method_options: dict[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: Accountant = "tightest"
    epochs: float = 10.0
    sampling: str = "poisson"
    batch_size: int | None = None
    microbatch_size: int | None = None
    clip_norm: float = 1.0
    per_layer: bool = False
    optimizer: str = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.0
    task: str = "images"
    task_options: dict[str, Any] = field(default_factory=dict)
    model: str = "mlp"
    activation: str = "tanh"
    features: str = "none"
    whitening: str = "random_images"
    filters: int | None = None
    masked_loss: bool = False
    public: str = "mnist5k"
    public_examples: int = 500
    public_rank: int = 50

    def __post_init__(self):
        choices = {
            "method": METHODS,
            "accountant": ACCOUNTANTS,
            "sampling": catalog.SAMPLINGS,
            "optimizer": OPTIMIZERS,
            "task": TASKS,
            "model": TASKS[self.task].models if self.task in TASKS else (),
            "activation": ACTIVATIONS,
            "features": FEATURES,
            "whitening": PUBLIC,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        for name in ("epsilon", "noise_multiplier", "epochs", "clip_norm", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("batch_size", "microbatch_size", "filters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("epsilon or noise_multiplier must be given, or both")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is an option of sgd, got it with {self.optimizer}")
        if self.per_layer and self.method != "dp_sgd":
            raise ValueError(f"per_layer is an option of dp_sgd, got it with {self.method}")
        samplings = METHODS[self.method].samplings
        if samplings and self.sampling not in samplings:
            words = f"sampling must be one of {', '.join(samplings)} with method {self.method}"
            raise ValueError(f"{words}, got {self.sampling!r}")
        if self.sampling == "full" and self.batch_size is not None:
            raise ValueError(f"batch_size must not be given with sampling full, got {self.batch_size}")
        if not 0 <= self.seed < 2**128:
            raise ValueError(f"seed must be in [0, 2^128), got {self.seed}")
        object.__setattr__(self, "method_options", options_of(self.method, self.method_options))
        known = TASKS[self.task].options
        if unknown := sorted(set(self.task_options) - set(known)):
            listed = ", ".join(known) or "none"
            raise ValueError(f"task {self.task!r} has no option {', '.join(unknown)}; its options: {listed}")
        object.__setattr__(self, "task_options", dict(known) | self.task_options)

    @property
    def key(self) -> jax.Array:
        return dpx.secret_key(self.seed)

    def sampling_of(self, examples: int) -> Sampling:
        """How the batches are drawn from a data set of this size."""
        if self.sampling == "full":
            return dpx.FullBatch(examples=examples)
        batch_size = 256 if self.batch_size is None else self.batch_size
        if batch_size > examples:
            raise ValueError(f"batch_size must be at most the {examples} training examples, got {batch_size}")
        sampling = catalog.SAMPLINGS[self.sampling]
        if "steps_per_epoch" in sampling.build_parameters:
            return sampling.build(examples=examples, steps_per_epoch=round(examples / batch_size))
        if "bands" in sampling.build_parameters:  # with plain noise, more bands only cost more
            bands = int(self.method_options.get("bands", 1))
            return sampling.build(examples=examples, batch_size=batch_size, bands=bands)
        return sampling.build(examples=examples, batch_size=batch_size)

    def steps_of(self, sampling: Sampling, examples: int) -> int:
        """How many steps the epochs are."""
        if isinstance(sampling, dpx.ShuffledEpochs):
            return max(1, math.ceil(self.epochs * sampling.steps_per_epoch))
        return max(1, round(self.epochs * examples / sampling.divisor))

    def clip_norms_of(self, params) -> dict[str, float]:
        """For per_layer: the clip norm of every layer, the first level of the parameters' tree."""
        return dict.fromkeys(params, self.clip_norm / math.sqrt(len(params)))

    def mechanism_of(self, sampling, steps: int, key, trained=None, **found: Any) -> Callable[[float], dpx.Mechanism]:
        """(noise_multiplier) -> the method with its optimizer. found: what the method needs beside its options.

        trained: (path) -> whether a parameter is trained, or None, as in `examples.tasks.Task`.
        """
        of_the_run = {"clip_norm": self.clip_norm, "momentum": self.momentum, "learning_rates": ()} | found
        optimizer = OPTIMIZERS[self.optimizer](self.learning_rate, self.momentum)

        def make(noise_multiplier):
            mechanism = build(
                self.method,
                self.method_options,
                steps_per_epoch=max(1, round(sampling.examples / sampling.divisor)),
                noise_multiplier=noise_multiplier,
                sampling=sampling,
                steps=steps,
                key=key,
                **of_the_run,
            )
            if trained is not None:
                mechanism = dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask=trained))
            return dpx.chain(mechanism, optimizer)

        return make

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
