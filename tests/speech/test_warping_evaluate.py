"Time warping: the vectorised distance against two loops, its invariances, and what `hits` answers."
import numpy as np
import pytest

from xtts_nb.speech.evaluate import dtw_distance, hits, level_free


def loops(query, reference):
    F, G = len(query), len(reference)
    cost = np.sqrt(((query[:, None].astype(float) - reference[None])**2).sum(-1))
    total = np.full((F + 1, G + 1), np.inf)
    for i in range(F):
        for j in range(G):
            total[i + 1, j + 1] = min(total[i, j + 1] + cost[i, j], total[i + 1, j] + cost[i, j],
                                      total[i, j] + 2 * cost[i, j]
                                      ) if i or j else 2 * cost[0, 0]
    return total[F, G] / (F + G)


def clip(frames, seed, bins=80):
    "A smooth random walk: frames that resemble their neighbours, as in speech."
    return np.random.default_rng(seed).normal(size=(frames, bins)).cumsum(0).astype(np.float32)


@pytest.mark.parametrize('frames, others', [
    (1, [1]), (1, [1, 7]), (7, [1]), (7, [1, 2, 7, 30]), (30, [7, 29, 30, 31]), (2, [40, 3]),
    (40, [2, 2, 2])])
def test_equals_two_loops(frames, others):
    query, references = clip(frames, 0), [clip(n, i + 1) for i, n in enumerate(others)]
    got = dtw_distance(query, references)
    assert got.shape == (len(others),) and got.dtype == np.float32
    assert np.allclose(got, [loops(query, r) for r in references], rtol=1e-4, atol=1e-3)


def test_a_distance_does_not_depend_on_the_other_references():
    query, references = clip(20, 0), [clip(n, n) for n in (5, 50, 21)]
    together = dtw_distance(query, references)
    assert np.allclose(together, [dtw_distance(query, [r])[0] for r in references], rtol=1e-5)


def test_there_and_back_are_equally_far():
    a, b = clip(25, 1), clip(33, 2)
    assert np.isclose(dtw_distance(a, [b])[0], dtw_distance(b, [a])[0], rtol=1e-4)


def test_a_clip_is_next_to_itself_at_any_speed():
    a = clip(40, 3)
    stretched = np.repeat(a, 2, axis=0)
    assert dtw_distance(a, [a, stretched, clip(40, 4)])[:2].max() < 0.05 < dtw_distance(a, [clip(40, 4)])[0]


def test_inputs_are_left_as_they_were():
    a, b = clip(10, 1), clip(12, 2)
    copies = a.copy(), b.copy()
    dtw_distance(a, [b])
    level_free(a)
    assert np.array_equal(a, copies[0]) and np.array_equal(b, copies[1])


def test_loudness_does_not_count_but_colour_does():
    a, b = clip(30, 5), clip(30, 6)
    assert np.allclose(level_free(a + 3), level_free(a), atol=1e-4)
    nearest = lambda query, others: dtw_distance(level_free(query), [*map(level_free, others)]).argmin()
    quiet = a - 60
    assert dtw_distance(quiet, [b - 60, a]).argmin() == 0   # as they are, the level decides
    assert nearest(quiet, [b - 60, a]) == 1
    tilted = a + np.linspace(-5, 5, 80, dtype=np.float32)
    assert nearest(tilted, [a, tilted + 1]) == 1


def test_hits_ask_for_the_sentence_among_all_and_the_voice_within_it():
    sentences = {'one': clip(40, 1), 'two': clip(50, 2)}
    colours = {'low': np.linspace(4, -4, 80, dtype=np.float32),
               'high': np.linspace(-4, 4, 80, dtype=np.float32)}
    labels = [(s, v) for s in sentences for v in colours]
    references = [sentences[s] + colours[v] for s, v in labels]
    spoken = np.repeat(sentences['one'] + colours['high'], [1, 2] * 20, axis=0) + 2
    assert hits(spoken, references, labels, ('one', 'high')) == (True, True)
    assert hits(spoken, references, labels, ('one', 'low')) == (True, False)
    assert hits(spoken, references, labels, ('two', 'high'))[0] is False
    only_other_sentence = [labels.index(('one', 'low')), labels.index(('two', 'high')),
                           labels.index(('two', 'low'))]
    copies = [references[i] for i in only_other_sentence], [labels[i] for i in only_other_sentence]
    assert hits(spoken, *copies, ('two', 'high')) == (False, True)


def test_hits_without_a_reference_of_the_sentence_say_so():
    with pytest.raises(ValueError, match="'three'"):
        hits(clip(5, 1), [clip(5, 1)], [('one', 'low')], ('three', 'low'))
