"A grown model: old ids, old rows, old answers; the new language complete."
import json
import os
from pathlib import Path

import numpy as np
import pytest

from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.model import XTTS
from xtts_nb.new_language import grow, grow_tokenizer
from xtts_nb.text import Tokenizer, train_tokenizer

OLD, NEW = ['The old dog sleeps all day.', 'The boat is old, too!'], ['سگ پیر می‌خوابد.', 'قایق ۱۲ تومان است؟']


@pytest.fixture(scope='module')
def tokenizer(): return Tokenizer(train_tokenizer(OLD, ['en'], 48).bpe, 'xtts')

@pytest.fixture(scope='module')
def model(tokenizer):
    config = XTTSConfig.tiny(width=64).replace(model={'gpt': {'text_tokens': tokenizer.size}})
    return XTTS(config, tokenizer)


def test_old_texts_keep_their_ids(tokenizer):
    grown = grow_tokenizer(tokenizer, 'fa', NEW)
    assert all(grown.encode(t, 'en') == tokenizer.encode(t, 'en') for t in OLD)
    assert grown.start == tokenizer.start and grown.cleaner == 'xtts' and grown.languages == ['en', 'fa']

def test_the_new_texts_are_known_to_the_last_character(tokenizer):
    grown = grow_tokenizer(tokenizer, 'fa', NEW)
    for text in NEW:
        ids = grown.encode(text, 'fa')
        assert not grown.unknown(text, 'fa') and 1 not in ids and grown.decode(ids) == '[fa]' + grown.clean(text, 'fa')
    assert sorted(grown.bpe.get_vocab().values()) == list(range(grown.size))

def test_a_grown_tokenizer_goes_through_a_file(tokenizer, tmp_path):
    grown = grow_tokenizer(tokenizer, 'fa', NEW)
    grown.save(tmp_path / 't.json')
    again = Tokenizer.load(tmp_path / 't.json')
    assert again.to_json() == grown.to_json() and again.encode(NEW[0], 'fa') == grown.encode(NEW[0], 'fa')
    assert grow_tokenizer(again, 'sw', ['ŋ']).encode(NEW[0], 'fa') == grown.encode(NEW[0], 'fa')

def test_the_vocabulary_of_xtts_grows_and_old_ids_stay(tmp_path):
    if not os.environ.get('XTTS_NB_VOCAB'): pytest.skip('no vocabulary of XTTS: XTTS_NB_VOCAB names no file')
    old = Tokenizer.load(os.environ['XTTS_NB_VOCAB'], 'xtts')
    grow_tokenizer(old, 'fa', NEW).save(tmp_path / 't.json')
    grown = Tokenizer.load(tmp_path / 't.json')
    rows = json.loads((Path(__file__).parent / 'data/sentences.json').read_text(encoding='utf-8'))
    for language in old.languages:
        for row in rows[language]:
            if 'ids' in row: assert grown.encode(row['text'], language) == row['ids']
    assert grown.size > old.size and not any(grown.unknown(t, 'fa') or 1 in grown.encode(t, 'fa') for t in NEW)

def test_the_order_of_texts_does_not_matter(tokenizer):
    assert grow_tokenizer(tokenizer, 'fa', NEW).to_json() == grow_tokenizer(tokenizer, 'fa', reversed(NEW)).to_json()

def test_old_rows_are_the_same_bits(model):
    before = {name: v.numpy() for name, v in model.weights.items()}
    grown = grow(model, 'fa', NEW)
    larger = set()
    for name, v in grown.weights.items():
        old, new = before[name], v.numpy()
        assert np.array_equal(new[tuple(slice(n) for n in old.shape)].view(np.uint8), old.view(np.uint8)), name
        assert np.array_equal(model.weights[name].numpy(), old), name
        if new.shape != old.shape: larger.add(name.split('/', 1)[1])
    assert larger == {'text_embedding/embeddings', 'text_head/kernel', 'text_head/bias'}
    assert grown.config.model.gpt.text_tokens == grown.tokenizer.size > model.tokenizer.size

def test_new_rows_are_like_the_old_ones_and_repeat(model):
    pick = lambda m: next(v.numpy() for k, v in m.weights.items() if k.endswith('text_embedding/embeddings'))
    old, a, b, c = pick(model), *(pick(grow(model, 'fa', NEW, seed)) for seed in (0, 0, 1))
    new = a[len(old):]
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert 0.5 < new.std() / old.std() < 2 and len({row.tobytes() for row in new}) == len(new)

def test_spare_rows_are_used_before_more_are_made(tokenizer):
    spare = XTTS(XTTSConfig.tiny(width=64), tokenizer)   # 256 rows
    grown = grow(spare, 'fa', NEW)
    assert grown.config == spare.config and 1 not in grown.tokenizer.encode(NEW[0], 'fa')

def test_saved_and_loaded(model, tmp_path):
    grown = grow(model, 'fa', NEW)
    grown.save(tmp_path / 'm')
    again = XTTS.load(tmp_path / 'm')
    assert all(np.array_equal(a, b) for a, b in zip(grown.weights.values(), again.weights.values()))
    assert again.tokenizer.encode(NEW[1], 'fa') == grown.tokenizer.encode(NEW[1], 'fa')

@pytest.mark.parametrize('language, reason', [('en', 'has en already'), ('fas', 'no language code'), ('', 'no language code')])
def test_what_cannot_grow(tokenizer, language, reason):
    with pytest.raises(UserError, match=reason): grow_tokenizer(tokenizer, language, NEW)
