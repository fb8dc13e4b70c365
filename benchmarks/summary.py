"""The tables of `benchmarks.step`: every row compared with its framework's floor, and the limits that dpx promises."""

from typing import Any

from benchmarks.report import table

OURS = "dpx auto"
OPACUS = "Opacus ghost"


def tables(results: dict[str, Any], floors: dict[str, str]) -> dict[str, str]:
    """results: "model, batch" -> row -> {"framework", "seconds", "compile"}; floors: framework -> its plain row."""
    rows = {name: row["framework"] for found in results.values() for name, row in found.items()}
    found = {}
    for framework, floor in floors.items():
        names = [name for name, of in rows.items() if of == framework and name != floor]
        columns = [(floor + " (ms)", lambda rows, floor=floor: milliseconds(rows, floor))]
        columns += [(name, lambda rows, name=name, floor=floor: ratio(rows, name, floor)) for name in names]
        found[f"Median time over that of {floor}"] = table(results, columns)
    found["Time divided by that of JAX's fastest step without privacy"] = table(results, [
        ("fastest", lambda rows: fastest(rows, floors["jax"])),
        ("fastest (ms)", lambda rows: milliseconds(rows, fastest(rows, floors["jax"]) or "")),
        *((name, lambda rows, name=name: ratio(rows, name, fastest(rows, floors["jax"]) or ""))
          for name, of in rows.items() if of == "jax" and name.startswith("dpx")),
    ])  # fmt: skip
    found["Milliseconds"] = table(results, [(name, lambda rows, name=name: milliseconds(rows, name)) for name in rows])
    found["Against the peers"] = table(results, [
        (OURS + " (ms)", lambda rows: milliseconds(rows, OURS)),
        ("over its floor", lambda rows: ratio(rows, OURS, floors["jax"])),
        ("fastest JAX peer, over " + OURS, jax_peer),
        (OPACUS + " (ms)", lambda rows: milliseconds(rows, OPACUS)),
        ("over its floor", lambda rows: ratio(rows, OPACUS, floors.get("torch", ""))),
        (f"{OURS} is ahead of it in", lambda rows: ahead(rows, floors)),
    ])  # fmt: skip
    found["Choice, noise and compilation"] = table(results, [
        ("auto over the better of ghost and vmap", choice),
        ("noise over one normal per parameter", noise),
        ("vmap compiles in (s)", lambda rows: seconds(rows, "dpx vmap")),
        ("auto, over vmap", lambda rows: ratio(rows, OURS, "dpx vmap", "compile")),
        ("ghost, over vmap", lambda rows: ratio(rows, "dpx ghost", "dpx vmap", "compile")),
    ])  # fmt: skip
    return found


def ratio(rows, name: str, base: str, of: str = "seconds") -> str | None:
    return f"{rows[name][of] / rows[base][of]:.2f}" if name in rows and base in rows else None


def fastest(rows, floor: str) -> str | None:
    """The name of the fastest step without privacy: of the whole batch, or of parts of it one after another."""
    plain = [name for name in rows if name.startswith(floor)]
    return min(plain, key=lambda name: rows[name]["seconds"], default=None)


def milliseconds(rows, name: str) -> str | None:
    return f"{rows[name]['seconds'] * 1e3:.1f}" if name in rows else None


def seconds(rows, name: str) -> str | None:
    return f"{rows[name]['compile']:.1f}" if name in rows else None


def jax_peer(rows) -> str | None:
    """Among those that are libraries: by hand is not one."""
    peers = [name for name in rows if name.startswith(("optax", "jax_privacy"))]
    if OURS not in rows or not peers:
        return None
    fastest = min(peers, key=lambda name: rows[name]["seconds"])
    return f"{fastest}: {ratio(rows, fastest, OURS)}"


def ahead(rows, floors) -> str | None:
    if not {OURS, OPACUS, floors["jax"], floors.get("torch")} <= set(rows):
        return None
    ours, theirs = rows[OURS]["seconds"], rows[OPACUS]["seconds"]
    over_floor = ours / rows[floors["jax"]]["seconds"] < theirs / rows[floors["torch"]]["seconds"]
    won = [name for name, is_won in (("time", ours < theirs), ("ratio", over_floor)) if is_won]
    return " and ".join(won) or "neither"


def choice(rows) -> str | None:
    paths = [rows[name]["seconds"] for name in ("dpx ghost", "dpx vmap") if name in rows]
    return f"{rows[OURS]['seconds'] / min(paths):.2f}" if OURS in rows and len(paths) == 2 else None


def noise(rows) -> str | None:
    """Where one normal per parameter takes at least a tenth of a step; elsewhere the difference says nothing."""
    silent = f"{OURS}, without noise"
    if not {OURS, silent, "noise alone"} <= set(rows):
        return None
    whole, rest, alone = (rows[name]["seconds"] for name in (OURS, silent, "noise alone"))
    return f"{(whole - rest) / alone:.2f}" if alone >= 0.1 * whole else None
