"Sources: their table, licences, errors and the downloaded folder; with a local server."
import hashlib
import io
import json
import re
import socket
import stat
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from process import tree
from xtts_nb.app.download import (
    SOURCES, Source, _file, download, download_text, find_source, source_rows, terms)
from xtts_nb.config import UserError
from xtts_nb.data.corpora import read_corpus

HUB = 'me/model', 'c' * 40
FILES = {'LICENSE.txt': b'Ask first.\n', 'a.pth': bytes(500_000), 'b.pth': b'b' * 70_000}


@dataclass
class Plan:
    "The files of the server, and the requests that it got."
    files: dict = field(default_factory=dict)
    breaks: int | None = None   # the next response ends after so many bytes
    requests: list = field(default_factory=list)   # (name, range) of each GET
    ranges: bool = True
    address: str = ''


class Handler(BaseHTTPRequestHandler):
    "A server of files with the response headers of the Hub."
    def do_HEAD(self):
        plan, name, span = self.server.plan, self.path.split('/')[-1], self.headers.get('Range')
        if self.command == 'GET': plan.requests.append((name, span))
        if not plan.ranges: span = None
        body, start = plan.files.get(name), int(span[6:-1]) if span else 0
        self.send_response(404 if body is None else 206 if span else 200)
        size = len(body or b'')
        headers = {'ETag': f'"{name}"', 'X-Repo-Commit': HUB[1], 'Content-Length': size - start}
        if span: headers['Content-Range'] = f'bytes {start}-{size - 1}/{size}'
        for key, value in headers.items(): self.send_header(key, str(value))
        self.end_headers()
        if self.command == 'GET' and body:
            self.wfile.write(body[start:][:plan.breaks])
            plan.breaks = None

    do_GET = do_HEAD

    def log_message(self, *_): pass


@pytest.fixture
def server(monkeypatch):
    "The plan of a server for one test."
    monkeypatch.setenv('no_proxy', '*')
    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as running:
        running.plan = Plan(address=f'http://127.0.0.1:{running.server_port}')
        thread = threading.Thread(target=running.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True)
        thread.start()
        yield running.plan
        running.shutdown()
        thread.join()

def known(name, body) -> dict: return _file(name, len(body), hashlib.sha256(body).hexdigest())

@pytest.fixture
def model(server) -> Source:
    server.files |= FILES
    files = [known(*f) for f in FILES.items()]
    return Source('model', files, 'Some License', server.address, HUB, True, 'convert from-coqui {} MODEL')

@pytest.fixture
def fetch(server):
    "Download from the server; its requests are in `server.requests`."
    def fetch(source, out, **options):
        server.requests.clear()
        return download(source, out, server.address, **{'accept': True} | options)
    return fetch

def archive(server, body, name='c.tar.bz2') -> Source:
    "A corpus that is this archive."
    server.files[name] = body
    return Source('corpus', [known(name, body)], 'public domain', 'https://example.org')

def tarred(*members) -> bytes:
    "An archive of (name, bytes) or ready `TarInfo`s."
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w:bz2') as t:
        for m in members:
            info, body = (m, b'') if isinstance(m, tarfile.TarInfo) else (tarfile.TarInfo(m[0]), m[1])
            info.size = len(body)
            t.addfile(info, io.BytesIO(body))
    return out.getvalue()

def zipped(*names) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as z:
        for name in names: z.writestr(name, str(name))
    return out.getvalue()

def packed(corpus, top='Top-1.0/') -> bytes:
    return tarred(*((top + name, body) for name, body in tree(corpus).items() if (corpus / name).is_file()))

def refused(call, *arguments, **options) -> str:
    "The message of the `UserError` that this call raises."
    with pytest.raises(UserError) as e: call(*arguments, **options)
    assert str(e.value).endswith('.') and '\n' not in str(e.value)
    return str(e.value)


# --- the table ----------------------------------------------------------------------------------------------

def test_every_file_of_the_table_is_pinned():
    files = [f for s in SOURCES.values() for f in s.files]
    assert all(re.fullmatch('[0-9a-f]{64}', f['sha256']) and f['bytes'] > 0 for f in files)
    assert (len({f['sha256'] for f in files}), len(files)) == (16, 17)   # one licence twice
    assert sum(f['bytes'] for f in files) == 100_786_687_369
    model, voices, *corpora = SOURCES.values()
    assert re.fullmatch('[0-9a-f]{40}', model.hub[1]) and model.hub[1] in model.url
    assert model.terms and model.files[0]['file'] == 'LICENSE.txt'
    assert voices.terms and voices.name == 'xtts-voices'
    assert (voices.files[0], voices.hub) == (model.files[0], model.hub)
    assert download_text(voices, {'files': voices.files, 'folder': 'v'}).endswith(
        'xtts-nb voices import v/speakers_xtts.pth --model MODEL --voices VOICES')
    assert all(len(s.files) == 1 and not s.hub and not s.terms for s in corpora)
    assert all(s.url.startswith('https://') for s in corpora)
    assert source_rows()[2] == {'name': 'ljspeech', 'GB': 2.75, 'licence': 'public domain'}
    assert len(SOURCES) == 11

@pytest.mark.parametrize('name, part', [
    ('ljspech', 'one of xtts-v2, xtts-voices, ljspeech, '), ('', 'ljspeech'),
    ('common-voice', 'https://commonvoice.mozilla.org')])
def test_what_is_not_in_the_table(name, part):
    assert part in refused(find_source, name)


# --- the licence --------------------------------------------------------------------------------------------

def test_nothing_is_fetched_before_the_licence_is_accepted(server, model, fetch, tmp_path):
    text = refused(fetch, model, tmp_path / 'out', accept=False)
    assert 'Some License' in text and '--accept-cpml' in text and not server.requests and tree(tmp_path) == {}

def test_the_text_of_the_licence(server, model):
    assert terms(model, server.address) == 'Ask first.\n' and server.requests == [('LICENSE.txt', None)]
    server.files['LICENSE.txt'] = b'Ask nobody'
    text = terms(model, server.address)
    assert 'Some License' in text and f'{model.url}/LICENSE.txt' in text and 'Ask nobody' not in text


# --- a model ------------------------------------------------------------------------------------------------

def test_a_model(server, model, fetch, tmp_path):
    out = tmp_path / 'new' / 'Größe 大'
    result = fetch(model, out)
    assert result == {'name': 'model', 'folder': str(out), 'files': [known(*f) for f in FILES.items()]}
    got = tree(out)
    stored = json.loads(got.pop('download.json'))
    assert stored == {'name': 'model', 'from': server.address, 'licence': 'Some License',
                      'files': result['files']}
    assert got == FILES and list(out.parent.iterdir()) == [out]
    assert download_text(model, result).splitlines()[1:] == [
        'a.pth: 500,000 bytes, SHA-256 as published', 'b.pth: 70,000 bytes, SHA-256 as published',
        f'{out} is ready (Some License): xtts-nb convert from-coqui {out} MODEL']
    assert fetch(model, out) == result and not server.requests

def test_a_connection_that_breaks_is_resumed(server, model, fetch, tmp_path):
    server.files['a.pth'], server.breaks = bytes(12 << 20), 11 << 20   # the library counts in 10 MiB
    model.files[:] = [known('a.pth', server.files['a.pth'])]
    fetch(model, tmp_path / 'out')
    assert server.requests == [('a.pth', None), ('a.pth', f'bytes={10 << 20}-')]

@pytest.mark.parametrize('ranges', [True, False])
def test_an_archive_that_stops_is_not_fetched_from_its_start(server, fetch, corpus, tmp_path, ranges):
    "44 GB would take hours again; a server that knows no ranges sends all of it."
    source, server.ranges = archive(server, body := packed(corpus)), ranges
    server.breaks, part = 2**17 + 1000, tmp_path / 'c.download' / 'c.tar.bz2.part'
    assert 'repeat the command' in refused(fetch, source, tmp_path / 'c')
    assert server.requests == [('c.tar.bz2', None)] and part.read_bytes() == body[:2**17]
    fetch(source, tmp_path / 'c')
    assert server.requests == [('c.tar.bz2', 'bytes=131072-')]
    assert read_corpus(tmp_path / 'c')[0] and not part.parent.exists()

def begin(work):
    work.mkdir()
    (work / 'download.json').write_text('{"for": "c"}')

@pytest.mark.parametrize('left', [b'x' * 1000, b'x' * 10**6], ids=['of another file', 'longer than the file'])
def test_a_wrong_part_costs_one_more_fetch(server, fetch, corpus, tmp_path, left):
    source = archive(server, packed(corpus))
    begin(tmp_path / 'c.download')
    (tmp_path / 'c.download' / 'c.tar.bz2.part').write_bytes(left)
    if len(left) < source.files[0]['bytes']:
        assert 'repeat the command' in refused(fetch, source, tmp_path / 'c')   # its checksum is wrong
    fetch(source, tmp_path / 'c')
    assert server.requests == [('c.tar.bz2', None)] and read_corpus(tmp_path / 'c')[0]

def test_a_part_that_is_whole_needs_no_request(server, fetch, corpus, tmp_path):
    source = archive(server, body := packed(corpus))
    begin(tmp_path / 'c.download')
    (tmp_path / 'c.download' / 'c.tar.bz2.part').write_bytes(body)
    fetch(source, tmp_path / 'c')
    assert server.requests == [] and read_corpus(tmp_path / 'c')[0]

def test_wrong_bytes_are_removed_and_files_that_came_are_not_fetched_again(server, model, fetch, tmp_path):
    server.files['b.pth'] = bytes(70_000)
    text = refused(fetch, model, tmp_path / 'out')
    assert model.files[2]['sha256'] in text and 'b.pth' in text and '--from' in text
    assert not (tmp_path / 'out').exists()
    server.files['b.pth'] = FILES['b.pth']
    fetch(model, tmp_path / 'out')
    assert server.requests == [('b.pth', None)] and {p.name for p in tmp_path.iterdir()} == {'out'}


# --- a corpus -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('top', ['Top-1.0/', ''], ids=['in a folder', 'flat'])
def test_a_corpus_that_prepare_reads(server, fetch, corpus, tmp_path, top):
    source, out = archive(server, packed(corpus, top)), tmp_path / 'stored' / 'c'
    out.mkdir(parents=True)   # an empty folder is filled
    result = fetch(source, out)
    got = tree(out)
    assert json.loads(got.pop('download.json'))['files'] == result['files'] == source.files
    assert got == tree(corpus)
    assert len(read_corpus(out)[0]) == 14 and list(out.parent.iterdir()) == [out]
    assert f'xtts-nb prepare {out} --out CACHE' in download_text(source, result)
    assert fetch(source, out) == result and not server.requests

@pytest.mark.parametrize('names, made', [(['txt/a', 'b'], {'b', 'txt', 'txt/a'}), (['a..b'], {'a..b'}),
                                         (['top/a/1', 'top/b'], {'a', 'a/1', 'b'})])
def test_a_zip(server, fetch, tmp_path, names, made):
    "Only a single folder around everything is removed."
    fetch(archive(server, zipped(*names), 'c.zip'), tmp_path / 'c')
    assert {*tree(tmp_path / 'c')} == made | {'download.json'}

def test_a_tar_made_of_the_folder_itself(server, fetch, tmp_path):
    here, sub = tarfile.TarInfo('./'), tarfile.TarInfo('./txt')
    here.type = sub.type = tarfile.DIRTYPE
    fetch(archive(server, tarred(here, sub, ('./txt/a', b'x'), ('./b', b'y'))), tmp_path / 'c')
    made = tree(tmp_path / 'c')
    assert {*made} == {'b', 'txt', 'txt/a', 'download.json'} and (made['txt/a'], made['b']) == (b'x', b'y')

def special(kind, target='') -> bytes:
    member = tarfile.TarInfo('evil')
    member.type, member.linkname = kind, target
    return tarred(('good', b''), member, ('evil/evil', b'x'))

@pytest.mark.parametrize('name, body', [
    ('c.tar', tarred(('../evil', b'x'))), ('c.tar', tarred(('a/../../../evil', b'x'))),
    ('c.tar', special(tarfile.SYMTYPE, '..')), ('c.tar', special(tarfile.LNKTYPE, '/etc/passwd')),
    ('c.tar', special(tarfile.FIFOTYPE)), ('c.zip', zipped('../evil')), ('c.zip', zipped('good', '/evil')),
    ('c.tar', tarred(('good', b'x' * 9999))[:-50]), ('c.zip', b'no archive')],
    ids=['up', 'up later', 'symlink', 'hard link', 'pipe', 'zip up', 'zip absolute', 'broken', 'no zip'])
def test_an_archive_stays_in_its_folder(server, fetch, tmp_path, name, body):
    refused(fetch, archive(server, body, name), tmp_path / 'c')
    assert {*tree(tmp_path)} == {'c.download', 'c.download/download.json', f'c.download/{name}'}

def test_a_link_in_a_zip_is_a_file(server, fetch, tmp_path):
    link = zipfile.ZipInfo('evil')
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    fetch(archive(server, zipped(link, 'b'), 'c.zip'), tmp_path / 'c')
    assert (tmp_path / 'c' / 'evil').is_file() and not (tmp_path / 'c' / 'evil').is_symlink()

def test_a_wrong_archive_is_never_unpacked(server, fetch, corpus, tmp_path):
    source = archive(server, packed(corpus))
    server.files['c.tar.bz2'] = tarred(('evil', b'x'))
    begin(tmp_path / 'c.download')
    (tmp_path / 'c.download' / 'tmp12345678').write_text('left by a killed process')
    assert source.files[0]['sha256'] in refused(fetch, source, tmp_path / 'c')
    assert {*tree(tmp_path)} == {'c.download', 'c.download/download.json'}

def test_ctrl_c_while_unpacking_keeps_the_archive(server, fetch, corpus, tmp_path, monkeypatch):
    source = archive(server, packed(corpus))
    def press(*_, **__): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(tarfile.TarFile, 'extractfile', press)
        fetch(source, tmp_path / 'c')
    assert {*tree(tmp_path)} == {'c.download', 'c.download/c.tar.bz2', 'c.download/download.json'}
    fetch(source, tmp_path / 'c')
    assert not server.requests and list(tmp_path.iterdir()) == [tmp_path / 'c']


# --- what is refused ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('text', ['{}', '[]', '1', '{"name": "other", "files": []}', '{"name": "model"}',
                                  'text', None])
def test_a_folder_of_something_else(server, model, fetch, tmp_path, text):
    out = tmp_path / 'out'
    if text is None: out.write_text('mine')
    else:
        out.mkdir()
        (out / 'download.json').write_text(text)
        (out / 'thesis.txt').write_text('mine')
    before = tree(tmp_path)
    assert f'{out}: already holds' in refused(fetch, model, out)
    assert tree(tmp_path) == before and not server.requests

def test_a_damaged_model_and_another_release(server, model, fetch, corpus, tmp_path):
    fetch(model, tmp_path / 'm')
    (tmp_path / 'm' / 'a.pth').write_bytes(b'months of work')
    assert 'already holds' in refused(fetch, model, tmp_path / 'm') and not server.requests
    fetch(archive(server, packed(corpus)), tmp_path / 'c')
    assert 'already holds' in refused(fetch, archive(server, packed(corpus, 'Top-1.1/')), tmp_path / 'c')

@pytest.mark.parametrize('base', [None, 'mirror', 'ftp://a.b', 'file:/etc', 'http://', 'http://a:port'])
@pytest.mark.parametrize('hub', [(), HUB], ids=['web', 'hub'])
def test_an_address_without_the_file(server, tmp_path, base, hub):
    source = Source('corpus', [known('c.tar', b'')], 'free', server.address, hub)
    text = refused(download, source, tmp_path / 'c', base or server.address)
    address = base or server.address
    assert text.startswith(f'corpus: could not be fetched from {address} to {tmp_path / "c"} (')
    assert 'or try another mirror with --from' in text and not (tmp_path / 'c').exists()

def test_nobody_listens(server, tmp_path):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))   # bound, but does not listen
        address = f'http://127.0.0.1:{s.getsockname()[1]}'
        text = refused(download, archive(server, b''), tmp_path / 'c', address)
    assert 'refused' in text and not (tmp_path / 'c').exists()

def test_too_little_room_is_found_before_it_is_filled(server, model, fetch, tmp_path, monkeypatch):
    monkeypatch.setattr('shutil.disk_usage', lambda _: SimpleNamespace(free=1000))
    text = refused(fetch, model, tmp_path / 'out')
    assert '570,011 bytes are needed and 1,000 are free' in text and not server.requests

def test_an_archive_needs_room_for_its_files_too(server, fetch, tmp_path, monkeypatch):
    monkeypatch.setattr('shutil.disk_usage', lambda _: SimpleNamespace(free=1999))
    text = refused(fetch, archive(server, bytes(1000)), tmp_path / 'out')
    assert '2,000 bytes are needed and 1,999 are free' in text and not server.requests
    (tmp_path / 'out.download' / 'c.tar.bz2').write_bytes(bytes(1000))   # fetched before
    monkeypatch.setattr('shutil.disk_usage', lambda _: SimpleNamespace(free=999))
    assert '1,000 bytes are needed' in refused(fetch, archive(server, bytes(1000)), tmp_path / 'out')

def test_a_folder_below_a_file(server, model, fetch, tmp_path):
    (tmp_path / 'x').write_text('mine')
    assert 'x' in refused(fetch, model, tmp_path / 'x' / 'out') and tree(tmp_path) == {'x': b'mine'}


# --- the command --------------------------------------------------------------------------------------------

def test_the_command_asks_for_the_licence_of_the_released_model(ran, server, tmp_path, monkeypatch):
    "The server does not have it, so its name is shown; nothing else is requested."
    monkeypatch.chdir(tmp_path)
    done = ran(f'download xtts-v2 --from {server.address} --json')
    assert (done.code, done.out) == (2, '') and {name for name, _ in server.requests} <= {'LICENSE.txt'}
    assert 'https://coqui.ai/cpml.txt' in done.err and 'Traceback' not in done.err and tree(tmp_path) == {}
    assert 'repeat with --accept-cpml' in done.said[-1]

def test_the_command(ran, server, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'settings.ini').write_text('[workspace]\ndata = my data\n')
    source = archive(server, packed(corpus))
    monkeypatch.setitem(SOURCES, 'corpus', source)
    done = ran(f'download corpus --from {server.address} --json')
    folder = str(tmp_path / 'my data' / 'corpus')
    assert done.code == 0 and done.json == {'name': 'corpus', 'folder': folder, 'files': source.files}
    done = ran('download corpus --out', 'my data/corpus')
    assert done.code == 0 and 'xtts-nb prepare my data/corpus --out CACHE' in done.out

@pytest.mark.parametrize('name', ['thesis.txt', 'c.tar.bz2'])
def test_what_somebody_put_next_to_an_unfinished_download_stays(server, fetch, corpus, tmp_path, name):
    source = archive(server, packed(corpus))
    (tmp_path / 'c.download').mkdir()
    (tmp_path / 'c.download' / name).write_text('mine')
    assert name in refused(fetch, source, tmp_path / 'c') and not (tmp_path / 'c').exists()
    assert (tmp_path / 'c.download' / name).read_text() == 'mine'
