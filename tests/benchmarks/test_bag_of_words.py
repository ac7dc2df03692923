"""The bag-of-words baseline learns from words and adjacent pairs of words."""

from benchmarks.bag_of_words import BagOfWords, features
from tests.training.classifiers import reviews


def test_features_are_words_and_adjacent_pairs():
    assert features("Not bad, not") == ["not", "bad", ",", "not", "not bad", "bad ,", ", not"]


def test_classes_with_distinctive_words_are_learned():
    texts, labels = zip(*reviews(97), strict=True)
    names = ("bad", "good")
    bag = BagOfWords(texts, [names.index(label) for label in labels])
    held_out, truth = zip(*reviews(31, seed=500), strict=True)
    assert [names[index] for index in bag.predict(held_out)] == list(truth)
