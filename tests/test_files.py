"Outputs appear whole or not at all: under exceptions, Ctrl-C and a full disk, and beside foreign content."
import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from process import python, tree
from xtts_nb.config import UserError
from xtts_nb import files
from xtts_nb.data.cache import work_path
from xtts_nb.files import (
    append_line, atomic_file, atomic_folder, check_own, check_writable, fingerprint, inside, locked,
    raise_file_limit, read_json, read_json_lines, write_json)


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, SystemExit, MemoryError, UserError])
@pytest.mark.parametrize('before', [None, b'old'])
def test_an_interrupted_file_leaves_what_was_there(tmp_path, error, before):
    path = tmp_path / 'a.txt'
    if before: path.write_bytes(before)
    kept = tree(tmp_path)
    with pytest.raises(error), atomic_file(path) as part:
        part.write_text('half')
        raise error('stop')
    assert tree(tmp_path) == kept


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, SystemExit, MemoryError, UserError])
@pytest.mark.parametrize('replace', [False, True])
def test_an_interrupted_folder_leaves_what_was_there(tmp_path, error, replace):
    out = tmp_path / 'out'
    if replace:
        out.mkdir()
        (out / 'old').write_text('old')
    kept = tree(tmp_path)
    with pytest.raises(error), atomic_folder(out, replace) as part:
        (part / 'sub').mkdir()
        (part / 'sub' / 'half').write_text('half')
        raise error('stop')
    assert tree(tmp_path) == kept


@pytest.mark.parametrize('files', [3, 60])
def test_what_is_written_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch, files):
    "Else a machine that loses its power may keep the name without the content; many files are one wait."
    order, (sync, rename) = [], (os.fsync, os.rename)
    def fsync(handle):
        order.append(Path(os.readlink(f'/proc/self/fd/{handle}')).name)
        sync(handle)
    monkeypatch.setattr(os, 'fsync', fsync)
    monkeypatch.setattr(os, 'rename', lambda old, new: (order.append('rename'), rename(old, new)))
    with atomic_file(tmp_path / 'file') as part: part.write_text('x')
    assert order == [part.name, tmp_path.name]
    order.clear()
    with atomic_folder(tmp_path / 'out') as part:
        for i in range(files): write_json(part / 'sub' / str(i), i)   # these wait for nothing of their own
    assert order[-2:] == ['rename', tmp_path.name]
    assert set(order[:-2]) == ({'0', '1', '2', 'sub', 'new'} if files == 3 else set())


@pytest.mark.parametrize('there', [True, False])
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path, there):
    "Else the content would lie on the disk of the link, and the old one would never be freed."
    here, disk = tmp_path / 'here', tmp_path / 'disk'
    for folder in (here, disk): folder.mkdir()
    if there:
        (disk / 'cache').mkdir()
        for path in (disk / 'cache' / 'x', disk / 'file'): path.write_text('old')
    for name in ('cache', 'file'): (here / name).symlink_to(disk / name)
    with atomic_folder(here / 'cache', replace=True) as part:
        assert part.parent.parent == disk
        (part / 'x').write_text('new')
    with atomic_file(here / 'file') as part: part.write_text('new')
    assert all((here / name).is_symlink() for name in ('cache', 'file'))
    assert tree(disk) == {'cache': b'', 'cache/x': b'new', 'file': b'new'}
    assert {p.name for p in here.iterdir()} == {'cache', 'file'}
    assert work_path(here / 'cache') == disk / 'cache.work'


def test_nothing_stands_there_before_the_end(tmp_path):
    with atomic_file(tmp_path / 'a') as part:
        part.write_text('half')
        assert not (tmp_path / 'a').exists() and part.parent == tmp_path
    with atomic_folder(tmp_path / 'f') as part:
        (part / 'x').write_text('half')
        assert not (tmp_path / 'f').exists() and part.parent.parent == tmp_path
    assert tree(tmp_path) == {'a': b'half', 'f': b'', 'f/x': b'half'}


def test_a_file_that_was_never_written_is_an_error(tmp_path):
    with pytest.raises(UserError, match='a.txt'), atomic_file(tmp_path / 'a.txt'): pass
    assert not any(tmp_path.iterdir())


def test_a_file_takes_no_place_of_a_folder_or_a_device(tmp_path):
    (tmp_path / 'folder').mkdir()
    os.mkfifo(tmp_path / 'pipe')
    for name in ('folder', 'pipe'):
        with pytest.raises(UserError, match=f'{name}: is not a regular file and will not be replaced'):
            with atomic_file(tmp_path / name): pytest.fail('worked')
    with atomic_folder(tmp_path / 'new' / 'deep') as part: (part / 'x').write_text('1')
    assert (tmp_path / 'new/deep/x').is_file()


@pytest.mark.parametrize('make', ['file', 'folder'])
def test_a_folder_that_holds_something_is_refused_before_any_work(tmp_path, make):
    out = tmp_path / 'out'
    if make == 'file': out.write_text('mine')
    else:
        out.mkdir()
        (out / 'mine').write_text('mine')
    kept, worked = tree(tmp_path), []
    with pytest.raises(UserError, match='out.*already holds something.*choose another'), atomic_folder(out):
        worked.append(1)
    assert not worked and tree(tmp_path) == kept


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / 'out').mkdir()
    with atomic_folder(tmp_path / 'out') as part: (part / 'x').write_text('1')
    assert tree(tmp_path) == {'out': b'', 'out/x': b'1'}


def test_a_replaced_folder_keeps_nothing_of_the_old_one(tmp_path):
    with atomic_folder(tmp_path / 'out') as part: (part / 'old').write_text('1')
    with atomic_folder(tmp_path / 'out', replace=True) as part: (part / 'new').write_text('2')
    assert tree(tmp_path) == {'out': b'', 'out/new': b'2'}


def test_a_file_is_no_folder_to_replace(tmp_path):
    (tmp_path / 'out').write_text('mine')
    with pytest.raises(UserError, match='out'), atomic_folder(tmp_path / 'out', replace=True) as part:
        (part / 'x').write_text('1')
    assert tree(tmp_path) == {'out': b'mine'}


def test_ctrl_c_while_the_old_folder_goes_loses_neither(tmp_path, monkeypatch):
    out, real = tmp_path / 'out', shutil.rmtree
    with atomic_folder(out) as part:
        for i in range(3): (part / f'{i}').write_text('old')
    def interrupted(path, *args, **kwargs):
        first = Path(path) / '0'
        if not first.is_file() or first.read_text() != 'old': return real(path, *args, **kwargs)
        first.unlink()
        raise KeyboardInterrupt
    monkeypatch.setattr(shutil, 'rmtree', interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(out, replace=True) as part:
        for i in range(3): (part / f'{i}').write_text('new')
    contents = {p.name: p.read_text() for p in out.iterdir()}
    assert contents in ({str(i): 'old' for i in range(3)}, {str(i): 'new' for i in range(3)})


REASONS = [(errno.ENOSPC, 'the disk is full; free some space'), (errno.EDQUOT, 'quota'),
           (errno.EACCES, 'not writable'),
           (errno.EROFS, 'read-only'), (errno.EIO, 'Input/output error')]

@pytest.mark.parametrize('number, reason', REASONS)
def test_a_failed_write_names_file_and_remedy(tmp_path, monkeypatch, number, reason):
    def fail(handle): raise OSError(number, os.strerror(number))
    (tmp_path / 'a.json').write_text('{}')
    kept = tree(tmp_path)
    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(UserError, match=f'a.json.*{reason}.*nothing was written'):
        write_json(tmp_path / 'a.json', {'a': 1})
    with pytest.raises(UserError, match=f'f: .*{reason}'), atomic_folder(tmp_path / 'f') as part:
        (part / 'x').write_text('1')
    monkeypatch.undo()
    assert tree(tmp_path) == kept


def test_a_place_to_write_is_made_or_found_and_left_empty(tmp_path):
    for _ in range(2): check_writable(tmp_path / 'a/b/c')
    assert [p.name for p in tmp_path.rglob('*')] == ['a', 'b']
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(UserError, match='a file stands where a folder is needed'):
        check_writable(tmp_path / 'file/b')

def test_a_file_in_the_way_of_a_folder(tmp_path):
    (tmp_path / 'a').write_text('mine')
    with pytest.raises(UserError, match='a file stands where a folder is needed'):
        write_json(tmp_path / 'a' / 'b', 1)
    assert tree(tmp_path) == {'a': b'mine'}


WRITE_TOO_MUCH = '''
import resource, signal, sys
from pathlib import Path
import numpy as np
from xtts_nb.data.audio import save_audio
from xtts_nb.data.cache import COLUMN_TYPES, write_shard
from xtts_nb.config import UserError
from xtts_nb.files import atomic_folder, save_weights, write_json
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
folder = Path(sys.argv[1])
row = {'codes': np.ones(9000), 'text': np.ones(9000), 'mel': np.ones((90, 80))}
row |= dict.fromkeys(COLUMN_TYPES, 1)
def shard():
    with atomic_folder(folder / 'shards') as part: write_shard(part / 'shard', [row] * 9)
writers = {'json': lambda: write_json(folder / 'json', ['x' * 100] * 3000),
           'wav': lambda: save_audio(folder / 'wav', np.ones(100_000)),
           'weights': lambda: save_weights(folder / 'weights', {'a': np.ones(50_000)}), 'shards': shard}
for name, write in writers.items():
    try: write()
    except UserError as e:
        print(name, 'UserError', str(folder / name) in str(e), 'nothing was written' in str(e))
    except Exception as e: print(name, type(e).__name__)
    else: print(name, 'written')
'''

@pytest.fixture(scope='module')
def limited(tmp_path_factory):
    "What four writers say when no file may grow beyond 20 000 bytes, and the folder they wrote to."
    folder = tmp_path_factory.mktemp('limited')
    done = python(WRITE_TOO_MUCH, folder)
    assert done.code == 0, done.err
    return dict(line.split(' ', 1) for line in done.out.splitlines()), folder

@pytest.mark.parametrize('name', ['json', 'wav', 'weights', 'shards'])
def test_a_write_that_the_system_refuses_is_one_sentence(limited, name):
    assert limited[0][name] == 'UserError True True'

def test_a_write_that_the_system_refuses_leaves_nothing(limited):
    assert len(limited[0]) == 4 and not any(limited[1].iterdir())


def test_json_goes_there_and_back(tmp_path):
    value = {'ü': [1, 2.5, None, True], 'سلام': {'a': ''}}
    write_json(tmp_path / 'deep' / 'er' / 'a.json', value)
    assert read_json(tmp_path / 'deep' / 'er' / 'a.json') == value
    write_json(tmp_path / 'b.json', {'سلام': [1]})
    assert (tmp_path / 'b.json').read_text(encoding='utf-8') == '{\n "سلام": [\n  1\n ]\n}\n'


def test_a_value_json_cannot_hold_leaves_the_old_file(tmp_path):
    write_json(tmp_path / 'a.json', 1)
    with pytest.raises(TypeError): write_json(tmp_path / 'a.json', {'a': object()})
    assert tree(tmp_path) == {'a.json': b'1\n'}


@pytest.mark.parametrize('content, message', [(None, 'missing'), (b'', 'not JSON'), (b'{"a": ', 'not JSON'),
                                              (b'\xff\xfe', 'not JSON')])
def test_a_bad_json_file_is_named(tmp_path, content, message):
    if content is not None: (tmp_path / 'a.json').write_bytes(content)
    with pytest.raises(UserError, match=f'a.json: .*{message}.*make it again'): read_json(tmp_path / 'a.json')


def test_a_fingerprint_changes_with_every_part():
    prints = [fingerprint(*parts) for parts in
              [(), (1,), ('1',), (1, 2), ([1, 2],), (b'x',), ('x',), ({'a': 1},), ({'a': 2},), ({'b': 1},),
               ('12',), ('1', '2')]]
    assert len(set(prints)) == len(prints) and all(len(p) == 16 for p in prints)
    assert fingerprint({'a': 1, 'b': 2}) == fingerprint({'b': 2, 'a': 1})
    assert fingerprint(np.arange(3).tobytes()) == fingerprint(np.arange(3).tobytes())
    # caches and runs of every release hold such ones
    known = hashlib.sha256(b'ab' + b'{"a": 2, "b": [1]}').hexdigest()[:16]
    assert fingerprint(b'ab', {'b': [1], 'a': 2}) == known


MINE = 'out.20251129.old', 'out.7.part', 'out.host-7.old', f'out.0a1b2c3d{files.PART}'

@pytest.mark.parametrize('there', [True, False])
def test_backups_of_the_user_are_no_leftovers(tmp_path, there):
    for name in (*MINE, *['out'] * there):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'mine').write_text('mine')
    kept = tree(tmp_path)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / 'out', replace=True) as part:
            (part / 'new').write_text('1')
            raise KeyboardInterrupt
        assert tree(tmp_path) == kept

KILLED = '''
import os, signal, sys
from pathlib import Path
from xtts_nb.files import atomic_folder
out, within, renames = Path(sys.argv[1]), *map(int, sys.argv[2:])
os.chdir(out if within else '/')   # the current folder is filled from within
rename, done = os.rename, []
def counted(old, new):
    if len(done) == renames: os.kill(os.getpid(), signal.SIGKILL)
    done.append(rename(old, new))
os.rename = counted
with atomic_folder(out, replace=True) as part:
    for name in 'bc': (part / name).write_text('new')
'''

@pytest.mark.parametrize('within, renames', [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)])
def test_what_a_killed_writer_left_is_undone_or_finished(tmp_path, within, renames):
    out = tmp_path / 'out'
    with atomic_folder(out) as part:
        for name in 'ab': (part / name).write_text('old')
    assert python(KILLED, out, within, renames).code == -9 and [*tmp_path.rglob(f'*{files.PART}')]
    with pytest.raises(KeyboardInterrupt), atomic_folder(out, replace=True): raise KeyboardInterrupt
    names, text = ('bc', b'new') if renames > 2 else ('ab', b'old')   # the third says that all is there
    assert tree(tmp_path) == {'out': b'', **{f'out/{name}': text for name in names}}

def test_a_writer_that_lives_is_not_disturbed_and_no_result_is_lost(tmp_path):
    out = tmp_path / 'out'
    with pytest.raises(UserError, match='out: already holds something.* kept in .*out-2'):
        with atomic_folder(out) as part:
            (part / 'first').write_text('1')
            with atomic_folder(out) as other: (other / 'second').write_text('2')
            assert (part / 'first').is_file()
    assert tree(tmp_path) == {'out': b'', 'out/second': b'2', 'out-2': b'', 'out-2/first': b'1'}

@pytest.mark.parametrize('when', ['before', 'meanwhile'])
def test_what_is_not_ours_is_never_replaced(tmp_path, when):
    out, own = tmp_path / 'out', lambda folder: check_own(folder, {'a', 'b'}.__contains__, 'a cache')
    with atomic_folder(out) as part: (part / 'a').write_text('old')
    if when == 'before': (out / 'thesis').write_text('mine')
    with pytest.raises(UserError, match='not a cache .thesis.;'), atomic_folder(out, own) as part:
        (part / 'b').write_text('new')
        assert when == 'meanwhile'
        (out / 'thesis').write_text('mine')
    kept = {'out-2': b'', 'out-2/b': b'new'} if when == 'meanwhile' else {}
    assert tree(tmp_path) == {'out': b'', 'out/a': b'old', 'out/thesis': b'mine'} | kept
    (out / 'thesis').unlink()
    with atomic_folder(out, own) as part: (part / 'b').write_text('new')
    assert tree(out) == {'b': b'new'}

def test_what_comes_after_the_last_look_is_kept(tmp_path):
    out, looks = tmp_path / 'out', []
    with atomic_folder(out) as part: (part / 'a').write_text('old')
    def own(folder):
        check_own(folder, {'a'}.__contains__, 'a cache')
        looks.append(folder)
        if len(looks) == 2: (out / 'thesis').write_text('mine')
    with atomic_folder(out, own) as part: (part / 'b').write_text('new')
    kept = {'out-2': b'', 'out-2/a': b'old', 'out-2/thesis': b'mine'}
    assert tree(tmp_path) == {'out': b'', 'out/b': b'new'} | kept

@pytest.mark.parametrize('inside, ours', [
    ({}, True), ({'lock': ''}, True), ({f'mark.json.0123abcd{files.PART}': '{'}, True),
    ({'mark.json': ''}, False),
    ({'mark.json': '{"for": "out"}', 'x': ''}, True), ({'mark.json': '["for"]'}, False), ({'x': ''}, False)])
def test_a_work_folder_is_known_by_its_mark(tmp_path, inside, ours):
    for name, text in inside.items(): (tmp_path / name).write_text(text)
    assert files.is_work(tmp_path, 'mark.json') == ours

WITHIN = '''
import sys
from pathlib import Path
from xtts_nb.files import atomic_folder
for name in 'ab':
    with atomic_folder(Path(sys.argv[1]), replace=True) as part: (part / name).write_text(name)
print(*[p.name for p in Path(sys.argv[1]).iterdir()])
'''

def test_a_mount_point_is_filled_from_within(tmp_path):
    "Also one on the same disk, which looks like any other folder."
    (tmp_path / 'out').mkdir()
    (tmp_path / 'here').mkdir()
    for mount in ('mount -t tmpfs none', f'mount --bind {tmp_path / "here"}'):
        out, shell = tmp_path / 'out', f'{mount} "$0" && exec "$@"'
        done = subprocess.run(['unshare', '-rm', 'sh', '-c', shell, out, sys.executable, '-c', WITHIN, out],
                              capture_output=True, text=True)
        if 'unshare' in done.stderr or 'mount' in done.stderr.split(':')[0]: pytest.skip(done.stderr)
        assert done.stdout == 'b\n', done.stderr
    assert tree(tmp_path / 'here') == {'b': b'b'}

def test_the_current_folder_is_filled_from_within(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in 'ab':
        with atomic_folder('.', replace=True) as part: (part / name).write_text(name)
    assert os.listdir('.') == ['b'] and tree(tmp_path) == {'b': b'b'}

def test_a_name_as_long_as_the_disk_allows(tmp_path):
    name = 'あ' * 85
    with atomic_file(tmp_path / f'{name}') as part: part.write_text('x')
    assert tree(tmp_path) == {name: b'x'}
    with pytest.raises(UserError, match='the name is too long'), atomic_file(tmp_path / f'{name}a') as part:
        part.write_text('x')

LARGER = 'the file would be larger than allowed'

@pytest.mark.parametrize('room, line, reason', [
    (3, 'second', 'the disk is full'), (0, 'second', LARGER), (0, '', LARGER)])
def test_a_line_is_added_whole_or_not_at_all(tmp_path, room, line, reason):
    path = tmp_path / 'new' / 'lines'
    append_line(path, 'first')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 + room, before[1]))   # as on a disk with so much room left
    try:
        with pytest.raises(UserError, match=f'lines: {reason}'): append_line(path, line)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b'first\n'
    append_line(path, 'سلام')
    assert path.read_text(encoding='utf-8') == 'first\nسلام\n'

LOCKS = [(None, True), (BlockingIOError, False), (PermissionError, False), (OSError, True)]

@pytest.mark.parametrize('error, works', LOCKS)
def test_a_held_lock_is_refused_and_a_disk_without_locks_is_not(tmp_path, monkeypatch, error, works):
    import fcntl
    def lockf(file, how):
        assert how == fcntl.LOCK_EX | fcntl.LOCK_NB and file.name == str(path)
        if error: raise error
    path, worked = tmp_path / 'new' / 'lock', []
    monkeypatch.setattr(fcntl, 'lockf', lockf)
    if works:
        with locked(path, 'busy'): worked.append(1)
    else:
        with pytest.raises(UserError, match='^busy$'), locked(path, 'busy'): worked.append(1)
    assert worked == [1] * works
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='nothing was written there'):
        with locked(tmp_path / 'file' / 'lock', 'busy'): pass

@pytest.mark.parametrize('name', ['a', 'deep/a', './a', 'deep/../a', 'within', 'deep/back/a', 'not there'])
def test_a_name_inside(nested, name): assert inside(nested, name) == nested / name

@pytest.mark.parametrize('name', ['', '.', '..', '../a', '/etc/passwd', 'deep/../../a', 'out/a', 'out',
                                  'deep/up/x', 'round',
                                  'a\0b', 7, None])
def test_a_name_that_leads_out(nested, name):
    with pytest.raises(UserError, match='get the folder anew|Get the folder anew'): inside(nested, name)

@pytest.fixture
def nested(tmp_path):
    "A folder with links inside and out, itself reached by a link."
    home = tmp_path / 'home'
    (home / 'deep').mkdir(parents=True)
    (home / 'a').write_text('')
    (home / 'within').symlink_to('a')
    (home / 'deep' / 'back').symlink_to(home)
    (home / 'out').symlink_to(tmp_path)
    (home / 'deep' / 'up').symlink_to('../..')
    (home / 'round').symlink_to('round')
    (tmp_path / 'linked').symlink_to(home)
    return tmp_path / 'linked'


def test_more_files_may_be_open_only_if_the_system_allows_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try: assert [raise_file_limit(n) for n in (600, 400)] == [600, 600] == [
        resource.getrlimit(resource.RLIMIT_NOFILE)[0]] * 2
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def test_a_value_in_each_line(tmp_path):
    "A text within JSON may hold other ends of lines."
    values = [{'a': 'one\u2028two\x85'}, 3]
    text = ''.join(json.dumps(value, ensure_ascii=False) + '\n' for value in values)
    (tmp_path / 'f').write_text(text, encoding='utf-8')
    assert read_json_lines(tmp_path / 'f') == values
