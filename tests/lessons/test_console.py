"""Do titles and tables line up on the terminal?"""

from qkv.lessons.console import print_section


def test_a_title_is_underlined_to_its_own_width(capsys):
    print_section("T̄ sources")  # the bar takes no column
    title, line, *_ = capsys.readouterr().out.splitlines()
    assert (title, line) == ("T̄ sources", "-" * 9)
