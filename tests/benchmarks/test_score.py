"How the diagnosis of the ward is judged and counted, and that it can be run."
import json

import pytest

from benchmarks.diagnosis.ward import score
from benchmarks.diagnosis.ward.cases import Case, cases
from benchmarks.diagnosis.ward.score import diagnosed, in_words, judge, totals

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


def test_a_row_in_words():
    row = judge(SLOW, said(finding('no parallel')), 2.)
    assert in_words(row).split() == 'slow named 1 led - 9.0 s no parallel 2.0 x (measured 2.0 x)'.split()
    assert 'ALARM' in in_words(judge(WELL, said(finding()))) and ' healthy ' in in_words(judge(WELL, said()))
    assert in_words(judge(SLOW, {'error': 'it fell', 'seconds': 1.})).endswith('it fell')


def test_a_run_goes_on_and_the_scored_half_is_only_counted(monkeypatch, tmp_path, capsys):
    out, asked = tmp_path / 'ward.jsonl', []
    def answer(script, seconds):
        asked.append(script.parent.name)
        return said()
    monkeypatch.setattr(score, 'diagnosed', answer)
    monkeypatch.setattr(score, 'chosen', lambda names, half: [SLOW, WELL])
    monkeypatch.setattr('sys.argv', ['score.py', '--out', str(out)])
    score.main()
    text = capsys.readouterr()
    assert 'slow' in text.err and 'well' not in text.err and asked == ['slow', 'well']
    assert json.loads(text.out)['scored']['healthy'] == 1 and len(out.read_text().splitlines()) == 2
    score.main()
    assert asked == ['slow', 'well'] and capsys.readouterr().out == text.out


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
    (case,) = [c for c in cases('development') if c.name == name]
    row = judge(case, diagnosed(case.scripts[0]), 30.)
    assert row['named'] == 1 and row['led'] == 1 and row['seconds'] < 60
