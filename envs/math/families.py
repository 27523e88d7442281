"""The families of generated problems: each draws a question and its exact answer, of a level from 1 (easy) to 5."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction

from envs.math.numbers import Exact

LEVELS = range(1, 6)

Drawn = tuple[str, Exact]
"""A question and its answer."""


def arithmetic(rng: random.Random, level: int) -> Drawn:
    """Sums, differences and products of whole numbers; products go first."""
    most = 10 * level * level
    terms = [_product(rng, most) if rng.random() < 0.5 else [rng.randint(1, most)] for _ in range(level + 1)]
    signs = [1, *(rng.choice((1, -1)) for _ in terms[1:])]
    text = "".join(
        f"{'' if at == 0 else ' + ' if sign > 0 else ' - '}{_times(term)}"
        for at, (sign, term) in enumerate(zip(signs, terms, strict=True))
    )
    return f"Compute ${text}$.", Exact.of(sum(s * math.prod(term) for s, term in zip(signs, terms, strict=True)))


def fractions(rng: random.Random, level: int) -> Drawn:
    """Sums and differences of fractions, in lowest terms."""
    total, text = Fraction(0), ""
    for at in range(level + 1):
        part = Fraction(rng.randint(1, 6 * level), rng.randint(2, 4 + 3 * level))
        sign = rng.choice((1, -1)) if at else 1
        total += sign * part
        text += ("" if at == 0 else " + " if sign > 0 else " - ") + Exact.of(part).latex
    return f"Compute ${text}$. Give the exact value.", Exact.of(total)


def linear(rng: random.Random, level: int) -> Drawn:
    """One equation with one unknown on both sides."""
    most = 5 * level
    left, right = rng.sample(range(1, most + 2), 2)
    solution = Fraction(rng.randint(-most, most), 1 if level < 3 else rng.randint(1, level))
    there = rng.randint(-most, most)
    here = (right - left) * solution + there
    return (
        f"Solve ${_polynomial({'x': Fraction(left), '': here})} = {_polynomial({'x': Fraction(right), '': there})}$ "
        "for $x$.",
        Exact.of(solution),
    )


def simultaneous(rng: random.Random, level: int) -> Drawn:
    """Two equations with two unknowns, of which one value is asked."""
    most = 3 + 2 * level
    while True:
        a, b, c, d = (_nonzero(rng, most) for _ in range(4))
        if a * d != b * c:
            break
    x, y = (Fraction(rng.randint(-most, most), 1 if level < 4 else rng.randint(1, 4)) for _ in range(2))
    asked, value = rng.choice((("x", x), ("y", y), ("x + y", x + y), ("x - y", x - y)))
    first, second = (f"{_polynomial({'x': p, 'y': q})} = {Exact.of(p * x + q * y).latex}" for p, q in ((a, b), (c, d)))
    return f"Given ${first}$ and ${second}$, find the value of ${asked}$.", Exact.of(value)


def quadratic(rng: random.Random, level: int) -> Drawn:
    """A quadratic equation with two rational roots, of which one is asked."""
    most = 2 + 3 * level
    lead = [1, 1] if level < 3 else [rng.randint(1, level), rng.randint(1, level)]
    roots = sorted(Fraction(rng.randint(-most, most), below) for below in lead)
    if roots[0] == roots[1]:
        roots[1] += 1
    scale = math.lcm(*((p * q).denominator for p, q in ((roots[0], roots[1]), (roots[0] + roots[1], Fraction(1)))))
    terms = {"x^2": Fraction(scale), "x": -scale * (roots[0] + roots[1]), "": scale * roots[0] * roots[1]}
    which, root = rng.choice((("smaller", roots[0]), ("larger", roots[1])))
    return f"Find the {which} root of ${_polynomial(terms)} = 0$.", Exact.of(root)


def modular(rng: random.Random, level: int) -> Drawn:
    """The remainder of a number or of a power."""
    modulus = rng.randint(3, 8 + 20 * (level - 1))
    if level == 1:
        number = rng.randint(modulus, 200)
        return f"What is the remainder when ${number}$ is divided by ${modulus}$?", Exact.of(number % modulus)
    base, power = rng.randint(2, 10 * level), rng.randint(2, 4 ** (level - 1) + 4)
    question = f"What is the remainder when ${base}^{{{power}}}$ is divided by ${modulus}$?"
    return question, Exact.of(pow(base, power, modulus))


def divisors(rng: random.Random, level: int) -> Drawn:
    """The greatest common divisor or the least common multiple."""
    shared = rng.randint(1, 4 * level)
    numbers = [shared * factor for factor in rng.sample(range(2, 6 + 4 * level), 2 if level < 4 else 3)]
    listed = _listed(numbers)
    if rng.random() < 0.5:
        return f"What is the greatest common divisor of {listed}?", Exact.of(math.gcd(*numbers))
    return f"What is the least common multiple of {listed}?", Exact.of(math.lcm(*numbers))


def counting(rng: random.Random, level: int) -> Drawn:
    """Choices, arrangements of letters, and paths."""
    kind = rng.randrange(3)
    if kind == 0:
        of = rng.randint(4, 4 + 3 * level)
        chosen = rng.randint(2, of - 2)
        return f"In how many ways can ${chosen}$ of ${of}$ books be chosen?", Exact.of(math.comb(of, chosen))
    if kind == 1:
        word = "".join(rng.choices("AABBCDE", k=3 + level))
        ways = math.factorial(len(word)) // math.prod(map(math.factorial, Counter(word).values()))
        return f"How many different arrangements do the letters of {word} have?", Exact.of(ways)
    right, up = rng.randint(1, 3 + level), rng.randint(1, 2 + level)
    question = (
        f"How many paths lead from $(0, 0)$ to $({right}, {up})$, where each step goes one unit to the right or one "
        "unit up?"
    )
    return question, Exact.of(math.comb(right + up, up))


def sequences(rng: random.Random, level: int) -> Drawn:
    """A term or the sum of an arithmetic or a geometric sequence."""
    first, terms = rng.randint(1, 5 * level), rng.randint(4, 6 + 4 * level)
    if rng.random() < 0.5:
        kind, step = "arithmetic", _nonzero(rng, 3 * level)
        values = [Fraction(first + at * step) for at in range(terms)]
    else:
        kind, terms = "geometric", rng.randint(4, 4 + level)
        ratio = Fraction(rng.randint(2, 3) if level < 3 else rng.choice((2, 4, 5)), 1 if level < 3 else 3)
        values = [first * ratio**at for at in range(terms)]
    given = ", ".join(Exact.of(value).latex for value in values[:3])
    last, total = f"term number ${terms}$", f"the sum of the first ${terms}$ terms"
    asked, value = rng.choice(((last, values[-1]), (total, sum(values, Fraction(0)))))
    return f"The {kind} sequence ${given}, \\dots$ goes on in the same way. Find {asked}.", Exact.of(value)


def geometry(rng: random.Random, level: int) -> Drawn:
    """Lengths and areas, exact, as square roots where they are."""
    most = 4 + 3 * level
    a, b, c = (rng.randint(1, most) for _ in range(3))
    kind = rng.randrange(4)
    if kind == 0:
        question = f"A right triangle has legs of lengths ${a}$ and ${b}$. Find the length of its hypotenuse."
        return _exactly(question), Exact.root_of(a * a + b * b)
    if kind == 1:
        question = f"Find the area of an equilateral triangle with sides of length ${a * level}$."
        return _exactly(question), Exact.root_of(3).times(Fraction((a * level) ** 2, 4))
    if kind == 2:
        question = f"A sandbox measures ${a}$ by ${b}$ by ${c}$. Find the length of its space diagonal."
        return _exactly(question), Exact.root_of(a * a + b * b + c * c)
    question = f"Find the distance between the points $({a}, {-b})$ and $({-c}, {a})$."
    return _exactly(question), Exact.root_of((a + c) ** 2 + (a + b) ** 2)


FAMILIES: Mapping[str, Callable[[random.Random, int], Drawn]] = {
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
    """A sum of multiples of unknowns (the empty name for none); terms of factor 0 are left out."""
    text = ""
    for name, factor in terms.items():
        size = abs(Fraction(factor))
        if size:
            sign = (" - " if factor < 0 else " + ") if text else ("-" if factor < 0 else "")
            text += sign + (name if name and size == 1 else Exact.of(size).latex + name)
    return text or "0"
