from __future__ import annotations

from tools.editor import outline

SOURCE = '''\
import os

def short(a):
    return a

class Thing:
    def long(self):
        """Words."""
        a = 1
        b = 2
        c = 3
        return a + b + c

    size = 3
'''


def test_long_bodies_are_left_out_and_numbers_stay() -> None:
    shown = outline(SOURCE.splitlines())
    assert "     4\t    return a\n" in shown
    assert "     7\t    def long(self):\n       ... lines 8-12 left out ...\n    13\t\n    14\t    size = 3" in shown


def test_text_that_is_not_python_is_shown_whole() -> None:
    assert outline(["print 'old'", "x"]) == "     1\tprint 'old'\n     2\tx"


def test_a_body_on_the_line_of_its_def_is_shown() -> None:
    assert outline(["def f(): return (1,", "2,", "3,", "4,", "5)"]).count("\n") == 4
