"Sources: their table, licences, errors and the downloaded folder; with a local server."
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from process import tree
from xtts_nb.app.download import _SOURCES, _Source, _file, download
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
def model(server) -> _Source:
    server.files |= FILES
    files = [known(*f) for f in FILES.items()]
    return _Source('model', files, 'Some License', server.address, HUB, True, 'convert from-coqui {} MODEL')

@pytest.fixture
def fetch(server):
    "Download from the server; its requests are in `server.requests`."
    def fetch(source, out, **options):
        server.requests.clear()
        return download(source, out, server.address, **{'accept': True} | options)
    return fetch

def archive(server, body, name='c.tar.bz2') -> _Source:
    "A corpus that is this archive."
    server.files[name] = body
    return _Source('corpus', [known(name, body)], 'public domain', 'https://example.org')

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

# --- the table and the licence ------------------------------------------------------------------------------

# --- a model and an archive ---------------------------------------------------------------------------------

def test_a_model(server, model, fetch, tmp_path):
    out = tmp_path / 'new' / 'Größe 大'
    result = fetch(model, out)
    assert result == {'name': 'model', 'folder': str(out), 'files': [known(*f) for f in FILES.items()]}
    got = tree(out)
    assert json.loads(got.pop('download.json')) == {
        'name': 'model', 'from': server.address, 'licence': 'Some License', 'files': result['files']}
    assert got == FILES and list(out.parent.iterdir()) == [out]
    assert fetch(model, out) == result and not server.requests
    (out / 'a.pth').write_bytes(b'months of work')
    assert 'already holds' in refused(fetch, model, out) and not server.requests

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

def test_wrong_bytes_are_removed_and_files_that_came_are_not_fetched_again(server, model, fetch, tmp_path):
    server.files['b.pth'] = bytes(70_000)
    assert model.files[2]['sha256'] in refused(fetch, model, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    server.files['b.pth'] = FILES['b.pth']
    fetch(model, tmp_path / 'out')
    assert server.requests == [('b.pth', None)] and {p.name for p in tmp_path.iterdir()} == {'out'}

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

def test_ctrl_c_while_unpacking_keeps_the_archive(server, fetch, corpus, tmp_path, monkeypatch):
    source = archive(server, packed(corpus))
    def press(*_, **__): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(tarfile.TarFile, 'extractfile', press)
        fetch(source, tmp_path / 'c')
    assert {*tree(tmp_path)} == {'c.download', 'c.download/c.tar.bz2', 'c.download/download.json'}
    fetch(source, tmp_path / 'c')
    assert not server.requests and list(tmp_path.iterdir()) == [tmp_path / 'c']

# --- what is refused, and the command -----------------------------------------------------------------------

@pytest.mark.parametrize('text', ['{}', '1', '{"name": "other", "files": []}', 'text', None])
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

@pytest.mark.parametrize('name', ['thesis.txt', 'c.tar.bz2'])
def test_what_somebody_put_next_to_an_unfinished_download_stays(server, fetch, corpus, tmp_path, name):
    source = archive(server, packed(corpus))
    (tmp_path / 'c.download').mkdir()
    (tmp_path / 'c.download' / name).write_text('mine')
    assert name in refused(fetch, source, tmp_path / 'c') and not (tmp_path / 'c').exists()
    assert (tmp_path / 'c.download' / name).read_text() == 'mine'

def test_too_little_room_is_found_before_it_is_filled(server, model, fetch, tmp_path, monkeypatch):
    "An archive needs room for its files too, but for itself only once."
    free = lambda size: monkeypatch.setattr('shutil.disk_usage', lambda _: SimpleNamespace(free=size))
    free(1000)
    assert '570,011 bytes are needed' in refused(fetch, model, tmp_path / 'm') and not server.requests
    free(1999)
    assert '2,000 bytes are needed' in refused(fetch, archive(server, bytes(1000)), tmp_path / 'out')
    (tmp_path / 'out.download' / 'c.tar.bz2').write_bytes(bytes(1000))   # fetched before
    free(999)
    assert '1,000 bytes are needed' in refused(fetch, archive(server, bytes(1000)), tmp_path / 'out')

def test_the_command(ran, server, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'settings.ini').write_text('[workspace]\ndata = my data\n')
    before = tree(tmp_path)
    done = ran(f'download xtts-v2 --from {server.address} --json')   # the server does not have its licence
    assert (done.code, done.out) == (2, '') and {name for name, _ in server.requests} <= {'LICENSE.txt'}
    assert 'https://coqui.ai/cpml.txt' in done.err and '--accept-cpml' in done.said[-1]
    assert tree(tmp_path) == before
    monkeypatch.setitem(_SOURCES, 'corpus', source := archive(server, packed(corpus, '')))
    done = ran(f'download corpus --from {server.address} --json')
    folder = str(tmp_path / 'my data' / 'corpus')
    assert done.code == 0 and done.json == {'name': 'corpus', 'folder': folder, 'files': source.files}
    got = tree(tmp_path / 'my data/corpus')
    assert json.loads(got.pop('download.json'))['files'] == source.files and got == tree(corpus)
    names = [row['name'] for row in ran('download --json').json['sources']]
    assert names == [*_SOURCES] and all(name in ran('download').out for name in names)
