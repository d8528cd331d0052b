"Sources by name: their table, their terms, their folders, and the command."
import hashlib
import io
import json
import os
import re
import resource
import subprocess
import sys
import tarfile
import zipfile

import pytest

from process import interrupted, tree, xtts_nb
from server import serving
from xtts_nb.app import cli
from xtts_nb.data.corpora import read_corpus
from xtts_nb.config import UserError
from xtts_nb.app.download import (
    SOURCES, Source, _note, download, download_text, find_source, source_rows, terms)
from xtts_nb.app.transfer import File


@pytest.fixture
def server(monkeypatch):
    "A server of this test, without files."
    monkeypatch.setenv('no_proxy', '*')
    with serving(files={}) as plan: yield plan

def known(name, body) -> File: return File(name, f'https://example.org/{name}', len(body), hashlib.sha256(body).hexdigest())

def names(server) -> list[str]: return [r.path for r in server.asked]

@pytest.fixture
def model(server) -> Source:
    "A model of three files under terms; nothing is known of the last."
    server.files |= {'LICENSE.txt': b'Ask first.\n', 'a.pth': bytes(50_000), 'b.pth': bytes(70_000)}
    files = [known(n, b) for n, b in server.files.items()]
    return Source('model', (*files[:2], File('b.pth', 'https://example.org/b.pth')), 'Some License', terms='LICENSE.txt',
                  then='xtts-nb convert from-coqui {folder} MODEL')

def packed(corpus, top='Top-1.0/') -> bytes:
    "A corpus as a tar."
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w:bz2') as t:
        for name, body in tree(corpus).items():
            if not (corpus / name).is_file(): continue
            info = tarfile.TarInfo(top + name); info.size = len(body)
            t.addfile(info, io.BytesIO(body))
    return out.getvalue()

def archive(server, body, name='c.tar.bz2') -> Source:
    server.files[name] = body
    return Source('corpus', (known(name, body),), 'public domain', archive=True, then='xtts-nb prepare {folder} --out CACHE')


# --- the table ------------------------------------------------------------------------------------------------------

def test_every_file_of_the_table_is_known_to_the_last_bit():
    for source in SOURCES.values():
        for f in source.files:
            assert f.bytes > 0 and re.fullmatch('[0-9a-f]{64}', f.sha256) and f.url.startswith('https://') and f.name in f.url
        assert len({f.name for f in source.files}) == len(source.files) and source.licence
    assert len({f.sha256 for s in SOURCES.values() for f in s.files}) == sum(len(s.files) for s in SOURCES.values())

BYTES = {   # as the servers of the publishers say
    'LICENSE.txt': 4014, 'config.json': 4368, 'vocab.json': 361_219, 'mel_stats.pth': 1067,
    'dvae.pth': 210_514_388, 'model.pth': 1_867_929_118,
    'LJSpeech-1.1.tar.bz2': 2_748_572_632, 'VCTK-Corpus-0.92.zip': 11_747_302_977,
    'dev-clean.tar.gz': 1_291_469_655, 'dev-other.tar.gz': 924_804_676, 'test-clean.tar.gz': 1_230_670_113,
    'test-other.tar.gz': 964_502_297, 'train-clean-100.tar.gz': 7_723_686_890,
    'train-clean-360.tar.gz': 27_504_073_644, 'train-other-500.tar.gz': 44_565_031_479}

def test_the_lengths_are_those_that_were_published():
    assert {f.name: f.bytes for source in SOURCES.values() for f in source.files} == BYTES

def test_the_released_model_is_named_by_commit_and_comes_licence_first():
    source = find_source('xtts-v2')
    assert all(re.search('/resolve/[0-9a-f]{40}/', f.url) for f in source.files)
    assert source.files[0].name == source.terms and {'model.pth', 'dvae.pth', 'mel_stats.pth', 'vocab.json', 'config.json'} < {
        f.name for f in source.files}

def test_corpora_are_archives_under_the_names_of_their_files():
    corpora = {name: s for name, s in SOURCES.items() if name != 'xtts-v2'}
    assert all(s.archive and not s.terms and len(s.files) == 1 and s.then.startswith('xtts-nb prepare')
               for s in corpora.values())
    assert not SOURCES['xtts-v2'].archive and not Source('x', (), 'free').archive
    names = {name: s.files[0].name for name, s in corpora.items()}
    assert names['ljspeech'] == 'LJSpeech-1.1.tar.bz2' and names['libritts-dev-clean'] == 'dev-clean.tar.gz'
    shown = {row['name']: (row['GB'], row['licence']) for row in source_rows()}
    assert shown['ljspeech'] == (2.75, 'public domain') and shown['xtts-v2'][0] == 2.08
    assert len(shown) == len(SOURCES) == 10

@pytest.mark.parametrize('name, parts', [('ljspech', ['ljspech', 'ljspeech', 'xtts-v2']), ('', ['ljspeech']),
                                         ('common-voice', ['agree', 'https://commonvoice.mozilla.org'])])
def test_what_is_not_in_the_table(name, parts):
    with pytest.raises(UserError) as e: find_source(name)
    assert all(p in str(e.value) for p in parts)


# --- terms ----------------------------------------------------------------------------------------------------------

def test_nothing_is_fetched_before_the_terms_are_accepted(server, model, tmp_path):
    with pytest.raises(UserError, match='Some License.*--accept-cpml'): download(model, tmp_path / 'out', server.address)
    assert not server.asked and tree(tmp_path) == {}

def test_the_text_is_shown(server, model):
    assert terms(model, server.address, pause=0) == 'Ask first.\n' and names(server) == ['/LICENSE.txt']

@pytest.mark.parametrize('body', [None, b'Ask nobody!'], ids=['missing', 'another text'])
def test_a_text_that_cannot_be_had_is_named(server, model, body):
    del server.files['LICENSE.txt']
    if body: server.files['LICENSE.txt'] = body
    text = terms(model, server.address, pause=0)
    assert 'Some License' in text and 'https://example.org/LICENSE.txt' in text and 'nobody' not in text


# --- a model --------------------------------------------------------------------------------------------------------

def test_a_model(server, model, tmp_path):
    out = tmp_path / 'new' / 'Größe 大'
    result = download(model, out, server.address, accept=True)
    assert result.keys() == {'name', 'folder', 'files', 'resumed_bytes'} and result['resumed_bytes'] == 0
    assert [(f['file'], f['bytes'], f['checked']) for f in result['files']] == [
        ('LICENSE.txt', 11, 'pinned'), ('a.pth', 50_000, 'pinned'), ('b.pth', 70_000, 'size')]
    assert {k: v for k, v in tree(out).items() if k != 'download.json'} == server.files
    made = json.loads((out / 'download.json').read_text(encoding='utf-8'))
    assert made['files'] == result['files'] and made['licence'] == 'Some License' and made['from'] == server.address
    text = download_text(model, result)
    assert f'xtts-nb convert from-coqui {out} MODEL' in text and 'a.pth: 50,000 bytes, SHA-256 as published' in text

def test_the_result_says_what_was_checked_and_what_is_next(model, tmp_path):
    files = [dict(file=c, bytes=1234, checked=c) for c in ('pinned', 'declared', 'size')]
    result, plain = {'folder': 'there', 'files': files}, Source('x', model.files[2:], 'Free')
    rows = ['pinned: 1,234 bytes, SHA-256 as published',
            'declared: 1,234 bytes, SHA-256 as the server declares it',
            'size: 1,234 bytes, length only; its SHA-256 is kept in download.json']
    assert download_text(plain, result).splitlines() == [*rows, 'there is ready (Free).']
    assert download_text(model, result).splitlines()[3:] == [
        'there is ready (Some License): xtts-nb convert from-coqui there MODEL']
    _note(plain, tmp_path, files, None)
    assert json.loads((tmp_path / 'download.json').read_text()) == {
        'name': 'x', 'from': 'https://example.org', 'licence': 'Free', 'files': files}

def test_what_is_there_is_not_fetched_again(server, model, tmp_path):
    first = download(model, tmp_path / 'out', server.address, accept=True)
    (tmp_path / 'out' / 'a.pth').unlink()
    server.asked.clear()
    assert download(model, tmp_path / 'out', server.address, accept=True) == first and names(server) == ['/a.pth']

def test_a_model_that_broke_off_goes_on(server, model, tmp_path):
    server.most, server.limit = 40_000, 2   # the licence, and the first part of a.pth
    with pytest.raises(UserError, match='40000 bytes are kept'):
        download(model, tmp_path / 'out', server.address, accept=True, pause=0, tries=1)
    assert set(tree(tmp_path / 'out')) == {'LICENSE.txt', 'a.pth.part', 'a.pth.part.mark', 'download.json'}
    server.limit = None
    result = download(model, tmp_path / 'out', server.address, accept=True, pause=0)
    assert {k: v for k, v in tree(tmp_path / 'out').items() if k != 'download.json'} == server.files
    assert result['resumed_bytes'] == 80_000   # 40 000 of a.pth and of b.pth

def test_a_file_without_a_checksum_has_to_stay_what_it_was(server, model, tmp_path):
    download(model, tmp_path / 'out', server.address, accept=True)
    (tmp_path / 'out' / 'b.pth').unlink()
    server.files['b.pth'] = bytes(70_001)
    with pytest.raises(UserError, match='b.pth.*download.json'): download(model, tmp_path / 'out', server.address, accept=True)
    assert not (tmp_path / 'out' / 'b.pth').exists()

@pytest.mark.parametrize('text', ['{}', '[]', '{"name": "other", "files": []}', '{"name": "model"}',
                                  '{"name": "model", "files": [1]}', 'text', ''])
def test_a_folder_of_something_else(server, model, tmp_path, text):
    (tmp_path / 'download.json').write_text(text)
    with pytest.raises(UserError, match='download.json'): download(model, tmp_path, server.address, accept=True)
    assert tree(tmp_path) == {'download.json': text.encode()} and not server.asked

def test_files_of_the_user_are_not_replaced(server, model, tmp_path):
    (tmp_path / 'a.pth').write_text('months of work')
    with pytest.raises(UserError, match='a.pth: stands there already'): download(model, tmp_path, server.address, accept=True)
    assert (tmp_path / 'a.pth').read_text() == 'months of work'


# --- a corpus -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('top', ['Top-1.0/', ''], ids=['in a folder', 'flat'])
def test_a_corpus_that_prepare_reads(server, corpus, tmp_path, top):
    source = archive(server, packed(corpus, top))
    server.most = 30_000
    result = download(source, tmp_path / 'stored' / 'c', server.address, pause=0)
    got = tree(tmp_path / 'stored' / 'c')
    assert json.loads(got.pop('download.json'))['files'] == result['files'] and got == tree(corpus)
    assert {p.name for p in (tmp_path / 'data').iterdir()} == {'c'} and result['resumed_bytes'] > 0
    assert len(read_corpus(tmp_path / 'stored' / 'c')[0]) == 14 and read_corpus(tmp_path / 'stored' / 'c')[1] == []
    server.asked.clear()
    assert download(source, tmp_path / 'stored' / 'c', server.address) == result | {'resumed_bytes': 0} and not server.asked

@pytest.mark.parametrize('names, made', [
    (['txt/a.txt', 'b.txt'], {'b.txt', 'txt', 'txt/a.txt'}), (['a.txt'], {'a.txt'}),
    (['a/1.txt', 'b/2.txt'], {'a', 'a/1.txt', 'b', 'b/2.txt'}),
    (['top/a/1.txt', 'top/b.txt'], {'a', 'a/1.txt', 'b.txt'})])
def test_a_zip(server, tmp_path, names, made):
    "A folder that holds all of an archive is taken away, and nothing else."
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as z:
        for name in names: z.writestr(name, name)
    download(archive(server, out.getvalue(), 'c.zip'), tmp_path / 'c', server.address)
    assert {*tree(tmp_path / 'c')} == made | {'download.json'}

def test_ctrl_c_while_unpacking_leaves_the_archive_and_no_folder(server, corpus, tmp_path):
    source = archive(server, packed(corpus))
    def press(name, *_):
        if name.startswith('unpack'): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): download(source, tmp_path / 'c', server.address, progress=press)
    assert set(tree(tmp_path)) == {'c.tar.bz2'}
    server.asked.clear()
    download(source, tmp_path / 'c', server.address)
    assert not server.asked and {p.name for p in tmp_path.iterdir()} == {'c'}

def test_an_evil_archive_leaves_no_folder(server, tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w:gz') as t:
        for name in ('good', '../evil'): t.addfile(tarfile.TarInfo(name))
    with pytest.raises(UserError, match='"../evil"'): download(archive(server, out.getvalue()), tmp_path / 'c', server.address)
    assert set(tree(tmp_path)) == {'c.tar.bz2'}

def test_a_wrong_archive_is_never_unpacked(server, corpus, tmp_path):
    source = archive(server, packed(corpus))
    server.files['c.tar.bz2'] = bytes(len(server.files['c.tar.bz2']))
    with pytest.raises(UserError, match='SHA-256'): download(source, tmp_path / 'c', server.address)
    assert tree(tmp_path) == {}

def test_a_foreign_folder_is_found_before_the_transfer(server, corpus, tmp_path):
    source = archive(server, packed(corpus))
    (tmp_path / 'c').mkdir(); (tmp_path / 'c' / 'thesis.txt').write_text('mine')
    (tmp_path / 'd').write_text('mine')
    for out in ('c', 'd'):
        with pytest.raises(UserError, match='already holds something'): download(source, tmp_path / out, server.address)
    assert set(tree(tmp_path)) == {'c', 'c/thesis.txt', 'd'} and not server.asked

def test_a_missing_archive_leaves_no_folder(server, corpus, tmp_path):
    source = archive(server, packed(corpus))
    server.files.clear()
    with pytest.raises(UserError, match='no such file'): download(source, tmp_path / 'new' / 'c', server.address)
    assert tree(tmp_path) == {}

def test_an_empty_folder_is_filled(server, corpus, tmp_path):
    (tmp_path / 'c').mkdir()
    download(archive(server, packed(corpus)), tmp_path / 'c', server.address)
    assert len(read_corpus(tmp_path / 'c')[0]) == 14

def test_another_release_in_the_folder(server, corpus, tmp_path):
    download(archive(server, packed(corpus)), tmp_path / 'c', server.address)
    newer = archive(server, packed(corpus, 'Top-1.1/'))
    with pytest.raises(UserError, match='already holds something'): download(newer, tmp_path / 'c', server.address)


# --- the command ----------------------------------------------------------------------------------------------------

def run(*arguments, capfd) -> tuple[int, str, str]:
    "The command in this process: exit code, stdout, stderr."
    old, sys.argv = sys.argv, ['xtts-nb', 'download', *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as end: cli.main()
    finally: sys.argv = old
    return end.value.code, *capfd.readouterr()

def test_without_a_name_the_list_is_shown(capfd):
    code, out, _ = run('--json', capfd=capfd)
    assert code == 0 and [s['name'] for s in json.loads(out)['sources']] == list(SOURCES)
    code, out, _ = run(capfd=capfd)
    assert code == 0 and all(s in out for s in SOURCES) and 'public domain' in out

@pytest.mark.parametrize('name, part', [('ljspech', 'ljspeech'), ('common-voice', 'commonvoice.mozilla.org')])
def test_an_unknown_name(capfd, name, part):
    code, out, err = run(name, capfd=capfd)
    assert (code, out, len(err.splitlines())) == (2, '', 1) and part in err

def test_the_licence_of_the_released_model(server, capfd, tmp_path, monkeypatch):
    "It cannot be had here, so it is named; and nothing else is asked for."
    monkeypatch.chdir(tmp_path)
    code, out, err = run('xtts-v2', '--from', server.address, '--json', capfd=capfd)
    assert (code, out) == (2, '') and names(server) == ['/LICENSE.txt'] and tree(tmp_path) == {}
    assert 'https://coqui.ai/cpml.txt' in err and find_source('xtts-v2').files[0].url in err
    last = err.splitlines()[-1]
    assert last.startswith('xtts-nb: xtts-v2: ') and 'repeat with --accept-cpml' in last and 'Traceback' not in err

def test_accepted_it_is_fetched_first(server, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run('xtts-v2', '--accept-cpml', '--from', server.address, capfd=capfd)
    assert (code, out) == (2, '') and names(server) == ['/LICENSE.txt'] and tree(tmp_path) == {}
    assert f'{server.address}/LICENSE.txt: the server has no such file (HTTP 404)' in err.splitlines()[-1]

def test_the_command(server, corpus, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'settings.ini').write_text('[workspace]\ndata = my data\n')
    source = archive(server, packed(corpus))
    monkeypatch.setitem(SOURCES, 'corpus', source)
    server.most = 100_000
    code, out, err = run('corpus', '--from', server.address, '--json', capfd=capfd)
    result = json.loads(out)
    assert code == 0 and result['folder'] == str(tmp_path / 'my data' / 'corpus') and result['resumed_bytes'] > 0
    assert result['files'] == [{'file': 'c.tar.bz2', 'bytes': source.files[0].bytes, 'sha256': source.files[0].sha256,
                                'checked': 'pinned'}] and 'c.tar.bz2, MB' in err
    code, out, _ = run('corpus', '--from', server.address, '--out', 'my data/corpus', capfd=capfd)
    assert code == 0 and 'xtts-nb prepare my data/corpus --out CACHE' in out

@pytest.fixture
def endless(server, tmp_path):
    "A server that begins a real part of LibriTTS and never ends it."
    server.files['dev-other.tar.gz'], server.claim = os.urandom(600_000), SOURCES['libritts-dev-other'].files[0].bytes
    return server

def test_ctrl_c_says_that_it_can_go_on(endless, tmp_path):
    endless.hangs, endless.most = 1, 300_000   # so there is more to come, however late Ctrl-C is
    done = interrupted('download', 'libritts-dev-other', '--from', endless.address, '--out', 'c', at='dev-other', cwd=tmp_path)
    assert done.code == 130 and done.out == '' and 'Traceback' not in done.err
    assert done.err.strip().splitlines()[-1] == 'xtts-nb: Stopped.' and 'the same command goes on' in done.err
    kept = (tmp_path / 'dev-other.tar.gz.part').stat().st_size
    assert kept > 0 and not (tmp_path / 'c').exists() and set(tree(tmp_path)) == {
        'dev-other.tar.gz.part', 'dev-other.tar.gz.part.mark'}
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (kept, kept))   # as a full disk does
    done = xtts_nb('download', 'libritts-dev-other', '--from', endless.address, '--out', 'c', cwd=tmp_path, before=limit)
    assert endless.asked[-1].headers['Range'] == f'bytes={kept}-'
    (said,) = done.said
    assert done.code == 2 and 'dev-other.tar.gz.part: ' in said and 'what has come is kept' in said
    assert (tmp_path / 'dev-other.tar.gz.part').stat().st_size == kept and not (tmp_path / 'c').exists()

def test_tensorflow_is_not_needed():
    program = 'import sys; import xtts_nb.app.download; print("tensorflow" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', program], capture_output=True, text=True).stdout.strip() == 'False'
