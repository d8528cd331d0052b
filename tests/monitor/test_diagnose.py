"Diagnosis: what is asked of the rules, the order of findings, remedies that are tried, and whole trainings."
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from clock import Clock
from process import python

from xtts_nb.bench import Arm
from xtts_nb.monitor import diagnose as costs, diagnose as rules, diagnose as diagnosis
from xtts_nb.config import UserError, setup_tf
from xtts_nb.monitor.diagnose import (
    MIN_GAIN, Diagnosis, Finding, Measured, RemedyTrial, ranked, _shares, apply_remedies, compare_loops,
    diagnose, measured_gain)
from xtts_nb.monitor.loop import tf_sleep, stages

setup_tf(threads=2)


def measured(**more):
    "A batch takes 8 s, a step 10 s, of which 6 s are compiled; nothing hides behind anything."
    return Measured(**dict(loop=18., pipeline=8., step=10., compute=6., first=1., batches=20, rows=4,
                           wait=8.) | more)

def finding(disease, gain, cure=None): return Finding(disease, f'why {disease}', f'do {disease}', gain, cure)


# Order and shares

def test_earlier_findings_stay_before_equal_ones():
    found = [finding(name, gain) for name, gain in (('a', 1.5), ('b', 1.55), ('c', 3.), ('d', 1.2))]
    assert [f.disease for f in ranked(found)] == ['c', 'a', 'b', 'd']
    found = [finding('a', 1.), finding('b', 1.1), finding('c', 1.11)]
    assert [f.disease for f in ranked(found)] == ['c', 'a', 'b']


@pytest.mark.parametrize('more, shares', [
    ({}, (.444, .222, .333)), (dict(wait=2.), (.111, .556, .333)), (dict(traced=4.), (.222, .444, .333)),
    (dict(loop=5.), (0., 0., 1.)), (dict(loop=9.), (0., .333, .667)),
    (dict(loop=.5, step=.25, compute=.25), (.5, 0., .5))])
def test_shares_of_the_wall_time(more, shares): assert tuple(_shares(measured(**more)).values()) == shares


# The rules are asked

@pytest.fixture
def asked(monkeypatch):
    "A training whose measurement and findings the test states; notes what is timed, and the rules' case."
    class Asked:
        def __init__(self):
            self.m, self.input, self.step, self.staged, self.cases = measured(), [], [], [], []
        def __call__(self, batches=8, seconds=10.):
            def rule(found): return lambda c: (self.cases.append(c), found)[1]
            monkeypatch.setattr(diagnosis, 'INPUT_RULES', [rule(f) for f in self.input])
            monkeypatch.setattr(diagnosis, 'STEP_RULES', [rule(f) for f in self.step])
            return diagnose([1, 2], print, batches, seconds)
    one, clock = Asked(), Clock()
    def measure_training(dataset, step, batches, seconds, timeout):
        clock.sleep(30.)
        return one.m, [np.ones(3)], []
    def stage_seconds(dataset, seconds):
        one.staged.append(seconds)
        return []
    for name, new in dict(time=clock, measure_training=measure_training, stage_seconds=stage_seconds).items():
        monkeypatch.setattr(diagnosis, name, new)
    return one


@pytest.mark.parametrize('found, expected', [
    ([None, None], ['input-bound']), ([finding('a', 2.), None], ['a']),
    ([None, finding('a', MIN_GAIN)], ['a']),
    ([finding('a', 1.1), None], ['input-bound'])])
def test_a_slow_input_without_a_known_cause_is_input_bound(asked, found, expected):
    asked.input = found
    assert [f.disease for f in asked()] == expected


def test_what_is_worth_a_change_is_reported(asked):
    asked.input = [finding('a', 2.)]
    asked.step = [finding('b', MIN_GAIN), None, finding('c', 1.14), finding('d', 3.)]
    verdict = asked()
    assert [f.disease for f in verdict] == ['d', 'a', 'b'] and len(verdict) == 3 and verdict[1].disease == 'a'
    assert {id(c) for c in asked.cases} == {id(asked.cases[0])} and len(asked.cases) == 5
    c = asked.cases[0]
    assert (c.dataset, c.step, c.m, c.python, c.deadline, c.calls) == ([1, 2], print, asked.m, None, 114., [])
    assert (verdict.seconds, verdict.bound, verdict.slow_stage) == (30., 'input-bound', None)


def test_a_rule_that_fails_is_named_and_the_others_are_asked(asked, monkeypatch):
    asked.step = [finding('a', 2.)]
    def find_nothing(c): raise KeyError('first\nsecond')
    asked()
    monkeypatch.setattr(diagnosis, 'INPUT_RULES', [find_nothing])
    verdict = diagnose([1, 2], print, 8, 10.)
    assert [f.disease for f in verdict] == ['a', 'input-bound']
    assert verdict.unseen[-1] == "what find_nothing looks for: KeyError: 'first\\nsecond'"


@pytest.mark.parametrize('promised, staged', [(1.05, []), (1.06, [2.])])
def test_stages_are_timed_where_the_input_matters(asked, monkeypatch, promised, staged):
    asked.m = measured(loop=.018, pipeline=.008, step=.01, compute=.006, wait=.008)
    asked()
    assert asked.staged == [2.]   # a fifth of 10 s: the input costs nearly half of the time
    asked.staged.clear()
    monkeypatch.setattr(diagnosis, 'predict_gain', lambda m, **change: promised)
    asked()
    assert asked.staged == staged


def test_the_slow_stage_and_the_largest_share_are_named(asked, monkeypatch):
    asked.m = measured(compute=10., wait=1.)
    (stage,) = stages(tf.data.Dataset.range(3))
    monkeypatch.setattr(diagnosis, 'stage_seconds', lambda dataset, seconds: [(stage, 5.)])
    verdict = asked()
    assert (verdict.slow_stage, verdict.bound) == ('Range', 'compute-bound')


def test_too_few_batches_are_refused(asked):
    asked(batches=8)
    with pytest.raises(UserError, match='7 batches are too few'): asked(batches=7)


# What is shown

def test_a_diagnosis_in_text_markdown_and_json():
    m = measured(loop=.018, pipeline=.008, step=.0100004, compute=.006)
    shares = {'input': .444, 'host': .556}
    two = Diagnosis([finding('a', 2.04), finding('b', 1.5)], m, 'input-bound', shares, 'Map', ['n'], ['u'],
                    1.26)
    head = ('18.0 ms per step, most of it input (input 44%, host 56%); the pipeline alone takes 8.0 ms, '
            'the step alone 10.0 ms, its compiled functions 6.0 ms.')
    assert two.lines() == [head, '1. a, gain 2.0 x', '   why a', '   Remedy: do a.', '2. b, gain 1.5 x',
                           '   why b',
                           '   Remedy: do b.', 'Note: n', 'Not seen: u.']
    assert two._repr_markdown_().splitlines() == [
        head, '', '| disease | evidence | remedy | predicted gain |', '|---|---|---|---:|',
        '| a | why a | do a | 2.0 × |',
        '| b | why b | do b | 1.5 × |', '', 'Note: n', '', 'Not seen: u.']
    said = json.loads(json.dumps(two.to_dict()))
    assert said['measured'] == vars(m) | {'step': .01} and said['seconds'] == 1.3
    assert said['slow_stage'] == 'Map'
    assert [f['disease'] for f in said['findings']] == ['a', 'b']
    assert (said['notes'], said['unseen']) == (['n'], ['u'])
    none = Diagnosis([], m, 'input-bound', shares, None, [], [], 1.)
    head = head.replace('18.0 ms per step, most of it input', 'input-bound: 18.0 ms per step')
    assert none.lines() == [head, 'Nothing to fix.'] and repr(none) == f'{head}\nNothing to fix.'
    assert none._repr_markdown_() == f'{head}\n\nNothing to fix.'


# Remedies

def test_trainings_take_turns_and_each_round_counts_by_row(monkeypatch):
    asked, first, periods = [], [], iter([8., 3., 4., 6., 2., 5.])
    def run_iterations(batches, step, at_most, seconds): asked.append((step, at_most, seconds))
    monkeypatch.setattr(diagnosis, 'run_iterations', run_iterations)
    monkeypatch.setattr(diagnosis, 'first_step', lambda step, batch: first.append((step, batch)))
    monkeypatch.setattr(diagnosis, 'period', lambda some: next(periods))
    rows = tf.data.Dataset.from_tensors(tf.ones((4, 2)))
    # a has 4 rows, those of b are unknown
    arms = {'a': Arm('a', [2., 1., .5]), 'b': Arm('b', [3., 6., 5.])}
    assert compare_loops({'a': (rows, 'A'), 'b': ([7], 'B')}, 9, 5.) == arms
    assert asked == [('A', 9, 5.), ('B', 9, 5.)] * 3
    assert [step for step, _ in first] == ['A', 'B'] and first[1][1] == 7


@pytest.mark.parametrize('now, then, gain, clear', [
    ([3., 3., 3.], [2., 2., 2.], 1.5, True), ([1.05] * 3, [1.] * 3, 1.05, False),
    ([1.06] * 3, [1.] * 3, 1.06, True),
    ([2., 4., 8.], [1., 2., 4.], 2., True),         # the machine became slower, for both
    ([2., 2., 1.], [1., 1., 1.], 2., False),        # not faster in each round
    ([9., 1., 1.], [1., 1., 1.1], 1., False)])      # one slow round before is no gain
def test_a_gain_is_clear_if_every_round_shows_it(now, then, gain, clear):
    assert measured_gain(Arm('now', now), Arm('then', then)) == (gain, clear)


@pytest.mark.parametrize('gain, kept, line', [
    (None, False, 'a: b; predicted 2.00 x, by hand'),
    (1.5, True, 'a: b; predicted 2.00 x, measured 1.50 x, kept'),
    (.9, False, 'a: b; predicted 2.00 x, measured 0.90 x, taken back')])
def test_a_trial_in_a_line(gain, kept, line):
    trial = RemedyTrial('a', 'b', 2., gain, kept)
    assert trial.line() == line and len({trial, trial}) == 1
    failed = RemedyTrial('a', 'b', 2., None, False, 'TypeError')
    assert failed.line() == 'a: b; predicted 2.00 x, failed (TypeError)'
    left = RemedyTrial('a', 'b', 2., None, False, alters='the batch size')
    assert left.line() == ('a: b; predicted 2.00 x, not tried, because it changes what is learned: '
                           'the batch size')


@pytest.mark.parametrize('cure, now, measured_gain, kept', [
    (lambda d, s: ('d', 's'), 1.05, 1.05, False), (lambda d, s: ('d', 's'), 1.06, 1.06, True),
    (None, 2., None, False),
    (lambda d, s: None, 2., None, False), (lambda d, s: (None, s), 2., None, False),
    (lambda d, s: (d, None), 2., 2., True)])
def test_a_remedy_is_kept_where_it_helps(monkeypatch, cure, now, measured_gain, kept):
    compared, said = [], []
    def compare_loops(*what): compared.append(what); return {'now': Arm('', [now]), 'then': Arm('', [1.])}
    monkeypatch.setattr(diagnosis, 'compare_loops', compare_loops)
    dataset, step, (trial,) = apply_remedies('data', 'step', [finding('a', 2., cure)], 8, 3., said.append)
    assert trial == RemedyTrial('a', 'do a', 2., measured_gain, kept) and said == [trial.line()]
    assert (dataset, step) == (cure('data', 'step') if kept else ('data', 'step'))
    assert compared == ([] if measured_gain is None else [({'now': ('data', 'step'),
                                                            'then': cure('data', 'step')}, 8, 3.)])


@pytest.mark.parametrize('change_learning', [False, True])
def test_what_is_learned_is_changed_only_on_request(change_learning):
    data, cure = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat(), lambda d, s: (d, fast)
    slow = tf.function(lambda b: tf_sleep(20_000, tf.reduce_sum(b)))
    fast = tf.function(lambda b: tf.reduce_sum(b))
    larger = Finding('tiny batch', 'why', 'more rows', 2., cure, 'the batch size')
    _, step, (trial,) = apply_remedies(data, slow, [larger], 8, .2, lambda line: None, change_learning)
    assert (step is fast) == trial.kept == (trial.measured_gain is not None) == change_learning
    assert trial.alters == ('' if change_learning else 'the batch size')


def test_a_remedy_is_tried_on_what_earlier_ones_left():
    data = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat()
    slow = tf.function(lambda b: tf_sleep(20_000, tf.reduce_sum(b)))
    fast = tf.function(lambda b: tf.reduce_sum(b))
    found = [finding('step', 2., lambda d, s: (d, fast)), finding('worse', 2., lambda d, s: (d, slow)),
             finding('no step', 2., lambda d, s: (d, lambda b: 1 / 0)),
             finding('no cure', 2., lambda d, s: d / s),
             finding('other', 2.)]
    _, step, trials = apply_remedies(data, slow, found, 8, .2, lambda line: None)
    assert step is fast and [t.kept for t in trials] == [True] + [False] * 4
    assert [t.error for t in trials] == ['', '', 'UserError', 'TypeError', '']


# Whole trainings

def test_no_rule_knows_what_the_emulated_trainings_are_made_of():
    for module in (rules, costs, diagnosis):
        source = Path(module.__file__).read_text()
        assert not re.search('SleepDataset|tf_sleep|emulated|patients', source), module.__name__


def test_syncs_of_a_real_step_are_noted_in_text_and_json():
    compiled = tf.function(lambda b: (tf.reduce_sum(b), tf.reduce_mean(b), tf.reduce_max(b)))
    def step(batch): return [x.numpy() for x in compiled(batch)]
    data = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat().prefetch(2)
    verdict = diagnose(data, step, batches=8, seconds=1.)
    assert verdict.measured.syncs == 3
    said = [f.evidence for f in verdict if f.disease == 'host sync per step'] + verdict.notes
    assert any('3 results' in s for s in said)
    if not any(f.disease == 'host sync per step' for f in verdict):
        assert any('3 results' in n for n in verdict.to_dict()['notes'])
        assert any('3 results' in line for line in verdict.lines())


def test_compilations_are_noted_where_every_length_returns_in_the_same_order():
    "Each round sees lengths that are compiled already, so no loop gains from fewer of them."
    w = tf.ones((8, 8))
    step = tf.function(lambda b: tf.reduce_sum(b @ w), jit_compile=True,
                       input_signature=[tf.TensorSpec([None, 8])])
    lengths = tf.data.Dataset.range(1, 51).map(lambda n: tf.ones([n, 8])).prefetch(2)
    verdict = diagnose(lengths, step, batches=8, seconds=20.)   # time for all eight
    m = verdict.measured
    assert m.shapes >= 8 and m.rebuilt == m.shapes - 1 and m.rebuilding > 0, m
    (note,) = [n for n in verdict.notes if 'traced or compiled again' in n]
    assert f'{m.rebuilt} times' in note and ' ms each' in note
    assert note in verdict.to_dict()['notes'] and f'Note: {note}' in verdict.lines()


def test_what_is_compiled_once_is_not_noted():
    step = tf.function(lambda b: tf.reduce_sum(b), jit_compile=True)
    verdict = diagnose(tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat().prefetch(2), step, batches=8,
                       seconds=1.)
    assert verdict.measured.rebuilt == 0 and not any('compiled again' in n for n in verdict.notes)


def test_a_finite_dataset_of_python_batches_and_a_step_that_returns_nothing():
    verdict = diagnose([np.ones((4, 2), 'f')] * 30, lambda b: None, batches=8, seconds=1.)
    assert verdict.bound and 'Python operations of the pipeline: its graph cannot be read' in verdict.unseen


# Data and steps that fail

def from_python(source):
    return tf.data.Dataset.from_generator(source, output_signature=tf.TensorSpec([2], tf.float32))

def raising():
    yield np.ones(2, 'f')
    raise OSError('clip 7 is gone')

@pytest.mark.parametrize('data, says', [
    (lambda: tf.data.Dataset.range(0), 'is empty'),
    (lambda: from_python(raising), 'failed at batch 1: .*clip 7 is gone'),
    (lambda: [np.ones(2)] * 2, 'ended after 2 of 4 batches')])
def test_data_that_fails_is_named(data, says):
    with pytest.raises(UserError, match=says): diagnose(data(), lambda b: b)


def test_a_step_that_fails_is_named():
    with pytest.raises(UserError, match='The step failed on the first batch: ZeroDivisionError'):
        diagnose(tf.data.Dataset.range(9), lambda b: 1 / 0)


def test_what_this_tensorflow_lacks_is_not_seen(asked, monkeypatch):
    monkeypatch.setattr(diagnosis, 'missing_hooks', lambda: ['host syncs: none'])
    assert asked().unseen == ['host syncs: none']


@pytest.mark.slow
def test_data_that_never_comes_does_not_keep_the_process():
    program = ('import time, tensorflow as tf; from xtts_nb.monitor.diagnose import diagnose\n'
               'def never():\n    time.sleep(10**6); yield 1.\n'
               'data = tf.data.Dataset.from_generator(never, output_signature=tf.TensorSpec([]))\n'
               'diagnose(data, lambda b: b, timeout=1)')
    done = python(program, timeout=100)
    assert done.code == 1 and 'gave no batch within 1 s' in done.err.splitlines()[-1]

@pytest.mark.parametrize('given, reason', [
    ([{'a': 1., 'z': 2.}, {'b': 1., 'z': 2.}], 'its argument t is a dict whose keys change: a, z; b, z; ...'),
    ([[1.], [1., 2.]], 'its argument t holds other numbers of tensors: 1, 2, ...'),
    ([[1.], [2.]], None)])
def test_arguments_of_another_structure(given, reason):
    @tf.function
    def step(x, t): return x + sum(tf.nest.flatten(t))
    for t in given: step(tf.zeros(2), tf.nest.map_structure(tf.constant, t))
    step(tf.zeros(3), tf.nest.map_structure(tf.constant, given[0]))
    found = rules.python_argument(rules.changed_arguments(step))
    assert (found and found[0]) == reason
    if found: assert 't' in found[1] and found[2].startswith('step(x, ')
