"""The methods a training run can name. A new one is an entry: a builder and the options that are its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import dpx


class Option(NamedTuple):
    """One number of a method: `--name`, with `_` written as `-`."""

    default: float | int | str
    help: str


class Method(NamedTuple):
    """build: (*, clip_norm, noise_multiplier, sampling, steps, key, **options) -> dpx.Mechanism.

    needs_basis: `build` also takes `basis`, of `dpx.public_subspace` (examples/public.py makes it).
    """

    build: Callable[..., dpx.Mechanism]
    options: dict[str, Option] = {}
    needs_basis: bool = False


def dp_sgd(*, clip_norm, noise_multiplier, sampling, steps, key) -> dpx.Mechanism:
    del steps
    return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)


def dynamic_dp_sgd(*, clip_norm, noise_multiplier, sampling, steps, key, rho_mu, rho_c, hold) -> dpx.Mechanism:
    return dpx.dynamic_dp_sgd(
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        rho_mu=rho_mu,
        rho_c=rho_c,
        steps=steps,
        every=steps_held(hold, sampling),
        sampling=sampling,
        key=key,
    )


def d2p_sgd(*, clip_norm, noise_multiplier, sampling, steps, key, power, stability, hold) -> dpx.Mechanism:
    del clip_norm, steps  # normalization takes its place
    return dpx.d2p_sgd(
        noise_multiplier=noise_multiplier,
        power=power,
        stability=stability,
        every=steps_held(hold, sampling),
        sampling=sampling,
        key=key,
    )


def d2p2_sgd(*, clip_norm, sampling, steps, hold, **rest) -> dpx.Mechanism:
    del clip_norm, steps
    return dpx.d2p2_sgd(every=steps_held(hold, sampling), sampling=sampling, **projected(**rest))


def dp2_sgd(*, clip_norm, steps, **rest) -> dpx.Mechanism:
    del clip_norm, steps
    return dpx.dp2_sgd(**projected(**rest))


def projected(*, projection, reduction_rate, rank, **rest) -> dict[str, Any]:
    """The options of a projection as the arguments of the library."""
    return rest | {"kind": projection, "rank": rank or None, "reduction_rate": None if rank else reduction_rate}


def random_freeze_sgd(*, sampling, steps, freeze_rate, cooling, masks, posterior, **rest) -> dpx.Mechanism:
    return dpx.random_freeze_sgd(
        freeze_rate=rising(0.0, freeze_rate, 0, round(cooling * steps)),
        every=steps_held(masks, sampling),
        posterior=bool(posterior),
        sampling=sampling,
        **rest,
    )


def ranked_freeze_sgd(*, sampling, steps, freeze_rate, cooling, masks, **rest) -> dpx.Mechanism:
    return dpx.ranked_freeze_sgd(
        freeze_rate=rising(0.0, freeze_rate, 0, round(cooling * steps)),
        every=steps_held(masks, sampling),
        sampling=sampling,
        **rest,
    )


def ada_dpigu(*, steps, keep, keep_at_last, warmup, relative, masked_loss, **rest) -> dpx.Mechanism:
    del masked_loss  # of the training loop
    first = max(1, round(warmup * steps))
    return dpx.ada_dpigu(
        keep=rising(keep, keep_at_last or keep, first, max(1, steps - first)),
        warmup=first,
        relative=bool(relative),
        **rest,
    )


def adaptive_clipping(*, clip_norm, sampling, steps, quantile, indicator_noise, clip_rate, **rest) -> dpx.Mechanism:
    del steps
    return dpx.adaptive_clipping(
        initial_clip_norm=clip_norm,
        quantile=quantile,
        learning_rate=clip_rate,
        indicator_noise=indicator_noise * sampling.divisor,
        sampling=sampling,
        **rest,
    )


def dice_sgd(*, clip_norm, steps, feedback, outer_clip, reset_every, normalize, **rest) -> dpx.Mechanism:
    del steps
    return dpx.dice_sgd(
        clip_norm=clip_norm,
        feedback_norm=feedback * clip_norm,
        outer_clip_norm=outer_clip * clip_norm,
        reset_every=reset_every or None,
        stability=normalize or None,
        **rest,
    )


def gep_sgd(*, basis, clip_norm, steps, public, public_examples, anchor_rank, residual_clip, **rest) -> dpx.Mechanism:
    del steps, public, public_examples, anchor_rank  # of the basis
    return dpx.gep_sgd(basis, embedding_clip_norm=clip_norm, residual_clip_norm=residual_clip * clip_norm, **rest)


def rising(first: float, last: float, begin: int, steps: int) -> Any:
    """From `first` at step `begin` to `last`, `steps` later; a number where nothing changes."""
    return last if first == last or steps == 0 else optax.linear_schedule(first, last, steps, begin)


def steps_held(hold: str, sampling) -> int:
    """For how many steps a schedule keeps its value."""
    if hold not in ("step", "epoch"):
        raise ValueError(f"hold must be step or epoch, got {hold!r}")
    return 1 if hold == "step" else max(1, round(sampling.examples / sampling.divisor))


HOLD = Option("step", "schedules change every step, or every epoch")

AUTOMATIC = {"stability": Option(0.01, "stability constant of the normalization g / (|g| + stability)")}
FALLING = {"power": Option(0.25, "the noise falls as the step (or epoch) to this power"), "hold": HOLD}
PROJECTION = AUTOMATIC | {
    "projection": Option("countsketch", "gaussian, orthonormal, subset, countsketch or hadamard"),
    "reduction_rate": Option(0.3, "share of the coordinates that the projection saves"),
    "rank": Option(0, "how many coordinates it keeps, in place of the reduction rate"),
    "order": Option("project_then_clip", "or clip_then_project, as published"),
}

FREEZE = {
    "freeze_rate": Option(0.7, "share of the coordinates frozen once cooling is over"),
    "cooling": Option(1.0, "share of the steps over which the freeze rate rises from 0"),
    "masks": Option("epoch", "draw a mask every step, or every epoch"),
}

METHODS: dict[str, Method] = {
    "dp_sgd": Method(dp_sgd),
    "dynamic_dp_sgd": Method(
        dynamic_dp_sgd,
        {
            "rho_mu": Option(2.0, "growing mu: noise multiplier before the first step over that of the last"),
            "rho_c": Option(2.0, "sensitivity decay: clip norm before the first step over that of the last"),
            "hold": HOLD,
        },
    ),
    "d2p_sgd": Method(d2p_sgd, AUTOMATIC | FALLING),
    "d2p2_sgd": Method(d2p2_sgd, PROJECTION | FALLING),
    "dp2_sgd": Method(dp2_sgd, PROJECTION),
    "random_freeze_sgd": Method(
        random_freeze_sgd, FREEZE | {"posterior": Option(0, "1 to clip, then mask; 0 to mask, then clip")}
    ),
    "ranked_freeze_sgd": Method(ranked_freeze_sgd, FREEZE),
    "ada_dpigu": Method(
        ada_dpigu,
        {
            "keep": Option(0.6, "share of the coordinates kept after the warm-up"),
            "keep_at_last": Option(0.0, "that share at the last step, if it is to rise"),
            "warmup": Option(0.1, "share of the steps in which all coordinates move and are scored"),
            "example_keep": Option(1.0, "share of all coordinates that each example keeps of its own"),
            "mean_decay": Option(0.9, "of the moving average of the released gradient"),
            "variance_decay": Option(0.999, "of the moving average of its squared deviation"),
            "stability": Option(1e-8, "added to the standard deviation"),
            "relative": Option(1, "1 to keep the units of the clip norm after the warm-up; 0 is as published"),
            "masked_loss": Option(0, "1 to have the loss, and the model, at the masked parameters"),
        },
    ),
    "dice_sgd": Method(
        dice_sgd,
        {
            "feedback": Option(1.0, "norm of what is fed back at a step, at most, over the clip norm"),
            "outer_clip": Option(
                1.1, "norm up to which a gradient enters the error, over the clip norm; inf as published"
            ),
            "reset_every": Option(0, "forget the error every so many steps, which needs less noise; 0 never does"),
            "normalize": Option(0.0, "its automatic form with this stability constant; 0 clips"),
        },
    ),
    "gep_sgd": Method(
        gep_sgd,
        {
            "public": Option("mnist5k", "data set whose gradients, public, span the subspace (with random labels)"),
            "public_examples": Option(500, "how many of its images"),
            "anchor_rank": Option(50, "dimension of the subspace, which is kept for the run"),
            "residual_clip": Option(0.5, "clip norm of what lies outside, over that of what lies inside"),
            "embedding_share": Option(0.5, "share of the precision that what lies inside has"),
        },
        needs_basis=True,
    ),
    "adaptive_clipping": Method(
        adaptive_clipping,
        {
            "quantile": Option(0.5, "of the gradient norms, which the clip norm follows"),
            "indicator_noise": Option(0.05, "noise on the count of examples below, over the batch size"),
            "clip_rate": Option(0.2, "how fast the clip norm follows"),
        },
    ),
}


def options_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The method's options with their defaults filled in; ValueError for an option it does not have."""
    known = METHODS[method].options
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"method {method!r} has no option {', '.join(unknown)}; its options: {', '.join(known) or 'none'}"
        )
    return {name: given.get(name, option.default) for name, option in known.items()}
