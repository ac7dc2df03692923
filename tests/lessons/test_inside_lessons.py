"""The lessons on inspection print correct numbers."""

import re

METHODS = ("attention", "rollout", "value-weighted", "knock-out")


def test_the_lesson_on_heads_names_the_best_head_of_each_pattern(run_lesson):
    lesson = run_lesson("head-patterns")
    for pattern in ("previous-token", "first-token", "delimiter", "duplicate", "induction"):
        layer, head, score, uniform = lesson.numbers(f"{pattern} ", which=1)
        assert 0 <= layer < 8
        assert 0 <= head < 6
        assert 2 * uniform < score <= 1
    unwrapped = lesson.text.replace("\n", " ")
    assert int(re.search(r"(\d+) of the 48 heads", unwrapped)[1]) >= 1
    assert float(re.search(r"by at most (\S+)\.", unwrapped)[1]) < 1e-5
    detail = lesson.text.split("Query·key")[1]
    weights = [float(row) for row in re.findall(r"(0\.\d{3})$", detail, re.MULTILINE)]
    assert weights == sorted(weights, reverse=True)
    assert 0 < sum(weights) <= 1.002


def test_the_lesson_on_it_finds_the_animal_when_tired_and_the_law(run_lesson):
    lesson = run_lesson("what-it-refers-to")
    tired, wide = (lesson.numbers("animal ", which=which) for which in (0, 1))
    assert tired[:3] == wide[:3]
    assert tired[3] < 0 < wide[3]
    street = [lesson.numbers("street ", which=which)[3] for which in (0, 1)]
    assert street[1] < street[0]
    assert re.findall(r"All 4 methods \w+ (\w+)\.", lesson.text) == ["animal", "Law"]
    choices = re.findall(r"(\S+) → (\w+)", lesson.text)
    assert choices == [(method, "animal") for method in METHODS[:3]] + [(METHODS[3], "street")]
