"""The facts that identify a run. If a folder has others, `fit` refuses it: two different runs would share one noise."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.fitting import processes
from dpx.fitting.settings import RunPlan
from dpx.fitting.step import Carry
from dpx.gradients.one_example import adding_note, function_of_row, rows_with_keys, shapes_of_row
from dpx.mechanism import Mechanism
from dpx.reports.report import version_of
from dpx.states.record import RECORD_VERSION, ReleaseState, fingerprint
from dpx.values import Tree, as_local_array
from dpx.xla.jaxprs import closure_arrays, identity_of_program
from dpx.xla.place import current_place, flags_in_variable, tracing_for_place

RECORD = "record of the releases"  # names a fact: the version of the record and the fields of a run's states
PROGRAM = "mechanism and optimizer, with their schedules (their fingerprint)"
LAYOUT = "layout of the arrays (its fingerprint)"
MACHINE = "kind of machine"
MEMORY = "bytes of memory that microbatches are chosen for"
LIBRARIES = ("numpy", "scipy", "flax")  # their versions may affect the values of the data, the draw and the loss
OF_LIBRARIES = (*(f"version of {name}" for name in LIBRARIES), "libraries of the backend (their fingerprint)")
KERNELS = "kernels that the GPU has timed (a random name)"
OF_DEVICES = ("processes", "devices", LAYOUT, "backend", MACHINE, MEMORY, KERNELS, *OF_LIBRARIES)
ARRAYS, EVENT = "arrays (their fingerprint)", "event and sampling (their fingerprint)"
OF_STEPS = ("chunk_size", "microbatch_size", "norms", "backward_passes")
SOME_EXAMPLES = "some examples of the data (their mark)"
LOSS = "loss (the fingerprint of its gradient)"
# Facts that affect a step's sums but neither its noise nor its batch. A later step may use another loss, too.
ROUNDING = (*OF_DEVICES, *OF_STEPS, LOSS)
IN_WORDS = {  # facts whose values mean nothing to a reader
    EVENT: "the noise or the sampling",
    ARRAYS: "the optimizer, its learning rate, or the shapes of the parameters",
    PROGRAM: "the optimizer, its learning rate, or a schedule",
    LOSS: "the loss or the model",
    SOME_EXAMPLES: "the data",
    LAYOUT: "how the arrays lie on the devices",
    OF_LIBRARIES[-1]: "the libraries of the backend",
}
SETTING = "setting "  # the prefix of further facts about rounding
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables that hold flags
SILENT = ("--xla_dump", "--xla_force_host_platform_device_count")  # XLA flags that change no result
QUIET = (  # prefixes, after "jax_", of settings that change no result or that another fact covers
    *("array_garbage", "captured_constants", "check_proxy", "compilation_cache", "compiler_detailed", "cpu_get"),
    *("cross_host", "cuda_visible", "debug_leaked", "debug_log", "distributed", "dump", "enable_compilation_cache"),
    *("enable_preemption", "enable_recoverability", "explain", "hlo_source", "include_", "log", "num_cpu_devices"),
    "numpy_rank_promotion",  # only warns or raises
    *("oneapi_visible", "persistent_cache", "platform", "pprint", "raise_persistent", "rocm_visible", "send_traceback"),
    *("share_binary", "source_url", "traceback", "tracer_error", "transfer_guard"),
)
INSTRUCTIONS = ("avx", "fma", "sse", "amx", "asimd", "sve")  # CPU instruction sets that may change the order of a sum
PACKAGES = ("jax", "jaxlib", "optax")  # their versions, like that of dpx, affect the results of a run
VERSION = "version of dpx"


def facts_identifying_run(run: RunPlan, carry: Carry, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts that identify a run. A key's fingerprint identifies it without revealing it.

    options: options for computing the gradient. Like the backend, machine, settings and versions, they affect how sums
        are rounded. A repeated step must match in every bit, because its noise is the same.
    """
    optimizer = run.optimizer
    described = jax.tree_util.tree_leaves_with_path(carry)
    shapes = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in described]
    numbers = sum(leaf.size for leaf in jax.tree.leaves(carry.params))
    facts = {f"stage {number} of the mechanism": stage for number, stage in enumerate(optimizer.stages, start=1)}
    facts |= {RECORD: f"version {RECORD_VERSION}: {', '.join(ReleaseState._fields)}"}
    facts |= {"event of a step": repr(optimizer.event(1)), "sampling": repr(optimizer.sampling)}
    facts |= {EVENT: fingerprint((optimizer.event(1), optimizer.sampling))}
    secrets = {"noise": optimizer.key, "batches": run.key}
    facts |= {f"key of the {name} (its mark)": int(keys.mark_of_key(key)) for name, key in secrets.items()}
    facts |= {"delta": run.delta, "accountant": run.accountant}
    facts |= {"records of a person": run.records} if run.records > 1 else {}
    facts |= {"parameters": f"{numbers} numbers", ARRAYS: fingerprint("\n".join(shapes))}
    facts |= {PROGRAM: _fingerprint_of_program(optimizer, carry)}
    facts |= {name: repr(value) for name, value in options.items() if value not in (None, False)}
    facts |= {"processes": jax.process_count()} if jax.process_count() > 1 else {}
    facts |= {"backend": jax.default_backend(), MACHINE: device_kinds(), MEMORY: current_place().device_memory_bytes}
    facts |= {SETTING + name: value for name, value in settings_affecting_results().items()}
    facts |= {OF_LIBRARIES[-1]: fingerprint(_library_versions())} if jax.default_backend() != "cpu" else {}
    facts |= {VERSION: version_of("dpx-jax")}  # not "dpx", which is another package
    return facts | {f"version of {name}": version_of(name) for name in (*PACKAGES, *LIBRARIES)}


def is_descriptive_fact(name: str) -> bool:
    """Whether a fact only describes other facts in words. New wording alone does not make a run a different one."""
    return name in ("event of a step", "sampling") or name.startswith("stage ")


def differences_in_words(differ: list[str], stored: dict[str, Any], facts: dict[str, Any]) -> str:
    """Describes the facts that `differ`, except those that follow from another one: any change to a part changes the
    whole program's fingerprint, and the equations of the loss take the optimizer's arrays as arguments."""
    causes = {"sampling", "parameters", *(name for name in differ if name.startswith("stage "))} & {*differ}
    hidden = {KERNELS, "event of a step"}
    hidden |= {EVENT, PROGRAM} if causes else set()
    hidden |= {ARRAYS} if causes - {"sampling"} else set()
    hidden |= {PROGRAM} if EVENT in differ else set()
    hidden |= {PROGRAM, LOSS} if ARRAYS in differ else set()
    perhaps = "perhaps " * any(name.startswith("version of ") for name in differ)

    def in_words(name: str) -> str:
        before, now = stored.get(name), facts.get(name)
        if name.startswith("stage "):
            return f"the mechanism ({before or 'nothing'!r}, now {now or 'nothing'!r})"
        if name.startswith("key of "):
            return f"the {name.removesuffix(' (its mark)')}"
        if name in IN_WORDS:
            return perhaps * (name in (PROGRAM, ARRAYS, LOSS)) + IN_WORDS[name]
        return f"{name} was {before}, now {now}"

    return "; ".join(in_words(name) for name in differ if name not in hidden)


def is_changeable_fact(name: str) -> bool:
    """Whether a run may continue with a different value of this fact, if it skips the steps that may have been made."""
    return name in ROUNDING or name.startswith(SETTING)


def _shapes_of(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)  # on no mesh


def fingerprint_of_loss(
    loss: Callable, optimizer: Mechanism, loss_at: Callable, carry: Carry, rows: Tree, options: dict
):
    """Fingerprints the equations of one example's gradient and everything they close over, including keys; an int. If
    it does not change, repeating a step with the same rows gives the same sum.

    rows: some examples, on axis 0. The other arguments are those of `compiled_step`.
    """
    shapes = _shapes_of(carry)
    keyed = partial(rows_with_keys, optimizer, with_key=options["with_key"])
    row = shapes_of_row(jax.eval_shape(keyed, shapes.state, rows))
    of_row = function_of_row(loss, has_aux=options["has_aux"])

    def of_example(carry, row):
        value, pull, _ = jax.vjp(lambda params: of_row(params, row), loss_at(*carry), has_aux=True)
        (gradient,) = pull(jax.tree.map(jnp.ones_like, value))
        return value, [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype != jax.dtypes.float0]

    with adding_note("loss", lambda: row[0]):
        closed = jax.make_jaxpr(of_example)(shapes, row)
    found = [jax.random.key_data(array) if keys.is_key(array) else array for array in closure_arrays(closed)]
    return fingerprint((identity_of_program(closed), list(map(bytes_of, found))))


def _fingerprint_of_program(optimizer: Mechanism, carry: Carry) -> int:
    """Fingerprints the equations of `optimizer.update` on one device, including all constants of the schedules."""
    shapes = _shapes_of(carry)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((1, *p.shape), np.float32), shapes.params)
    included = jax.ShapeDtypeStruct((1,), np.bool_)
    with tracing_for_place(devices=1):
        closed = jax.make_jaxpr(
            lambda grads, carry, included: optimizer.update(grads, *carry[::-1], included=included)
        )(grads, shapes, included)
    of_constants = [bytes_of(constant) for constant in closure_arrays(closed) if not keys.is_key(constant)]
    return fingerprint((identity_of_program(closed), of_constants))


def device_kinds() -> str:
    """The device kinds in all processes. For CPUs, also how many are used, because XLA splits sums over them."""
    if jax.default_backend() != "cpu":
        return ", ".join(sorted({device.device_kind for device in jax.devices()}))
    return "; ".join(dict.fromkeys(processes.from_every_process(_cpu_facts())))


def _cpu_facts() -> str:
    """The number of CPUs that this process may use, their name and a fingerprint of their instruction sets."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    file = Path("/proc/cpuinfo")
    lines = file.read_text(errors="replace").split("\n\n")[0].splitlines() if file.is_file() else []
    found = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    words = found.get("flags", found.get("features", "")).split()
    known = sorted(word for word in words if word.startswith(INSTRUCTIONS))
    name = found.get("model name", found.get("cpu part", platform.processor() or platform.machine()))
    threads = os.environ.get("PJRT_NPROC", os.environ.get("NPROC", count))
    return f"{threads} CPUs, {name}, instructions {fingerprint(known)}"


def _library_versions() -> list[str]:
    """The versions of the backend and of the libraries that contain the accelerator's compiler and kernels."""
    packages = {f"{found.name} {found.version}" for found in importlib.metadata.distributions()}
    version = jax.extend.backend.get_backend().platform_version
    return [version, *sorted(name for name in packages if name.startswith(("jax", "libtpu", "nvidia")))]


def settings_affecting_results() -> dict[str, str]:
    """Settings that may affect results: environment variables, and all jax settings not known to be harmless."""
    found = {name: " ".join(flag for flag in flags_in_variable(name) if not flag.startswith(SILENT)) for name in FLAGS}
    found |= {name: os.environ.get(name, "") for name in VARIABLES}
    settings = {name: re.sub("0x[0-9a-f]+", "", repr(value)) for name, value in jax.config.values.items()}
    quiet = tuple(f"jax_{name}" for name in QUIET)
    found |= {name: value for name, value in sorted(settings.items()) if not name.startswith(quiet)}
    return {name: value for name, value in found.items() if value}


def autotunes_kernels() -> bool:
    """Whether XLA may time its kernels and choose different ones in each process, or add in any order. On a GPU it may,
    unless a flag forbids both."""
    forbidden = {"--xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops=true", "--xla_gpu_deterministic_ops=1"}
    return jax.default_backend() in ("gpu", "cuda", "rocm") and forbidden.isdisjoint(flags_in_variable("XLA_FLAGS"))


def bytes_of(array: Any) -> bytes:
    return np.asarray(as_local_array(array)).tobytes()


def layout_fingerprint(carry: Carry, sharding: Any) -> int:
    """A fingerprint of how rows, parameters and state are laid out on devices, which decides how sums are rounded."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return fingerprint(jax.device_count())
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(carry)]
    return fingerprint(
        (jax.device_count(), tuple(sharding.mesh.shape.values()), sharding.num_devices, tuple(sharding.spec), shards)
    )
