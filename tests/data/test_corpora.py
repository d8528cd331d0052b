"Layouts and rows, with a reason for each that is dropped; sound of every kind; the report of what is there."
import io
import json
import os
import shutil
import struct

import numpy as np
import pytest
import soundfile

from process import tree
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data import corpora
from xtts_nb.data.audio import load_audio, resample, save_audio, synthetic_voice
from xtts_nb.data.corpora import (
    Clip, Dropped, _find_layout, _LAYOUTS, layout_line, _LONGEST_LINE, measure_clip,
    read_audio, read_corpus, _read_rows, reason_kind, report_text, summary, synthetic_corpus, visible)
from xtts_nb.data.prepare import encode_corpus
from xtts_nb.data.text import clean

LINE = 'low-0|aa bb|aa bb|low|en'   # a row that can be used
SOUND = b'any bytes: nothing here opens them'

@pytest.fixture
def folder(tmp_path):
    "wavs/low-0.wav to low-2.wav: files that are there, which is all that rows are checked for."
    for i in range(3): put(tmp_path / 'corpus/wavs' / f'low-{i}.wav')
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

# --- rows without a header ----------------------------------------------------------------------------------

@pytest.mark.parametrize('line, text, speaker, language', [
    ('low-0|Ab', 'Ab', 'speaker', 'de'), ('low-0|Ab|ab|', 'ab', 'speaker', 'de'),
    ('low-0|Ab|ab|anna|en|', 'ab', 'anna', 'en'), ('low-0|Ab||anna|en', 'Ab', 'anna', 'en'),
    ('low-0|Ab|ab||EN', 'ab', 'speaker', 'en'), ('low-0|Ab|ab|anna|zh_CN', 'ab', 'anna', 'zh-cn'),
    ('low-0|"Ab|ab" c', 'ab" c', 'speaker', 'de'), ('low-0|Ab|ab|anna|', 'ab', 'anna', 'de'),
    (' low-0 | Ab | ab ', 'ab', 'speaker', 'de')])
def test_rows_of_two_three_and_five_columns(folder, line, text, speaker, language):
    clips, dropped = read(folder, line, language='de')
    assert not dropped and facts(clips) == [('low-0', text, speaker, language)]

BAD_ROWS = [   # line 2, id, what the reason names
    ('low-1', 'low-1', 'line 2 has 1 columns'), ('low-1|a|a|low', 'low-1', 'line 2 has 4 columns'),
    ('||||||', 'line 2', 'line 2'), ('|a|a', 'line 2', 'line 2'), ('low-0|b|b', 'low-0', 'occurs twice'),
    ('nobody|a|a', 'nobody', 'wavs/nobody.wav is missing'), ('x' * 300 + '|a|a', 'x' * 300, 'missing'),
    ('lo\0w|a|a', 'lo\0w', r'wavs/lo\x00w.wav is missing'), ('folder|a|a', 'folder', 'wav is a folder'),
    ('pipe|a|a', 'pipe', 'not a regular file'), ('device|a|a', 'device', 'not a regular file'),
    ('circle|a|a', 'circle', 'leads back to itself'), ('nowhere|a|a', 'nowhere', 'missing'),
    ('../low-1|a|a', '../low-1', 'leaves the corpus folder'), ('..\\x|a|a', '..\\x', 'leaves'),
    ('a/../../low-1|a|a', 'a/../../low-1', 'leaves'),
    ('/etc/passwd|a|a', '/etc/passwd', 'leaves the corpus folder'), ('low-1| | ', 'low-1', 'empty'),
    ('low-1|""|«»', 'low-1', 'empty'), ('low-1|\x01\x02|\x03', 'low-1', 'empty'),
    ('low-1|x|\u200f\u200f', 'low-1', 'empty'), ('low-1|...|...', 'low-1', 'no letter or digit: ...'),
    ('low-1|a|😀', 'low-1', 'no letter'),
    (f'low-1|a|{"a" * (_LONGEST_LINE + 9)}', 'low-1', 'characters, more than'),
    ('low-1|a|sch�n', 'low-1', 'not UTF-8: "sch'), ('low-1|a|a|low|English', 'low-1', '"English"'),
    ('low-1|a|a|low|e\x1bn', 'low-1', r'"e\x1bn"')]

@pytest.mark.parametrize('line, name, reason', BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_dropped_with_its_reason(folder, line, name, reason):
    wavs = folder / 'wavs'
    (wavs / 'folder.wav').mkdir()
    os.mkfifo(wavs / 'pipe.wav')
    (wavs / 'device.wav').symlink_to('/dev/zero')
    links = {'circle': 'round', 'round': 'circle', 'nowhere': 'gone'}
    for link, to in links.items(): (wavs / f'{link}.wav').symlink_to(wavs / f'{to}.wav')
    clips, dropped = read(folder, '\n'.join([LINE, line, 'low-2|cc|cc']))
    assert [c.id for c in clips] == ['low-0', 'low-2'] and list(dropped) == [name]
    assert reason in dropped[name] and visible(dropped[name], 1000) == dropped[name]

def test_the_longest_text_and_what_is_shown_of_a_text(folder):
    clips, dropped = read(folder, f'low-0|{"a" * 10_000}\nlow-1|{"a" * 10_001}')
    assert [c.id for c in clips] == ['low-0'] and '10,001 characters' in dropped['low-1']
    assert visible('می\u200cخوابد\u200e') == 'می\u200cخوابد\\u200e'   # a joiner belongs to the word
    assert [visible('a\n' * n, 4) for n in (2, 3)] == ['a\\na\\n', 'a\\na\\n…']

def test_bytes_that_are_not_utf8_cost_their_row(folder):
    clips, dropped = read(folder, f'{LINE}\nlow-1|schön|schön\n'.encode('latin-1')
                          + b'lo\xffw|a|a\nlow-2|cc|cc\n')
    assert [c.id for c in clips] == ['low-0', 'low-2']
    assert dropped['low-1'].startswith('not UTF-8: "sch\\udcf6n" in line 2')
    assert 'line 3' in dropped['lo\udcffw']
    json.dumps([visible(k) for k in dropped]).encode()   # it can be written down

def test_the_same_row_in_other_encodings_and_line_ends(folder):
    row, marks = LINE.encode(), ('\ufeff' + LINE).encode('utf-16-le')
    for raw in (row + b'\n', b'\xef\xbb\xbf' + row, row + b'\r\n', b'\r' + row + b'\r',
                b'\n\n' + row + b'\n   \n', b'\xff\xfe' + marks,   # two marks
                LINE.encode('utf-16'), (LINE + '\r\n').encode('utf-16-le'), LINE.encode('utf-16-be'),
                *(f'low-0|aa{c}bb|aa{c}bb|low|en\n'.encode() for c in '\u2028\x85\0\x0b')):
        clips, dropped = read(folder, raw)
        assert not dropped, raw
        assert [(c.id, clean(c.text), c.speaker, c.language) for c in clips] == [
            ('low-0', 'aa bb', 'low', 'en')], raw

def test_text_in_any_script_and_ids_of_any_name_are_kept(folder):
    for text in ('سلام\u200fدنیا', 'a\u202eb', 'Ünïcödé', '日本語', 'हिन्दी', 'a 😀'):
        assert [c.text for c in read(folder, f'low-0|{text}')[0]] == [text]
    for name in ('anna/1', 'a:b', '100%', "it's", 'a b', 'ä', 'x.wav', 'a.b', '-n', '~', '$HOME', 'CON'):
        put(folder / 'wavs' / (name if name.endswith('.wav') else f'{name}.wav'))
        clips, dropped = read(folder, f'{name}|aa')
        assert [c.id for c in clips] == [name] and clips[0].path.is_file(), dropped

# --- metadata as a whole ------------------------------------------------------------------------------------

def pipe(path): path.parent.mkdir(exist_ok=True), os.mkfifo(path)

@pytest.mark.parametrize('make, named', [
    *((lambda f, raw=raw: put(f / 'metadata.csv', raw), 'metadata.csv') for raw in (
        b'', b'\n \n', b'\xef\xbb\xbf', b'audio,text\n')),
    *((lambda f, raw=raw: put(f / 'metadata.csv', raw), 'none of the') for raw in (
        bytes(range(256)), b'\0' * 99, b'\xff\xfe\x00', 'low-0|schön|schön'.encode('latin-1'))),
    (lambda f: put(f / 'metadata.csv', 'text,speaker\na,b'), 'audio'),
    (lambda f: put(f / 'metadata.csv', 'path,speaker\na,b'), 'text'),
    (lambda f: f.with_name('nowhere'), 'nowhere'), (lambda f: (f / 'metadata.csv').mkdir(), 'metadata.csv'),
    (lambda f: pipe(f / 'metadata.csv'), 'metadata.csv'),
    (lambda f: [put(f / f'train{i}.txt', LINE) for i in range(7)], 'train4.txt')])
def test_metadata_of_which_nothing_can_be_read(folder, small, dvae, tmp_path, make, named):
    source = make(folder)
    with pytest.raises(UserError) as e:
        encode_corpus(source if str(source).endswith('nowhere') else folder, tmp_path / 'out', small, dvae)
    assert named in str(e.value) and not (tmp_path / 'out').exists()

def test_sound_may_lie_behind_a_link(folder, tmp_path):
    shutil.move(folder / 'wavs', tmp_path / 'other disk')
    (folder / 'wavs').symlink_to(tmp_path / 'other disk')
    (folder / 'wavs' / 'linked.wav').symlink_to(put(tmp_path / 'third disk' / 'x.wav'))
    clips, dropped = read(folder, f'{LINE}\nlinked|aa')
    assert [c.id for c in clips] == ['low-0', 'linked'], dropped

def test_sound_of_any_ending_is_found_but_a_named_file_is_not_replaced_by_another(folder):
    for ending in ('.flac', '.mp3', '.ogg', '.opus', '.m4a', '.WAV'):
        path = put(folder / 'wavs' / f'{ending[1:]}{ending}')
        assert [c.path for c in read(folder, f'{ending[1:]}|aa')[0]] == [path]
    for name in ('clips/a.wav', 'b.aiff', 'wavs/LJ001.0001.wav'): put(folder / name)
    clips, dropped = read(folder, 'path,text\na.mp3,hello\na.aiff,hello\na.wav,hello\nb.aiff,x\nLJ001.0001,x')
    assert [c.path.name for c in clips] == ['a.wav', 'b.aiff', 'LJ001.0001.wav']
    assert dropped == {name: f'the file {name} is missing' for name in ('a.mp3', 'a.aiff')}

# --- tables -------------------------------------------------------------------------------------------------

HELLO = '"Hello, ""you"" there"'
TABLES = {
    'CSV': f'id,audio,text,speaker,language\r\n1,wavs/low-0.wav,{HELLO},anna,de\r\n',
    'semicolons': f'id;path;sentence;speaker_name;lang\n1;wavs/low-0.wav;{HELLO};anna;de\n',
    'TSV': 'id\tfile\ttranscript\tclient_id\tlocale\n1\twavs/low-0.wav\tHello, "you" there\tanna\tde\n',
    'TSV with quotes': f'id\tfile\ttranscript\tclient_id\tlocale\n1\twavs/low-0.wav\t{HELLO}\tanna\tde\n',
    'bars': 'audio_file|text|speaker_name|language|id\nwavs/low-0.wav|Hello, "you" there|anna|de|1\n',
    'any order': f'up_votes,Text,LANG,Speaker,ID,file_name,age\n3,{HELLO},DE,anna,1,low-0.wav,\n',
    'normalised first': 'id|text|normalized_text|speaker|language\n1|Hi|Hello, "you" there|anna|de\n',
    'no normalised': 'id|text|normalised text|speaker|language\n1|Hello, "you" there||anna|de\n',
    'trailing delimiters': f'id,audio,text,speaker,language\n1,wavs/low-0.wav,{HELLO},anna,de,,,\n',
    'BOM': f'\ufeffid , audio , text , speaker , language\n1 , wavs/low-0 , {HELLO}, anna , de\n',
    'Windows': f'id,audio,text,speaker,language\n1,wavs\\low-0.wav,{HELLO},anna,de\n',
    'JSONL': json.dumps({'id': '1', 'audio_filepath': 'wavs/low-0.wav', 'text': 'Hello, "you" there',
                         'Speaker': 'anna', 'lang': 'de', 'duration': 1.5, 'tags': [1, None]})}

@pytest.mark.parametrize('kind', TABLES)
def test_named_columns_in_any_order_and_form(folder, kind):
    if 'normalised' in kind: put(folder / 'wavs' / '1.wav')
    for name in ('metadata.csv', 'any name.txt'):
        clips, dropped = read(folder, TABLES[kind], name)
        assert not dropped and facts(clips) == [('1', 'Hello, "you" there', 'anna', 'de')]
        assert clips[0].path.is_file()

@pytest.mark.parametrize('place', ['', 'clips', 'wavs', 'audio'])
def test_sound_of_a_table_lies_beside_it_or_in_a_usual_folder(folder, place):
    shutil.rmtree(folder / 'wavs')
    path, outside = put(folder / place / 'x.flac'), put(folder.parent / 'y.flac')
    assert [c.path for c in read(folder, 'path,text\nx.flac,hello')[0]] == [path]
    assert [c.path for c in read(folder, f'path,text\n{path},hello')[0]] == [path]   # absolute, in the folder
    assert 'leaves the corpus folder' in read(folder, f'path,text\n{outside},hello')[1][str(outside)]

ROW = '{{"audio": "wavs/low-{}.wav", "text": "a", "speaker": 7}}'
BAD_CELLS = [   # header, row; id; reason
    ('audio,text,speaker', 'wavs/low-1.wav,hello', 'wavs/low-1.wav', 'line 3 has 2 columns'),
    ('audio,text', 'wavs/low-1.wav,hello, you', 'wavs/low-1.wav', 'line 3 has 3 columns'),
    ('audio,text', 'wavs/low-1.wav,"hello" you', 'line 3', 'line 3 is not a row'),
    ('audio,text', f'wavs/low-1.wav,{"a" * 200_000}', 'line 3', 'line 3 is not a row: field larger'),
    ('audio,text', ',hello', 'line 3', 'line 3'), ('audio,text', 'low-1.wav,', 'low-1.wav', 'empty'),
    ('audio,text,locale', 'wavs/low-1.wav,hello,unknown', 'wavs/low-1.wav', '"unknown"'),
    ('audio,text', 'https://x.y/z.wav,hello', 'https://x.y/z.wav', 'missing')]
BAD_JSON = [   # line 2; id; reason
    ('{"audio": "wavs/low-1.wav", "text": "he', 'line 2', 'not JSON'), ('["a"]', 'line 2', 'no JSON object'),
    ('[' * 100_000, 'line 2', 'not JSON'), ('NaN', 'line 2', 'no JSON object'),
    ('{"audio": {"path": "x"}, "text": "a"}', 'line 2', '"audio" is dict'),
    ('{"audio": "wavs/low-1.wav", "text": null}', 'wavs/low-1.wav', 'empty'),
    (r'{"audio": "wavs/low-1.wav", "text": "a\ud83d"}', 'wavs/low-1.wav', 'not UTF-8'),
    (r'{"audio": "\ud83d", "text": "a"}', '\ud83d', 'not UTF-8'), ('{"text": "a"}', 'line 2', 'line 2'),
    ('{"audio": "a\\nb", "text": "a"}', 'a\nb', r'a\nb.wav is missing'),
    ('{"audio": "wavs/low-1.wav", "text": "a", "x": ' + '9' * 5000 + '}', 'line 2', 'not JSON')]

@pytest.mark.parametrize('header, row, name, reason', [*BAD_CELLS, *(('', *bad) for bad in BAD_JSON)],
                         ids=range(len(BAD_CELLS + BAD_JSON)))
def test_a_bad_row_of_a_table_or_of_json(folder, header, row, name, reason):
    good = ','.join(['wavs/low-{}.wav', 'hello', *['en'] * (header.count(',') - 1)]) if header else ROW
    lines = [header, good.format(0), row, good.format(2)]
    clips, dropped = read(folder, '\n'.join(filter(None, lines)), 'metadata.csv' if header else 'm.jsonl')
    assert [c.id for c in clips] == ['wavs/low-0.wav', 'wavs/low-2.wav'], dropped
    assert [*dropped] == [name] and reason in dropped[name] and len(dropped[name].splitlines()) == 1

TEXTS = 'Hello there, you.', 'Good morning!', 'It rains.'
LISTS = {   # a line for a file and a text without a header -> the speaker and language that it gives
    '{file}|{text}|0': ('0', 'de'), '{file}|{i}|{text}': (None, 'de'), '{file}|{text}|anna': ('anna', 'de'),
    '{file}|anna|EN|{text}': ('anna', 'en'), '{file}||EN|{text}': ('speaker', 'en'),
    '{file}|0|{text}|_': ('0', 'de'), '{file}|{text}|{text}|3.0{i}': ('speaker', 'de'),
    '{file}\t{text}': ('speaker', 'de'), '"{file}"|"{text}"': ('speaker', 'de'),
    'D:\\voice\\{name}|anna|EN|{text}': ('anna', 'en'), '{file}|yes|yes': ('speaker', 'de'),
    '\ufeff{name} \u200b|\u200b{text}': ('speaker', 'de')}

@pytest.mark.parametrize('line', LISTS)
def test_a_list_without_a_header_is_read_by_its_content(folder, line):
    speaker, language = LISTS[line]
    rows = [line.format(file=f'wavs/low-{i}.wav', name=f'low-{i}.wav', text=text, i=i)
            for i, text in enumerate(TEXTS)]
    clips, dropped = read(folder, '\n'.join(rows), 'x.list', language='de')
    assert not dropped and [c.text for c in clips] == (['yes'] * 3 if 'yes' in line else [*TEXTS])
    assert [(c.path.name, c.speaker, c.language) for c in clips] == [
        (f'low-{i}.wav', speaker or str(i), language) for i in range(3)]

@pytest.mark.parametrize('line', [
    '{text}|low-{i}', 'low-{i}|{text}|{i}|{i}', '{text}|0|low-{i}', 'low-{i}\t{i}2345', 'low-{i},Hello'])
def test_a_list_whose_columns_are_not_clear_is_refused(folder, line):
    rows = [line.format(text=text, i=i) for i, text in enumerate(TEXTS)]
    with pytest.raises(UserError, match='x.list.*first line'): read(folder, '\n'.join(rows), 'x.list')

@pytest.mark.parametrize('line', ['low-{}|Hello there, {}.|{}', 'low-{0}|{2}|Hello there, {1}.'])
def test_speakers_of_one_clip_each_are_no_texts(folder, line):
    clips, _ = read(folder, '\n'.join(line.format(i, i, name) for i, name in enumerate(('anna', 'bob'))))
    assert [(c.text, c.speaker) for c in clips] == [('Hello there, 0.', 'anna'), ('Hello there, 1.', 'bob')]

def test_cells_of_several_lines_and_paths_of_another_machine(folder):
    clips, dropped = read(folder, 'file,text\nlow-0,"one\ntwo"\nlow-1,"open\nlow-2,three')
    assert [c.text for c in clips] == ['one two', 'three'] and [*dropped] == ['line 4']
    clips, dropped = read(folder, 'D:\\a\\low-0.wav|hello\nD:\\b\\low-0.wav|good morning')
    assert len(clips) == 1 and 'another row' in [*dropped.values()][0]
    put(folder / 'wavs' / 'a\nb.wav')
    clips, dropped = read(folder, json.dumps({'audio': 'a\nb', 'text': 'c'}), 'x.jsonl')
    assert not dropped and clips[0].path.is_file()

def test_the_text_beside_is_of_the_same_name_and_language(tmp_path):
    for name in 'a.de.srt a.en.srt b.de.srt b.de.wav B.txt b.wav c.old.txt'.split(): put(tmp_path / name)
    beside = corpora._Beside(('.txt', '.srt'), 'en')
    found = [beside.find(tmp_path / name) for name in ('a.wav', 'b.de.wav', 'B.wav', 'c.wav')]
    assert [p and p.name for p in found] == ['a.en.srt', 'b.de.srt', 'B.txt', None]

@pytest.mark.parametrize('content', [
    '{"audio_filepath": "wavs/low-0.wav", "offset": 0.0, "duration": 1.5, "text": "one"}\n'
    '{"audio_filepath": "wavs/low-0.wav", "offset": 1.5, "duration": 0.5, "text": "two"}',
    'file,start,end,text\nlow-0,0,1.5,one\nlow-0,1.5,2,two'])
def test_parts_of_a_recording(folder, content):
    "For who reads them as such; nobody else gets the whole recording with the text of a part."
    clips, dropped = read(folder, content, 'x', parts=True)
    assert not dropped and [(c.text, c.start, c.end) for c in clips] == [('one', 0, 1.5), ('two', 1.5, 2)]
    clips, dropped = read(folder, content, 'x')
    assert not clips and len(dropped) == 2
    for times in ('1,', ',2', '2,1', 'a,b', '-1,2', '00:01,00:02', '0,inf', 'nan,1'):
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

# --- layouts ------------------------------------------------------------------------------------------------

def vctk(folder, sound='wav48_silence_trimmed', name='{}_mic1.flac'):
    for clip in ('p225_001', 'p225_002', 'p226_001'):
        put(folder / sound / clip[:4] / name.format(clip))
        put(folder / 'txt' / clip[:4] / f'{clip}.txt', f'Text {clip}.\n')
    put(folder / 'speaker-info.txt', 'ID AGE GENDER\n')
    return folder

def libritts(folder, top=''):
    for speaker, chapter in (('19', '198'), ('19', '227'), ('26', '495')):
        clip, place = f'{speaker}_{chapter}_000000', folder / top / speaker / chapter
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

def kaldi(folder):
    put(folder / 'wav.scp', 'a wavs/low-0.wav\nb /their/disk/wavs/low-1.wav\nc sox x.wav -t wav - |\n')
    put(folder / 'utt2spk', 'a anna\nb-1 bob\nc carl\n')
    put(folder / 'segments', 'b-1 b 0.5 1.75\n')
    put(folder / 'text', 'a One two\nb-1\tThree \nc Four\nd Five\n')
    return folder

def test_kaldi_with_parts_of_recordings(folder):
    clips, dropped = read_corpus(kaldi(folder), parts=True)
    assert facts(clips) == [('a', 'One two', 'anna', 'en'), ('b-1 0.5-1.75', 'Three', 'bob', 'en')]
    assert [(c.path.name, c.start, c.end) for c in clips] == [('low-0.wav', 0, None), ('low-1.wav', .5, 1.75)]
    assert [d.id for d in dropped] == ['c', 'd'] and all('missing' in d.reason for d in dropped)

def librispeech(folder, top=''):
    for name in ('84-121123-0000', '84-121123-0001', '84-121550-0000'):
        place = folder / top / '84' / name[3:9]
        put(place / f'{name}.flac')
        with open(place / f'84-{name[3:9]}.trans.txt', 'a') as file: file.write(f'{name} GO {name[-1]}\n')
    return folder

def mls(folder):
    for i in range(3): put(folder / f'audio/10/1/10_1_{i}.flac')
    put(folder / 'transcripts.txt', ''.join(f'10_1_{i}\tso {i}\n' for i in range(3)))
    return folder

CORPORA = {
    'lists': (librispeech, [(f'84-{c}', f'GO {c[-1]}', '84', 'en')
                            for c in ('121123-0000', '121123-0001', '121550-0000')]),
    'vctk': (vctk, [(c, f'Text {c}.', c[:4], 'en') for c in ('p225_001', 'p225_002', 'p226_001')]),
    'libritts': (libritts,
                 [(f'{c}_000000', f'Text {c}_000000.', c[:2], 'en') for c in ('19_198', '19_227', '26_495')]),
    'commonvoice': (commonvoice,
                    [(f'cv_{i}.mp3', f'Text "{i}"', 'c' * 128 + str(i), 'sv') for i in range(3)]),
    'ljspeech': (lambda f: put(f / 'metadata.csv', LINE), [('low-0', 'aa bb', 'low', 'en')]),
    'table': (lambda f: put(f / 'metadata.csv', 'path,text\nlow-0.wav,hello'),
              [('low-0.wav', 'hello', 'speaker', 'en')]),
    'pairs': (lambda f: [put(f / 'wavs' / name, 'hello') for name in ('low-0.txt', 'low-1.LAB', 'low-2.TXT')],
              [(f'wavs/low-{i}', 'hello', 'speaker', 'en') for i in range(3)]),
    'jsonl': (lambda f: put(f / 'metadata.jsonl', '{"path": "low-0.wav", "text": "hello"}'),
              [('low-0.wav', 'hello', 'speaker', 'en')])}

@pytest.mark.parametrize('name', _LAYOUTS)
def test_each_layout_is_found_and_read(folder, name, monkeypatch):
    make, wanted = CORPORA[name]
    make(folder)
    monkeypatch.chdir(folder.parent)
    assert facts(read_corpus('corpus')[0]) == wanted   # of a path that is relative
    for layout in (None, name):
        clips, dropped = read_corpus(folder, layout=layout)
        assert facts(clips) == wanted and not dropped and all(c.path.is_file() for c in clips)
    line = layout_line(folder)
    assert _find_layout(folder)[0] == name and f'read as {name} (' in line and len(line.splitlines()) == 1

@pytest.mark.parametrize('make', [
    lambda f: vctk(f, 'wav48', '{}.wav'), lambda f: libritts(f, 'train-clean-100'),
    lambda f: commonvoice(f, 'train.tsv'), lambda f: librispeech(f, 'dev-clean'), mls])
def test_older_and_deeper_forms(folder, make): assert len(read_corpus(make(folder))[0]) == 3

def test_which_metadata_are_read(folder):
    "The list that is named; metadata before folders; the layout that is named before the look."
    commonvoice(folder)
    assert [len(read_corpus(folder / f'{name}.tsv')[0]) for name in ('other', 'validated')] == [1, 3]
    put(vctk(folder) / 'metadata.csv', LINE)
    assert _find_layout(folder)[0] == 'ljspeech' and len(read_corpus(folder, layout='vctk')[0]) == 3
    put(folder / 'wavs' / 'audio.wav')
    assert facts(read(folder, 'audio|text', layout='ljspeech')[0]) == [('audio', 'text', 'speaker', 'en')]

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
    assert found.pop('pipe') == 'the text file is not a regular file'
    assert found.pop('empty') == 'the text is empty'
    assert 'not UTF-8' in found.pop('latin') and 'not UTF-8' in found.pop('odd')
    assert list(found.values()) == ['the text has no recording'], found

def test_rows_come_one_by_one(folder):
    "The first clip is there before the second line is read."
    path = put(folder / 'metadata.csv', f'{LINE}\n' + 'low-1|a\n' * 100_000)
    rows = _read_rows(folder)
    assert next(rows).id == 'low-0'
    path.write_text('')   # what the buffer does not hold is gone
    assert sum(1 for _ in rows) < 5000

def test_the_synthetic_corpus_is_the_same_in_every_release(tmp_path):
    "Recorded times and scores were taken on it."
    folder = synthetic_corpus(tmp_path / 'a', clips=8, seconds=0.1)
    assert tree(folder) == tree(synthetic_corpus(tmp_path / 'b', clips=8, seconds=0.1))
    texts = ('aa bb', 'bb cc dd', 'cc dd ee ff', 'dd ee ff gg hh', 'ee ff', 'ff gg hh', 'gg hh aa bb',
             'hh aa bb cc dd')
    rows = [f'{voice}-{i}|{text}|{text}|{voice}|en' for voice in ('low', 'high')
            for i, text in enumerate(texts)]
    assert (folder / 'metadata.csv').read_text().splitlines() == rows
    for name, seconds, pitch in (('low-0', 0.1, 100), ('low-5', 0.6, 110), ('high-2', 0.3, 208)):
        save_audio(tmp_path / 'x.wav', synthetic_voice(seconds, pitch))
        assert (tmp_path / 'x.wav').read_bytes() == (folder / 'wavs' / f'{name}.wav').read_bytes()
    first = [-0.018358, -0.155355, 0.0118, -0.063861, -0.008241, 0.013919, -0.031782, 0.001817, -0.00636]
    assert np.allclose(synthetic_voice(0.5)[500:10000:1111], first, atol=1e-6)

# --- sound of every kind ------------------------------------------------------------------------------------

CONFIG, VOICE, CLICK = XTTSConfig.tiny(), synthetic_voice(1.), np.arange(22050) == 99

def sound(kind='WAV', subtype=None, rate=22050, wav=VOICE, channels=1):
    "A file's bytes."
    data = io.BytesIO()
    soundfile.write(data, np.stack([wav] * channels, 1), rate, format=kind, subtype=subtype)
    return data.getvalue()

def half(*kind): return (data := sound(*kind))[:len(data) // 2]

def at(rate): return resample(VOICE, 22050, rate)

def head(size: int):
    "A wav file whose head says that it holds `size` bytes of sound."
    return (data := sound())[:40] + struct.pack('<I', size) + data[44:]

def chunks(): return (data := sound())[:12] + b'LIST\x04\0\0\0INFO' + data[12:] + b'junk\x02\0\0\0ab'

def flac(mark: int, length=None):
    "With another length in its head."
    data = bytearray(sound('FLAC'))
    data[21] |= mark
    if length: data[22:26] = length
    return bytes(data)

def pages():
    "A sound of several Ogg pages without the last one."
    data = sound('OGG', 'OPUS', 24000, np.tile(at(24000), 4))
    return data[:data.rindex(b'OggS')]

GOOD = {   # name: bytes, largest error
    **{f'{s}.wav': (sound('WAV', s), 0.04)
       for s in ('PCM_U8', 'PCM_16', 'PCM_24', 'PCM_32', 'FLOAT', 'DOUBLE', 'ALAW', 'ULAW',
                 'IMA_ADPCM', 'MS_ADPCM')},
    **{f'{k}.wav': (sound(k), 1e-4) for k in ('WAVEX', 'RF64', 'W64', 'AIFF', 'AU', 'CAF')},
    'x.flac': (sound('FLAC'), 1e-4), 'x.mp3': (sound('MP3'), 0.05), 'x.ogg': (sound('OGG', 'VORBIS'), 0.05),
    'x.opus': (sound('OGG', 'OPUS', 24000, at(24000)), 0.2), 'flac in.wav': (sound('FLAC'), 1e-4),
    'mp3 in.wav': (sound('MP3'), 0.05), 'wav in.mp3': (sound(), 1e-4),
    'stereo.wav': (sound(channels=2), 1e-4), '6 channels.wav': (sound(channels=6), 1e-4),
    '8 kHz.wav': (sound(rate=8000, wav=at(8000)), 0.2),
    '192 kHz.wav': (sound(rate=192000, wav=at(192000)), 0.01),
    '37800 Hz.wav': (sound(rate=37800, wav=at(37800)), 0.01), 'more chunks.wav': (chunks(), 1e-4),
    'from a pipe.wav': (head(0xFFFFFFFF), 1e-4), '4 GB.wav': (head(0xF0000000), 1e-4),
    'one byte short.wav': (sound()[:-1], 1e-4)}

BAD = {   # name: bytes, reason
    'cut off.wav': (half('WAV'), 'the sound is cut off: 50% of it is missing'),
    **{f'{"-".join(k)}.{e}': (half(*k), 'cut off') for *k, e in (
        ('WAV', 'PCM_24', 'wav'), ('WAV', 'FLOAT', 'wav'), ('WAVEX', 'wav'), ('RF64', 'wav'), ('W64', 'w64'),
        ('AIFF', 'aiff'), ('AU', 'au'), ('MP3', 'mp3'))},
    'cut off.flac': (half('FLAC'), 'to its end'), 'cut off.ogg': (half('OGG', 'VORBIS'), 'not readable'),
    'a page cut off.opus': (pages(), 'cut off'), '1 GB.wav': (head(2**30), 'cut off: 100%'),
    'damaged.flac': ((d := sound('FLAC'))[:len(d) // 2] + b'x' * 9 + d[len(d) // 2 + 9:], 'to its end'),
    'empty.wav': (b'', '0 bytes'), 'head only.wav': (sound()[:44], '0 samples'),
    'half a head.wav': (sound()[:20], 'not readable'), 'no length.wav': (head(0), '0 samples'),
    'no samples.wav': (sound(wav=np.zeros(0)), '0 samples'),
    'nan.wav': (sound(subtype='FLOAT', wav=np.where(CLICK, np.nan, VOICE)), 'NaN'),
    'beyond float.wav': (sound(subtype='DOUBLE', wav=np.where(CLICK, 1e300, np.float64(VOICE))), 'infinite'),
    'integers as floats.wav': (sound(subtype='FLOAT', wav=VOICE * 32768), 'times full scale'),
    'silent.wav': (sound(wav=np.zeros(22050)), 'silent'), 'dc.wav': (sound(wav=np.full(22050, .5)), 'silent'),
    'one sample.wav': (sound(wav=np.ones(1)), '1 samples, too short for a mel'),
    'short.wav': (sound(wav=VOICE[:5000]), 'shorter than data.min_seconds'),
    '10 minutes.wav': (sound(subtype='PCM_U8', rate=8000, wav=np.zeros(4_800_000)),
                       '600.00 s, longer than data.max_seconds'),
    # 2^34 samples promised: reading in blocks finds out that they are not there, without the memory for them
    'a day.flac': (flac(4), 'longer than data.max_seconds'),
    'days.flac': (flac(15, b'\xff' * 4), 'no possible length'),
    '44101 Hz.wav': (sound(rate=44101), '44101 Hz'), 'text.wav': (b'hello ' * 999, 'not readable as audio'),
    'page.mp3': (b'<!DOCTYPE html><p>404' * 99, 'a web page'),
    'song.m4a': (b'\0\0\0\x18ftypM4A \0\0\0\0M4A mp42' + bytes(999), 'read'),
    'head.raw': (bytes(999), 'not readable as audio'),
    'a pointer.wav': (b'version https://git-lfs.', 'git lfs'),
    # by bytes at their place: not a web page, not AAC
    'WAV of any size.wav': (b'RIFF\x3c\x07\0\0WAVEfmt ', 'not readable'),
    'WAV like AAC.wav': (b'RIFF\xff\xf1\0\0WAVEfmt ', 'not readable')}

def load(path, content, config=CONFIG):
    if content is not None: path.write_bytes(content)
    [(_, found)] = read_audio([Clip('x', 'a', 'a', 'en', path)], config)
    return found

@pytest.mark.parametrize('name', GOOD)
def test_sound_that_is_read_as_it_is(tmp_path, name):
    content, error = GOOD[name]
    wav = load(tmp_path / name, content)
    assert not isinstance(wav, Dropped), wav
    assert wav.dtype == np.float32 and abs(len(wav) - 22050) < 1200   # ADPCM fills its last block
    assert np.abs(wav[500:21000] - VOICE[500:21000]).max() < error
    assert np.array_equal(wav, load_audio(tmp_path / name))

@pytest.mark.parametrize('name', [*BAD, 'a: b/gone.wav'])
def test_sound_that_is_left_out_with_a_reason(tmp_path, name):
    content, reason = BAD.get(name, (None, 'missing'))
    dropped = load(tmp_path / name, content)
    assert isinstance(dropped, Dropped) and reason in dropped.reason and str(tmp_path) not in dropped.reason
    assert len(dropped.reason.splitlines()) == 1 and dropped.reason[-1] != '.'

LEVEL = np.where(np.arange(22050) % 2, 1, -1)

@pytest.mark.parametrize('wishes, good, bad, reason', [
    ({'max_seconds': 1.}, VOICE, np.append(VOICE, 0), 'longer than data.max_seconds 1.0'),
    ({'min_seconds': 0.5}, VOICE[:11025], VOICE[:11024], 'shorter than data.min_seconds 0.5'),
    ({'min_seconds': 0.01}, VOICE[:1025], VOICE[:1024], '1024 samples, too short for a mel'),
    ({}, LEVEL * 0.0011, LEVEL * 0.0009, '-60 dB')])
def test_what_is_just_taken_and_just_not(tmp_path, wishes, good, bad, reason):
    config = CONFIG.replace(data=wishes)
    assert isinstance(load(tmp_path / 'x.wav', sound(subtype='FLOAT', wav=good), config), np.ndarray)
    assert reason in load(tmp_path / 'x.wav', sound(subtype='FLOAT', wav=bad), config).reason
    for promised, cut in ((44544, False), (44548, True)):   # 44100 bytes: one of a hundred may be missing
        assert isinstance(load(tmp_path / 'x.wav', head(promised)), Dropped) == cut

def page(flags, rest=b'\xff', length=99): return b'OggS\0' + bytes([flags]) + rest * length

def test_clips_come_in_order_for_any_number_of_workers(corpus, small):
    clips = read_corpus(corpus)[0]
    runs = [[(c.id, len(w)) for c, w in read_audio(clips, small.replace(data={'num_workers': n}), chunk=3)]
            for n in (1, 4)]
    assert runs[0] == runs[1] and [i for i, _ in runs[0]] == [c.id for c in clips]

# --- what is measured, and the report -----------------------------------------------------------------------

PARTS = 'peak', 'clipped', 'leading', 'inner', 'trailing'

def measured(wav, *names): return [measure_clip(np.float32(wav), 22050)[k] for k in names or PARTS]

@pytest.mark.parametrize('scale', [1., 0.05])
def test_a_frame_is_silent_below_a_hundredth_of_the_loudest(scale):
    "20 ms each: 1 just silent, loud, just loud, 2 silent, loud, 3 silent; and an incomplete frame."
    levels = [0.00995, 0.9, 0.01005, 0, 0, 1, 0, 0, 0.00995]
    wav = np.concatenate([level * LEVEL[:441] for level in levels] + [LEVEL[:440]])
    assert measured(wav * scale, *PARTS[2:]) == [round(n / 9, 4) for n in (1, 2, 3)]
    assert measured(wav * scale, 'clipped') == [round((440 + 441) / len(wav), 4) if scale == 1 else 0]

def test_what_is_measured_of_little_and_of_other_rates(tmp_path):
    assert measured(np.zeros(441)) == measured(np.zeros(4410)) == [0, 0, 0, 0, 1] and measured([]) == [0] * 5
    assert measured([0.99, 0.1, -0.99, 0.98]) == [0.99, 0.5, 0, 0, 0]
    assert measured([0.123456]) == [0.1235, 0, 0, 0, 0]
    assert measured(VOICE, 'sound') == measured(VOICE.copy(), 'sound') != measured(VOICE[:-1], 'sound')
    for rate in (22050, 44100, 48000):   # clipping is found after a change of rate
        for wav, clipped in ((at(rate) * 9, True), (at(rate), False)):
            soundfile.write(tmp_path / 'x.wav', np.clip(wav, -1, 1), rate)
            found, = measured(load_audio(tmp_path / 'x.wav'), 'clipped')
            assert found > 0.5 * np.mean(np.abs(wav) >= 1) > 0 if clipped else found == 0

def row(name, text='hello', speaker='anna', seconds=1., **values):
    "A line of the table of clips."
    return {'id': name, 'text': text, 'speaker': speaker, 'language': 'en', 'seconds': seconds, 'peak': 0.5,
            'clipped': 0., 'leading': 0., 'inner': 0., 'trailing': 0., 'sound': name} | values

def test_reasons_of_one_kind_are_counted_together():
    reasons = ['the file wavs/a.wav is missing', 'the file b: 3 (x).wav is missing', 'not UTF-8: "a"',
               'line 3 has 4 columns instead of id|text', 'line 17 has 1 columns instead of id|text',
               '12.00 s, longer than data.max_seconds 11.6', '600.01 s, longer than data.max_seconds 9']
    report = summary([row('a')], [Dropped(str(i), r) for i, r in enumerate(reasons)])
    assert report['reasons'] == {
        'the file … is missing': 2, 'not UTF-8': 1, 'line N has N columns instead of id|text': 2,
        'N s, longer than data.max_seconds N': 2} and {*map(reason_kind, reasons)} == {*report['reasons']}

def test_no_name_forges_a_line():
    report = summary([row('a\nclipped 99', speaker='\u202ex\n'), row('b', sound='a\nclipped 99')],
                     [Dropped('c\ndropped 0', 'bad')])
    text = report_text(report)
    assert '\u202e' not in text and not any(
        line.startswith(('clipped 99', 'dropped 0')) for line in text.splitlines())

def test_the_report_to_read_and_its_numbers():
    "A third of a second each, and 2 s; four groups of equal sound; seven clipped, one almost clipped."
    clipped = dict(zip('abcdefgh', (0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.7, 0.001)))
    table = [row(name, 'hello' if i else 'a ', str(i), 1 / 3 if i < 10 else 2., leading=1 / 3,
                 inner=(name == 'f') / 3, clipped=clipped.get(name, 0.), sound='ddddaabbccc'[i])
             for i, name in enumerate('abcdefghijk')]
    report = summary(table, [Dropped('x', 'bad'), Dropped('y', 'bad'), Dropped('z', 'worse')])
    text = report_text(report, most=2)
    assert '11 clips (a = b = c; e = f; g = h)' in text and '7: g 70%, a 7%, b 6%, c 5%, d 4%' in text
    assert '  2 × bad\n' in text and text.endswith('  x: bad\n  y: bad\n  and 1 more\n')
    assert report_text(report, most=3).endswith('  y: bad\n  z: worse\n') and len(report['most_clipped']) == 5
    assert report['seconds'] == 5.33 and report['most_silent'][0] == {'id': 'f', 'share': 0.6667}
    assert report['silence'] == {'leading': 0.3333, 'inner': 0.0303, 'trailing': 0.}
