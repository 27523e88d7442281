"""Catalog of five real tasks: bugs of published packages that the next release fixed, with issues as users report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """The step of ``package`` from ``old`` to ``new``.

    ``code`` is the directory of the package's code, ``tests`` the directory of its tests (hidden, from ``new``),
    ``run`` the tests to run (default: all), ``root`` the import path. ``fails`` is one test that fails with the old
    code.
    """

    package: str
    old: str
    new: str
    code: str
    tests: str
    fails: str
    issue: str
    root: str = "."
    run: str = ""

    @property
    def task_id(self) -> str:
        return f"{self.package}-{self.new}"


RELEASES = (
    Release(
        package="sqlparse",
        old="0.5.1",
        new="0.5.2",
        code="sqlparse",
        tests="tests",
        fails="tests/test_format.py::TestFormat::test_strip_comments_preserves_hint",
        issue="""strip_comments removes optimizer hints

`sqlparse.format(sql, strip_comments=True)` removes SQL hints as if they were ordinary comments, so the formatted
statement no longer means the same to the database. A hint looks like a comment with a plus sign: `--+full(u)`,
`#+ hint`, `/*+cluster(T)*/`. Hints should be left exactly where they are; ordinary comments in the same statement
should still be removed:

    >>> sqlparse.format('select --+full(u)', strip_comments=True)
    'select '                                # expected: 'select --+full(u)'
    >>> sqlparse.format('select --+full(u)\\n--comment simple', strip_comments=True)
    # expected: 'select --+full(u)\\n'
    >>> sqlparse.format('insert /*+ DIRECT */ into sch.table_name as select * from foo', strip_comments=True)
    # expected: unchanged""",
    ),
    Release(
        package="packaging",
        old="24.0",
        new="24.1",
        code="src/packaging",
        tests="tests",
        fails="tests/test_markers.py::TestMarker::test_python_full_version_untagged",
        root="src",
        run="tests/test_markers.py",
        issue="""Marker.evaluate() raises InvalidVersion on untagged Python builds

On a Python that was built from an untagged commit `platform.python_version()` returns something like `3.11.1+`, which
is not a valid PEP 440 version. Evaluating a marker about the full version of the running Python then raises:

    >>> Marker("python_full_version < '3.12'").evaluate()
    packaging.version.InvalidVersion: Invalid version: '3.11.1+'

It should evaluate to True there. `default_environment()` should go on returning what `platform.python_version()` says,
and a `python_full_version` ending in `+` that the *caller* passes in the environment should still raise
`InvalidVersion`.""",
    ),
    Release(
        package="pathspec",
        old="0.12.0",
        new="0.12.1",
        code="pathspec",
        tests="tests",
        fails="tests/test_03_pathspec.py::PathSpecTest::test_01_match_file_3_unmatch",
        issue="""PathSpec.match_file() returns None instead of False

Since 0.12.0 `PathSpec.match_file()` returns None for a file that no pattern matches. Its annotation and documentation
say that it returns a bool, and code that tests `is False` broke:

    >>> spec = PathSpec.from_lines('gitwildmatch', ['*.txt', '!test/'])
    >>> spec.match_file('unmatch.bin')      # None; expected: False

`PathSpec.check_file()` should go on telling an unmatched file (None) from an excluded one (False).""",
    ),
    Release(
        package="voluptuous",
        old="0.14.1",
        new="0.14.2",
        code="voluptuous",
        tests="voluptuous/tests",
        fails="voluptuous/tests/tests.py::test_in_unsortable_container",
        issue="""In and NotIn raise TypeError when the container cannot be sorted

If validation fails with `In` or `NotIn` and the container's members cannot be compared with each other, a TypeError
escapes while the error message is being made, where an `Invalid` is expected:

    >>> Schema(In((int, str, float)))('x')
    TypeError: '<' not supported between instances of 'type' and 'type'

The message should list such members sorted by their text: "value must be one of [<class 'float'>, <class 'int'>,
<class 'str'>]", and "value must not be one of [...]" for `NotIn`. Containers that can be sorted should give the same
message as before.""",
    ),
    Release(
        package="parso",
        old="0.8.3",
        new="0.8.4",
        code="parso",
        tests="test",
        fails="test/test_python_errors.py::test_python_exception_matches[{} += 1]",
        issue="""Syntax error messages differ from those of Python 3.10 and later

The error finder (`parso/python/errors.py`) promises the messages that CPython gives. Python 3.10 reworded several
of them, and for grammars of version 3.10 and later we still give the old ones. What an invalid target of an assignment,
deletion, augmented assignment or named expression is called should be, from 3.10 on:

- "dict literal" instead of "dict display"
- "ellipsis" instead of "Ellipsis"
- "expression" instead of "operator"

for example `{} += 1`, `... = 1`, `a + b += 1`, `not 1 = 3`, `del x + y`, `for (not 1) in []: pass`, `(a + b := 1)`.
And a bytes literal with a character outside ASCII (`b"\\xe4"` typed as that letter) gives "bytes can only contain ASCII
literal characters" without the final full stop when parso runs on Python 3.10 or later. Older grammars keep the old
words.""",
    ),
)
