"""Tokens, and the rows of a unit: sequences of a fixed length, each of which holds the text of one unit alone."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import dpx
from examples.finetune.documents import Corpus

Layout = Literal["packed", "padded"]


class Bytes:
    """The bytes of UTF-8, and one more token, which starts and ends a text. No table was learned, so nothing leaks."""

    start, vocabulary = 256, 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class Published:
    """The tokenizer of a checkpoint, tokenizer.json in its folder, read by the package tokenizers. It is public."""

    STARTS = ("<|begin_of_text|>", "<bos>", "<s>", "<|endoftext|>")

    def __init__(self, folder: str | Path):
        try:
            library: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ImportError("the tokenizer of a checkpoint needs: pip install tokenizers") from error
        self._tokenizer = library.Tokenizer.from_file(str(Path(folder).expanduser() / "tokenizer.json"))
        found = [token for token in map(self._tokenizer.token_to_id, self.STARTS) if token is not None]
        if not found:
            raise ValueError(f"tokenizer.json must have one of the tokens {self.STARTS}")
        self.start, self.vocabulary = found[0], self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens])


def tokenizer_of(folder: str | Path) -> Bytes | Published:
    """That of a checkpoint's folder, which is bytes where tokenizer.json is not there."""
    return Published(folder) if (Path(folder).expanduser() / "tokenizer.json").is_file() else Bytes()


class Rows(NamedTuple):
    """tokens: int32 (rows, length + 1), each text behind a start token, zeros at the end. sizes: int32 (rows,), how
    many tokens of a row count. owners: str (rows,), the unit of each row."""

    tokens: np.ndarray
    sizes: np.ndarray
    owners: np.ndarray

    def users(self, most: int, unit: str) -> dpx.UserData:
        """One item a unit: ((tokens (most, length + 1), sizes (most,)), included (most,))."""
        return dpx.UserData((self.tokens, self.sizes), self.owners, most=most, unit=unit)


def rows_of(corpus: Corpus, tokenizer: Any, *, length: int, layout: Layout = "packed") -> Rows:
    """The rows of all units, each unit's own together, in the order of its texts.

    length: int, at least 2, how many tokens a row predicts. A longer text fills several rows. Each begins with the last
        token of the row before it, so that every token but the first is predicted once.
    layout: "packed" writes the texts of a unit one behind the other; "padded" begins a row for each text. No row holds
        texts of two units, in either layout, because the gradient of such a row would belong to two units.
    Raises ValueError for another length or layout.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")
    if layout not in ("packed", "padded"):
        raise ValueError(f"layout must be 'packed' or 'padded', got {layout!r}")
    streams: dict[str, list[list[int]]] = {}
    for text, unit in zip(corpus.texts, corpus.units, strict=True):
        written = streams.setdefault(unit, [])
        if layout == "padded" or not written:
            written.append([])
        written[-1] += [tokenizer.start, *tokenizer.encode(text)]
    for written in streams.values():
        written[-1].append(tokenizer.start)  # the end of the unit
    pieces = [(unit, piece) for unit, written in streams.items() for one in written for piece in cut(one, length)]
    tokens = np.zeros((len(pieces), length + 1), np.int32)
    for row, (_, piece) in enumerate(pieces):
        tokens[row, : len(piece)] = piece
    sizes = np.array([len(piece) for _, piece in pieces], np.int32)
    return Rows(tokens, sizes, np.array([unit for unit, _ in pieces]))


def cut(stream: Sequence[int], length: int) -> list[Sequence[int]]:
    """Pieces of at most length + 1 tokens, each of which begins with the last token of the one before."""
    starts = range(0, max(1, len(stream) - 1), length)
    return [stream[start : start + length + 1] for start in starts]
