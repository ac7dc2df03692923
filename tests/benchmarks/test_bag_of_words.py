"""The baseline learns which words tell classes apart, and nothing from their order beyond pairs."""

from benchmarks.bag_of_words import BagOfWords, features
from tests.training.classifiers import reviews


def test_words_and_pairs_of_words_are_the_features():
    assert features("Not bad, not") == ["not", "bad", ",", "not", "not bad", "bad ,", ", not"]


def test_classes_that_words_tell_apart_are_learnt():
    texts, labels = zip(*reviews(97), strict=True)
    names = ("bad", "good")
    bag = BagOfWords(texts, [names.index(label) for label in labels])
    held_out, truth = zip(*reviews(31, seed=500), strict=True)
    assert [names[answer] for answer in bag.answers(held_out)] == list(truth)
