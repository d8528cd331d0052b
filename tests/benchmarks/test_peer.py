"Another library in another Python: nobody agrees to its terms but the user; and the output of a script."
import argparse
import json
import sys

import pytest

from benchmarks import peer as page
from benchmarks.peer import Peer
from xtts_nb.config import UserError


def agreement():
    import os
    while True: yield os.environ.get('COQUI_TOS_AGREED')


def asks_for_agreement():
    "As coqui-tts does before it loads a model whose licence must be agreed to."
    import os
    if os.environ.get('COQUI_TOS_AGREED') != '1':
        print(' > You must confirm the following:')
        answer = input('"I agree to the terms of the non-commercial licence" - [y/n]')
        if answer != 'y': raise Exception('You must agree to the terms of service to use this model.')
    while True: yield 'loaded'


@pytest.mark.parametrize('set_to', [None, '0', '1'])
def test_only_the_user_agrees_to_terms(monkeypatch, set_to):
    if set_to is None: monkeypatch.delenv('COQUI_TOS_AGREED', raising=False)
    else: monkeypatch.setenv('COQUI_TOS_AGREED', set_to)
    with Peer(sys.executable, agreement, needs='Python') as peer: assert peer() == set_to


def test_a_library_that_asks_for_agreement_fails_with_the_remedy(monkeypatch):
    monkeypatch.delenv('COQUI_TOS_AGREED', raising=False)
    with Peer(sys.executable, asks_for_agreement) as peer, pytest.raises(UserError) as e: peer()
    assert str(e.value) == (f'{sys.executable}: coqui-tts 0.28 asks for agreement to its terms; '
                            'read them, and if you agree, set COQUI_TOS_AGREED=1 and run this again.')
    monkeypatch.setenv('COQUI_TOS_AGREED', '1')
    with Peer(sys.executable, asks_for_agreement) as peer: assert peer() == 'loaded'
    with pytest.raises(UserError, match='^no-such-python: cannot be run; give the Python of coqui-tts 0.28'):
        Peer('no-such-python', agreement)


def test_a_script_prints_its_result_and_records_it(monkeypatch, capsys):
    kept = []
    monkeypatch.setattr(page, 'write_record', lambda *given, **notes: kept.append((given, notes)))
    monkeypatch.setattr(sys, 'argv', [str(page.ROOT / 'benchmarks/within/one.py'), '--json'])
    result = {'rows': [{'name': 'a', 'step_ms': 3.}], 'model': 'small'}
    given = page.arguments('A script.').parse_args(['--json'])
    page.output(given, 'step_speed', result, ok=True)
    assert json.loads(capsys.readouterr().out) == result | {'ok': True} and not kept
    page.output(argparse.Namespace(json=False, record=True), 'step_speed', result)
    assert capsys.readouterr().out.startswith('small')
    assert kept == [(('step_speed',), {'program': 'python benchmarks/within/one.py', **result})]


@pytest.mark.parametrize('main, code', [(lambda: None, None), (lambda: 1, 1)])
def test_the_exit_code_of_a_script(main, code):
    with pytest.raises(SystemExit) as end: page.run(main)
    assert end.value.code == code


def test_an_error_of_the_user_is_one_sentence(monkeypatch, capsys):
    def main(): raise UserError('a: is not there.')
    monkeypatch.setattr(sys, 'argv', [str(page.ROOT / 'benchmarks/within/one.py')])
    with pytest.raises(SystemExit) as end: page.run(main)
    assert end.value.code == 2 and capsys.readouterr().err == 'one.py: a: is not there.\n'
