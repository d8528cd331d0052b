"Cleaning, unknown characters, training that repeats, and files that are no tokenizer."
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from xtts_nb.config import UserError
from xtts_nb.data.text import (
    CLEANERS, TEXT_STOP, Tokenizer, clean, fold_language, learn_merges, pad_ids, plain_markdown,
    train_tokenizer)

TEXTS = ['The old dog sleeps.', 'The cold fog creeps, and the old dog sleeps.', 'Der alte Hund schläft.',
         'سگ پیر می‌خوابد.', '老狗在睡觉。']
LANGUAGES = ['en', 'de', 'fa', 'zh-cn']


@pytest.fixture(scope='module')
def tokenizer(): return train_tokenizer(TEXTS, LANGUAGES, 128)


@pytest.mark.parametrize('text, cleaned', [
    ('', ''), ('   ', ''), ('\t\n', ''), ('""', ''), ('“”„«»', ''), ('A', 'a'), (' A  b\tc\nd ', 'a b c d'),
    ('"Quoted" “too”', 'quoted too'),
    ('Fru\u0308h', 'früh'), ('FRÜH', 'früh'), ('a\u00a0b', 'a b'), ('a\x00b\x1fc', 'a b c'),
    ("don't", "don't"),
    ('老 狗', '老 狗'),
    ('ΑΣ', 'ας'), ('می\u200cخوابد', 'می\u200cخوابد'), ('a\u2028b', 'a b'), ('\ufeffa', 'a'),
    ('İzmir', 'izmir')])
def test_clean(text, cleaned):
    assert clean(text) == cleaned and clean(cleaned) == cleaned

@pytest.mark.parametrize('language', LANGUAGES)
@pytest.mark.parametrize('text', TEXTS)
def test_decoding_gives_the_cleaned_text_and_the_tag(tokenizer, text, language):
    ids = tokenizer.encode(text, language)
    assert tokenizer.decode(ids) == f'[{language}]{clean(text)}'
    assert ids[0] == tokenizer.encode('', language)[0] and tokenizer.encode('', language) == ids[:1]
    assert TEXT_STOP not in ids and tokenizer.start not in ids and max(ids) < tokenizer.size

def test_languages_and_marks(tokenizer):
    assert tokenizer.languages == sorted(LANGUAGES)
    assert [tokenizer.bpe.id_to_token(i) for i in range(4)] == ['[STOP]', '[UNK]', '[SPACE]', '[START]']
    assert tokenizer.start == 3

@pytest.mark.parametrize('language', ['fr', 'FR-fr', '', 'z', 'STOP'])
def test_an_unknown_language_is_named_with_those_there_are(tokenizer, language):
    with pytest.raises(UserError, match=f'no language "{language}"; it has de, en, fa, zh-cn'):
        tokenizer.encode('the', language)

@pytest.mark.parametrize('codes, language', [
    (('en', 'EN', ' en ', 'en-US', 'en_GB'), 'en'), (('zh', 'ZH', 'zh-CN', 'zh-tw', 'cmn'), 'zh-cn'),
    (('fa-IR',), 'fa'), (('de-at',), 'de')])
def test_case_and_region_of_a_language_do_not_matter(tokenizer, codes, language):
    for code in codes:
        assert tokenizer.language(code) == fold_language(code) == language
        assert tokenizer.encode('the', code) == tokenizer.encode('the', language)

def test_languages_of_three_letters_are_languages_and_cantonese_is_not_mandarin(tokenizer):
    codes = 'kab', 'kmr', 'ckb', 'fil', 'yue'
    many = train_tokenizer(TEXTS, codes, 128)
    assert many.languages == sorted(codes) and many.encode('the', 'kab') != many.encode('the', 'kmr')
    assert many.language('zh-HK') == many.language('zh_Hant_MO') == 'yue'
    with pytest.raises(UserError, match='zh-HK'): tokenizer.language('zh-HK')
    assert '3' in clean('3', 'fil')   # Finnish numbers would be wrong

def test_a_region_that_the_model_knows_is_kept():
    both = train_tokenizer(TEXTS, ['pt', 'pt-br'], 128)
    codes = 'pt-BR', 'pt_br', 'pt-PT', 'PT'
    assert [*map(both.language, codes)] == ['pt-br', 'pt-br', 'pt', 'pt']

@pytest.mark.parametrize('text, spoken, dropped, unknown', [
    ('The old dog.', 'the old dog.', '', ''),
    ('**The** *old* `dog`, ~~the~~ ***fog***.', 'the old dog, the fog.', '*`~', ''),
    ('the dog ☺! \U0001f468\u200d\U0001f469', 'the dog .', '☺\U0001f468\U0001f469', ''),
    ('the☺dog☺', 'the dog', '☺', ''), ('old…', 'old.', '', ''), ('the — fog', 'the fog', '—', ''),
    ('the\u200b dog\ufeff, fo\u00adg', 'the dog, fog', '', ''), ('the ж dog', 'the dog', '', 'ж'),
    ('fócé ｄｏｇ the\u0301 oﬀ', 'foce dog the off', '', ''), ("t'he", 'the', "'", ''),
    ('خُوابدً', 'خوابد', '\u064b\u064f', ''),
    ('☺', '', '☺', ''), ('***', '', '*', ''), ('', '', '', ''), ('*', '', '*', '')])
def test_what_of_a_text_can_be_said(tokenizer, text, spoken, dropped, unknown):
    said = tokenizer.speakable(text, 'en')
    assert said == (''.join(c for c in spoken if c not in unknown), sorted(dropped), sorted(unknown))
    assert tokenizer.speakable(said.text, 'en').text == said.text

def test_numbers_are_said_though_the_corpus_has_no_digit():
    "And though it lacks a letter of their words."
    plain = train_tokenizer(['one two three, four five sen dogs. hello have cats i keep'], ['en'])
    assert plain.speakable('Hello, I have 3 cats & 6 dogs!', 'en') == (
        'hello, i have three cats and siks dogs.', [], [])
    assert 1 not in plain.encode(plain.speakable('3 cats, 6 dogs', 'en').text, 'en')

@pytest.mark.parametrize('text, plain', [
    ('a_b_c and 2 * 3 * 4', 'a_b_c and 2 * 3 * 4'), ('_a b_ __c__', 'a b c'), ('a - b', 'a - b'),
    ('You need:\n\n- eggs\n- milk, \n- [x] two\n  apples!', 'You need:\n\nEggs. Milk, Two apples!'),
    ('# Setup\nRun it\n1. a\n2. b\n\n10. c', 'Setup.\n\nRun it\n\n1. A. 2. B. 10. C.'), ('2.', '2. '),
    ('• a\n• b', 'A. B.'),
    ('| name | age |\n|---|---|\n| bob | ten |', 'Name, age. Bob, ten.'),
    ('Use this:\n```py\nfor i in x:\n```\nDone.', 'Use this:\n\nDone.'), ('* * *\na', 'a'), ('> b\n---', 'b'),
    ('See [the docs](https://e.com/x_(y)), [more](https://a.b "title"), https://www.e.com/x?y=1.',
     'See the docs, more, e.com.'),
    ('<p>One <b>t</b>wo</p>', '\nOne two'), ('Dear <name>, $x^2$ for $5', 'Dear  name , x^2 for $5'),
    ('A[^1] b.\n\n[^1]: note', 'A b.\n\nnote'),
    ('    It was dark.\n\n[Anna]: yes', 'It was dark.\n\n[Anna]: yes')])
def test_only_what_markdown_means_is_removed(text, plain): assert plain_markdown(text) == plain

@pytest.mark.parametrize('text', ['1' * 30_000, '1' + ',000' * 8_000, '[' * 30_000, '\ud800a'])
def test_no_text_takes_time_squared_or_fails(tokenizer, text):
    began = time.monotonic()
    assert tokenizer.speakable(text, 'en') and time.monotonic() - began < 20

def test_the_released_tokenizer_is_given_numbers_as_they_are_meant():
    signs = Tokenizer(train_tokenizer(['five at percent euro minus and a b'], ['en'], 128).bpe, 'xtts')
    assert signs.speakable('5 € & -5% @', 'en') == ('five euro & minus 5% @', [], [])
    assert signs.speakable('a ж € b', 'en') == ('a b', ['€'], ['ж'])
    assert 1 in signs.encode('ж a', 'en')   # [UNK], as in coqui-tts

@pytest.mark.parametrize('text, unknown',
                         [('the', []), ('THE', []), ('"the"', []), ('', []), ('tжe ж q', ['q', 'ж']),
                          ('the 😀', ['😀']),
                          ('a1', ['1'])])
def test_unknown_characters(tokenizer, text, unknown):
    assert tokenizer.unknown(text) == unknown

@pytest.mark.parametrize('text', ['[STOP]', '[START] the', 'the[UNK]', '[SPACE]', '[en] the', 'the [de]'])
def test_a_mark_written_in_a_text_is_unknown(tokenizer, text):
    "It is refused before it could act as a mark; capitals never do."
    assert {'[', ']'} <= set(tokenizer.unknown(text))
    assert not {TEXT_STOP, tokenizer.start} & set(tokenizer.encode(text, 'en'))

@pytest.mark.parametrize('language', ['eng', 'EN', '', 'english', 'e', 'zh-hk'])
def test_a_language_code_that_is_none_is_refused(language):
    "Else the tokenizer would be made without it, and every clip of it be dropped."
    with pytest.raises(UserError, match='language'): train_tokenizer(TEXTS, ['de', language], 128)

@pytest.mark.parametrize('size', [1, 20])
def test_too_few_tokens_name_the_setting(size):
    with pytest.raises(UserError, match='model.gpt.text_tokens to at least') as e:
        train_tokenizer(TEXTS, LANGUAGES, size)
    needed = int(str(e.value).rsplit(' ', 1)[1].rstrip('.'))
    assert train_tokenizer(TEXTS, LANGUAGES, needed).size == needed
    with pytest.raises(UserError): train_tokenizer(TEXTS, LANGUAGES, needed - 1)

@pytest.mark.parametrize('size', [64, 80, 128, 6681])
def test_it_never_has_more_tokens_than_asked(size):
    assert train_tokenizer(TEXTS, LANGUAGES, size).size <= size

def test_without_texts_there_are_only_marks():
    assert train_tokenizer([], ['en'], 16).size == 5

def test_merges_shorten(tokenizer):
    assert len(tokenizer.encode('the old dog', 'en')) < 1 + len('the old dog') - 2

def test_what_occurs_twice_is_merged_the_commonest_first(capfd):
    assert learn_merges(['ab abc', 'abc ab x', 'xy']) == [('a', 'b'), ('ab', 'c')]
    assert capfd.readouterr() == ('', '')

CHILD = '''
import sys
import time
sys.path.insert(0, sys.argv[1])
from test_text import LANGUAGES, TEXTS, train_tokenizer
import hashlib
many = [' '.join(TEXTS[(i * k) % 5].split()[::-1 if i % 2 else 1]) for i in range(40) for k in (1, 2, 3)]
print(hashlib.sha256(train_tokenizer(many, set(LANGUAGES), 300).to_json().encode()).hexdigest())
'''

def test_two_fresh_processes_make_the_same_tokenizer():
    run = lambda seed, threads: subprocess.run(
        [sys.executable, '-c', CHILD, os.path.dirname(__file__)], capture_output=True,
        text=True, check=True,
        env=os.environ | {'PYTHONHASHSEED': seed, 'RAYON_NUM_THREADS': threads}).stdout
    assert len(run('1', '1').strip()) == 64 and run('1', '1') == run('2', '4')

def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / 'new' / 't.json')
    again = Tokenizer.load(tmp_path / 'new' / 't.json')
    assert again.to_json() == tokenizer.to_json()
    assert again.languages == tokenizer.languages
    assert again.size == tokenizer.size
    assert all(again.encode(t, 'fa') == tokenizer.encode(t, 'fa') for t in TEXTS)
    again.save(tmp_path / 'b.json')
    assert (tmp_path / 'b.json').read_bytes() == (tmp_path / 'new/t.json').read_bytes()

@pytest.mark.parametrize('content, reason', [
    (None, 'missing'), (b'', 'not a tokenizer file'), (b'{}', 'not a tokenizer file'),
    (b'[1]', 'not a tokenizer file'),
    (b'\xff\xfe', 'not a tokenizer file'), ('half', 'not a tokenizer file'),
    ('without START', r'lacks \[START\]')])
def test_a_file_that_is_no_tokenizer_is_named(tokenizer, tmp_path, content, reason):
    path = tmp_path / 't.json'
    if content == 'half': path.write_text(tokenizer.to_json()[:500])
    elif content == 'without START': path.write_text(tokenizer.to_json().replace('[START]', '[BEGIN]'))
    elif content is not None: path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as e: Tokenizer.load(path)
    assert str(path) in str(e.value)

@pytest.mark.parametrize('rows, width', [([[1, 2], [3]], 4), ([[1, 2], [3]], 2), ([[]], 3), ([[7]], 1)])
def test_padding(rows, width):
    padded = pad_ids(rows, width)
    assert padded.shape == (len(rows), width) and padded.dtype == np.int32
    assert all(list(p[:len(r)]) == r and not p[len(r):].any() for p, r in zip(padded, rows))

def test_the_file_is_plain_json(tokenizer):
    assert json.loads(tokenizer.to_json())['model']['type'] == 'BPE'

def test_the_cleaner_is_part_of_the_file(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(CLEANERS, 'loud', lambda text, language: text.upper())
    Tokenizer(tokenizer.bpe, 'loud').save(tmp_path / 't.json')
    assert '睡' in (tmp_path / 't.json').read_text(encoding='utf-8')   # as people read it
    again = Tokenizer.load(tmp_path / 't.json')
    assert again.cleaner == 'loud' and again.decode(again.encode('the', 'en')) == '[en]' + '[UNK]' * 3
    assert again.unknown('the') == ['E', 'H', 'T']
    assert again.to_json() == Tokenizer(tokenizer.bpe, 'loud').to_json()
    assert Tokenizer.load(tmp_path / 't.json', 'plain').encode('the', 'en') == tokenizer.encode('the', 'en')

def test_a_cleaner_that_nobody_has_is_named(tokenizer, tmp_path):
    Tokenizer(tokenizer.bpe, 'lost').save(tmp_path / 't.json')
    with pytest.raises(UserError, match='"lost", which is none of plain, xtts'):
        Tokenizer.load(tmp_path / 't.json')

def test_a_file_of_the_plain_cleaner_is_one_of_hugging_face(tokenizer):
    "So that the files and caches from before cleaners had names stay valid."
    assert tokenizer.to_json() == tokenizer.bpe.to_str()
