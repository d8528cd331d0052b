"A grown model: old ids, old rows, old answers; the new language complete."
import json
import os
from pathlib import Path

import numpy as np
import pytest

from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.files import read_tensors, write_tensors
from xtts_nb.models.xtts import XTTS
from process import tree, xtts_nb
from xtts_nb.train.finetune import _grown, grow, grow_folder, grow_tokenizer, new_pieces, read_texts
from xtts_nb.data.text import Tokenizer, learn_merges, train_tokenizer

OLD = ['The old dog sleeps all day.', 'The boat is old, too!']
NEW = ['سگ پیر می‌خوابد.', 'قایق ۱۲ تومان است؟']


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
        assert not grown.unknown(text, 'fa') and 1 not in ids
        assert grown.decode(ids) == '[fa]' + grown.clean(text, 'fa')
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
    rows = json.loads((Path(__file__).parents[1] / 'stored/sentences.json').read_text(encoding='utf-8'))
    for language in old.languages:
        for row in rows[language]:
            if 'ids' in row: assert grown.encode(row['text'], language) == row['ids']
    assert grown.size > old.size
    assert not any(grown.unknown(t, 'fa') or 1 in grown.encode(t, 'fa') for t in NEW)

def test_the_order_of_texts_does_not_matter(tokenizer):
    assert grow_tokenizer(tokenizer, 'fa', NEW).to_json() == grow_tokenizer(tokenizer, 'fa',
                                                                            reversed(NEW)).to_json()

def test_old_rows_are_the_same_bits(model):
    before = {name: v.numpy() for name, v in model.weights.items()}
    grown = grow(model, 'fa', NEW)
    larger = set()
    for name, v in grown.weights.items():
        old, new = before[name], v.numpy()
        assert np.array_equal(new[tuple(slice(n) for n in old.shape)].view(np.uint8),
                              old.view(np.uint8)), name
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
    assert grown.config == spare.config.replace(model={'gpt': {'grown_from': tokenizer.size}})
    assert 1 not in grown.tokenizer.encode(NEW[0], 'fa')

@pytest.mark.parametrize('axis', [0, 1])
def test_new_rows_are_drawn_around_the_mean_of_the_old_ones(axis):
    old = np.random.default_rng(5).normal([[1., 50.], [20., 7.], [3., 9.]]).astype(np.float32)
    shape = (5, 2) if axis == 0 else (3, 6)
    grown = _grown(old, shape, np.random.default_rng(3))
    more = np.random.default_rng(3).standard_normal((2, 2) if axis == 0 else (3, 4))
    expected = np.expand_dims(old.mean(axis), axis) + np.expand_dims(old.std(axis), axis) * more
    old_rows, added = np.split(grown, [old.shape[axis]], axis)
    assert grown.dtype == np.float32 and np.array_equal(old_rows, old)
    assert np.allclose(added, expected, rtol=1e-5)
    assert _grown(old, old.shape, None) is old

def test_a_second_language_keeps_the_place_where_growth_began(model):
    twice = grow(grow(model, 'fa', NEW), 'sv', ['å ä'])
    assert twice.config.model.gpt.grown_from == model.tokenizer.size
    assert twice.tokenizer.languages == ['en', 'fa', 'sv']

def test_the_new_tag_is_a_mark_like_the_old_ones(tokenizer):
    made = json.loads(grow_tokenizer(tokenizer, 'fa', NEW).bpe.to_str())
    marks = {m.pop('content'): m for m in made['added_tokens']}
    assert marks['[fa]'] == marks['[en]'] | {'id': tokenizer.size}

def test_saved_and_loaded(model, tmp_path):
    grown = grow(model, 'fa', NEW)
    grown.save(tmp_path / 'm')
    again = XTTS.load(tmp_path / 'm')
    assert all(np.array_equal(a, b) for a, b in zip(grown.weights.values(), again.weights.values()))
    assert again.tokenizer.encode(NEW[1], 'fa') == grown.tokenizer.encode(NEW[1], 'fa')

@pytest.mark.parametrize('texts', [[], [''], [' ', '"']])
def test_texts_without_text(tokenizer, texts):
    with pytest.raises(UserError, match='texts in fa are empty'): grow_tokenizer(tokenizer, 'fa', texts)


# --- pieces of words ----------------------------------------------------------------------------------------

MANY = [f'{a} {b}' for a in ('سگ', 'سگ‌ها', 'قایق', 'old سگ', 'boat')
        for b in ('پیر', 'پیرتر', 'کهنه', 'dog')]

@pytest.mark.parametrize('tokens', [0, 5, 20, 25, 30, 10_000])
def test_pieces_fill_up_to_the_number_asked_for(tokenizer, tokens):
    least = grow_tokenizer(tokenizer, 'fa', MANY).size - tokenizer.size
    most = grow_tokenizer(tokenizer, 'fa', MANY, 10**6).size - tokenizer.size
    grown = grow_tokenizer(tokenizer, 'fa', MANY, tokens)
    assert least == 1 + len({*''.join(tokenizer.clean(t, 'fa') for t in MANY)} - {' '} -
                            {*tokenizer.bpe.get_vocab()})
    assert least < most and grown.size - tokenizer.size == min(max(tokens, least), most)
    assert sorted(grown.bpe.get_vocab().values()) == list(range(grown.size))

def test_pieces_make_rows_shorter_and_leave_old_texts_alone(tokenizer):
    plain, pieces = (grow_tokenizer(tokenizer, 'fa', MANY, n) for n in (0, 40))
    for text in MANY:
        ids = pieces.encode(text, 'fa')
        assert pieces.decode(ids) == '[fa]' + pieces.clean(text, 'fa') and 1 not in ids
    length = lambda t: sum(len(t.encode(text, 'fa')) for text in MANY)
    assert length(pieces) < 0.8 * length(plain)
    for text in [*OLD, 'boatdog', 'olddog the']:
        assert pieces.encode(text, 'en') == tokenizer.encode(text, 'en')

@pytest.mark.parametrize('known, characters, pairs', [
    ('a b', 'a', [('a', 'b')]), ('a b c', 'a', [('a', 'b'), ('ab', 'c')]), ('a b c', 'c', []),
    ('a b c ab', 'c', [('ab', 'c')]),
    ('a b c ab', 'a', [('ab', 'c')]), ('b c', 'a', []), ('a b c d', 'd', [])])
def test_pieces_are_made_of_what_there_is(known, characters, pairs):
    "The texts are merged as a + b, then as ab + c."
    assert learn_merges(['abc ab'] * 3) == [('a', 'b'), ('ab', 'c')]
    assert list(new_pieces(['abc ab'] * 3, {*known.split()}, {*characters})) == pairs

def test_every_piece_holds_a_new_character(tokenizer):
    cleaned = [tokenizer.clean(t, 'fa') for t in MANY]
    known = set(tokenizer.bpe.get_vocab())
    characters = set(''.join(cleaned)) - {' '} - known
    pairs = list(new_pieces(cleaned, known | characters, characters))
    assert pairs and all(characters & set(a + b) for a, b in pairs) and len(set(pairs)) == len(pairs)
    assert not all(characters & set(a + b) for a, b in learn_merges(cleaned))   # others were refused


# --- a folder for a folder ----------------------------------------------------------------------------------

@pytest.fixture
def home(model, tmp_path):
    "A model with a tensor and settings besides, and texts."
    model.save(tmp_path / 'model')
    path = tmp_path / 'model/model.safetensors'
    write_tensors(path, dict(read_tensors(path)) | {'decoder/enter/bias': np.arange(3, dtype=np.float32)})
    (tmp_path / 'model/coqui.json').write_text('{"model": "xtts"}')
    (tmp_path / 'fa.txt').write_text('\n\n'.join(NEW) + '\n', encoding='utf-8')
    (tmp_path / 'empty.txt').write_text(' \n\n')
    (tmp_path / 'binary.txt').write_bytes(b'\xff\xfe\x00')
    (tmp_path / 'taken').mkdir()
    (tmp_path / 'taken/note').write_text('mine')
    return tmp_path

def test_grow_as_a_command(home, model, tokenizer):
    before = tree(home / 'model')
    done = xtts_nb('add-language', 'grown', '--model', 'model', '--language', 'fa', '--texts', 'fa.txt',
                   '--tokens', '30', '--json', cwd=home)
    assert done.code == 0, done.err
    assert done.json == dict(tokens_before=tokenizer.size, tokens=XTTS.load(home / 'grown').tokenizer.size,
                             out='grown')
    assert tree(home / 'model') == before and (home / 'grown/coqui.json').read_text() == '{"model": "xtts"}'
    old, new = (dict(read_tensors(home / name / 'model.safetensors')) for name in ('model', 'grown'))
    assert old.keys() == new.keys()
    for name, x in old.items():
        old_rows = new[name][tuple(slice(n) for n in x.shape)]
        assert old_rows.dtype == x.dtype and old_rows.tobytes() == x.tobytes(), name

@pytest.mark.parametrize('line, parts', [
    ('out --model nowhere --language fa --texts fa.txt', ['nowhere', 'holds no model']),
    ('out --model model --language en --texts fa.txt', ['has en already']),
    ('out --model model --language persian --texts fa.txt', ['persian', 'language code']),
    ('out --model model --language fa --texts no.txt', ['no.txt', 'missing']),
    ('out --model model --language fa --texts empty.txt', ['empty.txt', 'no text']),
    ('out --model model --language fa --texts binary.txt', ['binary.txt', 'UTF-8']),
    ('taken --model model --language fa --texts fa.txt', ['taken', 'already holds something'])])
def test_what_grow_refuses(home, line, parts, monkeypatch, ran):
    monkeypatch.chdir(home)
    before, done = tree(home), ran(f'add-language {line}')
    assert done.code == 2 and done.out == '' and 'Traceback' not in done.err
    assert all(part in done.err.splitlines()[-1] for part in parts), done.err
    assert tree(home) == before

def test_texts_are_lines(home):
    assert read_texts(home / 'fa.txt') == NEW
    (home / 'fa.txt').write_bytes(('\ufeff' + '\r\n'.join(NEW) + '\r\n').encode())   # by an editor of Windows
    assert read_texts(home / 'fa.txt') == NEW

def test_a_model_whose_weights_are_broken_leaves_nothing(home):
    path = home / 'model/model.safetensors'
    path.write_bytes(path.read_bytes()[:-5])
    before = tree(home)
    with pytest.raises(UserError, match='model.safetensors'):
        grow_folder(home / 'model', home / 'out', 'fa', NEW)
    assert tree(home) == before

@pytest.mark.parametrize('language, reason',
                         [('en', 'has en already'), ('fas', 'no language code'), ('', 'no language code')])
def test_what_cannot_grow(tokenizer, language, reason):
    with pytest.raises(UserError, match=reason): grow_tokenizer(tokenizer, language, NEW)
