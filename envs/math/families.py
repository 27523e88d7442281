"""Generates problems with exact answers, deterministically for each seed.

Each family draws a question and its exact answer at a level from 1 (easy) to 5. The splits are disjoint for all seeds:
a hash of the question decides whether a problem is held out. A family has one wording for each question, so that no
problem is in both splits in different words.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from envs.math.records import Problem

LEVELS = range(1, 6)


@dataclass(frozen=True, slots=True)
class Exact:
    """``factor`` times the square root of ``radicand``, a square-free positive integer."""

    factor: Fraction
    radicand: int = 1

    @classmethod
    def rational(cls, value: int | Fraction) -> Exact:
        return cls(Fraction(value))

    @classmethod
    def sqrt(cls, square: int | Fraction) -> Exact:
        """The square root of ``square`` > 0."""
        product = Fraction(square).numerator * Fraction(square).denominator
        outside = 1
        for base in range(2, math.isqrt(product) + 1):
            while product % (base * base) == 0:
                product //= base * base
                outside *= base
        return cls(Fraction(outside, Fraction(square).denominator), product)

    def times(self, number: int | Fraction) -> Exact:
        return Exact(self.factor * number, self.radicand)

    @property
    def latex(self) -> str:
        r"""The number in LaTeX: ``-\frac{3}{4}``, ``5\sqrt{2}``, ``\frac{\sqrt{3}}{2}``."""
        sign, above, below = "-" if self.factor < 0 else "", abs(self.factor.numerator), self.factor.denominator
        root = "" if self.radicand == 1 else rf"\sqrt{{{self.radicand}}}"
        top = root if root and above == 1 else f"{above}{root}"
        return f"{sign}{top}" if below == 1 else rf"{sign}\frac{{{top}}}{{{below}}}"


QuestionAnswer = tuple[str, Exact]
"""A question and its answer."""


def arithmetic(rng: random.Random, level: int) -> QuestionAnswer:
    """Sums, differences and products of integers."""
    most = 10 * level * level
    terms = [_product(rng, most) if rng.random() < 0.5 else [rng.randint(1, most)] for _ in range(level + 1)]
    signs = [1, *(rng.choice((1, -1)) for _ in terms[1:])]
    text = "".join(
        f"{'' if at == 0 else ' + ' if sign > 0 else ' - '}{_times(term)}"
        for at, (sign, term) in enumerate(zip(signs, terms, strict=True))
    )
    return f"Compute ${text}$.", Exact.rational(sum(s * math.prod(term) for s, term in zip(signs, terms, strict=True)))


def fractions(rng: random.Random, level: int) -> QuestionAnswer:
    """Sums and differences of fractions, in lowest terms."""
    total, text = Fraction(0), ""
    for at in range(level + 1):
        part = Fraction(rng.randint(1, 6 * level), rng.randint(2, 4 + 3 * level))
        sign = rng.choice((1, -1)) if at else 1
        total += sign * part
        text += ("" if at == 0 else " + " if sign > 0 else " - ") + Exact.rational(part).latex
    return f"Compute ${text}$. Give the exact value.", Exact.rational(total)


def linear(rng: random.Random, level: int) -> QuestionAnswer:
    """One linear equation in one unknown."""
    most = 5 * level
    left, right = rng.sample(range(1, most + 2), 2)
    solution = Fraction(rng.randint(-most, most), 1 if level < 3 else rng.randint(1, level))
    there = rng.randint(-most, most)
    here = (right - left) * solution + there
    return (
        f"Solve ${_polynomial({'x': Fraction(left), '': here})} = {_polynomial({'x': Fraction(right), '': there})}$ "
        "for $x$.",
        Exact.rational(solution),
    )


def simultaneous(rng: random.Random, level: int) -> QuestionAnswer:
    """Two linear equations in two unknowns."""
    most = 3 + 2 * level
    while True:
        a, b, c, d = (_nonzero(rng, most) for _ in range(4))
        if a * d != b * c:
            break
    x, y = (Fraction(rng.randint(-most, most), 1 if level < 4 else rng.randint(1, 4)) for _ in range(2))
    target, value = rng.choice((("x", x), ("y", y), ("x + y", x + y), ("x - y", x - y)))
    first, second = (
        f"{_polynomial({'x': p, 'y': q})} = {Exact.rational(p * x + q * y).latex}" for p, q in ((a, b), (c, d))
    )
    return f"Given ${first}$ and ${second}$, find the value of ${target}$.", Exact.rational(value)


def quadratic(rng: random.Random, level: int) -> QuestionAnswer:
    """A quadratic equation with two rational roots."""
    most = 2 + 3 * level
    lead = [1, 1] if level < 3 else [rng.randint(1, level), rng.randint(1, level)]
    roots = sorted(Fraction(rng.randint(-most, most), below) for below in lead)
    if roots[0] == roots[1]:
        roots[1] += 1
    scale = math.lcm(*((p * q).denominator for p, q in ((roots[0], roots[1]), (roots[0] + roots[1], Fraction(1)))))
    terms = {"x^2": Fraction(scale), "x": -scale * (roots[0] + roots[1]), "": scale * roots[0] * roots[1]}
    which, root = rng.choice((("smaller", roots[0]), ("larger", roots[1])))
    return f"Find the {which} root of ${_polynomial(terms)} = 0$.", Exact.rational(root)


def modular(rng: random.Random, level: int) -> QuestionAnswer:
    """The remainder of a number or of a power."""
    modulus = rng.randint(3, 8 + 20 * (level - 1))
    if level == 1:
        number = rng.randint(modulus, 200)
        return f"What is the remainder when ${number}$ is divided by ${modulus}$?", Exact.rational(number % modulus)
    base, power = rng.randint(2, 10 * level), rng.randint(2, 4 ** (level - 1) + 4)
    question = f"What is the remainder when ${base}^{{{power}}}$ is divided by ${modulus}$?"
    return question, Exact.rational(pow(base, power, modulus))


def divisors(rng: random.Random, level: int) -> QuestionAnswer:
    """The greatest common divisor or the least common multiple."""
    shared = rng.randint(1, 4 * level)
    numbers = [shared * factor for factor in rng.sample(range(2, 6 + 4 * level), 2 if level < 4 else 3)]
    listed = _listed(numbers)
    if rng.random() < 0.5:
        return f"What is the greatest common divisor of {listed}?", Exact.rational(math.gcd(*numbers))
    return f"What is the least common multiple of {listed}?", Exact.rational(math.lcm(*numbers))


def counting(rng: random.Random, level: int) -> QuestionAnswer:
    """Choices, arrangements of letters, and paths."""
    kind = rng.randrange(3)
    if kind == 0:
        of = rng.randint(4, 4 + 3 * level)
        chosen = rng.randint(2, of - 2)
        return f"In how many ways can ${chosen}$ of ${of}$ books be chosen?", Exact.rational(math.comb(of, chosen))
    if kind == 1:
        word = "".join(rng.choices("AABBCDE", k=3 + level))
        ways = math.factorial(len(word)) // math.prod(map(math.factorial, Counter(word).values()))
        return f"How many different arrangements do the letters of {word} have?", Exact.rational(ways)
    right, up = rng.randint(1, 3 + level), rng.randint(1, 2 + level)
    question = (
        f"How many paths lead from $(0, 0)$ to $({right}, {up})$, where each step goes one unit to the right or one "
        "unit up?"
    )
    return question, Exact.rational(math.comb(right + up, up))


def sequences(rng: random.Random, level: int) -> QuestionAnswer:
    """A term or the sum of an arithmetic or a geometric sequence."""
    first, terms = rng.randint(1, 5 * level), rng.randint(4, 6 + 4 * level)
    if rng.random() < 0.5:
        kind, step = "arithmetic", _nonzero(rng, 3 * level)
        values = [Fraction(first + at * step) for at in range(terms)]
    else:
        kind, terms = "geometric", rng.randint(4, 4 + level)
        ratio = Fraction(rng.randint(2, 3) if level < 3 else rng.choice((2, 4, 5)), 1 if level < 3 else 3)
        values = [first * ratio**at for at in range(terms)]
    given = ", ".join(Exact.rational(value).latex for value in values[:3])
    last, total = f"term number ${terms}$", f"the sum of the first ${terms}$ terms"
    target, value = rng.choice(((last, values[-1]), (total, sum(values, Fraction(0)))))
    return f"The {kind} sequence ${given}, \\dots$ goes on in the same way. Find {target}.", Exact.rational(value)


def geometry(rng: random.Random, level: int) -> QuestionAnswer:
    """Exact lengths and areas."""
    most = 4 + 3 * level
    a, b, c = (rng.randint(1, most) for _ in range(3))
    kind = rng.randrange(4)
    if kind == 0:
        question = f"A right triangle has legs of lengths ${a}$ and ${b}$. Find the length of its hypotenuse."
        return _exactly(question), Exact.sqrt(a * a + b * b)
    if kind == 1:
        question = f"Find the area of an equilateral triangle with sides of length ${a * level}$."
        return _exactly(question), Exact.sqrt(3).times(Fraction((a * level) ** 2, 4))
    if kind == 2:
        question = f"A box measures ${a}$ by ${b}$ by ${c}$. Find the length of its space diagonal."
        return _exactly(question), Exact.sqrt(a * a + b * b + c * c)
    question = f"Find the distance between the points $({a}, {-b})$ and $({-c}, {a})$."
    return _exactly(question), Exact.sqrt((a + c) ** 2 + (a + b) ** 2)


FAMILIES: Mapping[str, Callable[[random.Random, int], QuestionAnswer]] = {
    "arithmetic": arithmetic,
    "fractions": fractions,
    "linear": linear,
    "simultaneous": simultaneous,
    "quadratic": quadratic,
    "modular": modular,
    "divisors": divisors,
    "counting": counting,
    "sequences": sequences,
    "geometry": geometry,
}


def _exactly(question: str) -> str:
    return f"{question} Give the exact value."


def _product(rng: random.Random, most: int) -> list[int]:
    return [rng.randint(2, max(3, math.isqrt(most) + 2)), rng.randint(2, most)]


def _times(factors: list[int]) -> str:
    return r" \times ".join(map(str, factors))


def _nonzero(rng: random.Random, most: int) -> int:
    return rng.choice((1, -1)) * rng.randint(1, most)


def _listed(numbers: list[int]) -> str:
    return ", ".join(f"${number}$" for number in numbers[:-1]) + f" and ${numbers[-1]}$"


def _polynomial(terms: Mapping[str, int | Fraction]) -> str:
    """The sum of ``terms``, factors by unknown (the empty name for a constant), without terms of factor 0."""
    text = ""
    for name, factor in terms.items():
        size = abs(Fraction(factor))
        if size:
            sign = (" - " if factor < 0 else " + ") if text else ("-" if factor < 0 else "")
            text += sign + (name if name and size == 1 else Exact.rational(size).latex + name)
    return text or "0"


GENERATOR_VERSION = 1
SPLITS = ("train", "heldout")
_HELDOUT_SHARE = 8
"""One of 8 questions is held out."""
_MAX_REPEATS = 10_000


def generate(split: str, count: int, seed: int, levels: Sequence[int] = tuple(LEVELS)) -> list[Problem]:
    """The first ``count`` problems of ``split`` under ``seed``. Raises ValueError if there are fewer."""
    problems = list(islice(stream(split, seed, levels), count))
    if len(problems) < count:
        raise ValueError(f"levels {list(levels)} have {len(problems)} {split} problems under seed {seed}, not {count}")
    return problems


def stream(split: str, seed: int, levels: Sequence[int] = tuple(LEVELS)) -> Iterator[Problem]:
    """Problems of ``split`` and ``levels`` without duplicates. The stream ends after 10,000 draws without a new
    question.

    Raises ValueError for an unknown split or level.
    """
    if split not in SPLITS or not levels or not set(levels) <= set(LEVELS):
        raise ValueError(f"split {split!r}, levels {list(levels)}: one of {', '.join(SPLITS)}, and some of 1 to 5")
    rng = random.Random(f"maths/{GENERATOR_VERSION}/{split}/{seed}")
    seen: set[str] = set()
    repeats = 0
    while repeats < _MAX_REPEATS:
        family, level = rng.choice(list(FAMILIES)), rng.choice(list(levels))
        question, answer = FAMILIES[family](rng, level)
        if question in seen or _is_held_out(question) != (split == "heldout"):
            repeats += 1
            continue
        repeats = 0
        seen.add(question)
        yield Problem(
            id=f"math-{split}-{seed}-{len(seen) - 1:05d}",
            question=question,
            answer=answer.latex,
            family=family,
            level=level,
        )


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % _HELDOUT_SHARE == 0
