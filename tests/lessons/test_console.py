"""Titles on the terminal are underlined."""

from qkv.lessons.console import print_section


def test_the_underline_is_as_wide_as_the_title(capsys):
    print_section("T̄ sources")  # the combining macron has no width
    title, line, *_ = capsys.readouterr().out.splitlines()
    assert (title, line) == ("T̄ sources", "-" * 9)
