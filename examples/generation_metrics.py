"""Metrics of generated texts: BLEU, NIST, METEOR, ROUGE-L and CIDEr, all of whole words in lower case.

    score(outputs, references) -> {"bleu": 62.6, "nist": 7.05, "meteor": 38.5, "rouge_l": 66.6, "cider": 1.83}

BLEU, NIST and METEOR are those of the package nltk. This METEOR finds equal words and equal stems, but no synonyms,
because they need WordNet's data: it is the metric of 2005 (Banerjee and Lavie), and its figures are not those of the
program METEOR 1.5 in the tables of papers. ROUGE-L and CIDEr are written here, after the papers that are named there.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.text_data import words_of

Tokens = list[str]


def score(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The five metrics of outputs with one or more references each; BLEU, METEOR and ROUGE-L in percent.

    Raises ValueError for an output without a reference, and if nltk is not installed.
    """
    if len(outputs) != len(references) or not outputs or not all(references):
        raise ValueError(f"each output needs references, got {len(outputs)} outputs, {len(references)} references")
    hypotheses = [words_of(output) for output in outputs]
    wanted = [[words_of(reference) for reference in some] for some in references]
    return {
        "bleu": 100 * bleu(hypotheses, wanted),
        "nist": nist(hypotheses, wanted),
        "meteor": 100 * meteor(hypotheses, wanted),
        "rouge_l": 100 * rouge_l(hypotheses, wanted),
        "cider": cider(hypotheses, wanted),
    }


def _nltk(name: str) -> Any:
    try:
        import importlib

        return importlib.import_module(f"nltk.{name}")
    except ImportError as error:
        raise ValueError("the metrics of generated text need nltk: pip install nltk") from error


def bleu(outputs: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """BLEU of 1 to 4 words, of the whole corpus, without smoothing (Papineni et al. 2002)."""
    wanted = [{gram for one in some for gram in _grams(one, 4)} for some in references]
    if not any(grams & set(_grams(output, 4)) for grams, output in zip(wanted, outputs, strict=True)):
        return 0.0  # where nltk warns: no four words in a row are right
    return float(_nltk("translate.bleu_score").corpus_bleu(references, outputs))


def _grams(tokens: Tokens, size: int) -> list[tuple[str, ...]]:
    return list(zip(*(tokens[start:] for start in range(size)), strict=False))


def nist(outputs: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """NIST of 1 to 5 words: matches weigh by their information in the references (Doddington 2002)."""
    longest = max(map(len, outputs))
    return float(_nltk("translate.nist_score").corpus_nist(references, outputs, n=min(5, longest))) if longest else 0.0


class _NoSynonyms:
    """In place of WordNet."""

    @staticmethod
    def synsets(word: str) -> list:
        del word
        return []


def meteor(outputs: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """The mean over outputs of METEOR with the best reference, by equal words and equal stems."""
    module = _nltk("translate.meteor_score")
    pairs = zip(references, outputs, strict=True)
    return float(np.mean([module.meteor_score(some, one, wordnet=_NoSynonyms()) for some, one in pairs]))


def rouge_l(outputs: Sequence[Tokens], references: Sequence[Sequence[Tokens]], beta: float = 1.2) -> float:
    """The mean over outputs of the F-measure of the longest common subsequence (Lin 2004; beta as in COCO captions).

    Precision and recall are the largest over the references, each by itself.
    """
    values = []
    for output, some in zip(outputs, references, strict=True):
        common = [_common(output, reference) for reference in some]
        precision = max(length / max(1, len(output)) for length in common)
        recall = max(length / max(1, len(reference)) for length, reference in zip(common, some, strict=True))
        both = recall + beta**2 * precision
        values.append((1 + beta**2) * precision * recall / both if both else 0.0)
    return float(np.mean(values))


def _common(one: Tokens, other: Tokens) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = row
        row = [0]
        for place, against in enumerate(other):
            row.append(before[place] + 1 if word == against else max(before[place + 1], row[place]))
    return row[-1]


def cider(outputs: Sequence[Tokens], references: Sequence[Sequence[Tokens]], sigma: float = 6.0) -> float:
    """CIDEr-D times 10, as tables show it (Vedantam et al. 2015, https://arxiv.org/abs/1411.5726).

    The cosine of tf-idf vectors of 1 to 4 words, with clipped counts and a Gaussian penalty for other lengths, mean
    over references and outputs. The document frequencies are those of the references.
    """
    total = math.log(len(references))
    values = []
    for size in range(1, 5):
        seen: collections.Counter = collections.Counter()
        for some in references:
            seen.update({gram for reference in some for gram in _grams(reference, size)})

        def weights(tokens: Tokens, size=size, seen=seen) -> dict[tuple[str, ...], float]:
            counted = collections.Counter(_grams(tokens, size))
            return {gram: count * (total - math.log(max(1, seen[gram]))) for gram, count in counted.items()}

        for output, some in zip(outputs, references, strict=True):
            mine = weights(output)
            for reference in some:
                theirs = weights(reference)
                overlap = sum(min(mine[gram], theirs[gram]) * theirs[gram] for gram in mine.keys() & theirs.keys())
                norms = _norm(mine) * _norm(theirs)
                penalty = math.exp(-((len(output) - len(reference)) ** 2) / (2 * sigma**2))
                values.append(penalty * overlap / norms / len(some) if norms else 0.0)
    return 10 * sum(values) / (4 * len(outputs))


def _norm(weights: dict[tuple[str, ...], float]) -> float:
    return math.sqrt(sum(weight**2 for weight in weights.values()))
