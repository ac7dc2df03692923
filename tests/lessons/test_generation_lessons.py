"""The lessons on generation print correct numbers."""

import re
from itertools import pairwise


def test_the_cache_lesson_prints_costs_that_grow_as_lecture_e_says(run_lesson):
    lesson = run_lesson("kv-cache")
    sizes = (8, 32, 64, 128, 256, 384, 512, 768)
    for n in sizes:
        cached, recomputed, ratio, *_ = lesson.numbers(f"{n:>5,}  ".rstrip() + " ")
        assert cached == 24 * 128**2 * 4 + 2 * 128 * 512 + 4 * 128 * 4 * n
        assert recomputed == n * cached
        assert ratio == n
        real, formula, by_cost = lesson.numbers(f"{n:>5,}  ".rstrip() + " ", which=1)
        assert real == formula == by_cost == 2 * n * 128 * 4 * 4
    error = re.search(r"at most\s+(\S+)\.", lesson.text.replace("\n", " "))
    assert float(error[1]) < 1e-5
    assert "k_new" in lesson.text


def test_the_generation_lesson_generates_greedily_and_updates_the_probabilities(run_lesson):
    lesson = run_lesson("generate")
    rows = re.findall(r"^  +(\d)  (.{22})  (\S+) +([01]\.\d{3})  (.+)$", lesson.text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 9))
    assert rows[0][1].strip() == "The cat sat"
    for (_, text, selected, p, others), (_, after, *_) in pairwise(rows):
        assert after.strip().endswith(selected.replace("·", "").strip())
        assert after != text
        assert float(p) >= max(map(float, re.findall(r"[01]\.\d{3}", others)))
    changed, unchanged = re.search(r"up to +(\S+)\. .* at most +(\S+),", lesson.text.replace("\n", " ")).groups()
    assert float(changed) > 0.05
    assert float(unchanged) < 1e-5
    possible = lesson.numbers("possible tokens")
    assert possible[:4] == [4096, 4096, 4096, 3]
    assert max(possible[4:]) < 4096
    assert re.search(r"\[(stop|length), \d+ new tokens\]", lesson.text.replace("\n", " "))
    other = run_lesson("generate", seed=2).text
    assert other.split("Samples")[0] == lesson.text.split("Samples")[0]
    assert other.split("Samples")[1] != lesson.text.split("Samples")[1]
