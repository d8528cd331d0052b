"""Stages against the stored results of coqui-tts for the same small checkpoint; PyTorch is not needed.

Those of one network are compared in `tests/models`."""
import json
from pathlib import Path

import numpy as np
import pytest

from make_parity_data import utterance
from benchmarks import parity
from benchmarks.parity import our_text, PARITY_SENTENCES, read_sentences, text_parity
from xtts_nb.config import UserError
from xtts_nb.data.text import clean_for, _LANGUAGES, Tokenizer, train_tokenizer
from xtts_nb.train.step import token_losses
from xtts_nb.models.xtts import XTTS

STORED = Path(__file__).parents[1] / 'stored'

def test_features(toy_inputs, theirs, toy_xtts, all_ok):
    rows = parity.feature_parity(toy_inputs, theirs, toy_xtts.config)
    all_ok(rows)
    assert len(rows) == 4

def test_latents(toy_inputs, theirs, toy_xtts, all_ok):
    all_ok(parity.latents_parity(toy_xtts, toy_inputs, theirs))

@pytest.mark.slow
def test_greedy(toy_inputs, theirs, toy_xtts, all_ok):
    all_ok(parity.greedy_parity(toy_xtts.gpt, toy_inputs, theirs))

@pytest.mark.slow
def test_a_whole_utterance(toy_xtts, all_ok):
    "Two recordings and a sentence in, sound out."
    with np.load(STORED / 'utterance.npz') as file: theirs = dict(file)
    rows = parity.utterance_parity(toy_xtts, utterance(), theirs)
    all_ok(rows)
    seconds = len(theirs['utterance_wav']) / 24000
    assert rows[-1]['note'] == f"{len(theirs['utterance_states'][0])} codes, {seconds:.2f} s"

@pytest.mark.slow
def test_habits_show_without_parity(toy, toy_inputs, theirs):
    "Without `parity`, the mask of the text's STOP and the number of STOPs give another loss."
    default = XTTS.load(toy)
    parts = token_losses(default.gpt, parity.gpt_batch(toy_inputs, theirs))
    ours = {name: float(parts[f'{name}_loss'] / parts[f'{name}_count']) for name in ('text', 'code')}
    assert abs(ours['code'] / theirs['code_loss'] - 1) > 1e-3
    assert int(parts['code_count']) == sum(toy_inputs['code_length'] + 1)

@pytest.mark.slow
def test_a_changed_weight_is_seen(toy_inputs, theirs, toy_xtts):
    kernel = toy_xtts.gpt.blocks[1].expand.kernel
    before = kernel.numpy()
    kernel.assign(before * 1.01)
    rows = parity.gpt_parity(toy_xtts.gpt, toy_inputs, theirs)
    kernel.assign(before)
    assert not next(r for r in rows if r['stage'] == 'code logits')['ok']

# --- comparing ---------------------------------------------------------------------------------------------

A, B, C = parity.compare_stage, parity.compare_mel, parity.compare_codes
CELLS = np.zeros(1000)

def cells(*values): return np.r_[values, CELLS[len(values):]]

@pytest.mark.parametrize('ask, ours, theirs, more, expected', [
    (A, [2., 4.], [2., 5.], (), dict(max_abs=1, max_rel=0.2, ok=False)),
    (A, [1.25], [1.], (0.25,), dict(max_abs=0.25, max_rel=0.25, ok=True)),
    (A, [1 + 9e-5], [1.], (), dict(ok=True)), (A, [1 + 11e-5], [1.], (), dict(ok=False)),
    (A, [1e-13], [0.], (), dict(max_rel=0.1, ok=False)),
    (A, np.ones(3), np.ones(4), (), dict(ok=False, max_abs=None, max_rel=None, note='shape (3,), not (4,)')),
    (B, CELLS, CELLS, (), dict(ok=True, max_abs=0, note='100.000% within 1e-4')),
    (B, CELLS + 1e-4, CELLS, (), dict(ok=True)),
    (B, CELLS, CELLS + 1.1e-4, (), dict(ok=False, note='0.000% within 1e-4')),
    (B, cells(4e-4), CELLS, (), dict(ok=True, note='99.900% within 1e-4')),
    (B, cells(4e-4, 4e-4), CELLS, (), dict(ok=False)),
    (C, [1, 2, 3, 4], [1, 2, 3, 3], (), dict(ok=False, note='75.00% of 4 the same, 3 different ones')),
    (C, [1, 2, 3, 4], [1, 2, 3, 3], (0.75,), dict(ok=True)), (C, [1, 2], [1, 2], (), dict(ok=True)),
    (C, [1, 2], [1], (), dict(ok=False, note='shape (2,), not (1,)'))])
def test_what_counts_as_equal(ask, ours, theirs, more, expected):
    row = ask('x', ours, theirs, *more)
    found = {k: pytest.approx(v) if isinstance(v, float) else v for k, v in row.items() if k in expected}
    assert found == expected and row['stage'] == 'x'

# --- text ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def reader():
    return Tokenizer(train_tokenizer(['yes no and ja nein und oui non et'], ['en', 'de'], 64).bpe, 'xtts')

def test_every_language_has_a_sentence_with_something_to_read(tmp_path):
    assert sorted(PARITY_SENTENCES) == sorted(_LANGUAGES)
    assert read_sentences() == list(PARITY_SENTENCES.items())
    for language, text in PARITY_SENTENCES.items(): assert clean_for(text,
                                                                     language) != text.lower(), language
    for text in (None, '[]', '{"en": [5]}', '{"en": 5}', '{"en": [{"said": "x"}]}'):
        if text: (tmp_path / 's.json').write_text(text)
        with pytest.raises(UserError, match='s.json'): read_sentences(tmp_path / 's.json')

def test_the_stored_sentences_as_rows():
    "Cleaned text of all languages, without any vocabulary, against the stored readings of coqui-tts."
    stored = json.loads((STORED / 'sentences.json').read_text(encoding='utf-8'))
    rows = [(language, row) for language in _LANGUAGES for row in stored[language]]
    assert len(rows) > 500 and all(sum('clean' in row for row in stored[l]) >= 30 for l in _LANGUAGES)
    pairs = [(language, row['text']) for language, row in rows]
    ours = [(clean_for(text, language, as_trained=True), None) for language, text in pairs]
    theirs = [[row['clean'], None] if 'clean' in row else None for _, row in rows]
    cleaned, unread = text_parity(pairs, ours, theirs)
    assert cleaned['ok'] and unread['ok']
    assert cleaned['note'] == f'{len(pairs) - 17} of {len(pairs) - 17} sentences'
    assert unread['stage'] == 'text that coqui-tts cannot read' and unread['note'] == '17 of 17 sentences'

@pytest.mark.parametrize('row, change, stage', [
    (None, None, ''), (0, ['yes and no', [1, 2]], 'text ids'), (3, ['nom', None], 'cleaned text')])
def test_a_difference_is_counted_and_shown(reader, row, change, stage):
    pairs = [('en', 'Yes & no'), ('de', 'Ja'), ('fr', 'Oui'), ('fr', 'Non'), ('en', 'no')]
    ours = our_text(reader, pairs)
    assert ours[2] == ('oui', None) and reader.decode(ours[0][1]) == '[en]yes and no'
    theirs = [change if i == row else [text, ids] for i, (text, ids) in enumerate(ours[:4])] + [None]
    bad = [r for r in text_parity(pairs, ours, theirs) if not r['ok']]
    assert [r['stage'].startswith(stage) for r in bad] == [True] * (row is not None)
    for r in bad: assert (r['max_abs'], r['max_rel']) == (1, 0.5) and pairs[row][1] in r['note']
    (unread,) = text_parity([('en', '"')], our_text(reader, [('en', '"')]), [None])
    assert not unread['ok']   # neither reads it
