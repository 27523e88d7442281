"""The functions that generated repositories are made of, with the places where a bug can be seeded.

A template is the source of one correct function below a line ``# key | verbs to name it by | kinds of its arguments``.
``[[good||bad||family]]`` marks a site: the text ``good`` may be exchanged for ``bad``, a bug of ``family``; several
``||bad||family`` pairs may follow one ``good``. Placeholders: ``{f}`` the function's name, ``{a} {b} {c}`` its
parameters, ``{v}`` a loop variable, ``{t}`` a local, ``{k}`` a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FAMILIES = (
    "flipped_comparison",
    "boundary",
    "off_by_one",
    "wrong_default",
    "swapped_arguments",
    "missing_return",
    "wrong_operator",
    "wrong_constant",
    "wrong_variable",
    "negated_condition",
    "wrong_builtin",
    "wrong_initial",
    "wrong_index",
    "boolean_operator",
)
"""All bug families."""

HELDOUT_FAMILIES = ("wrong_index", "boolean_operator")
"""Families that no train task has, and that the split ``heldout_family`` consists of."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "total price score speed level stock weight budget order item user record value point rate cost size "
    "length title label line token field day hour page row batch node"
)
MODULES = _words(
    "pricing stock report stats scores billing orders metrics ledger reader labels tables pages utils core"
)

NAMES = {
    "int": _words("n x y count amount num size"),
    "pos": _words("n count amount num size step"),
    "ints": _words("items values nums scores data rows"),
    "word": _words("text name label word title"),
    "words": _words("words names parts labels fields"),
    "char": _words("char mark sep letter"),
    "dict": _words("table prices mapping counts stock"),
    "bool": _words("flag ready active done open"),
}
"""Parameter names by kind of argument."""

LOOP_NAMES = _words("item value entry elem v")
LOCAL_NAMES = _words("total result acc out found")


@dataclass(frozen=True, slots=True)
class Template:
    """One function: ``verbs`` to name it by, the kind of each argument (``NAMES``' keys), its marked source."""

    key: str
    verbs: tuple[str, ...]
    kinds: tuple[str, ...]
    source: str


_TEXT = """
# cap | cap limit clamp | int int
def {f}({a}, {b}):
    if {a} [[>||<||flipped_comparison]] {b}:
        return [[{b}||{a}||wrong_variable]]
    return {a}

# floor | floor raise lift | int int
def {f}({a}, {b}):
    return [[max||min||wrong_builtin]]({a}, {b})

# sum | sum add | ints
def {f}({a}):
    {t} = [[0||1||wrong_initial]]
    for {v} in {a}:
        {t} [[+=||-=||wrong_operator]] {v}
    return {t}

# product | multiply product | ints
def {f}({a}):
    {t} = [[1||0||wrong_initial||2||wrong_initial]]
    for {v} in {a}:
        {t} [[*=||+=||wrong_operator]] {v}
    return {t}

# mean | mean average | ints
def {f}({a}):
    if [[not {a}||{a}||negated_condition]]:
        return [[0||1||wrong_constant]]
    return [[sum||max||wrong_builtin]]({a}) [[//||*||wrong_operator]] len({a})

# count_above | count_high count_above | ints int
def {f}({a}, {b}):
    {t} = [[0||1||wrong_initial]]
    for {v} in {a}:
        if {v} [[>||<||flipped_comparison||>=||boundary]] {b}:
            {t} += [[1||2||wrong_constant]]
    return {t}

# count_equal | count_same matches | ints int
def {f}({a}, {b}):
    {t} = [[0||1||wrong_initial]]
    for {v} in {a}:
        if {v} [[==||!=||flipped_comparison]] {b}:
            {t} [[+=||-=||wrong_operator]] 1
    return {t}

# largest | largest best top | ints
def {f}({a}):
    {t} = {a}[0]
    for {v} in {a}:
        if {v} [[>||<||flipped_comparison]] {t}:
            {t} = {v}
    return {t}

# smallest | smallest lowest | ints
def {f}({a}):
    {t} = {a}[0]
    for {v} in {a}:
        if {v} [[<||>||flipped_comparison]] {t}:
            {t} = {v}
    return {t}

# spread | spread range | ints
def {f}({a}):
    return [[max({a}) - min({a})||max({a}) + min({a})||wrong_operator||min({a}) - max({a})||swapped_arguments]]

# divisible | divides even fits | int
def {f}({a}):
    return {a} [[%||//||wrong_operator]] {k} [[==||!=||negated_condition]] [[0||1||wrong_constant]]

# join | join show | words
def {f}({a}, sep=[["-"||" "||wrong_default||""||wrong_default]]):
    return [[sep.join({a})||sep.join({a}[1:])||off_by_one]]

# first | first head | ints pos
def {f}({a}, {b}=2):
    return {a}[:[[{b}||{b} + 1||off_by_one||{b} - 1||off_by_one]]]

# rest | rest tail | ints
def {f}({a}):
    return {a}[[[1:]||[2:]||off_by_one||[0:]||off_by_one||[:1]||wrong_index]]

# final | final latest last | ints
def {f}({a}):
    if [[not {a}||{a}||negated_condition]]:
        return None
    return {a}[[[-1]||[0]||wrong_index||[-2]||off_by_one]]

# reverse | reverse flip | word
def {f}({a}):
    return [[{a}[::-1]||{a}[::1]||wrong_constant||{a}[1::-1]||off_by_one]]

# count_char | count_marks tally | word char
def {f}({a}, {b}):
    {t} = [[0||1||wrong_initial]]
    for {v} in {a}:
        if {v} [[==||!=||negated_condition]] {b}:
            {t} += 1
    return {t}

# any_above | any_high has_high | ints int
def {f}({a}, {b}):
    return [[any||all||wrong_builtin]]({v} [[>||<||flipped_comparison||>=||boundary]] {b} for {v} in {a})

# all_above | all_high check_all | ints int
def {f}({a}, {b}):
    for {v} in {a}:
        if {v} [[<||>||flipped_comparison||<=||boundary]] {b}:
            return [[False||True||wrong_constant]]
    return True

# longer | longer keep_long | words
def {f}({a}):
    return [{v} for {v} in {a} if len({v}) [[>||<||flipped_comparison||>=||boundary]] {k}]

# scale | scale grow | ints int
def {f}({a}, {b}):
    return [{v} [[*||+||wrong_operator||-||wrong_operator]] {b} for {v} in {a}]

# shift | shift move | ints int
def {f}({a}, {b}):
    {t} = []
    for {v} in {a}:
        {t}.append([[{v} + {b}||{v} - {b}||wrong_operator||{b}||wrong_variable]])
    return {t}

# running | running build_up | ints
def {f}({a}):
    {t} = []
    last = [[0||1||wrong_initial]]
    for {v} in {a}:
        last [[+=||-=||wrong_operator]] {v}
        {t}.append([[last||{v}||wrong_variable]])
    return {t}

# lookup | lookup find get | dict word
def {f}({a}, {b}, default=[[0||1||wrong_default||None||wrong_default]]):
    return {a}.get([[{b}, default||default, {b}||swapped_arguments]])

# invert | invert swap | dict
def {f}({a}):
    return {[[val: key||key: val||swapped_arguments]] for key, val in {a}.items()}

# histogram | group histogram | words
def {f}({a}):
    {t} = {}
    for {v} in {a}:
        {t}[{v}] = {t}.get({v}, [[0||1||wrong_default]]) [[+||-||wrong_operator]] 1
    return {t}

# position | position index | ints int
def {f}({a}, {b}):
    for i, {v} in enumerate({a}):
        if {v} [[==||!=||negated_condition]] {b}:
            return [[i||{v}||wrong_variable||i + 1||off_by_one]]
    return [[-1||0||wrong_constant]]

# gap | gap distance | int int
def {f}({a}, {b}):
    return [[abs||max||wrong_builtin]]([[{a} - {b}||{a} + {b}||wrong_operator]])

# percent | percent share | int pos
def {f}({a}, {b}):
    return [[{a} * 100 // {b}||{b} * 100 // {a}||swapped_arguments||{a} * 10 // {b}||wrong_constant]]

# discount | discount reduce | int int
def {f}({a}, {b}):
    {t} = {a} * {b} // [[100||10||wrong_constant]]
    return [[{a} - {t}||{a} + {t}||wrong_operator||{b} - {t}||wrong_variable]]

# border | border outline | int int
def {f}({a}, {b}):
    return [[2 * ({a} + {b})||2 * ({a} - {b})||wrong_operator||{a} * ({a} + {b})||wrong_variable]]

# power | power compound | int pos
def {f}({a}, {b}):
    {t} = [[1||0||wrong_initial]]
    for _ in range([[{b}||{b} + 1||off_by_one||{b} - 1||off_by_one]]):
        {t} [[*=||+=||wrong_operator]] {a}
    return {t}

# factorial | factorial arrange | pos
def {f}({a}):
    {t} = [[1||0||wrong_initial]]
    for i in range(1, [[{a} + 1||{a}||off_by_one]]):
        {t} *= i
    return {t}

# strip_mark | strip clean | word char
def {f}({a}, {b}):
    if {a}.[[startswith||endswith||wrong_builtin]]({b}):
        return {a}[[[1:]||[2:]||off_by_one||[:1]||wrong_index]]
    return {a}

# pad | pad align | word
def {f}({a}, width={k}):
    return {a}.[[rjust||ljust||wrong_builtin]](width, [["0"||" "||wrong_constant]])

# initials | initials short | words
def {f}({a}):
    return "".join({v}[[[0]||[-1]||wrong_index||[1]||off_by_one]].[[upper||lower||wrong_builtin]]() for {v} in {a})

# unique | unique distinct | ints
def {f}({a}):
    {t} = []
    for {v} in {a}:
        if {v} [[not in||in||negated_condition]] {t}:
            {t}.append({v})
    return {t}

# common | common shared | ints ints
def {f}({a}, {b}):
    return [{v} for {v} in [[{a} if {v} in {b}||{b} if {v} in {a}||swapped_arguments]]]

# dot | dot combine | ints ints
def {f}({a}, {b}):
    return sum(x1 [[*||+||wrong_operator]] x2 for x1, x2 in zip({a}, [[{b}||{a}||wrong_variable]]))

# between | between inside | int int int
def {f}({a}, {b}, {c}):
    return {b} <= {a} [[and||or||boolean_operator]] {a} [[<=||>=||flipped_comparison||<||boundary]] {c}

# outside | outside beyond | int int int
def {f}({a}, {b}, {c}):
    return {a} [[<||>||flipped_comparison]] {b} [[or||and||boolean_operator]] {a} > {c}

# passed | passed check | int
def {f}({a}):
    if {a} [[>=||>||boundary||<||flipped_comparison]] {k}:
        return [["pass"||"fail"||wrong_constant]]
    return "fail"

# allow | allow accept | bool bool
def {f}({a}, {b}):
    return {a} [[and||or||boolean_operator]] [[not {b}||{b}||negated_condition]]

# either | either enable | bool bool
def {f}({a}, {b}):
    if {a} [[or||and||boolean_operator]] {b}:
        return [["on"||"off"||wrong_constant]]
    return "off"

# replace | rename replace | word char char
def {f}({a}, {b}, {c}):
    return {a}.replace([[{b}, {c}||{c}, {b}||swapped_arguments]])

# nonblank | nonblank filled | words
def {f}({a}):
    return [{v} for {v} in {a} if [[{v}||not {v}||negated_condition]]]

# rank | rank order | ints
def {f}({a}):
    return sorted({a}, reverse=[[True||False||wrong_constant]])

# middle | middle median | ints
def {f}({a}):
    return [[sorted||list||wrong_builtin]]({a})[[[len({a}) // 2]||[len({a}) // 2 - 1]||off_by_one||[0]||wrong_index]]

# minutes | minutes seconds | int int
def {f}({a}, {b}):
    return [[{a} * 60 + {b}||{a} + 60 * {b}||swapped_arguments||{a} * 24 + {b}||wrong_constant]]

# shorten | shorten cut | word pos
def {f}({a}, {b}=3):
    if len({a}) [[<=||>=||flipped_comparison]] {b}:
        return {a}
    return {a}[:[[{b}||{b} - 1||off_by_one]]] + [["."||""||wrong_constant]]

# after | after next | int pos
def {f}({a}, {b}):
    return ({a} [[+ 1||- 1||wrong_operator||+ 2||off_by_one]]) % {b}

# repeat | repeat copy | word pos
def {f}({a}, {b}=[[2||1||wrong_default||3||wrong_default]]):
    return {a} [[* {b}||+ {a}||wrong_operator]]

# mirror | mirror same | word
def {f}({a}):
    return {a} [[==||!=||negated_condition]] {a}[::-1]

# fee | fee charge | int
def {f}({a}, fee=[[5||0||wrong_default||50||wrong_default]]):
    if {a} [[>=||<=||flipped_comparison||>||boundary]] {k}:
        return {a}
    return [[{a} + fee||{a} - fee||wrong_operator||fee||wrong_variable]]
"""


def _parse(text: str) -> Iterator[Template]:
    for block in text.split("# ")[1:]:
        head, _, source = block.partition("\n")
        key, verbs, kinds = (part.strip() for part in head.split("|"))
        yield Template(key, _words(verbs), _words(kinds), source.strip() + "\n")


TEMPLATES = tuple(_parse(_TEXT))
"""All templates. Each of the sources is correct as it stands without a mutation."""
