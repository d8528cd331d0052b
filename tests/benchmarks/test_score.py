"How the diagnosis of the ward is judged and counted, and that it can be run."
import json

import pytest

from benchmarks.diagnosis.ward import run, score
from benchmarks.diagnosis.ward.cases import Case
from benchmarks.diagnosis.ward.score import diagnosed, in_words, judge, totals
from process import xtts_nb

SLOW = Case('slow', 'One', 'a', 'read', cause='c', place='p', cure='c', way='fit', kind='serial map',
            named=('no parallel', ), led=('num_parallel_calls', ))
WELL = Case('well', 'Two', 'b', 'read', why_healthy='w', looks_like='l')   # of the scored half


def finding(disease='busy', evidence='-', remedy='-', change='', gain=2., interval=(1.5, 2.5)):
    return dict(disease=disease, evidence=evidence, remedy=remedy, change=change, place='a.py:1',
                predicted_gain=gain, gain_interval=interval)

def said(*findings, **more): return {'findings': [*findings], 'notes': [], 'seconds': 9.} | more


@pytest.mark.parametrize('findings, named, led', [
    ([finding('No Parallel calls')], 1, None), ([finding(evidence='has no parallel calls')], 1, None),
    ([finding(), finding('no parallel')], 2, None),
    ([finding(), finding(), finding('no parallel')], None, None),
    ([finding(remedy='no parallel')], None, None), ([finding('num_parallel_calls')], None, None),
    ([finding(remedy='num_parallel_calls=8')], None, 1),
    ([finding('no parallel'), finding(change='map(f, num_parallel_calls=8)')], 1, 2), ([], None, None)])
def test_a_cause_is_named_and_a_cure_led_to_by_the_first_two(findings, named, led):
    row = judge(SLOW, said(*findings))
    assert (row['named'], row['led'], row['half'], row['kind']) == (named, led, 'development', 'serial map')
    assert len(row['findings']) == len(findings) and 'predicted' not in row


@pytest.mark.parametrize('ratio, gain, interval, within, inside', [
    (2., 2., (1.5, 2.5), True, True), (2.6, 2., (1.5, 2.5), True, False), (2.7, 2., (1.5, 2.8), False, True),
    (2., 2.6, (2.1, 3.), True, False), (2., 2.7, (1.5, 3.), False, True), (1.5, 2., (1.5, 2.5), False, True)])
def test_a_gain_is_that_of_the_finding_that_names_the_cause(ratio, gain, interval, within, inside):
    right = finding('no parallel', gain=gain, interval=interval)
    row = judge(SLOW, said(finding(gain=50.), right), ratio)
    assert (row['predicted'], row['within_30_percent'], row['in_interval']) == (gain, within, inside)
    assert 'predicted' not in judge(SLOW, said(finding()), ratio)


def test_a_healthy_program_with_a_finding_or_an_error_is_a_false_alarm():
    assert judge(WELL, said())['false_alarm'] is False
    for answer in (said(finding()), {'error': 'x', 'seconds': 1.}): assert judge(WELL, answer)['false_alarm']


def test_each_half_is_counted_by_itself():
    right, fell = finding('no parallel'), {'error': 'fell', 'seconds': 30.}
    rows = [judge(SLOW, said(finding(), right), 2.), judge(SLOW, said(right)), judge(SLOW, fell),
            judge(WELL, said()), judge(WELL, said(finding()))]
    found = totals(rows)
    assert found['development'] == {
        'slow': 3, 'named': 2, 'named_first': 1, 'led': 0, 'healthy': 0, 'false_alarms': 0, 'gains': 1,
        'within_30_percent': 1, 'in_interval': 1, 'errors': 1, 'longest_seconds': 30.}
    assert found['scored'] == dict.fromkeys(found['scored'], 0) | {
        'healthy': 2, 'false_alarms': 1, 'longest_seconds': 9.}


def test_a_finding_of_a_gpu_predicts_nothing():
    said_so = said(finding('no parallel', gain=1.) | {'only_on_gpu': True})
    assert 'predicted' not in judge(SLOW, said_so, 2.) and judge(SLOW, said_so, 2.)['named'] == 1


def test_a_row_in_words():
    row = judge(SLOW, said(finding('no parallel')), 2.)
    assert in_words(row).split() == 'slow named 1 led - 9.0 s no parallel 2.0 x (measured 2.0 x)'.split()
    assert 'ALARM' in in_words(judge(WELL, said(finding()))) and ' healthy ' in in_words(judge(WELL, said()))
    assert in_words(judge(SLOW, {'error': 'it fell', 'seconds': 1.})).endswith('it fell')


def test_a_run_goes_on_and_the_scored_half_is_only_counted(monkeypatch, tmp_path):
    out, asked, measured, lines = tmp_path / 'ward.jsonl', [], [], []
    def answer(script, seconds):
        asked.append((script.parent.name, seconds))
        return said(finding('no parallel'))
    monkeypatch.setattr(score, 'diagnosed', answer)
    monkeypatch.setattr(run, 'cases', lambda half: [SLOW, WELL])
    monkeypatch.setattr(score, 'measure', lambda case, n: measured.append((case, n)) or {'ratio': 2.1})
    rows = score.score_cases(None, None, 3, out, lines.append)
    assert asked == [('slow', 30.), ('well', 30.)] and measured == [(SLOW, 3)]
    assert lines == [f'1 of 2  {in_words(rows[0])}', '2 of 2  scored'] and rows[0]['ratio'] == 2.1
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert kept == json.loads(json.dumps(rows)) == score.score_cases([], None, 3, out) and len(asked) == 2
    assert [r.get('ratio') for r in score.score_cases([], None, 0)] == [None, None] and len(measured) == 1


def test_what_is_published_hides_the_scored_half():
    rows = [judge(SLOW, said(finding('no parallel')), 2.), judge(SLOW, said()),
            judge(SLOW, {'error': 'it fell', 'seconds': 1.}), judge(WELL, said(finding('a secret')))]
    shown = score.published(rows)
    assert shown[0] == dict(case='slow', kind='serial map', first='no parallel', named=1, led=None,
                            alarm=None, predicted=2., low=1.5, high=2.5, measured=2., seconds=9.)
    assert [r['first'] for r in shown] == ['no parallel', 'nothing to fix', 'an error', None]
    assert shown[3] == dict.fromkeys(shown[0]) | dict(case='of the scored half', kind='healthy', alarm=True,
                                                      seconds=9.)
    assert score.total_lines(totals(rows)) == [
        'development half: 0 of 3 led to the cure, 1 named the cause itself; '
        '0 of 0 healthy programs called slow; 1 of 1 gains within 30 %, 1 in their interval; 9 s at most',
        'scored half: 0 of 0 led to the cure, 0 named the cause itself; '
        '1 of 1 healthy programs called slow; 0 of 0 gains within 30 %, 0 in their interval; 9 s at most']
    assert len(score.total_lines(totals(rows[:3]))) == 1


@pytest.mark.slow
def test_a_program_that_fails_or_hangs_is_an_error(tmp_path, monkeypatch):
    wrong = tmp_path / 'wrong.py'
    wrong.write_text('raise ValueError("of its own")')
    found = diagnosed(wrong)
    assert 'ValueError' in found['error'] and found['seconds'] > 0
    monkeypatch.setattr(score, 'LONGEST', .01)
    assert diagnosed(wrong) == {'error': 'longer than 0.01 s', 'seconds': .01}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['count_as_argument'])
def test_a_case_is_diagnosed_as_its_user_would(name):
    "By the command itself, in a process of its own."
    done = xtts_nb('bench', 'diagnose', name, '--repeat', '0', '--json')
    assert done.code == 0, done.err
    (row,) = done.json['rows']
    assert row['named'] == 1 and row['led'] == 1 and row['seconds'] < 60
    assert row['case'] == name and done.json['development']['named'] == 1
