"""Checks the values that a caller passes (pytrees, numbers, functions), and describes them in messages.

Every ValueError states the condition and the value. No message shows an element of an array or a key, because a caller
who swaps arguments passes data or a key where a number belongs.
"""

import contextlib
import difflib
import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np
from jax.experimental import multihost_utils

Tree = Any  # a pytree of arrays
State = TypeVar("State")
Named = TypeVar("Named")  # a function or a class

LONGEST = 100  # characters of a string in a message
MOST_SHAPES = 8  # listed in a message
MOST_PATHS = 4  # listed in a message
GATHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs
PASSED = {"dpx", "jax", "functools", "contextlib"}  # packages whose stack frames are not the user's code

# dpx's name of an argument -> its names in Opacus, TF Privacy, JAX Privacy, optax.contrib and Keras.
FOREIGN = {
    "clip_norm": "l2_norm_clip l2_clip_norm max_grad_norm clipping_norm max_norm clip_threshold clip",
    "noise_multiplier": "noise_scale sigma noise noise_stddev",
    "epsilon": "target_epsilon budget privacy_budget",
    "delta": "target_delta",
    "batch_size": "lot_size expected_batch_size",
    "batch_size = rate * examples": "rate sample_rate sampling_rate sampling_prob sampling_probability",
    "examples": "num_examples number_of_examples dataset_size sample_size num_samples train_size n",
    "steps": "num_steps iterations num_iterations max_iterations train_steps",
    "epochs": "num_epochs n_epochs",
    "key = dpx.secret_key(seed)": "seed rng rng_key prng_key random_state random_seed noise_generator generator",
    "microbatch_size = batch_size / num_microbatches": "num_microbatches",
    "microbatch_size = batch_size / accumulation_steps": "accumulation_steps gradient_accumulation_steps",
    "chunk_size": "physical_batch_size max_physical_batch_size",
    "learning_rate": "lr",
    "loss": "loss_fn loss_function",
    "data = (x, y)": "x y X Y labels targets inputs",
    "data = dpx.UserData(data, users)": "users owners groups user_ids group_ids",
    "edges": "bins",
    "evaluate": "metrics metric eval_fn",
    "evaluate_private": "private_metric",
    "callbacks": "callback",
    "callbacks = [a function that returns True to end the run]": "stop early_stopping patience should_stop",
    "progress": "verbose progress_bar",
    "checkpoints": "checkpoint_dir checkpoint_path ckpt_dir workdir output_dir",
    "checkpoints = folder (the same call again continues the run)": "resume restore resume_from restore_from",
    "most": "max max_records",
    "low and high": "bounds",
}
OURS = {name: ours for ours, names in FOREIGN.items() for name in names.split()}
LOOKS: dict[str, Callable[[Any], bool]] = {  # whether a value can be this argument, judged by its attributes
    "loss": lambda value: callable(value) and not hasattr(value, "init"),
    **dict.fromkeys(("optimizer", "mechanism"), lambda value: hasattr(value, "init") and hasattr(value, "update")),
    "batch": lambda value: hasattr(value, "included"),
}
HOMES = {  # where an argument that a function lacks belongs: in a mechanism's arguments, or in another call
    "clip_norm": "clip_norm=...",
    "noise_multiplier": "noise_multiplier=...",
    "key": "key=dpx.secret_key()",
    "coordinates": "dpx.in_coordinates(mechanism, coordinates)",
    **dict.fromkeys(("loss", "data"), "dpx.fit(loss, optimizer, params, data)"),
    **dict.fromkeys(("epsilon", "delta", "steps"), "noise_multiplier=dpx.Budget(epsilon=..., delta=..., steps=...)"),
    "epochs": "noise_multiplier=dpx.Budget(epsilon=..., delta=..., epochs=...)",
    **dict.fromkeys(
        ("sampling", "examples", "batch_size"), "sampling=dpx.PoissonSampling(examples=..., batch_size=...)"
    ),
    "microbatch_size": "dpx.fit(microbatch_size=...) or dpx.private_updates(microbatch_size=...)",
    "chunk_size": "dpx.fit(chunk_size=...)",
    "learning_rate": "dpx.chain(mechanism, optax.sgd(learning_rate))",
    "shuffle": "sampling=dpx.ShuffledEpochs(examples=..., batch_size=...)",
    "validation_data": "dpx.fit(evaluate=...) if it is public, and else in dpx.fit(evaluate_private=...)",
    "momentum": "dpx.chain(mechanism, optax.sgd(learning_rate, momentum))",
    "target_quantile": "dpx.mechanisms.adaptive_clipping(target_quantile=...)",
    "schedule": "a mechanism's noise_multiplier, as a function of the step (dpx.accounting.accepts_budget)",
}
JOINED = {  # what happens to the result of a call with too many arguments, or one of another call; by its type
    "Coordinates": "; give its result to dpx.in_coordinates(dpx.dp_sgd(...), coordinates)",
    "PrivateStep": "; it returns a function of (params, batch, state)",
}
MISSING = {  # what a required argument can be, if its name does not say it
    "augment": "augment: a function of (example, key) that returns a view",
    "bands": "bands=8, for example",
    "basis": "basis: dpx.coordinates.public_subspace(...) of public gradients",
    "copies": "copies=4, for example",
    "correlation": "correlation=0.9, for example",
    "event": "event=mechanism.event(steps)",
    "least_noise.event": "event=lambda noise: sampling.event(np.full(steps, noise))",
    "freeze_rate": "freeze_rate=0.5, for example",
    "initial_clip_norm": "initial_clip_norm: about the usual norm of a gradient",
    "most_rows": "most_rows: the most rows of a table that a step updates",
    "outer_clip_norm": "outer_clip_norm=2 * clip_norm, for example",
    "threshold": "threshold: about how many examples of a batch must read a row",
    "warmup": "warmup: the number of steps in the first phase, such as steps // 10",
    "feedback_norm": "feedback_norm=clip_norm removes the bias",
    "indicator_noise": "indicator_noise=batch_size / 20, as in the paper",
    "kind": "kind='gaussian', 'orthonormal', 'subset', 'countsketch' or 'hadamard'",
    "multipliers": "multipliers=np.full(steps, 1.3)",
    "steps_or_state": "a number of steps, or an optimizer state; a run of dpx.fit has run.report and run.epsilon",
    "strategy": "strategy=dpx.strategies.lambda_cgd(correlation=0.9), for example",
    "score_on": "score_on='public' if score reads no private data, or else dpx.tuning.NoisySum(...)",
    "every": "every=1 for new coordinates in each step",
}


def find_only_node(tree: Tree, kind: type[State], called: str) -> State:
    """Returns the only node of type `kind` in `tree`. Raises ValueError about `called` for none or several."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    states = [node for node in nodes if isinstance(node, kind)]
    if len(states) != 1:
        raise ValueError(f"state must hold exactly one {called}, found {len(states)}")
    return states[0]


def map_nodes_of_type(function: Callable[[State], Any], tree: Tree, kind: type[State]) -> Tree:
    """Applies `function` to every node of type `kind` in `tree`, and leaves everything else unchanged."""

    def apply(node):
        return function(node) if isinstance(node, kind) else node

    return jax.tree.map(apply, tree, is_leaf=lambda node: isinstance(node, kind))


def unflatten_vectors(flat: Any, like: Tree) -> Tree:
    """Cuts vectors, (..., size), into arrays with the shapes of `like` behind the leading axes."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([0, *[math.prod(leaf.shape) for leaf in leaves]])
    parts = [flat[..., a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
    shaped = [part.reshape((*flat.shape[:-1], *leaf.shape)) for part, leaf in zip(parts, leaves, strict=True)]
    return structure.unflatten(shaped)


def float32_like(tree: Tree) -> Tree:
    """Returns the shapes of a tree of arrays or numbers, with dtype float32."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.float32), tree)


def leaf_path(path: tuple[Any, ...]) -> str:
    """Formats the path of a leaf, such as "dense/kernel"; "" if the tree is one leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def list_first_few(words: list[str], most: int = MOST_PATHS) -> str:
    """Lists the first few words, such as paths, and says how many follow."""
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def described(value: Any) -> str:
    """Describes `value` for a message that may be logged: its type, shape and dtype, but not what a container holds."""
    if value is None or isinstance(value, bool | int | float | complex | np.bool_ | np.number):
        return repr(value)
    if isinstance(value, np.generic):
        return f"an element of an array of {value.dtype}"
    if isinstance(value, str):
        return repr(value[:LONGEST])
    if isinstance(value, type):
        return f"the type {value.__name__}"
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list | dict | set | frozenset | bytes | bytearray):
        return f"a {kind}" if hasattr(value, "_fields") else f"a {kind} of length {len(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    return f"a {kind}"


def repr_with_shapes(record: Any) -> str:
    """Returns the `repr` of a NamedTuple or a dataclass of arrays, with counts and shapes instead of elements. Of a
    field `unreleased` or `unreleased_*`, says only that it is not private, because a `repr` ends up in logs."""
    names = [field.name for field in fields(record)] if is_dataclass(record) else record._fields
    return f"{type(record).__name__}({', '.join(f'{name}={_outline(name, getattr(record, name))}' for name in names)})"


def _outline(name: str, value: Any) -> str:
    if value is not None and name.startswith("unreleased"):
        return "not private, not shown"
    if isinstance(value, dict) and all(type(number) in (bool, int, float) for number in value.values()):
        return repr(value)  # for example the metrics of an evaluation
    arrays = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    if not arrays or arrays[0] is value:
        return described(value)
    return f"{len(arrays)} array{'s' * (len(arrays) > 1)} of {sum(math.prod(array.shape) for array in arrays)} numbers"


def as_local_array(array: Any) -> Any:
    """Makes `array` readable in this process. An array with parts in other processes becomes a numpy array."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return array
    return multihost_utils.process_allgather(array, tiled=True)


def require_number(
    name: str, value: float, *, minimum: float, maximum: float = math.inf, exclusive: bool = False
) -> float:
    """Returns `value` as a float. Raises ValueError unless it is finite, untraced and in [minimum, maximum], or in
    (minimum, maximum] if exclusive."""
    bound = range_in_words(minimum, maximum, exclusive=exclusive)
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a number or a function of the step, not a traced value")
    number = as_real(value)
    if number is None:
        raise ValueError(f"{name} must be a finite number {bound}, got {described(value)}")
    if not np.isfinite(number) or not minimum <= number <= maximum or (exclusive and number == minimum):
        raise ValueError(f"{name} must be a finite number {bound}, got {number}")
    return number


def range_in_words(minimum: float, maximum: float, *, exclusive: bool = False) -> str:
    least = f"{'above' if exclusive else 'at least'} {minimum:g}"
    return least if maximum == math.inf else f"{least} and at most {maximum:g}"


def as_real(value: Any) -> float | None:
    """Converts a real number (Python, numpy or jax) to a float; returns None for a bool, a string or anything else."""
    if isinstance(value, bool | str | bytes) or getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def require_open_fraction(name: str, value: Any) -> float:
    """Returns `value` as a float. Raises ValueError unless it is in (0, 1)."""
    number = as_real(value)
    if number is None or not 0 < number < 1:
        raise ValueError(f"{name} must be in (0, 1), got {described(value)}")
    return number


def require_floats(name: str, value: Any) -> np.ndarray:
    """Returns `value` as a float64 array. Raises ValueError for other types, without showing an element."""
    try:
        if np.asarray(value).dtype.kind in "SUMm":  # strings and dates, which NumPy would convert
            raise ValueError
        return np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must hold numbers, got {described(value)}") from None


def require_whole(name: str, value: Any, *, minimum: int = 1, maximum: float = math.inf) -> int:
    """Returns `value` as an int. Raises ValueError unless it is a Python or numpy integer in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not minimum <= value <= maximum:
        bound = f"of at least {minimum}" if maximum == math.inf else f"in [{minimum}, {maximum}]"
        advice = f": write {name}={int(value)}" if isinstance(value, float) and float(value).is_integer() else ""
        raise ValueError(f"{name} must be a whole number {bound}, got {described(value)}{advice}")
    return int(value)


def require_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        advice = ": what ends a run belongs in dpx.fit(callbacks=[...])" * callable(value)
        raise ValueError(f"{name} must be True or False, got {described(value)}{advice * (name == 'public_stop')}")
    return value


def require_function(name: str, value: Any, *arguments: str, **named: Any) -> Callable:
    """Returns `value`. Raises ValueError unless it is a function of these arguments and `named` ones, if any."""
    form = ", ".join([*arguments, *(f"{one}=..." for one in named)])
    of, words = f" of ({form})" if form else "", ""
    if form and callable(value):
        with contextlib.suppress(ValueError):  # some functions of other languages have no signature
            words = _explain_signature_mismatch(inspect.signature(value), arguments, named)
    if not callable(value) or words:
        raise ValueError(f"{name} must be a function{of}, got {described(value)}{': ' * bool(words)}{words}")
    return value


def _explain_signature_mismatch(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> str:
    """Says why a function with this signature cannot take these arguments, and which are missing; "" if it can."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        with contextlib.suppress(TypeError):
            given = signature.bind_partial(*args, **kwargs).arguments
            needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in GATHERS]
            lacking = [repr(name) for name in needed if name not in given]
            several = len(lacking) > 1
            return f"missing {'' if several else 'a '}required argument{'s' * several}: {', '.join(lacking)}"
        return str(error)
    return ""


def require_path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a path, got {described(value)}")
    return Path(value).expanduser()


def require_text(name: str, value: Any):
    if not (isinstance(value, str) and value.strip() and value.isprintable()):
        raise ValueError(f"{name} must be one line of printable text, got {described(value)}")


def rounded_up(value: float, digits: int) -> str:
    """Formats a bound, rounded up to `digits` digits so that the printed number is a bound too."""
    value = float(value)  # NumPy's float32 has no decimal
    nearest = f"{value:.{digits}g}"
    if float(nearest) >= value:
        return nearest
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(value)):.{digits}g}"


def rounded_down(value: float, digits: int) -> str:
    """Formats a lower bound of at least 0, rounded down to `digits` digits."""
    return rounded_up(-value, digits).removeprefix("-")


def number_for_json(value: Any) -> int | float:
    """Python's number for one of NumPy or JAX, or for a fraction: the `default` of `json.dumps`."""
    return value.item() if hasattr(value, "item") else float(value)


def unit_in_words(records: int, drawn: str = "example") -> str:
    """Names the privacy unit, without an article: what the sampling draws, or a person with several of them."""
    if records == 1:
        return drawn
    return f"person with up to {records} records" + (f" (each one {drawn})" if drawn != "example" else "")


def for_whom(records: int) -> str:
    """Says whom an epsilon protects, in words to print after it; "" if it protects one unit of the sampling."""
    return "" if records == 1 else f" for a {unit_in_words(records)}"


def warn_user(words: str) -> None:
    """Issues a UserWarning at the user's line, which is the nearest stack frame outside the packages in PASSED."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED:
        frame, level = frame.f_back, level + 1
    warnings.warn(words, stacklevel=level)


def explain_misuse(function: Named) -> Named:
    """Wraps a function or class so that its TypeErrors name its arguments, and say if two seem to be swapped."""
    made: Any = function
    signature, a_class = inspect.signature(made), isinstance(made, type)
    call = made.__init__ if a_class else made

    def checked(*args, **kwargs):
        given = bind_arguments(made.__name__, signature, args[a_class:], kwargs).arguments
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if words := " and ".join(f"{other} looks like the {name}" for name, other in _swapped_arguments(given)):
                order = ", ".join(_positional_names(signature))
                error.add_note(
                    f"dpx: are arguments swapped? {made.__name__} takes {order}, and what was given as {words}"
                )
            raise

    named: Any = functools.wraps(call)(checked)
    if a_class:
        made.__init__, named = named, made
    return named


def explain_methods(kind: type):
    """Makes the TypeErrors of a class's public methods name its arguments, and those of the bases that dpx defines."""
    for base in kind.__mro__:
        for name, method in vars(base).copy().items():
            is_ours = base.__module__.startswith("dpx.") and inspect.isfunction(method) and name[0] != "_"
            if is_ours and "explained" not in vars(method):
                setattr(base, name, _explained_method(method))


def _explained_method(method: Any) -> Callable:
    @functools.wraps(method)
    def checked(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # it comes from within
            wrong = error
        signature = inspect.signature(method)
        signature = signature.replace(parameters=[*signature.parameters.values()][1:])
        bind_arguments(f"{type(self).__name__}.{method.__name__}", signature, args, kwargs)
        raise wrong

    vars(checked)["explained"] = True
    return checked


def _positional_names(signature: inspect.Signature) -> list[str]:
    return [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def _swapped_arguments(given: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns pairs (argument, another one whose value looks like it), for arguments whose own values do not."""
    return [
        (name, other)
        for name, looks in LOOKS.items()
        for other, value in given.items()
        if name in given and other != name and looks(value) and not looks(given[name])
    ]


def bind_arguments(
    name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Binds arguments to their names. Raises a TypeError that names the function, and dpx's word for an argument."""
    if not (words := _explain_signature_mismatch(signature, args, kwargs)):
        return signature.bind(*args, **kwargs)
    parameters, unnamed, called = signature.parameters, _positional_names(signature), name.rpartition(".")[2]
    ending = JOINED.get(str(getattr(signature.return_annotation, "__name__", signature.return_annotation)), "")
    if "too many" in words:
        rest = ", and the others by name" * (len(parameters) > len(unnamed))
        words = f"takes {', '.join(unnamed)} by position{rest}{ending}"
        words = words if unnamed else f"takes its arguments by name: {', '.join(parameters)}{ending}"
        words += "; give several arrays as data=(x, y)" * ("data" in unnamed)
        words += "; correct is predictions == labels" * ("correct" in unnamed)
    elif "missing" in words:
        for lacking in (one for one in MISSING if repr(one) in words):
            words += f" ({MISSING.get(f'{called}.{lacking}', MISSING[lacking])})"
    unknown = [given for given in kwargs if given not in parameters]
    if unknown and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        homes = [f"{n!r}, which is what it returns" if n == name else _argument_hint(n, parameters) for n in unknown]
        ending *= any(" belongs in " in home for home in homes) or not {"params", "batch", "state"}.isdisjoint(unknown)
        ending = ending or f"; its arguments are {', '.join(parameters)}" * any("," not in home for home in homes)
        words = f"got an unexpected argument {', and '.join(homes)}{ending}"
        if name == "epsilon" and "noise_multiplier" in unknown:
            words = "reads these numbers from a mechanism; dpx.accounting.dp_sgd_epsilon takes them as arguments"
    raise TypeError(f"{name}() {words}")


def _argument_hint(given: str, parameters: Any) -> str:
    """Quotes an unknown argument, and says what dpx calls it or where it belongs."""
    ours = OURS.get(given, given)
    name = ours.partition(" ")[0]
    if "UserData" in ours and "users" in parameters:
        ours = name = "users"
    if name in parameters:
        return f"{given!r}, which is {ours} here"
    if name == "clip_norm" and "stability" in parameters:
        return f"{given!r}, but it normalizes every gradient, in place of clipping"
    if name == "epochs" and "steps" in parameters:
        budget = " or in its budget" * ("budget" in parameters)
        return f"{given!r}, which is steps = sampling.steps({given}=...) here{budget}"
    if "canary" in parameters and name in ("loss", "data", "optimizer"):
        return f"{given!r}, but it runs the mechanism alone (dpx.audit.one_run is for a training run)"
    if holder := next((p for p in parameters if name in p.split("_or_") or (name == "epochs" and "steps_or" in p)), ""):
        is_steps = f" = sampling.steps({given}=...)" if name == "epochs" else ""
        return f"{given!r}, which is argument {[*parameters].index(holder) + 1} here, {holder}{is_steps}"
    if name == "steps" and (holder := next((p for p in ("shape", "multipliers") if p in parameters), "")):
        return f"{given!r}, which is the length of {holder} here"
    if name in ("steps", "epsilon", "noise_multiplier") and "event" in parameters:
        return (
            f"{given!r}, which belongs in event: {MISSING['event']}, or for least_noise {MISSING['least_noise.event']}"
        )
    near = difflib.get_close_matches(given, parameters, n=1, cutoff=0.75)
    lacked = "sampling" if HOMES.get(name, "").startswith(f"{name}=") else "examples" if name == "batch_size" else ""
    if name in HOMES and lacked not in parameters and not difflib.get_close_matches(given, near, cutoff=0.9):
        home, holder = HOMES[name], HOMES[name].partition("=")[0]
        home = home if holder in parameters or not holder.isidentifier() else f"dpx.dp_sgd({home})"
        return f"{given!r}, which {'' if ours == given else f'is {ours}, and '}belongs in {home}"
    return f"{given!r}" + (f", did you mean {near[0]!r}?" if near else "")
