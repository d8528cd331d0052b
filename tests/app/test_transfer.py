"Transfers over a server that breaks off, lies, changes its mind and hangs; archives that want out of their folder."
import hashlib
import io
import os
import socket
import stat
import struct
import tarfile
import threading
import time
import zipfile
from dataclasses import replace

import pytest

from process import tree
from server import BODY, serving
from xtts_nb.app import transfer
from xtts_nb.config import UserError
from xtts_nb.app.transfer import File, fetch, unpack

FILE = File('a.bin', 'https://example.org/a.bin', len(BODY), hashlib.sha256(BODY).hexdigest())
BARE = File('a.bin', 'https://example.org/a.bin')   # nothing is known of it


@pytest.fixture
def server(monkeypatch):
    "A server of this test."
    monkeypatch.setenv('no_proxy', '*')
    with serving() as plan: yield plan

def get(server, path, file=FILE, **options):
    "Fetch from the server without waiting: `(entry, bytes resumed)`."
    return fetch(file, path, server.address, **{'pause': 0, 'timeout': 5} | options)

def said(call, *arguments, **options) -> str:
    "The sentence of a refusal."
    with pytest.raises(UserError) as e: call(*arguments, **options)
    text = str(e.value)
    assert text.endswith('.') and '\n' not in text
    return text


# --- breaking off ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('reset', [False, True], ids=['closed', 'reset'])
def test_it_goes_on_where_it_broke_off(server, tmp_path, reset):
    server.most, server.reset = 400_000, reset
    entry, resumed = get(server, tmp_path / 'a.bin', tries=20)
    assert (tmp_path / 'a.bin').read_bytes() == BODY and set(tree(tmp_path)) == {'a.bin'}
    assert entry == {'file': 'a.bin', 'bytes': len(BODY), 'sha256': FILE.sha256, 'checked': 'pinned'}
    starts = [int(r.headers.get('Range', 'bytes=0-')[6:-1]) for r in server.asked]
    assert starts == sorted(starts) and resumed == starts[-1] > 0 and server.asked[0].headers['Range'] is None
    assert {r.headers['If-Range'] for r in server.asked if r.headers['Range']} == {'"1"'}
    if not reset: assert starts == [0, 400_000, 800_000] and server.sent == len(BODY)   # a reset loses what is on its way

def test_many_breaks_are_no_failure_as_long_as_it_gets_further(server, tmp_path):
    server.most = 100_000
    get(server, tmp_path / 'a.bin', tries=1)
    assert (tmp_path / 'a.bin').read_bytes() == BODY and len(server.asked) == 10

def test_a_later_call_goes_on(server, tmp_path):
    server.most, server.limit = 300_000, 1   # one answer, then nothing but closed connections
    text = said(get, server, tmp_path / 'a.bin', tries=2)
    assert '300000 bytes are kept' in text and '2 times' in text and server.address in text
    assert {k: len(v) for k, v in tree(tmp_path).items()} == {'a.bin.part': 300_000, 'a.bin.part.mark': 3}
    server.most, server.limit = None, None
    server.asked.clear()
    assert get(server, tmp_path / 'a.bin')[1] == 300_000
    assert [r.headers['Range'] for r in server.asked] == ['bytes=300000-'] and (tmp_path / 'a.bin').read_bytes() == BODY

def test_a_server_that_ignores_ranges_starts_over(server, tmp_path):
    server.ranges = False
    (tmp_path / 'a.bin.part').write_bytes(BODY[:500])
    (tmp_path / 'a.bin.part.mark').write_text('"1"')
    assert get(server, tmp_path / 'a.bin')[1] == 0 and (tmp_path / 'a.bin').read_bytes() == BODY

def test_a_server_that_ignores_ranges_and_always_breaks_off_ends(server, tmp_path):
    server.ranges, server.most = False, 1000
    assert '1000 bytes' in said(get, server, tmp_path / 'a.bin', tries=3) and len(server.asked) == 4

@pytest.mark.parametrize('obeys', [True, False], ids=['If-Range obeyed', 'If-Range ignored'])
def test_a_file_that_changes_in_between_starts_over(server, tmp_path, obeys):
    server.files['a.bin'], server.most, server.limit = bytes(len(BODY)), 200_000, 1
    said(get, server, tmp_path / 'a.bin', BARE, tries=1)
    server.files['a.bin'], server.most, server.limit, server.etag, server.if_range = BODY, None, None, '"2"', obeys
    entry, resumed = get(server, tmp_path / 'a.bin', BARE)
    assert (tmp_path / 'a.bin').read_bytes() == BODY and resumed == 0 and entry['checked'] == 'size'

@pytest.mark.parametrize('etag, date, file, ranged', [
    (None, None, FILE, True), (None, None, BARE, False), ('W/"1"', None, BARE, False),
    (None, 'Mon, 01 Jan 2024 00:00:00 GMT', BARE, True),
], ids=['checksum', 'nothing', 'weak', 'date'])
def test_what_it_takes_to_go_on(server, tmp_path, etag, date, file, ranged):
    "A strong mark of the server, or a checksum that tells in the end."
    server.etag, server.date, server.most = etag, date, 600_000
    get(server, tmp_path / 'a.bin', file, tries=2) if ranged else said(get, server, tmp_path / 'a.bin', file, tries=2)
    assert (server.asked[1].headers['Range'] is not None) == ranged and server.asked[1].headers['If-Range'] == date

@pytest.mark.parametrize('extra, right', [(0, True), (10, True)], ids=['complete', 'too long'])
@pytest.mark.parametrize('file', [FILE, BARE], ids=['pinned', 'bare'])
def test_a_part_with_nothing_missing(server, tmp_path, extra, right, file):
    (tmp_path / 'a.bin.part').write_bytes(BODY + bytes(extra))
    (tmp_path / 'a.bin.part.mark').write_text('"1"')
    get(server, tmp_path / 'a.bin', file)
    assert (tmp_path / 'a.bin').read_bytes() == BODY and set(tree(tmp_path)) == {'a.bin'}
    assert server.sent == (len(BODY) if extra else 0)

def test_a_hanging_server_is_left(server, tmp_path):
    server.most, server.hangs, notes = 300_000, 1, []
    progress = lambda name, done, total, note: notes.append(note)
    _, resumed = get(server, tmp_path / 'a.bin', timeout=0.3, progress=progress)
    assert (tmp_path / 'a.bin').read_bytes() == BODY and resumed >= 300_000
    assert any('does not answer; again in' in n for n in notes)

def test_progress_counts_what_was_there(server, tmp_path):
    (tmp_path / 'a.bin.part').write_bytes(BODY[:500_000])
    (tmp_path / 'a.bin.part.mark').write_text('"1"')
    told = []
    get(server, tmp_path / 'a.bin', progress=lambda *x: told.append(x))
    done = [x[1] for x in told]
    assert {x[0] for x in told} == {'a.bin, MB'} and {x[2] for x in told} == {len(BODY) / 1e6}
    assert done == sorted(done) and done[0] > 0.5 and done[-1] == len(BODY) / 1e6

def test_ctrl_c_keeps_the_part(server, tmp_path):
    def press(name, done, total, note): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): get(server, tmp_path / 'a.bin', progress=press)
    kept = (tmp_path / 'a.bin.part').stat().st_size
    assert 0 < kept < len(BODY) and get(server, tmp_path / 'a.bin')[1] == kept


# --- what is not the file -------------------------------------------------------------------------------------------

def test_wrong_bytes_are_removed_and_named(server, tmp_path):
    server.files['a.bin'] = BODY[:-1] + b'!'
    text = said(get, server, tmp_path / 'a.bin')
    assert FILE.sha256 in text and hashlib.sha256(server.files['a.bin']).hexdigest() in text and '/a.bin' in text
    assert tree(tmp_path) == {} and len(server.asked) == 1

def test_a_wrong_length_is_noticed_before_a_byte_is_written(server, tmp_path):
    server.files['a.bin'] = BODY + b'!'
    text = said(get, server, tmp_path / 'new' / 'a.bin')
    assert f'{len(BODY) + 1} bytes where {len(BODY)}' in text and tree(tmp_path) == {}

@pytest.mark.parametrize('body', [BODY[:-9], BODY + bytes(2_000_000)], ids=['short', 'long'])
def test_a_wrong_length_that_is_not_announced(server, tmp_path, body):
    server.files['a.bin'], server.lengths = body, False
    text = said(get, server, tmp_path / 'a.bin', tries=2)
    assert str(len(BODY)) in text and 'a.bin' not in tree(tmp_path)

def test_without_length_and_checksum_nobody_could_tell(server, tmp_path):
    server.lengths = False
    assert 'neither length nor checksum' in said(get, server, tmp_path / 'a.bin', BARE) and tree(tmp_path) == {}

@pytest.mark.parametrize('linked, how', [(FILE.sha256, 'declared'), ('a' * 40, 'size'), (None, 'size')],
                         ids=['SHA-256', 'another kind', 'none'])
def test_a_hub_declares_the_checksum_before_it_redirects(server, tmp_path, linked, how):
    server.redirects, server.linked = {'a.bin': 'store'}, linked
    server.files['store'] = BODY
    entry, _ = get(server, tmp_path / 'a.bin', BARE)
    assert entry['checked'] == how and entry['sha256'] == FILE.sha256 and [r.path for r in server.asked] == ['/a.bin', '/store']

def test_a_store_that_sends_something_else_than_declared(server, tmp_path):
    server.redirects, server.linked = {'a.bin': 'store'}, FILE.sha256
    server.files['store'] = bytes(len(BODY))
    assert FILE.sha256 in said(get, server, tmp_path / 'a.bin', BARE) and tree(tmp_path) == {}

def test_a_redirected_transfer_goes_on(server, tmp_path):
    server.redirects, server.most = {'a.bin': 'store'}, 600_000
    server.files['store'] = BODY
    assert get(server, tmp_path / 'a.bin')[1] == 600_000 and (tmp_path / 'a.bin').read_bytes() == BODY

def test_the_checksum_of_the_last_download_is_compared(server, tmp_path):
    entry, _ = get(server, tmp_path / 'a.bin', BARE)
    assert get(server, tmp_path / 'a.bin', BARE, known=entry) == (entry, 0) and len(server.asked) == 1
    (tmp_path / 'a.bin').unlink()
    server.files['a.bin'] = bytes(len(BODY))
    assert 'download.json' in said(get, server, tmp_path / 'a.bin', BARE, known=entry) and tree(tmp_path) == {}


# --- what stands there already --------------------------------------------------------------------------------------

def test_a_finished_file_is_not_fetched_again(server, tmp_path):
    first = get(server, tmp_path / 'a.bin')[0]
    assert get(server, tmp_path / 'a.bin') == (first, 0) and len(server.asked) == 1

@pytest.mark.parametrize('file', [FILE, BARE], ids=['pinned', 'bare'])
def test_another_file_of_that_name_is_not_replaced(server, tmp_path, file):
    (tmp_path / 'a.bin').write_text('my work')
    assert 'a.bin: stands there already' in said(get, server, tmp_path / 'a.bin', file)
    assert tree(tmp_path) == {'a.bin': b'my work'} and not server.asked

def test_a_folder_of_that_name(server, tmp_path):
    (tmp_path / 'a.bin').mkdir()
    assert 'stands there already' in said(get, server, tmp_path / 'a.bin') and not server.asked


# --- no file, no server, no room ------------------------------------------------------------------------------------

@pytest.mark.parametrize('status, word', [(404, 'has no such file'), (403, 'does not allow it'), (401, 'password'),
                                          (400, 'refuses')])
def test_what_no_patience_helps_against_is_said_at_once(server, tmp_path, status, word):
    server.statuses = [status] * 9
    text = said(get, server, tmp_path / 'new' / 'a.bin')
    assert word in text and str(status) in text and '--from' in text and len(server.asked) == 1 and tree(tmp_path) == {}

@pytest.mark.parametrize('status', [500, 503, 429, 408, 204])
def test_a_passing_fault(server, tmp_path, status):
    server.statuses = [status]
    get(server, tmp_path / 'a.bin')
    assert (tmp_path / 'a.bin').read_bytes() == BODY and len(server.asked) == 2

def test_a_fault_that_does_not_pass(server, tmp_path):
    server.statuses = [503] * 9
    text = said(get, server, tmp_path / 'a.bin', tries=3)
    assert '3 times' in text and 'nothing has come' in text and len(server.asked) == 3

def test_nobody_listens(tmp_path, monkeypatch):
    monkeypatch.setenv('no_proxy', '*')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))   # bound, and deaf
        text = said(fetch, FILE, tmp_path / 'a.bin', f'http://127.0.0.1:{s.getsockname()[1]}', pause=0, tries=2)
    assert 'refused' in text and 'check the network' in text and tree(tmp_path) == {}

def test_no_network(tmp_path, monkeypatch):
    def unknown(*_, **__): raise socket.gaierror(socket.EAI_AGAIN, 'Temporary failure in name resolution')
    monkeypatch.setenv('no_proxy', '*')
    monkeypatch.setattr(socket, 'getaddrinfo', unknown)
    text = said(fetch, FILE, tmp_path / 'a.bin', pause=0, tries=2)
    assert 'https://example.org/a.bin: Temporary failure in name resolution' in text and 'check the network' in text

def test_something_else_listens(tmp_path, monkeypatch):
    monkeypatch.setenv('no_proxy', '*')
    with socket.create_server(('127.0.0.1', 0)) as s:
        def greet():
            for _ in range(2):
                with s.accept()[0] as c: c.sendall(b'SSH-2.0-x\r\n'); c.recv(1000)
        threading.Thread(target=greet, daemon=True).start()
        text = said(fetch, FILE, tmp_path / 'a.bin', f'http://127.0.0.1:{s.getsockname()[1]}', pause=0, tries=2, timeout=5)
    assert 'check the network' in text and tree(tmp_path) == {}

@pytest.mark.parametrize('base', ['', 'mirror', 'ftp://a.b', 'file:/etc', 'http://', 'http://a..b', 'http://a:port',
                                  'http://[1', '//a'])
def test_what_is_no_web_address(tmp_path, base):
    if base: assert 'is no web address' in said(fetch, FILE, tmp_path / 'a.bin', base)
    else: assert 'is no web address' in said(fetch, replace(FILE, url='file:/etc/passwd'), tmp_path / 'a.bin')

def test_an_address_with_blanks_and_letters_beyond_ascii(server, tmp_path):
    server.files['my%20d%C3%A4ta/a.bin'] = BODY
    fetch(FILE, tmp_path / 'a.bin', f'{server.address}/my däta/', pause=0)
    assert [r.path for r in server.asked] == ['/my%20d%C3%A4ta/a.bin']

def test_too_little_room_is_said_before_it_is_filled(server, tmp_path, monkeypatch):
    real = transfer.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(transfer.shutil, 'disk_usage', lambda _: real._replace(free=len(BODY) // 2))
    text = said(get, server, tmp_path / 'a.bin')
    assert 'a.bin.part' in text and '1.0 MB are to come and 0.5 MB are free' in text and 'a.bin' not in tree(tmp_path)

def test_a_folder_that_is_a_file(server, tmp_path):
    (tmp_path / 'x').write_text('mine')
    assert 'x' in said(get, server, tmp_path / 'x' / 'a.bin') and tree(tmp_path) == {'x': b'mine'}

def test_a_clock_paces_the_tries(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(time, 'sleep', waits.append)
    server.statuses = [503] * 9
    said(get, server, tmp_path / 'a.bin', tries=5, pause=1.)
    assert waits == [1, 2, 4, 8]


# --- archives -------------------------------------------------------------------------------------------------------

def tarred(path, *members, mode='w:gz'):
    "An archive of `(name, bytes)` or ready `TarInfo`s."
    with tarfile.open(path, mode) as t:
        for m in members:
            if isinstance(m, tarfile.TarInfo): t.addfile(m); continue
            info = tarfile.TarInfo(m[0]); info.size = len(m[1])
            t.addfile(info, io.BytesIO(m[1]))
    return path

def special(name, kind, target=''):
    m = tarfile.TarInfo(name)
    m.type, m.linkname = kind, target
    return m

def zipped(path, *members, method=zipfile.ZIP_DEFLATED, mode=None):
    with zipfile.ZipFile(path, 'w', method) as z:
        for name, body in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            if mode: info.external_attr = mode << 16
            z.writestr(info, body)
    return path

@pytest.mark.parametrize('mode', ['w', 'w:gz', 'w:bz2', 'w:xz'])
def test_tar(tmp_path, mode):
    tarred(tmp_path / 'a', special('b', tarfile.DIRTYPE), ('b/c.txt', b'c'), ('./d e/ä.txt', b'd'), mode=mode)
    (tmp_path / 'out').mkdir()
    unpack(tmp_path / 'a', tmp_path / 'out')
    assert tree(tmp_path / 'out') == {'b': b'', 'b/c.txt': b'c', 'd e': b'', 'd e/ä.txt': b'd'}

def test_zip(tmp_path):
    zipped(tmp_path / 'a', ('b/', b''), ('b/c.txt', b'c' * 1000), ('d.txt', b'd'))
    (tmp_path / 'out').mkdir()
    told = []
    unpack(tmp_path / 'a', tmp_path / 'out', lambda *x: told.append(x))
    assert tree(tmp_path / 'out') == {'b': b'', 'b/c.txt': b'c' * 1000, 'd.txt': b'd'} and len(told) == 3

def test_a_tar_that_ends_in_a_zip_is_a_tar(tmp_path):
    inner = zipped(tmp_path / 'z', ('evil', b'x')).read_bytes()
    tarred(tmp_path / 'a', ('z.zip', inner), mode='w')
    (tmp_path / 'out').mkdir()
    unpack(tmp_path / 'a', tmp_path / 'out')
    assert set(tree(tmp_path / 'out')) == {'z.zip'}

EVIL = {
    'up': lambda p: tarred(p, ('../evil', b'x')), 'up later': lambda p: tarred(p, ('a/../../evil', b'x')),
    'absolute': lambda p: tarred(p, (f'{p.parent}/evil', b'x')),
    'symlink': lambda p: tarred(p, special('evil', tarfile.SYMTYPE, '/')),
    'symlink inside': lambda p: tarred(p, ('a', b'x'), special('evil', tarfile.SYMTYPE, 'a')),
    'symlink, then through it': lambda p: tarred(p, special('evil', tarfile.SYMTYPE, '..'), ('evil/evil', b'x')),
    'hard link': lambda p: tarred(p, special('evil', tarfile.LNKTYPE, '/etc/passwd')),
    'pipe': lambda p: tarred(p, special('evil', tarfile.FIFOTYPE)),
    'device': lambda p: tarred(p, special('evil', tarfile.CHRTYPE)),
    'drive': lambda p: tarred(p, ('C:evil', b'x')), 'backslash': lambda p: tarred(p, ('..\\evil', b'x')),
    'zip up': lambda p: zipped(p, ('../evil', b'x')), 'zip absolute': lambda p: zipped(p, (f'{p.parent}/evil', b'x')),
    'zip symlink': lambda p: zipped(p, ('evil', b'/etc'), mode=stat.S_IFLNK | 0o777),
}

@pytest.mark.parametrize('kind', EVIL)
def test_an_archive_stays_in_its_folder(tmp_path, kind):
    EVIL[kind](tmp_path / 'a')
    (tmp_path / 'out').mkdir()
    text = said(unpack, tmp_path / 'a', tmp_path / 'out')
    assert 'evil' in text and 'link, a device or a path out' in text and not [p for p in tree(tmp_path) if 'evil' in p]

@pytest.mark.parametrize('make', [
    lambda p: tarred(p, ('a', bytes(20_000_000)), mode='w:bz2'), lambda p: zipped(p, ('a', bytes(20_000_000))),
    lambda p: tarred(p, *((f'{i}', b'') for i in range(2300))),
], ids=['tar', 'zip', 'names'])
def test_a_bomb(tmp_path, make):
    make(tmp_path / 'a')
    (tmp_path / 'out').mkdir()
    assert 'more than 4 times' in said(unpack, tmp_path / 'a', tmp_path / 'out')
    assert sum(len(b) for b in tree(tmp_path / 'out').values()) < 2**20

def test_a_zip_that_understates_its_lengths(tmp_path):
    data = bytearray(zipped(tmp_path / 'a', ('a', bytes(20_000_000))).read_bytes())
    for mark, at in ((b'PK\3\4', 22), (b'PK\1\2', 24)): struct.pack_into('<I', data, data.index(mark) + at, 100)
    (tmp_path / 'a').write_bytes(data)
    (tmp_path / 'out').mkdir()
    assert 'is no archive' in said(unpack, tmp_path / 'a', tmp_path / 'out')
    assert sum(len(b) for b in tree(tmp_path / 'out').values()) <= 100

@pytest.mark.parametrize('ending', ['gz', 'bz2', 'xz', 'zip', 'text', 'empty'])
def test_broken_archives(tmp_path, ending):
    body = os.urandom(100_000)
    whole = (b'no archive' if ending == 'text' else b'' if ending == 'empty' else
             zipped(tmp_path / 'w', ('a', body)).read_bytes() if ending == 'zip' else
             tarred(tmp_path / 'w', ('a', body), mode=f'w:{ending}').read_bytes())
    (tmp_path / 'out').mkdir()
    half, hurt = whole[:len(whole) // 2], whole[:5000] + b'!' * 100 + whole[5100:]
    for data in [half] if ending in ('gz', 'text', 'empty') else [half, hurt]:   # the sum of a gz is not read in a stream
        (tmp_path / 'a').write_bytes(data)
        assert 'a: is no archive' in said(unpack, tmp_path / 'a', tmp_path / 'out')
