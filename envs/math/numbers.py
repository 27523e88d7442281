"""Exact numbers as answers: a fraction times the square root of a whole number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Exact:
    """``factor`` times the square root of ``radicand``, a whole number that no square above 1 divides."""

    factor: Fraction
    radicand: int = 1

    @classmethod
    def of(cls, value: int | Fraction) -> Exact:
        return cls(Fraction(value))

    @classmethod
    def root_of(cls, square: int | Fraction) -> Exact:
        """The square root of ``square``, which is above 0."""
        whole = Fraction(square).numerator * Fraction(square).denominator
        outside = 1
        for base in range(2, math.isqrt(whole) + 1):
            while whole % (base * base) == 0:
                whole //= base * base
                outside *= base
        return cls(Fraction(outside, Fraction(square).denominator), whole)

    def times(self, number: int | Fraction) -> Exact:
        return Exact(self.factor * number, self.radicand)

    @property
    def latex(self) -> str:
        r"""As it is written in LaTeX: ``-\frac{3}{4}``, ``5\sqrt{2}``, ``\frac{\sqrt{3}}{2}``."""
        sign, above, below = "-" if self.factor < 0 else "", abs(self.factor.numerator), self.factor.denominator
        root = "" if self.radicand == 1 else rf"\sqrt{{{self.radicand}}}"
        top = root if root and above == 1 else f"{above}{root}"
        return f"{sign}{top}" if below == 1 else rf"{sign}\frac{{{top}}}{{{below}}}"
