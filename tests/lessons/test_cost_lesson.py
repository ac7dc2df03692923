"""The lesson on cost prints exact numbers."""


def test_the_cost_lesson_prints_both_tables_with_exact_numbers(run_lesson):
    lesson = run_lesson("cost")
    assert "57,982,058,496" in lesson.row("gpt3")
    b, d, n_layers = 1, 768, 12
    for which, n in ((0, 512), (1, 1024)):
        total = n_layers * (24 * b * n * d**2 + 4 * b * n**2 * d)
        assert f"{total:,}" in lesson.row("sum of the above", which)
    step = n_layers * (24 * b * d**2 + 4 * b * 1024 * d)
    assert f"{step:,}" in lesson.row("sum of the above", 2)
    assert "37,748,736 bytes" in lesson.text
    assert lesson.text.count("Error on the slide") == 4


def test_its_encoder_decoder_grows_with_the_square_of_each_side(run_lesson):
    lesson = run_lesson("cost")
    encoder, decoder, _ = lesson.numbers("512   64")
    assert encoder == 6 * (24 * 512 * 512**2 + 4 * 512**2 * 512)
    assert decoder == 6 * (24 * 64 * 512**2 + 4 * 64**2 * 512)
