"""Every function of the catalog refuses an argument outside its domain, and says the domain and the value."""

import math

import jax
import pytest

from dpx import catalog
from tests.mechanisms import arguments_of

# The domain in words, as a pattern, and values outside of it. A function that has no such argument is left out.
NUMBER, WHOLE = "a finite number", "a whole number of at least 1"
OUTSIDE = {
    "clip_norm": (f"{NUMBER} at least|{NUMBER} above 0", [-1.0, math.nan, "1"]),
    "noise_multiplier": (f"{NUMBER} |above 0", [-0.1, math.inf, None, "1"]),
    "initial_clip_norm": (f"{NUMBER} at least", [0.0, 1e20]),
    "feedback_norm": (f"{NUMBER} at least", [0.0, math.inf]),
    "outer_clip_norm": (f"{NUMBER} at least", [0.5, math.nan, 1e16]),
    "embedding_clip_norm": (f"{NUMBER} above 0", [-1.0, 0.0]),
    "residual_clip_norm": (f"{NUMBER} above 0", [-1.0, 0.0]),
    "embedding_scale": (f"{NUMBER} above 0", [0.0, math.inf]),
    "residual_scale": (f"{NUMBER} above 0", [0.0, math.inf]),
    "indicator_noise": (f"{NUMBER} above 0", [0.0, math.nan]),
    "threshold": (f"{NUMBER} at least 0", [-1.0, math.nan]),
    "reads_norm": (f"{NUMBER} above 0", [0.0, math.inf]),
    "reads_scale": (f"{NUMBER} above 0", [0.0, math.inf]),
    "reads_share": (r"in \(0, 1\)", [0.0, 1.0]),
    "most_rows": (WHOLE, [0, 2.5]),
    "stability": (f"{NUMBER} at least", [0.0, math.nan]),
    "initial_variance": (f"{NUMBER} at least 0", [-1]),
    "noise_floor": (f"{NUMBER} at least 0", [-1]),
    "clip_learning_rate": (f"{NUMBER} at least 0", [-1.0]),
    "power": (f"{NUMBER} at least 0", [-1.0]),
    "rho_mu": (f"{NUMBER} at least 1", [0.5, math.nan]),
    "rho_c": (f"{NUMBER} at least 1", [0.5, math.nan]),
    "freeze_rate": (r"(in \[0, 1\)|a finite)", [-0.1, 1.0, 1.5, math.nan, "half"]),
    "reduction_rate": (r"in \[0, 1\)", [1.0, -0.1, math.nan]),
    "mean_decay": (r"in \[0, 1\)", [1, -0.1, "0.9"]),
    "variance_decay": (r"in \[0, 1\)", [1, -0.1, None]),
    "keep": (r"(in \(0, 1\]|a finite)", [0.0, 1.01, math.nan]),
    "example_keep": (r"in \(0, 1\]", [0.0, 1.5]),
    "fraction": (r"in \(0, 1\]", [0.0, 2]),
    "quantile": (r"in \(0, 1\)", [0.0, 1.0]),
    "embedding_share": (r"in \(0, 1\)", [0.0, 1.0]),
    "rank": (WHOLE, [0, 2.5, True, {"kernel": 3, "bias": -1}]),
    "every": (WHOLE, [0, -1, 1.5, True]),
    "warmup": (WHOLE, [0, 2.0]),
    "steps": (WHOLE, [0, 2.5]),
    "bands": (WHOLE, [0, 2.5]),
    "reset_every": (WHOLE, [0, 2.5, True]),
    "kind": ("one of gaussian, ", ["sparse"]),
    "order": ('"project_then_clip" or "clip_then_project"', ["both"]),
    "key": ("a jax PRNG key", [None]),
    "sampling": ("", [None]),
}
ENTRIES = (*catalog.METHODS, *catalog.COORDINATES, *catalog.MECHANISMS)


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_its_domain_an_argument_is_refused(name):
    domain, values = OUTSIDE[name]
    entries = [entry for entry in ENTRIES if name in entry.build_parameters]
    assert entries
    for entry in entries:
        arguments = arguments_of(entry, jax.random.key(7))
        if name == "rank":
            arguments.pop("reduction_rate")
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must be ({domain}).*got"):
                entry.build(**arguments | {name: value})
                pytest.fail(f"{entry.name} takes {name}={value}")
