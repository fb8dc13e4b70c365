"""Bounds in words, which are rounded up, and whom they are for."""

from decimal import ROUND_CEILING, Context


def rounded_up(value: float, digits: int) -> str:
    """A bound in words, rounded up to `digits` digits, so that what is printed holds too."""
    nearest = f"{value:.{digits}g}"
    if float(nearest) >= value:
        return nearest
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(value)):.{digits}g}"


def unit_in_words(records: int, drawn: str = "example") -> str:
    """The unit in words, without an article: what the sampling draws, or a person with several of them."""
    if records == 1:
        return drawn
    return f"person with up to {records} records" + (f" (each one {drawn})" if drawn != "example" else "")


def for_whom(records: int) -> str:
    """Whom an epsilon is for, in words to print behind it; nothing where it is for what the sampling draws."""
    return "" if records == 1 else f" for a {unit_in_words(records)}"
