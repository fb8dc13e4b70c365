"""The attack curve of a report as an SVG, which needs no library and loads nothing from elsewhere."""

import html
import math
from collections.abc import Sequence

_LEFT, _TOP, _WIDTH, _HEIGHT = 80, 30, 520, 360  # of the square of the rates, in pixels
_DECADES = 4  # of both axes, which end at a rate of 1
_LINE, _GUESS = "#0072b2", "#444"  # blue and grey differ for every eye, and in print; guessing is dotted too


def attack_curve(curve: Sequence[tuple[float, float]], unit: str) -> str:
    """A picture of the largest true-positive rate at each false-positive rate, and of guessing; both axes logarithmic.

    curve: at least two pairs (false-positive rate, bound of the true-positive rate), in (0, 1], rising. A rate below
        1e-4 is not drawn. unit: whom epsilon protects, in words.
    """
    drawn = [pair for pair in curve if min(pair) >= 10.0**-_DECADES]
    points = " ".join(f"{_x(wrong):.1f},{_y(right):.1f}" for wrong, right in drawn)
    title = html.escape(f"The largest true-positive rate of any attack on one {unit}, at each false-positive rate")
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    parts = [f"<title>{title}</title>"]
    for power in range(-_DECADES, 1):
        x, y, words = _x(10.0**power), _y(10.0**power), f"{100 * 10.0**power:g} %"
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{right}" stroke="#ddd" fill="none"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{words}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{words}</text>')
    dotted = f'stroke="{_GUESS}" stroke-width="1.5" stroke-dasharray="2 5" fill="none"'
    parts.append(f'<path d="M{_LEFT} {bottom}L{right} {_TOP}" {dotted}/>')
    parts.append(f'<polyline points="{points}" stroke="{_LINE}" stroke-width="2.5" fill="none"/>')
    wrong, most = drawn[len(drawn) // 3]
    parts.append(f'<text x="{_x(wrong):.1f}" y="{_y(most) - 8:.1f}" text-anchor="end" fill="{_LINE}">any attack</text>')
    parts.append(f'<text x="{_x(0.02):.1f}" y="{_y(0.02) + 22:.1f}" fill="{_GUESS}">guessing</text>')
    middle = _TOP + _HEIGHT / 2
    parts.append(f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 42}" text-anchor="middle">false-positive rate</text>')
    turned = f'transform="rotate(-90 16 {middle})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{middle}" {turned}>true-positive rate, at most</text>')
    box = f'viewBox="0 0 {right + 30} {bottom + 54}" role="img" font-family="sans-serif" font-size="14"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} width="100%">{"".join(parts)}</svg>'


def _x(rate: float) -> float:
    return _LEFT + _WIDTH * (1 + math.log10(rate) / _DECADES)


def _y(rate: float) -> float:
    """Rounded up, so that what is drawn is not below the bound."""
    return math.floor(10 * (_TOP - _HEIGHT * math.log10(rate) / _DECADES)) / 10
