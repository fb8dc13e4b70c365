"""Several programs on one folder, in many orders of their reads and writes: no step is released with two sets of bits.

The programs are threads. One runs at a time, from one access to a file to the next. Parameters, which orbax would
store, are here a record of the steps that made them.
"""

import contextlib
import itertools
import random
import threading
from types import SimpleNamespace

import pytest

from dpx.fitting import checkpoints, moves, programs
from dpx.fitting.checkpoints import Checkpoints
from dpx.fitting.facts import RECORD
from dpx.fitting.step import Carry

pytestmark = pytest.mark.filterwarnings("ignore:the run continues with another value of")
STEPS, EVERY = 6, (1, 2, 3)
LOCAL = threading.local()  # turn: of the program, how it waits until it may access a file


class Killed(BaseException):
    """Raised in a program at an access to a file."""


class Made:
    """Parameters: the number of each step, and on which devices it was made."""

    def __init__(self, steps):
        self.steps, self.count = steps, steps[-1][0]

    def after(self, step, devices):
        return Made((*self.steps, (step, devices)))

    def is_deleted(self):
        return False


class InMemory:
    """In place of `Stored`. checkpoints: of all programs, by steps."""

    checkpoints: dict[int, dict]

    def __init__(self, folder, program):
        pass

    def last(self):
        LOCAL.turn()
        return max(self.checkpoints, default=None)

    def restore(self, step, like):
        LOCAL.turn()
        if step not in self.checkpoints:
            raise ValueError("removed by another program")
        return self.checkpoints[step]

    def save(self, step, tree):
        LOCAL.turn()
        if step in self.checkpoints:
            return False
        self.checkpoints[step] = tree
        for old in sorted(self.checkpoints)[:-2]:
            del self.checkpoints[old]
        return True


def write(path, text):
    LOCAL.turn()
    path.with_name(path.name + ".part").write_text(text)
    path.with_name(path.name + ".part").replace(path)


def create(path, text):
    LOCAL.turn()
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(text)


def read(path, read=programs._read):
    LOCAL.turn()
    return read(path)


@pytest.fixture(autouse=True)
def replaced(monkeypatch):
    monkeypatch.setattr(checkpoints, "Stored", InMemory)
    monkeypatch.setattr(checkpoints, "write", lambda path, text: None)  # of what decides nothing
    monkeypatch.setattr(checkpoints, "steps_taken", lambda made: made.count)
    monkeypatch.setattr(moves, "require_skippable", lambda *arguments: None)
    monkeypatch.setattr(
        moves, "skipped", lambda carry, terms, reach: Carry(*[carry.params.after(reach, "skipped")] * 2)
    )
    for name, function in {"write": write, "create": create, "_read": read}.items():
        monkeypatch.setattr(programs, name, function)


def train(folder, releases, *, devices, start, every, ends, on_other_devices):
    """What `fit` does. releases: what each step was made of, in sets. ends: the step at which a callback ends it."""
    terms = SimpleNamespace(steps=STEPS, plan=STEPS, epsilon=lambda state: 0.0)
    run = Checkpoints(folder, {RECORD: "one", "norms": devices}, terms, on_other_devices)
    made = run.restore(Carry(*[Made(((0, start),))] * 2))[0].params
    while made.count < STEPS:
        reach = min(STEPS, (made.count // every + 1) * every)
        run.reserve(reach)
        while made.count < reach:
            LOCAL.turn()
            releases.setdefault(made.count + 1, set()).add((made.steps, devices))
            made = made.after(made.count + 1, devices)
            if made.count == ends:
                run.save(Carry(made, made), [])
                return run.reserve(ends)
        run.save(Carry(made, made), [])


class Program(threading.Thread):
    """`train` in turns."""

    def __init__(self, *arguments, **options):
        super().__init__(daemon=True)
        self.arguments, self.options = arguments, options
        self.mine, self.others, self.killed, self.failed = threading.Lock(), threading.Lock(), False, None
        self.mine.acquire()
        self.others.acquire()
        self.start()

    def wait(self):
        self.others.release()
        self.mine.acquire()
        if self.killed:
            raise Killed

    def run(self):
        self.mine.acquire()
        LOCAL.turn = self.wait
        try:
            train(*self.arguments, **self.options)
        except (Killed, ValueError):
            pass  # another program has the run, or this one was not allowed to continue on other devices
        except Exception as error:
            self.failed = error
        self.done = True
        self.others.release()

    done = False

    def turn(self, killed=False):
        self.killed = killed
        self.mine.release()
        self.others.acquire()


def released(folder, seed):
    """The releases of a few programs, which are drawn like their turns."""
    folder.mkdir()
    chance, releases, running, number = random.Random(seed), {}, [], itertools.count()
    InMemory.checkpoints, chosen, left = {}, None, 8
    starts, patience, kills = (chance.choice(of) for of in ([0.03, 0.1, 0.3], [0.3, 0.8, 0.95], [0.0, 0.02, 0.05]))
    while left or running:
        if left and (not running or chance.random() < starts):
            given = {"devices": chance.choice("AB"), "every": chance.choice(EVERY), "start": next(number)}
            given["ends"] = chance.choice([None, None, *range(1, STEPS)])
            running.append(Program(folder, releases, **given, on_other_devices=chance.random() < 0.8))
            left -= 1
        if chosen not in running or chance.random() > patience:
            chosen = chance.choice(running)
        chosen.turn(killed=chance.random() < kills)
        if chosen.failed:
            raise chosen.failed
        running = [program for program in running if not program.done]
    return releases


def test_no_order_releases_a_step_twice(tmp_path):
    made = 0
    for seed in range(30):
        releases = released(tmp_path / str(seed), seed)
        for step, found in releases.items():
            assert len(found) == 1, (seed, step, found)
        made += STEPS in releases
    assert made > 10


def test_what_another_program_has_stored_first(tmp_path, monkeypatch):
    """It lost the run while it stored that. The first parameters are those that are stored, and no others."""
    other, save, releases = Made(((0, "other"),)), InMemory.save, {}

    def late(self, step, tree):
        return save(self, step, {"params": other, "optimizer_state": other}) and False

    InMemory.checkpoints, LOCAL.turn = {}, lambda: None
    monkeypatch.setattr(InMemory, "save", late)
    given = {"devices": "A", "start": "own", "every": 3, "ends": None, "on_other_devices": False}
    with pytest.raises(ValueError, match="one program at a time, but another one has stored checkpoint 3"):
        train(tmp_path, releases, **given)
    assert releases.keys() == {1, 2, 3} and releases[1] == {(other.steps, "A")}
