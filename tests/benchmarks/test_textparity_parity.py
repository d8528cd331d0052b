"The rows that compare text, and their sentences; the readings of coqui-tts are stored."
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from xtts_nb.config import UserError
from xtts_nb.data.text import LANGUAGES, Tokenizer, clean_for, train_tokenizer
from benchmarks.parity import PARITY_SENTENCES, our_text, read_sentences, coqui_text, text_parity

STORED = Path(__file__).parents[1] / 'stored/sentences.json'


@pytest.fixture(scope='module')
def tokenizer():
    return Tokenizer(train_tokenizer(['yes no and ja nein und oui non et'], ['en', 'de'], 64).bpe, 'xtts')

def test_every_language_has_a_sentence_with_something_to_read():
    assert sorted(PARITY_SENTENCES) == sorted(LANGUAGES)
    assert read_sentences() == list(PARITY_SENTENCES.items())
    for language, text in PARITY_SENTENCES.items(): assert clean_for(text, language) != text.lower(), language

def test_sentences_of_a_file():
    pairs = read_sentences(STORED)
    assert len(pairs) > 500 and {language for language, _ in pairs} == set(LANGUAGES)

@pytest.mark.parametrize('text', ['[]', '{}', '{"en": []}', '{"en": [5]}', '{"en": ["x", 5]}',
                                  '{"en": 5}', '{"en": [{"said": "x"}]}', '"en"'])
def test_a_file_without_sentences(tmp_path, text):
    (tmp_path / 's.json').write_text(text)
    with pytest.raises(UserError, match='s.json: holds no sentences'): read_sentences(tmp_path / 's.json')

def test_no_file(tmp_path):
    with pytest.raises(UserError, match='s.json: the file is missing'): read_sentences(tmp_path / 's.json')

def test_the_stored_sentences_as_rows(tokenizer):
    "Cleaned text of all languages, without any vocabulary, against the stored readings of coqui-tts."
    stored = json.loads(STORED.read_text(encoding='utf-8'))
    rows = [(language, row) for language in LANGUAGES for row in stored[language]]
    pairs = [(language, row['text']) for language, row in rows]
    ours = [(clean_for(text, language, as_trained=True), None) for language, text in pairs]
    theirs = [[row['clean'], None] if 'clean' in row else None for _, row in rows]
    cleaned, unread = text_parity(pairs, ours, theirs)
    assert cleaned['ok'] and unread['ok']
    assert cleaned['note'] == f'{len(pairs) - 17} of {len(pairs) - 17} sentences'
    assert unread['stage'] == 'text that coqui-tts cannot read' and unread['note'] == '17 of 17 sentences'

def test_groups_of_sentences(tokenizer):
    pairs = [('en', 'Yes & no'), ('de', 'Ja'), ('fr', 'Oui'), ('fr', 'Non'), ('en', 'no')]
    ours = our_text(tokenizer, pairs)
    assert ours[2] == ('oui', None) and tokenizer.decode(ours[0][1]) == '[en]yes and no'
    theirs = [[text, ids] for text, ids in ours[:4]] + [None]
    assert [(r['stage'].split(',')[0], r['ok'], r['max_abs']) for r in text_parity(pairs, ours, theirs)] == [
        ('text ids', True, 0), ('cleaned text', True, 0), ('text that coqui-tts cannot read', True, 0)]

@pytest.mark.parametrize('row, change, stage',
                         [(0, ['yes and no', [1, 2]], 'text ids'), (3, ['nom', None], 'cleaned text')])
def test_a_difference_is_counted_and_shown(tokenizer, row, change, stage):
    pairs = [('en', 'Yes & no'), ('de', 'Ja'), ('fr', 'Oui'), ('fr', 'Non')]
    ours = our_text(tokenizer, pairs)
    theirs = [change if i == row else [text, ids] for i, (text, ids) in enumerate(ours)]
    (bad,) = [r for r in text_parity(pairs, ours, theirs) if not r['ok']]
    assert bad['stage'].startswith(stage) and (bad['max_abs'], bad['max_rel']) == (1, 0.5)
    assert bad['note'] == f'1 of 2 sentences, not {pairs[row][0]}: {pairs[row][1]}'

def test_a_sentence_that_neither_reads_is_not_ok(tokenizer):
    (row,) = text_parity([('en', '"')], our_text(tokenizer, [('en', '"')]), [None])
    assert not row['ok']

def test_a_missing_reading_is_an_error(tokenizer):
    with pytest.raises(ValueError): text_parity([('en', 'Yes')], our_text(tokenizer, [('en', 'Yes')]), [])

def test_a_note_shows_the_beginning_of_the_first_difference(tokenizer):
    pairs = [('en', 'no'), ('de', 'Ja ' * 20), ('en', 'Yes'), ('en', 'and')]
    theirs = [[text, ids if language == 'en' and text == 'no' else []] for (language, _), (text, ids) in
              zip(pairs, our_text(tokenizer, pairs))]
    (row,) = text_parity(pairs, our_text(tokenizer, pairs), theirs)
    assert row == dict(stage='text ids', max_abs=3., max_rel=0.75, ok=False,
                       note=f'1 of 4 sentences, not de: {("Ja " * 20)[:40]}')

def test_the_calls_of_the_tokenizer(monkeypatch):
    "Cleaning by the language alone, ids by its whole code; null where it fails."
    class Reader:
        def __init__(self, path): self.path = path
        def preprocess_text(self, text, language): return f'{self.path} {language} {text}'
        def encode(self, text, language): return [len(text), {'en': 1, 'zh-cn': 2}[language]]
    for name in ('TTS', 'TTS.tts', 'TTS.tts.layers', 'TTS.tts.layers.xtts', 'TTS.tts.layers.xtts.tokenizer'):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules['TTS.tts.layers.xtts.tokenizer'].VoiceBpeTokenizer = Reader
    readings = json.loads(coqui_text('v.json', json.dumps([['zh-cn', 'abc'], ['xx', 'd'], ['en', 'e']])))
    assert readings == [['v.json zh abc', [3, 2]], None, ['v.json en e', [1, 1]]]
