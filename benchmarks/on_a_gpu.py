"""What only a GPU can say of a private step: times, memory, its adder, the bits of its noise, and how it rounds.

    python -m benchmarks.on_a_gpu

* Adder: low-precision products with cancelling sums, beside the emulator of `benchmarks.adders`; and how far one row
  moves the sum of a block that was searched for it, as a share of what dpx proves.
* Noise: `dpx.keys.release` on the GPU beside the CPU's, for the same key. What differs is where float64 rounds
  differently within 2^-45 deviations of a border. Its time, beside that of `jax.random.normal`.
* Sums: the rows that `benchmarks.sum_rounding` found to be the worst, and a search from there; below 1 is what dpx
  proves.
* Norms: how much longer the norm that clips is than that of the example's own gradient, computed as a GPU computes it.
* Steps: without privacy, by hand (`jax.vmap`, clipping and a sum, with `jax.random.normal`), dpx with and without its
  noise, and jax_privacy where it is installed; all rows of a model take turns. Memory is what XLA has planned for
  temporaries. The rows of a model are compiled side by side, before one of them is timed.

Without a GPU, the command says so and measures nothing. Writes benchmarks/results/on_a_gpu.md.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import accelerators, adders, report, timing

NUMBERS = 2**24  # of a release
SCANNED = "gpt2_small, scanned"
SHORT = ", products in bfloat16"  # of JAX's default precision
MODELS = {  # batches
    "mlp": (256, 2048),
    "adadpigu_cnn": (256, 2048),
    "resnet20": (64, 1024),
    "transformer": (64, 1024),
    "vit_small": (16, 128),
    **dict.fromkeys(accelerators.LAYERS, (16,)),
    SCANNED: (8, 32),
    SCANNED + SHORT: (8, 32),
    accelerators.LORA: (8, 32),
}
JAX_PRIVACY = "jax_privacy"
ROWS = (*accelerators.ROWS, JAX_PRIVACY)
WORST = Path(__file__).parents[1] / "tests" / "data" / "worst_sum.npz"
LEAST = 0.02  # seconds that are timed at once


def found_gpu() -> Any:
    """The first GPU. Raises SystemExit, with words, if JAX has found none."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(
            f"No GPU is here: JAX has found {device.platform!r}. Nothing was measured. With a GPU, install "
            "jax[cuda12]; without one, python -m benchmarks.accelerators says what its compiler makes of a step."
        )
    return device


def multiplied(core: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of two matrices of low precision, by the algorithm that dpx names for this adder: float64."""
    import jax
    import jax.numpy as jnp

    from dpx.xla import matrix_units

    unit = matrix_units.BFLOAT16 if "bfloat16" in core else matrix_units.TF32
    dtype = jnp.bfloat16 if unit is matrix_units.BFLOAT16 else jnp.float32
    dot = functools.partial(jnp.dot, precision=unit.precision, preferred_element_type=jnp.float32)
    return np.asarray(jax.jit(dot)(jnp.asarray(left, dtype), jnp.asarray(right, dtype)), np.float64)


def rounded(core: str, x: np.ndarray) -> np.ndarray:
    """`x` rounded to operands of this adder."""
    fraction, exponent = np.frexp(x)
    bits = 8 if "bfloat16" in core else 11
    return np.ldexp(np.round(fraction * 2.0**bits), exponent - bits)


def of_the_adder(core: str, terms: int, size: int = 128) -> list[str]:
    """A line: of size^2 sums, how many are the emulator's to the bit; the farthest that a sum is off, as a share of
    what the proof allows one sum, for this GPU, for the emulator and for float32 additions in order."""
    rng, shape = np.random.default_rng(terms), (2, size, terms)
    left, right = rounded(core, rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 1, shape))
    products = left[:, None] * right
    exponents = np.frexp(left)[1][:, None] + np.frexp(right)[1] - 2
    exact, found = products.sum(-1), multiplied(core, left, right.T)
    emulated, float32 = adders.emulated(core, products, exponents), np.zeros_like(exact)
    for i in range(terms):
        float32 = (float32 + products[..., i]).astype(np.float32).astype(np.float64)
    allowed = 2.0**-24 * 1.6 * np.minimum(terms + 1, np.arange(terms + 2, 2, -1)).max() * np.abs(products).sum(-1)
    share = [f"{(np.abs(each - exact) / allowed).max():.3f}" for each in (found, emulated, float32)]
    return [core, str(terms), f"{100 * (found == emulated).mean():.1f}", *share]


def moved_block(core: str, rows: int, turns: int) -> list[str]:
    """A line: how far a searched block moves, as a share of what is proved, for this GPU and for the emulator."""
    factors = rounded(core, np.random.default_rng(rows).uniform(0.5, 1, rows))
    many = np.tile(factors[:, None], 64)  # a matrix, or the units stay idle
    found = adders.searched(core, rows, turns, add=lambda data: multiplied(core, data, many)[:, 0], factors=factors)
    return [core, str(rows), f"{found:.3f}", f"{adders.searched(core, rows, turns):.3f}"]


def noise_that_differs(one: Any, other: Any, numbers: int) -> tuple[int, float]:
    """How many numbers of a release differ between two devices, and the most, in standard deviations of the noise."""
    import jax
    import jax.numpy as jnp

    from dpx.xla.place import tracing_for_place

    found = []
    for device in (one, other):
        with jax.default_device(device), tracing_for_place(platform=device.platform, devices=1):
            found.append(np.asarray(jax.jit(released)(jax.random.key(2**40 + 3), jnp.zeros(numbers))))
    return int((found[0] != found[1]).sum()), float(np.abs(found[0] - found[1]).max())


def released(key: Any, sums: Any) -> Any:
    from dpx import keys

    return keys.release(key, 7, sums, 1.0)


def of_noise(numbers: int = 2**27) -> list[list[str]]:
    """The lines of `numbers` numbers: milliseconds and MiB of temporaries of dpx's release, and of JAX's normals."""
    import jax
    import jax.numpy as jnp

    def normal(key, sums):
        return sums + jax.random.normal(key, sums.shape)

    lines, inputs = [], (jax.random.key(3), jnp.zeros(numbers))
    for name, function in (("sum + jax.random.normal", normal), ("dpx.keys.release", released)):
        program = jax.jit(function).lower(*inputs).compile()
        run = timing.Timer(functools.partial(finished, program, inputs, 1), time.perf_counter)
        lines.append([name, f"{1e3 * min(run() for _ in range(10)):.2f}", f"{temporary(program):.0f}"])
    return lines


def moved_sums(searches: int, most: int = 1024) -> list[list[str]]:
    """For each path, and batches of at most `most`: how far an example has moved the sum beyond the clip norm, divided
    by what is proved."""
    from benchmarks import sum_rounding

    lines = []
    for one in sum_rounding.load(WORST):
        if one.path not in ("stacked gradients", "ghost norms", "chunks") or len(one.column) > most:
            continue
        sums = sum_rounding.PATHS[one.path](len(one.column))
        again = sum_rounding.excess(sums, one.rows, 1)
        searched, _, _ = sum_rounding.worst(sums, len(one.column), searches)
        lines.append([one.path, str(len(one.column)), *(f"{x:.3f}" for x in (one.found, again, searched))])
    return lines


def raised_norms(positions: tuple[int, ...]) -> list[list[str]]:
    """A line for each number of positions: by how much the norm of a tied embedding's example is raised, in percent."""
    import jax
    import jax.numpy as jnp
    import optax

    import dpx

    lines, rng, vocabulary, width = [], np.random.default_rng(0), 8192, 768

    def loss(p, tokens):
        hidden = p["table"][tokens[:-1]]
        hidden = hidden + jnp.tanh(hidden @ p["kernel"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ p["table"].T, tokens[1:]).mean()

    table, kernel = rng.normal(0, 0.02, (vocabulary, width)), rng.normal(0, width**-0.5, (width, width))
    params = {"table": jnp.asarray(table, jnp.float32), "kernel": jnp.asarray(kernel, jnp.float32)}
    sampling = dpx.FullBatch(examples=4)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(2**70))
    for length in positions:
        tokens = jnp.asarray(rng.integers(0, vocabulary, (4, length + 1)), jnp.int32)
        batch, state, found = dpx.Batch(tokens, None), mechanism.init(params), {}
        for norms in ("ghost", "vmap"):
            step = jax.jit(dpx.private_updates(loss, mechanism, norms=norms))
            found[norms] = np.asarray(step(params, batch, state).unreleased.norms, np.float64)
        true = np.asarray(jax.jit(jax.vmap(lambda s: optax.tree.norm(jax.grad(loss)(params, s))))(tokens), np.float64)
        lines.append([str(length), *(f"{100 * (found[n] / true - 1).max():.3f}" for n in found)])
    return lines


def finished(program: Any, inputs: tuple, times: int) -> Any:
    import jax

    return jax.block_until_ready([program(*inputs) for _ in range(times)][-1])


def temporary(program: Any) -> float:
    """MiB."""
    planned = program.memory_analysis()
    return planned.temp_size_in_bytes / 2**20 if planned else math.nan


def compiled(model: str, size: int, row: str) -> tuple[Any, tuple, float]:
    """The program of a step, its inputs, and the seconds to make it."""
    import jax

    precision = "bfloat16" if model.endswith(SHORT) else None
    name = model.removesuffix(SHORT)
    with jax.default_matmul_precision(precision) if precision else jax.default_matmul_precision("default"):
        start = time.perf_counter()
        if row == JAX_PRIVACY:
            function, inputs = with_jax_privacy(name, size)
        else:
            function, inputs = accelerators.step(name, row, jax.default_backend(), size)
        inputs = filled(inputs)
        return jax.jit(function).lower(*inputs).compile(), inputs, time.perf_counter() - start


def filled(inputs: Any) -> Any:
    """`inputs` with arrays in place of shapes. What already is an array stays."""
    import jax
    import jax.numpy as jnp

    def one(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(2), x.shape) if x.shape else jax.random.key(2)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return 0.02 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)
        return (jnp.arange(x.size) % 1000).reshape(x.shape).astype(x.dtype)

    return jax.tree.map(one, inputs, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))


def with_jax_privacy(model: str, size: int) -> tuple[Callable, tuple]:
    """Its step, and the inputs."""
    import jax
    import jax_privacy

    params, loss, batch, trained = accelerators.problem(model, size)
    params = filled(params)
    if model == accelerators.LORA:
        raise ValueError("its step trains all parameters")
    clipped = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, normalize_by=size, keep_batch_dim=False)
    noise = jax_privacy.noise_addition
    privatizer = noise.gaussian_privatizer(stddev=clipped.sensitivity(), prng_key=jax.random.key(2))
    return lambda p, b, s: privatizer.update(clipped(p, b), s), (params, batch, privatizer.init(params))


def steps_of(model: str, size: int, programs: dict[str, Any], rounds: int) -> list[list[str]]:
    """The lines of a model: milliseconds, and MiB of temporaries, with their ratios to those of the step without
    privacy. programs: of `compiled`, or an error, by row."""
    timers, lines, ran = {}, [], {}
    for row, made in programs.items():
        if isinstance(made, Exception):
            continue
        try:
            program, inputs, _ = made
            finished(program, inputs, 1)
            start = time.perf_counter()
            finished(program, inputs, 1)
            times = max(1, round(LEAST / (time.perf_counter() - start)))
            timers[row] = timing.Timer(functools.partial(finished, program, inputs, times), time.perf_counter)
            ran[row] = times
        except Exception as error:  # out of memory, say
            programs[row] = error
    found = timing.interleaved(timers, rounds)
    milliseconds = {row: 1e3 * min(found[row]) / ran[row] for row in found}
    plain = milliseconds.get(accelerators.PLAIN, math.nan)
    for row, made in programs.items():
        cells = [f"{type(made).__name__}: {str(made)[:60]}".replace("\n", " "), "", "", ""]
        if row in milliseconds:
            cells = [f"{milliseconds[row]:.3g}", f"{milliseconds[row] / plain:.2f}", f"{temporary(made[0]):.0f}"]
            cells.append(f"{made[2]:.0f}")
        lines.append([f"{model}, {size}, {row}", *cells])
    return lines


def of_steps(models: list[str], rounds: int, say: Callable[[list[list[str]]], None]) -> list[list[str]]:
    """All lines. The rows of a model are compiled side by side, and none while another is timed."""
    lines = []
    for model in models:
        for size in MODELS[model]:
            with ThreadPoolExecutor(len(ROWS)) as pool:
                futures = {row: pool.submit(compiled, model, size, row) for row in ROWS}
            programs = {row: one.exception() or one.result() for row, one in futures.items()}
            lines += (some := steps_of(model, size, programs, rounds))
            say(some)
        accelerators.problem.cache_clear()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", dest="models", action="append", choices=MODELS, help="a model; several times")
    parser.add_argument("--rounds", type=int, default=10, help="of the rows of a model, in turns")
    parser.add_argument("--searches", type=int, default=200, help="changes of rows to try for each sum")
    options = parser.parse_args()
    device = found_gpu()
    import jax

    def say(lines: list[list[str]]) -> None:
        print(*(" | ".join(line) for line in lines), sep="\n", flush=True)

    libraries = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-privacy", "flax", "optax")
    head = report.heading("benchmarks.on_a_gpu", libraries, devices=[device.device_kind])
    tables, notes = {}, []

    def add(title: str, columns: list[str], lines: list[list[str]]) -> None:
        say([[title], *lines])
        tables[title] = report.grid(columns, lines)
        report.write("on_a_gpu", head, tables, notes=notes)

    differ, most = noise_that_differs(device, jax.devices("cpu")[0], NUMBERS)
    notes.append(f"Of {NUMBERS} released numbers, {differ} differ from a CPU's, by at most {most:.3g} deviations.")
    add("Noise for 2^27 numbers", ["", "ms", "MiB temporary"], of_noise())
    cores = [core for core in adders.CORES if "H100" in core]
    terms = (8, 16, 32, 96, 1024)
    add(
        "Sums of products, and how far they are off, as a share of what the proof allows",
        ["adder", "terms", "% equal to the emulator", "here", "emulator", "float32 additions"],
        [of_the_adder(core, each) for core in cores for each in terms],
    )
    add(
        "How far one row moves a searched block, as a share of what is proved",
        ["adder", "rows", "here", "emulator"],
        [moved_block(core, rows, options.searches) for core in cores for rows in (8, 48, adders.MOST_ROWS)],
    )
    add(
        "Sums of whole steps, in units of what rounding may add",
        ["path", "batch", "on a CPU", "the same rows here", "a search here"],
        moved_sums(options.searches),
    )
    add("Norms, % above that of the gradient", ["positions", "ghost", "vmap"], raised_norms((64, 512, 2048)))
    columns = ["model, batch", "ms", "of not private", "MiB temporary", "seconds to compile"]
    add("Steps", columns, of_steps(options.models or [*MODELS], options.rounds, say))


if __name__ == "__main__":
    main()
