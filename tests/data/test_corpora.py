"An error in the metadata drops only its row, with a reason; all known layouts are read."
import json
import os
import shutil

import pytest

from process import tree
from xtts_nb.data import corpora
from xtts_nb.data.audio import save_audio, synthetic_voice
from xtts_nb.data.prepare import prepare
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.corpora import (
    LAYOUTS, LONGEST_LINE, LONGEST_TEXT, Dropped, check_dropped, file_fault, find_audio, find_layout,
    layout_line, read_corpus, read_lines, read_rows, synthetic_corpus, visible)
from xtts_nb.data.text import clean

LINE = 'low-0|aa bb|aa bb|low|en'   # a row that can be used
SOUND = b'any bytes: nothing here opens them'


@pytest.fixture
def folder(tmp_path):
    "wavs/low-0.wav to low-2.wav: files that are there, which is all that rows are checked for."
    (tmp_path / 'corpus' / 'wavs').mkdir(parents=True)
    for i in range(3): (tmp_path / 'corpus' / 'wavs' / f'low-{i}.wav').write_bytes(SOUND)
    return tmp_path / 'corpus'

def put(path, content=SOUND):
    "A file with its folders."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

def read(folder, content, name='metadata.csv', **how):
    "Clips and reasons of metadata with this content."
    path = put(folder / name, content)
    clips, dropped = read_corpus(folder if name == 'metadata.csv' else path, **how)
    return clips, {d.id: d.reason for d in dropped}

def facts(clips): return [(c.id, c.text, c.speaker, c.language) for c in clips]


# --- rows without a header ------------------------------------------------------------------------

@pytest.mark.parametrize('line, text, speaker, language', [
    ('low-0|Ab', 'Ab', 'speaker', 'de'), ('low-0|Ab|', 'Ab', 'speaker', 'de'),
    ('low-0|Ab|ab|', 'ab', 'speaker', 'de'),
    ('low-0|Dr. A|doctor a', 'doctor a', 'speaker', 'de'), ('low-0|Ab|ab|anna|en|', 'ab', 'anna', 'en'),
    ('low-0|Ab|ab|anna|en', 'ab', 'anna', 'en'), ('low-0|Ab||anna|en', 'Ab', 'anna', 'en'),
    ('low-0|Ab|ab||en', 'ab', 'speaker', 'en'), ('low-0|Ab|ab|anna|zh_CN', 'ab', 'anna', 'zh-cn'),
    ('low-0|Ab|ab|anna|EN', 'ab', 'anna', 'en'), ('low-0|"Ab|ab" c', 'ab" c', 'speaker', 'de'),
    ('low-0|Ab|ab|anna|', 'ab', 'anna', 'de'), (' low-0 | Ab | ab ', 'ab', 'speaker', 'de')])
def test_rows_of_two_three_and_five_columns(folder, line, text, speaker, language):
    clips, dropped = read(folder, line, language='de')
    assert not dropped and facts(clips) == [('low-0', text, speaker, language)]

BAD_ROWS = {   # line 2; id; what the reason says
    'one column': ('low-1', 'low-1', 'line 2 has 1 columns instead of'),
    'four columns': ('low-1|a|a|low', 'low-1', 'line 2 has 4 columns'),
    'six columns': ('low-1|a|a|low|en|x', 'low-1', 'line 2 has 6 columns'),
    'delimiters only': ('||||||', 'line 2', 'line 2'),
    'no id': ('|a|a', 'line 2', 'no file is named in line 2'),
    'missing file': ('nobody|a|a', 'nobody', 'the file wavs/nobody.wav is missing'),
    'name too long': ('x' * 300 + '|a|a', 'x' * 300, 'missing'),
    'null byte': ('lo\0w|a|a', 'lo\0w', r'wavs/lo\x00w.wav is missing'),
    'folder': ('folder|a|a', 'folder', 'wavs/folder.wav is a folder'),
    'pipe': ('pipe|a|a', 'pipe', 'no regular file'),
    'device': ('device|a|a', 'device', 'no regular file'),
    'link in a circle': ('circle|a|a', 'circle', 'leads back to itself'),
    'links in a circle': ('circle2|a|a', 'circle2', 'leads back to itself'),
    'link to nowhere': ('nowhere|a|a', 'nowhere', 'missing'),
    'up': ('../low-1|a|a', '../low-1', 'leaves the corpus folder'),
    'far up': ('../../x|a|a', '../../x', 'leaves the corpus folder'),
    'up in the middle': ('a/../../low-1|a|a', 'a/../../low-1', 'leaves'),
    'up on Windows': ('..\\x|a|a', '..\\x', 'leaves'),
    'absolute': ('/etc/passwd|a|a', '/etc/passwd', 'leaves the corpus folder'),
    'blank text': ('low-1| | ', 'low-1', 'the text is empty'),
    'quotes only': ('low-1|""|«»', 'low-1', 'the text is empty'),
    'control characters only': ('low-1|\x01\x02|\x03', 'low-1', 'the text is empty'),
    'marks only': ('low-1|x|\u200f\u200f', 'low-1', 'the text is empty'),
    'dots only': ('low-1|...|...', 'low-1', 'no letter or digit: ...'),
    'emoji only': ('low-1|a|😀', 'low-1', 'no letter'),
    'a novel': (f'low-1|a|{"word " * LONGEST_TEXT}', 'low-1', 'the text has 49,999 characters'),
    'a line without end': (f'low-1|a|{"a" * (LONGEST_LINE + 9)}', 'low-1', 'characters, more than'),
    'damaged text': ('low-1|a|sch�n', 'low-1', 'not UTF-8: "sch'),
    'twice': ('low-0|b|b', 'low-0', 'occurs twice'),
    'language in full': ('low-1|a|a|low|English', 'low-1', '"English"'),
    'language in control characters': ('low-1|a|a|low|e\x1bn', 'low-1', r'"e\x1bn"')}

@pytest.mark.parametrize('kind', BAD_ROWS)
def test_a_bad_row_is_dropped_with_its_reason(folder, kind):
    line, name, reason = BAD_ROWS[kind]
    wavs = folder / 'wavs'
    (wavs / 'folder.wav').mkdir()
    os.mkfifo(wavs / 'pipe.wav')
    (wavs / 'device.wav').symlink_to('/dev/zero')
    for link, to in (('circle', 'circle'), ('circle2', 'circle3'), ('circle3', 'circle2'),
                     ('nowhere', 'gone')):
        (wavs / f'{link}.wav').symlink_to(wavs / f'{to}.wav')
    clips, dropped = read(folder, '\n'.join([LINE, line, 'low-2|cc|cc']))
    assert [c.id for c in clips] == ['low-0', 'low-2'] and list(dropped) == [name]
    assert reason in dropped[name] and visible(dropped[name], 1000) == dropped[name]

@pytest.mark.parametrize('text, near', [('abcdefghijkl\ufffdmnopqrstuvwx', 'cdefghijkl\ufffdmnopqrstuv'),
                                        ('ab\ufffdc', 'ab\ufffdc')])
def test_what_stands_beside_a_damaged_character_is_shown(folder, text, near):
    reason = read(folder, f'low-0|{text}')[1]['low-0']
    assert reason == f'not UTF-8: "{near}" in line 1; save the file again as UTF-8'

def test_a_text_may_be_so_long(folder):
    clips, dropped = read(folder, f'low-0|{"a" * 10_000}\nlow-1|{"a" * 10_001}')
    assert [c.id for c in clips] == ['low-0']
    assert dropped == {'low-1': 'the text has 10,001 characters, more than 10,000'}

def test_shown_text_is_cut_and_marked():
    assert visible('می\u200cخوابد\u200e') == 'می\u200cخوابد\\u200e'   # a joiner belongs to the word
    assert [visible('a\n' * n, 4) for n in (2, 3)] == ['a\\na\\n', 'a\\na\\n…']

@pytest.mark.parametrize('content, lines', [
    ('abcdefg\nx\n', ['abcdefg', 'x']), ('abcdefgh\nx', ['abcdefgh', 'x']), ('abcdefgh', ['abcdefgh']),
    ('abcdefghijklmno\nx', ['abcdefgh', 'x']), ('abcdefghijklmnop\nx', ['abcdefgh', 'x']),
    ('\nab\n', [None, 'ab'])])
def test_what_is_beyond_the_longest_line_is_skipped(folder, monkeypatch, content, lines):
    monkeypatch.setattr(corpora, 'LONGEST_LINE', 8)
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line]
    assert list(read_lines(put(folder / 'x', content))) == numbered

def test_a_file_that_may_not_be_opened(folder, monkeypatch):
    def refuse(path): raise PermissionError
    path = folder / 'wavs/low-0.wav'
    assert file_fault(path) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, 'access', lambda path, mode: mode != os.R_OK)
        assert file_fault(path) == 'not readable'
    monkeypatch.setattr(os, 'stat', refuse)
    assert file_fault(path) == 'not readable'

@pytest.mark.parametrize('there, found', [
    ({}, (None, 'wavs/x.wav is missing')), ({'wavs/x.mp3': 'folder'}, (None, 'wavs/x.mp3 is a folder')),
    ({'wavs/x.wav': 'folder', 'x.wav': 'pipe'}, (None, 'wavs/x.wav is a folder')),
    ({'x.wav': 'pipe', 'x.mp3': 'folder'}, (None, 'x.wav is no regular file')),
    ({'wavs/x.wav': 'folder', 'x.flac': 'file'}, ('x.flac', None)),
    ({'x.wav': 'file', 'wavs/x.flac': 'file'}, ('x.wav', None)),
    ({'wavs/x.wav': 'file', 'x.wav': 'file'}, ('wavs/x.wav', None))], ids=str)
def test_which_file_is_meant_or_is_at_fault(folder, there, found):
    for name, kind in there.items():
        {'file': put, 'folder': os.mkdir, 'pipe': os.mkfifo}[kind](folder / name)
    path, reason = find_audio(folder, 'x', ('wavs', ''))
    assert (path or None, reason) == (found[0], found[1] and f'the file {found[1]}')

def test_bytes_that_are_not_utf8_cost_their_row(folder):
    clips, dropped = read(folder, f'{LINE}\nlow-1|schön|schön\n'.encode('latin-1')
                          + b'lo\xffw|a|a\nlow-2|cc|cc\n')
    assert [c.id for c in clips] == ['low-0', 'low-2']
    assert dropped['low-1'].startswith('not UTF-8: "sch\\udcf6n" in line 2')
    assert 'line 3' in dropped['lo\udcffw']
    json.dumps([visible(k) for k in dropped]).encode()   # it can be written down

def test_of_two_rows_with_one_id_the_first_is_used(folder):
    put(folder / 'metadata.csv', f'{LINE}\nlow-0|other|other|low|en\nlow-0|third|third|low|en')
    clips, dropped = read_corpus(folder)
    assert [c.text for c in clips] == ['aa bb'] and [d.id for d in dropped] == ['low-0', 'low-0']

@pytest.mark.parametrize('raw', [
    LINE.encode() + b'\n', b'\xef\xbb\xbf' + LINE.encode(), LINE.encode() + b'\r\n',
    b'\r' + LINE.encode() + b'\r',
    b'\n\n' + LINE.encode() + b'\n   \n', 'low-0|aa\u2028bb|aa\u2028bb|low|en\n'.encode(),
    'low-0|aa\x85bb|aa\x85bb|low|en\n'.encode(),
    b'low-0|aa\0bb|aa\0bb|low|en\n', b'low-0|aa\x0bbb|aa\x0bbb|low|en\r\n\n',
    LINE.encode('utf-16'), (LINE + '\r\n').encode('utf-16-le'), LINE.encode('utf-16-be'),
    b'\xff\xfe' + ('\ufeff' + LINE).encode('utf-16-le')],
    ids=['plain', 'BOM', 'CRLF', 'CR', 'blank lines', 'line separator', 'next line', 'null byte',
         'vertical tab', 'UTF-16',
         'UTF-16-LE without a mark', 'UTF-16-BE without a mark', 'two marks'])
def test_the_same_row_in_other_clothes(folder, raw):
    clips, dropped = read(folder, raw)
    assert not dropped
    assert [(c.id, clean(c.text), c.speaker, c.language) for c in clips] == [('low-0', 'aa bb', 'low', 'en')]

@pytest.mark.parametrize('text', ['سلام\u200fدنیا', 'a\u202eb', 'Ünïcödé', '日本語', 'हिन्दी', 'a 😀'])
def test_text_in_any_script_is_kept_as_it_is(folder, text):
    assert [c.text for c in read(folder, f'low-0|{text}')[0]] == [text]


# --- metadata as a whole --------------------------------------------------------------------------

@pytest.mark.parametrize('raw', [b'', b'\n \n', b'\xef\xbb\xbf', b'audio,text\n'],
                         ids=['empty', 'blank', 'BOM only', 'header only'])
def test_metadata_without_rows_is_refused(folder, raw):
    with pytest.raises(UserError, match='metadata.csv: has no rows'): read(folder, raw)

@pytest.mark.parametrize('raw', ['low-0|schön|schön'.encode('latin-1'), bytes(range(256)) * 9, b'\0' * 99,
                                 b'\xff\xfe\x00'],
                         ids=['latin-1', 'all bytes', 'zeros', 'half of UTF-16'])
def test_metadata_of_which_nothing_can_be_read(folder, small, dvae, tmp_path, raw):
    put(folder / 'metadata.csv', raw)
    with pytest.raises(UserError, match='metadata.csv|corpus: none of the'):
        prepare(folder, tmp_path / 'out', small, dvae)
    assert not (tmp_path / 'out').exists()

@pytest.mark.parametrize('kind', ['nowhere', 'empty folder', 'metadata is a folder', 'metadata is a pipe',
                                  'a pipe',
                                  'another list'])
def test_no_metadata_names_folder_and_remedy(tmp_path, small, dvae, kind):
    folder = tmp_path / 'corpus'
    if kind == 'empty folder': folder.mkdir()
    if kind == 'metadata is a folder': (folder / 'metadata.csv').mkdir(parents=True)
    if kind == 'metadata is a pipe':
        folder.mkdir()
        os.mkfifo(folder / 'metadata.csv')
    if kind == 'a pipe': os.mkfifo(folder)
    if kind == 'another list':
        for i in range(7): put(folder / f'train{i}.txt', LINE)
    with pytest.raises(UserError, match='corpus.*metadata.csv') as e:
        prepare(folder, tmp_path / 'out', small, dvae)
    five = '(train0.txt, train1.txt, train2.txt, train3.txt, train4.txt) or write a line'
    assert not (tmp_path / 'out').exists() and (kind != 'another list' or five in str(e.value))

@pytest.mark.parametrize('language', ['', 'English', 'e', '../x', 'e n'])
def test_the_language_of_the_rest_is_a_code(folder, language):
    with pytest.raises(UserError, match='is no language code'): read(folder, LINE, language=language)

def test_sound_may_lie_behind_a_link(folder, tmp_path):
    shutil.move(folder / 'wavs', tmp_path / 'other disk')
    (folder / 'wavs').symlink_to(tmp_path / 'other disk')
    (folder / 'wavs' / 'linked.wav').symlink_to(put(tmp_path / 'third disk' / 'x.wav'))
    clips, dropped = read(folder, f'{LINE}\nlinked|aa')
    assert [c.id for c in clips] == ['low-0', 'linked'], dropped

@pytest.mark.parametrize('name', ['anna/1', 'a:b', '100%', "it's", 'a b', 'ä', 'x.wav', 'a.b', '-n', '~',
                                  '$HOME', 'CON'])
def test_ids_may_be_any_name(folder, name):
    put(folder / 'wavs' / (name if name.endswith('.wav') else f'{name}.wav'))
    clips, dropped = read(folder, f'{name}|aa')
    assert [c.id for c in clips] == [name] and clips[0].path.is_file(), dropped

@pytest.mark.parametrize('ending', ['.flac', '.mp3', '.ogg', '.opus', '.m4a', '.WAV'])
def test_an_id_finds_sound_of_any_ending(folder, ending):
    path = put(folder / 'wavs' / f'x{ending}')
    clips, dropped = read(folder, f'x{ending}|aa\n' + ('x|aa|aa' if ending != '.WAV' else ''))
    assert {c.path for c in clips} == {path} and not dropped

def test_a_named_file_is_not_replaced_by_one_of_another_ending(folder):
    put(folder / 'clips' / 'a.wav')
    assert read(folder, 'path,text\na.mp3,hello\na.aiff,hello\na.wav,hello')[1] == {
        name: f'the file {name} is missing' for name in ('a.mp3', 'a.aiff')}

def test_sound_of_an_ending_that_an_id_has_seldom_is_found(folder):
    put(folder / 'a.aiff')
    put(folder / 'wavs' / 'LJ001.0001.wav')
    clips, dropped = read(folder, 'path,text\na.aiff,hello\nLJ001.0001,hello')
    assert [c.path.name for c in clips] == ['a.aiff', 'LJ001.0001.wav'] and not dropped


# --- tables ---------------------------------------------------------------------------------------

WANTED = [('1', 'Hello, "you" there', 'anna', 'de')]

TABLES = {
    'CSV': 'id,audio,text,speaker,language\r\n1,wavs/low-0.wav,"Hello, ""you"" there",anna,de\r\n',
    'semicolons': 'id;path;sentence;speaker_name;lang\n1;wavs/low-0.wav;"Hello, ""you"" there";anna;de\n',
    'TSV': 'id\tfile\ttranscript\tclient_id\tlocale\n1\twavs/low-0.wav\tHello, "you" there\tanna\tde\n',
    'TSV with quotes': 'id\tfile\ttranscript\tclient_id\tlocale\n1\twavs/low-0.wav\t"Hello, ""you"" '
    'there"\tanna\tde\n',
    'bars': 'audio_file|text|speaker_name|language|id\nwavs/low-0.wav|Hello, "you" there|anna|de|1\n',
    'any order and more': 'up_votes,Text,LANG,Speaker,ID,file_name,age\n3,"Hello, ""you"" '
    'there",DE,anna,1,low-0.wav,\n',
    'normalised first': 'id|text|normalized_text|speaker|language\n1|Hi|Hello, "you" there|anna|de\n',
    'no normalised': 'id|text|normalised text|speaker|language\n1|Hello, "you" there||anna|de\n',
    'trailing delimiters': 'id,audio,text,speaker,language\n1,wavs/low-0.wav,"Hello, ""you"" '
    'there",anna,de,,,\n',
    'BOM and spaces': '\ufeffid , audio , text , speaker , language\n1 , wavs/low-0 , "Hello, ""you"" '
    'there", anna , de\n',
    'Windows': 'id,audio,text,speaker,language\n1,wavs\\low-0.wav,"Hello, ""you"" there",anna,de\n',
    'JSONL': json.dumps({'id': '1', 'audio_filepath': 'wavs/low-0.wav', 'text': 'Hello, "you" there',
                         'Speaker': 'anna',
                         'lang': 'de', 'duration': 1.5, 'tags': [1, None]})}

@pytest.mark.parametrize('kind', TABLES)
def test_named_columns_in_any_order_and_form(folder, kind):
    if 'normalised' in kind: put(folder / 'wavs' / '1.wav')
    for name in ('metadata.csv', 'any name.txt'):
        clips, dropped = read(folder, TABLES[kind], name)
        assert not dropped and facts(clips) == WANTED and clips[0].path.is_file()

@pytest.mark.parametrize('place', ['', 'clips', 'wavs', 'audio'])
def test_sound_of_a_table_lies_beside_it_or_in_a_usual_folder(folder, place):
    shutil.rmtree(folder / 'wavs')
    path = put(folder / place / 'x.flac')
    assert [c.path for c in read(folder, 'path,text\nx.flac,hello')[0]] == [path]
    assert [c.path for c in read(folder, f'path,text\n{path},hello')[0]] == [path]   # absolute, in the folder
    outside = put(folder.parent / 'y.flac')
    assert 'leaves the corpus folder' in read(folder, f'path,text\n{outside},hello')[1][str(outside)]

@pytest.mark.parametrize('line, cells', [('"\t""\t"a"\t "b" ', ['"', '', 'a', 'b']), ('"a\ta"', ['"a', 'a"']),
                                         ('"a"b"\t"a""b"\t""""', ['"a"b"', 'a"b', '"'])])
def test_quotes_of_a_cell_are_taken_off_where_they_are_a_pair(line, cells):
    assert corpora._cells(line, '\t') == cells

BAD_CELLS = {   # header, row; id; reason
    'too few': ('audio,text,speaker', 'wavs/low-1.wav,hello', 'wavs/low-1.wav',
                'line 3 has 2 columns instead of'),
    'too many': ('audio,text', 'wavs/low-1.wav,hello, you', 'wavs/low-1.wav', 'line 3 has 3 columns'),
    'open quote': ('audio,text', 'wavs/low-1.wav,"hello', 'line 3', 'line 3 is no row'),
    'text behind a quote': ('audio,text', 'wavs/low-1.wav,"hello" you', 'line 3', 'line 3 is no row'),
    'huge cell': ('audio,text', f'wavs/low-1.wav,{"a" * 200_000}', 'line 3',
                  'line 3 is no row: field larger'),
    'no audio': ('audio,text', ',hello', 'line 3', 'no file is named in line 3'),
    'no text': ('audio,text', 'wavs/low-1.wav,', 'wavs/low-1.wav', 'the text is empty'),
    'language': ('audio,text,locale', 'wavs/low-1.wav,hello,unknown', 'wavs/low-1.wav', '"unknown"'),
    'other delimiter': ('audio\ttext', 'wavs/low-1.wav,hello', 'wavs/low-1.wav,hello', '1 columns'),
    'header again': ('audio,text', 'audio,text', 'audio', 'audio.wav is missing'),
    'URL': ('audio,text', 'https://x.y/z.wav,hello', 'https://x.y/z.wav', 'missing')}

@pytest.mark.parametrize('kind', BAD_CELLS)
def test_a_bad_row_of_a_table(folder, kind):
    header, row, name, reason = BAD_CELLS[kind]
    good = [d.join(['wavs/low-{i}.wav', 'hello', *['en'] * (header.count(d) - 1)])
            for d in ',\t' if d in header]
    clips, dropped = read(folder, '\n'.join([header, good[0].format(i=0), row, good[0].format(i=2)]))
    assert [c.id for c in clips] == ['wavs/low-0.wav', 'wavs/low-2.wav'], dropped
    assert list(dropped) == [name] and reason in dropped[name]

BAD_JSON = {
    'broken': ('{"audio": "wavs/low-1.wav", "text": "he', 'line 2', 'line 2 is not JSON'),
    'a list': ('["a", "b"]', 'line 2', 'no JSON object'),
    'deep': ('[' * 100_000, 'line 2', 'line 2 is not JSON'),
    'text is a number': ('{"audio": "wavs/low-1.wav", "text": 3}', 'line 2', '"text" is int'),
    'audio is an object': ('{"audio": {"path": "x"}, "text": "a"}', 'line 2', '"audio" is dict'),
    'text is null': ('{"audio": "wavs/low-1.wav", "text": null}', 'wavs/low-1.wav', 'the text is empty'),
    'speaker is a list': ('{"audio": "wavs/low-1.wav", "text": "a", "speaker": ["b"]}', 'line 2',
                          '"speaker" is list'),
    'half a character': (r'{"audio": "wavs/low-1.wav", "text": "a\ud83d"}', 'wavs/low-1.wav', 'not UTF-8'),
    'half a character in the name': (r'{"audio": "\ud83d", "text": "a"}', '\ud83d', 'not UTF-8'),
    'no audio': ('{"text": "a"}', 'line 2', 'no file is named'),
    'line end in the name': ('{"audio": "a\\nb", "text": "a"}', 'a\nb', r'a\nb.wav is missing'),
    'NaN': ('NaN', 'line 2', 'no JSON object'),
    'endless number': ('{"audio": "wavs/low-1.wav", "text": "a", "x": ' + '9' * 5000 + '}', 'line 2',
                       'not JSON')}

@pytest.mark.parametrize('kind', BAD_JSON)
def test_a_bad_line_of_json(folder, kind):
    line, name, reason = BAD_JSON[kind]
    good = '{{"audio": "wavs/low-{0}.wav", "text": "a", "speaker": 7}}'
    clips, dropped = read(folder, '\n'.join([good.format(0), line, good.format(2)]), 'metadata.jsonl')
    assert [(c.id, c.speaker) for c in clips] == [('wavs/low-0.wav', '7'), ('wavs/low-2.wav', '7')]
    assert list(dropped) == [name] and reason in dropped[name] and len(dropped[name].splitlines()) == 1

TEXTS = 'Hello there, you.', 'Good morning!', 'It rains.'
FILES = [f'wavs/low-{i}.wav' for i in range(3)]

LISTS = {   # without a header: a line for a file and a text; the speaker and language that it gives
    'StyleTTS2': ('{file}|{text}|0', '0', 'de'), 'VITS': ('{file}|{i}|{text}', None, 'de'),
    'names behind': ('{file}|{text}|anna', 'anna', 'de'),
    'names before': ('{file}|anna|{text}', 'anna', 'de'),
    'GPT-SoVITS': ('{file}|anna|EN|{text}', 'anna', 'en'),
    'no speaker': ('{file}||EN|{text}', 'speaker', 'en'),
    'vosk': ('{file}|0|{text}|_', '0', 'de'), 'CSS10': ('{file}|{text}|{text}|3.0{i}', 'speaker', 'de'),
    'tabs': ('{file}\t{text}', 'speaker', 'de'), 'quoted': ('"{file}"|"{text}"', 'speaker', 'de'),
    'another machine': ('D:\\voice\\{name}|anna|EN|{text}', 'anna', 'en'),
    'one text': ('{file}|yes|yes', 'speaker', 'de'),
    'marks': ('\ufeff{name} \u200b|\u200b{text}', 'speaker', 'de')}

@pytest.mark.parametrize('kind', LISTS)
def test_a_list_without_a_header_is_read_by_its_content(folder, kind):
    line, speaker, language = LISTS[kind]
    rows = [line.format(file=file, name=file[5:], text=text, i=i)
            for i, (file, text) in enumerate(zip(FILES, TEXTS))]
    clips, dropped = read(folder, '\n'.join(rows), 'x.list', language='de')
    texts = ['yes'] * 3 if kind == 'one text' else [*TEXTS]
    assert not dropped and [c.text for c in clips] == texts
    assert [(c.path.name, c.speaker, c.language) for c in clips] == [
        (f'low-{i}.wav', speaker or str(i), language) for i in range(3)]

@pytest.mark.parametrize('line', ['{text}|{file}', '{file}|{text}|{i}|{i}', '{text}|0|{file}'])
def test_a_list_whose_columns_are_not_clear_is_refused(folder, line):
    rows = [line.format(file=file, text=text, i=i) for i, (file, text) in enumerate(zip(FILES, TEXTS))]
    with pytest.raises(UserError, match='x.list.*first line'): read(folder, '\n'.join(rows), 'x.list')

@pytest.mark.parametrize('line', ['low-{}|Hello there, {}.|{}', 'low-{0}|{2}|Hello there, {1}.'])
def test_speakers_of_one_clip_each_are_no_texts(folder, line):
    clips, _ = read(folder, '\n'.join(line.format(i, i, name) for i, name in enumerate(('anna', 'bob'))))
    assert [(c.text, c.speaker) for c in clips] == [('Hello there, 0.', 'anna'), ('Hello there, 1.', 'bob')]

@pytest.mark.parametrize('content', ['low-0\t12345\nlow-1\t23456\nlow-2\t34567', 'low-0,Hello\nlow-1,Bye'])
def test_sizes_and_unnamed_cells_are_no_texts(folder, content):
    with pytest.raises(UserError, match='x.tsv.*first line'): read(folder, content, 'x.tsv')

def test_a_cell_in_quotes_may_have_several_lines(folder):
    rows = 'file,text\nlow-0,"one\ntwo"\nlow-1,"open\nlow-2,three'
    clips, dropped = read(folder, rows)
    assert [c.text for c in clips] == ['one two', 'three'] and [*dropped] == ['line 4']

def test_the_text_beside_is_of_the_same_name_and_language(tmp_path):
    for name in 'a.de.srt a.en.srt b.de.srt b.de.wav B.txt b.wav c.old.txt'.split(): put(tmp_path / name)
    beside = corpora.Beside(('.txt', '.srt'), 'en')
    found = [beside.find(tmp_path / name) for name in ('a.wav', 'b.de.wav', 'B.wav', 'c.wav')]
    assert [p and p.name for p in found] == ['a.en.srt', 'b.de.srt', 'B.txt', None]

def test_two_paths_of_another_machine_are_not_one_file(folder):
    clips, dropped = read(folder, 'D:\\a\\low-0.wav|hello\nD:\\b\\low-0.wav|good morning')
    assert len(clips) == 1 and 'another row' in [*dropped.values()][0]

PARTS = {
    'NeMo': '{"audio_filepath": "wavs/low-0.wav", "offset": 0.0, "duration": 1.5, "text": "one"}\n'
            '{"audio_filepath": "wavs/low-0.wav", "offset": 1.5, "duration": 0.5, "text": "two"}',
    'table': 'file,start,end,text\nlow-0,0,1.5,one\nlow-0,1.5,2,two'}

@pytest.mark.parametrize('kind', PARTS)
def test_parts_of_a_recording(folder, kind):
    "For who reads them as such; nobody else gets the whole recording with the text of a part."
    clips, dropped = read(folder, PARTS[kind], 'x', parts=True)
    assert not dropped and [(c.text, c.start, c.end) for c in clips] == [('one', 0, 1.5), ('two', 1.5, 2)]
    clips, dropped = read(folder, PARTS[kind], 'x')
    assert not clips and len(dropped) == 2

@pytest.mark.parametrize('times', ['1,', ',2', '2,1', 'a,b', '-1,2', '00:01,00:02', '0,inf', 'nan,1'])
def test_times_that_are_no_part(folder, times):
    clips, dropped = read(folder, f'file,start,end,text\nlow-0,{times},one', parts=True)
    assert not clips and 'seconds' in dropped['low-0']

@pytest.mark.parametrize('whole', [
    '[{"audio": "wavs/low-0.wav", "text": "hello"},\n{"audio": "wavs/low-1.wav", "text": "hi"}]',
    '{"wavs/low-0.wav": "hello", "wavs/low-1.wav": "hi"}',
    '{\n"low-0": {"text": "hello"},\n"low-1": {"text": "hi"}}',
    '{"version": 1, "data": [\n{"path": "low-0.wav", "text": "hello"}, '
    '{"path": "low-1.wav", "text": "hi"}]}'])
def test_a_whole_file_of_json(folder, whole):
    clips, dropped = read(folder, whole, 'x.json')
    assert not dropped
    assert [(c.path.name, c.text) for c in clips] == [('low-0.wav', 'hello'), ('low-1.wav', 'hi')]

def test_a_line_end_in_a_name_is_a_name(folder):
    put(folder / 'wavs' / 'a\nb.wav')
    clips, dropped = read(folder, json.dumps({'audio': 'a\nb', 'text': 'c'}), 'x.jsonl')
    assert not dropped and clips[0].path.is_file()

@pytest.mark.parametrize('header, named',
                         [('path,speaker', 'text'), ('text,speaker', 'audio'), ('sentence\tlocale', 'audio')])
def test_a_missing_column_is_named(folder, header, named):
    with pytest.raises(UserError, match=f'metadata.csv: the first line has no column for the {named}'):
        read(folder, f'{header}\na,b')


# --- layouts --------------------------------------------------------------------------------------

def vctk(folder, sound='wav48_silence_trimmed', name='{}_mic1.flac'):
    for speaker, number in (('p225', '001'), ('p225', '002'), ('p226', '001')):
        clip = f'{speaker}_{number}'
        put(folder / sound / speaker / name.format(clip))
        put(folder / 'txt' / speaker / f'{clip}.txt', f'Text {clip}.\n')
    put(folder / 'speaker-info.txt', 'ID AGE GENDER\n')
    return folder

def libritts(folder, top=''):
    for speaker, chapter in (('19', '198'), ('19', '227'), ('26', '495')):
        clip = f'{speaker}_{chapter}_000000'
        place = folder / top / speaker / chapter
        for end in ('.wav', '.normalized.txt', '.original.txt'): put(place / f'{clip}{end}', f'Text {clip}.')
        put(place / f'{speaker}_{chapter}.trans.tsv', 'a\tb\n')
    put(folder / 'speakers.tsv', 'READER\tGENDER\n')
    return folder

def commonvoice(folder, name='validated.tsv'):
    rows = ['client_id\tpath\tsentence\tup_votes\tage\tlocale\tsegment']
    for i in range(3):
        put(folder / 'clips' / f'cv_{i}.mp3')
        rows.append(f'{"c" * 128}{i}\tcv_{i}.mp3\t"Text ""{i}"""\t2\t\tsv-SE\t')
    put(folder / name, '\n'.join(rows))
    put(folder / 'other.tsv', '\n'.join(rows[:2]))
    put(folder / 'reported.tsv', 'a\tb\n')
    return folder

CORPORA = {
    'vctk': (vctk, [('p225_001', 'Text p225_001.', 'p225', 'en'),
                    ('p225_002', 'Text p225_002.', 'p225', 'en'),
                    ('p226_001', 'Text p226_001.', 'p226', 'en')]),
    'libritts': (libritts,
                 [(f'{c}_000000', f'Text {c}_000000.', c[:2], 'en') for c in ('19_198', '19_227', '26_495')]),
    'commonvoice': (commonvoice,
                    [(f'cv_{i}.mp3', f'Text "{i}"', 'c' * 128 + str(i), 'sv') for i in range(3)]),
    'ljspeech': (lambda f: put(f / 'metadata.csv', LINE).parent, [('low-0', 'aa bb', 'low', 'en')]),
    'table': (lambda f: put(f / 'metadata.csv', 'path,text\nlow-0.wav,hello').parent,
              [('low-0.wav', 'hello', 'speaker', 'en')]),
    'pairs': (lambda f: [put(f / 'wavs' / name, 'hello') for name in ('low-0.txt', 'low-1.LAB', 'low-2.TXT')]
              and f, [(f'wavs/low-{i}', 'hello', 'speaker', 'en') for i in range(3)]),
    'jsonl': (lambda f: put(f / 'metadata.jsonl', '{"path": "low-0.wav", "text": "hello"}').parent,
              [('low-0.wav', 'hello', 'speaker', 'en')])}

@pytest.mark.parametrize('name', LAYOUTS)
def test_each_layout_is_found_and_read(folder, name):
    make, wanted = CORPORA[name]
    make(folder)
    for layout in (None, name):
        clips, dropped = read_corpus(folder, layout=layout)
        assert facts(clips) == wanted and not dropped and all(c.path.is_file() for c in clips)
    line = layout_line(folder)
    assert find_layout(folder)[0] == name and f'read as {name} (' in line and len(line.splitlines()) == 1

@pytest.mark.parametrize('make', [
    lambda f: vctk(f, 'wav48', '{}.wav'), lambda f: libritts(f, 'train-clean-100'),
    lambda f: commonvoice(f, 'train.tsv')])
def test_older_and_deeper_forms(folder, make): assert len(read_corpus(make(folder))[0]) == 3

def test_a_list_that_is_named_is_read(folder):
    commonvoice(folder)
    assert len(read_corpus(folder / 'other.tsv')[0]) == 1
    assert len(read_corpus(folder / 'validated.tsv')[0]) == 3

@pytest.mark.parametrize('make', [vctk, libritts])
def test_sound_and_text_belong_together(folder, make):
    make(folder)
    paths = sorted(p for p in folder.rglob('*') if p.suffix in ('.wav', '.flac') and 'wavs' not in p.parts)
    text, end = (folder / 'txt/p225', '.txt') if make is vctk else (paths[0].parent, '.normalized.txt')
    paths[0].rename(paths[0].with_stem('alone_mic1'))
    if make is vctk: put(paths[0].with_stem('p225_001_mic2'))
    for bad, name in ((b'\xff\xfe\xff', 'odd'), (b'', 'empty'), ('schön'.encode('latin-1'), 'latin')):
        put(paths[0].with_stem(name))
        put(text / f'{name}{end}', bad)
    put(paths[0].with_stem('pipe'))
    os.mkfifo(text / f'pipe{end}')
    (paths[0].parent / 'round').symlink_to(folder)
    clips, dropped = read_corpus(folder)
    found = {d.id: d.reason for d in dropped}
    assert len(clips) == 2
    assert found.pop('alone' if make is vctk else 'alone_mic1') == 'the recording has no text file'
    assert found.pop('pipe') == 'the text file is no regular file'
    assert found.pop('empty') == 'the text is empty'
    assert 'not UTF-8' in found.pop('latin') and 'not UTF-8' in found.pop('odd')
    assert list(found.values()) == ['the text has no recording'], found

@pytest.mark.parametrize('layout, message', [
    ('vctk', 'is not laid out as vctk'), ('commonvoice', 'is not laid out as commonvoice'),
    ('lj', '"lj" is no layout; choose one of jsonl'),
    ('table', 'the first line has no column for the audio'), ('', 'no layout')])
def test_a_layout_that_does_not_fit(folder, layout, message):
    with pytest.raises(UserError, match=message): read(folder, LINE, layout=layout)

def test_a_forced_layout_beats_the_look(folder):
    put(folder / 'wavs' / 'audio.wav')
    assert facts(read(folder, 'audio|text', layout='ljspeech')[0]) == [('audio', 'text', 'speaker', 'en')]

def test_metadata_goes_before_folders(folder):
    put(vctk(folder) / 'metadata.csv', LINE)
    assert find_layout(folder)[0] == 'ljspeech' and len(read_corpus(folder, layout='vctk')[0]) == 3


# --- many, and few --------------------------------------------------------------------------------

def test_rows_come_one_by_one(folder):
    "The first clip is there before the second line is read."
    path, lines = folder / 'metadata.csv', [f'{LINE}\n'] + ['low-1|a\n'] * 100_000
    path.write_text(''.join(lines))
    rows = read_rows(folder)
    assert next(rows).id == 'low-0'
    path.write_text('')   # what the buffer does not hold is gone
    assert sum(1 for _ in rows) < 5000

def test_a_drop_rate_is_a_share_of_all_rows():
    dropped, config = [Dropped('a\nb', 'bad')] * 2, XTTSConfig.tiny().replace(data={'max_drop_rate': 0.5})
    check_dropped(dropped, 4, config, 'x')
    with pytest.raises(UserError, match=r'x: 2 of 3 clips cannot be used.*\(a\\nb: bad; a'):
        check_dropped(dropped, 3, config, 'x')
    with pytest.raises(UserError, match=r'rate 50% \(a\\nb: bad; a\\nb: bad; a\\nb: bad\); mend'):
        check_dropped(2 * dropped, 7, config, 'x')
    check_dropped([], 0, config, 'x')
    with pytest.raises(UserError, match='none of the 2'):
        check_dropped(dropped, 2, config.replace(data={'max_drop_rate': 1.}), 'x')

def test_synthetic_corpora_repeat(tmp_path):
    a, b = (tree(synthetic_corpus(tmp_path / n, clips=2, seconds=0.3)) for n in 'ab')
    assert a == b
    assert set(a) == {'metadata.csv', 'wavs',
                      *(f'wavs/{v}-{i}.wav' for v in ('low', 'high') for i in range(2))}

def test_the_synthetic_corpus_is_the_same_in_every_release(tmp_path):
    "Recorded times and scores were taken on it."
    folder = synthetic_corpus(tmp_path, clips=8, seconds=0.1)
    texts = ('aa bb', 'bb cc dd', 'cc dd ee ff', 'dd ee ff gg hh', 'ee ff', 'ff gg hh', 'gg hh aa bb',
             'hh aa bb cc dd')
    rows = [f'{voice}-{i}|{text}|{text}|{voice}|en' for voice in ('low', 'high')
            for i, text in enumerate(texts)]
    assert (folder / 'metadata.csv').read_text().splitlines() == rows
    for name, seconds, pitch in (('low-0', 0.1, 100), ('low-5', 0.6, 110), ('high-2', 0.3, 208)):
        save_audio(tmp_path / 'x.wav', synthetic_voice(seconds, pitch))
        assert (tmp_path / 'x.wav').read_bytes() == (folder / 'wavs' / f'{name}.wav').read_bytes()
