"Outputs appear whole or not at all: under exceptions, kills and a full disk, and next to foreign content."
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from process import Forked, python, tree
from xtts_nb import files
from xtts_nb.config import UserError
from xtts_nb.data.audio import save_audio
from xtts_nb.data.cache import _COLUMN_TYPES, _work_path, write_shard
from xtts_nb.files import (
    append_line, atomic_file, atomic_folder, check_own, check_writable, fingerprint, inside, load_weights,
    locked, named_weights, read_json, read_json_lines, read_tensors, save_weights, write_json, write_tensors)

# --- files and folders ------------------------------------------------------------------------------

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
    "Else the content would be on the disk of the link, and the old one would never be freed."
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
    assert _work_path(here / 'cache') == disk / 'cache.work'

def test_a_folder_appears_whole_and_keeps_nothing_of_an_old_one(tmp_path):
    (tmp_path / 'out').mkdir()   # an empty one may be filled
    for name, replace in (('a', False), ('b', True)):
        with atomic_folder(tmp_path / 'out', replace) as part:
            (part / name).write_text('x')
            assert not (tmp_path / 'out' / name).exists()
        assert tree(tmp_path) == {'out': b'', f'out/{name}': b'x'}
    name = 'あ' * 85   # as long as the disk allows
    with atomic_file(tmp_path / 'new' / name) as part: part.write_text('x')
    assert (tmp_path / 'new' / name).is_file()

def test_a_place_that_holds_something_else_is_refused_before_any_work(tmp_path):
    for name in ('file', 'full/mine', 'folder/mine'): write_json(tmp_path / name, 1)
    os.mkfifo(tmp_path / 'pipe')
    kept = tree(tmp_path)
    for place in (atomic_folder(tmp_path / 'file'), atomic_folder(tmp_path / 'full'),
                  atomic_folder(tmp_path / 'file', replace=True), atomic_file(tmp_path / 'folder'),
                  atomic_file(tmp_path / 'pipe')):
        with pytest.raises(UserError, match='choose another'), place: pytest.fail('worked')
    for write in (lambda: check_writable(tmp_path / 'file/b'), lambda: write_json(tmp_path / 'file/b', 1)):
        with pytest.raises(UserError, match='a file exists where a folder is needed'): write()
    with pytest.raises(TypeError): write_json(tmp_path / 'file', object())
    with pytest.raises(UserError, match='never'), atomic_file(tmp_path / 'never'): pass   # never written
    assert tree(tmp_path) == kept

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

@pytest.fixture
def room():
    "Sets the bytes beyond which no file of this process may grow, as on a disk with little room left."
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=before[0]: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)

def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, room):
    row = {'codes': np.ones(9000), 'text': np.ones(9000), 'mel': np.ones((90, 80))}
    def shards():
        with atomic_folder(tmp_path / 'shards') as part:
            write_shard(part / 'shard', [row | dict.fromkeys(_COLUMN_TYPES, 1)] * 9)
    writers = {'json': lambda: write_json(tmp_path / 'json', ['x' * 100] * 3000), 'shards': shards,
               'wav': lambda: save_audio(tmp_path / 'wav', np.ones(100_000)),
               'weights': lambda: save_weights(tmp_path / 'weights', {'a': np.ones(50_000)}),
               'tensors': lambda: write_tensors(tmp_path / 'tensors', {'a': np.ones(50_000)})}
    room(20_000)
    for name, write in writers.items():
        with pytest.raises(UserError, match=f'{tmp_path / name}.*nothing was written'): write()
    room()
    assert not any(tmp_path.iterdir())

@pytest.mark.parametrize('space, line', [(3, 'second'), (0, 'second'), (0, '')])
def test_a_line_is_added_whole_or_not_at_all(tmp_path, room, space, line):
    path = tmp_path / 'new' / 'lines'
    append_line(path, 'first')
    room(6 + space)
    with pytest.raises(UserError, match='lines: the'): append_line(path, line)
    room()
    assert path.read_bytes() == b'first\n'
    append_line(path, 'سلام')
    assert path.read_text(encoding='utf-8') == 'first\nسلام\n'

# --- what a killed writer leaves, and what is not ours ------------------------------------------------

MINE = 'out.20251129.old', 'out.7.part', 'out.host-7.old', f'out.0a1b2c3d{files.PART}'

def test_an_interrupted_write_leaves_what_was_there_and_backups_are_no_leftovers(tmp_path):
    for name in (*MINE, 'out'): write_json(tmp_path / name / 'mine', 'mine')
    kept = tree(tmp_path)
    for name in ('out', 'out', 'new'):
        with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / name, replace=True) as part:
            write_json(part / 'sub' / 'half', '1')
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

WITHIN = '''
import sys
from pathlib import Path
from xtts_nb.files import atomic_folder
for name in 'ab':
    with atomic_folder(Path(sys.argv[1]), replace=True) as part: (part / name).write_text(name)
print(*[p.name for p in Path(sys.argv[1]).iterdir()])
'''

def test_a_mount_point_is_filled_from_within(tmp_path):
    "As the current folder is; also one on the same disk, which looks like any other folder."
    for name in ('out', 'here'): (tmp_path / name).mkdir()
    for mount in ('mount -t tmpfs none', f'mount --bind {tmp_path / "here"}'):
        out, shell = tmp_path / 'out', f'{mount} "$0" && exec "$@"'
        done = subprocess.run(['unshare', '-rm', 'sh', '-c', shell, out, sys.executable, '-c', WITHIN, out],
                              capture_output=True, text=True)
        if 'unshare' in done.stderr or 'mount' in done.stderr.split(':')[0]: pytest.skip(done.stderr)
        assert done.stdout == 'b\n', done.stderr
    assert tree(tmp_path / 'here') == {'b': b'b'}

# --- locks --------------------------------------------------------------------------------------------

HOLD = '''
import os, sys, time
from xtts_nb.files import locked
with locked(sys.argv[1], 'busy'):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print('held', flush=True)
    time.sleep(60)
'''
ASK = 'import sys; from xtts_nb.files import locked\nwith locked(sys.argv[1], "busy"): print("free")'

def test_a_lock_is_held_until_its_process_ends_and_no_longer(tmp_path):
    "Even if a process that it has forked lives on; and a file that is locked keeps its content."
    path = tmp_path / 'new' / 'lock'
    append_line(path, 'content')
    child = Forked(HOLD, path, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == 'held\n'
    with pytest.raises(UserError, match='^busy$'), locked(path, 'busy'): pytest.fail('worked')
    import psutil
    orphans = psutil.Process(child.pid).children()
    child.kill()
    child.wait()
    with locked(path, 'busy'): assert path.read_text() == 'content\n'
    for orphan in orphans: orphan.send_signal(signal.SIGKILL)
    assert orphans

def test_a_lock_outlives_other_uses_of_its_file_and_locks_within(tmp_path):
    "POSIX record locks end as soon as the process closes any handle of the file."
    path = tmp_path / 'journal'
    with locked(path, 'busy'):
        with locked(path, 'busy'): append_line(path, 'one')
        assert 'UserError: busy' in python(ASK, path).err
        path.unlink()   # somebody else's lock is on another file
        assert python(ASK, path).out == 'free\n'
    with locked(path, 'busy'): pass
    with pytest.raises(UserError, match='nothing was written there'), locked(path / 'lock', 'busy'): pass

def test_a_disk_without_locks_is_used_without(tmp_path, monkeypatch):
    import fcntl
    def flock(file, how): raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(fcntl, 'flock', flock)
    with locked(tmp_path / 'lock', 'busy'): pass
    with atomic_folder(tmp_path / 'out') as part: (part / 'x').write_text('1')
    assert (tmp_path / 'out/x').is_file()

# --- names, JSON, fingerprints ------------------------------------------------------------------------

@pytest.fixture
def nested(tmp_path):
    "A folder with links inside and out, itself reached by a link."
    home = tmp_path / 'home'
    (home / 'deep').mkdir(parents=True)
    (home / 'a').write_text('')
    for name, target in (('within', 'a'), ('deep/back', home), ('out', tmp_path), ('deep/up', '../..'),
                         ('round', 'round')): (home / name).symlink_to(target)
    (tmp_path / 'linked').symlink_to(home)
    return tmp_path / 'linked'

def test_a_name_leads_inside_or_is_refused(nested):
    for name in ('a', 'deep/a', './a', 'deep/../a', 'within', 'deep/back/a', 'not there'):
        assert inside(nested, name) == nested / name
    for name in ('', '.', '..', '../a', '/etc/passwd', 'deep/../../a', 'out/a', 'out', 'deep/up/x', 'round',
                 'a\0b', 7, None):
        with pytest.raises(UserError, match='linked: '): inside(nested, name)

def test_json_is_text_in_any_language_and_a_bad_file_is_named(tmp_path):
    write_json(tmp_path / 'deep/a.json', {'سلام': [1]})
    assert (tmp_path / 'deep/a.json').read_text(encoding='utf-8') == '{\n "سلام": [\n  1\n ]\n}\n'
    values = [{'a': 'one\u2028two\x85'}, 3]   # a text within JSON may hold other ends of lines
    text = ''.join(json.dumps(value, ensure_ascii=False) + '\n' for value in values)
    (tmp_path / 'lines').write_text(text, encoding='utf-8')
    assert read_json_lines(tmp_path / 'lines') == values
    for content in (None, b'', b'{"a": ', b'\xff\xfe', b'version https://git-lfs', b'\n<!DOCTYPE html>'):
        if content is not None: (tmp_path / 'b.json').write_bytes(content)
        with pytest.raises(UserError, match='b.json: '): read_json(tmp_path / 'b.json')

def test_a_fingerprint_is_that_of_caches_and_runs_that_exist():
    known = hashlib.sha256(b'ab' + b'{"a": 2, "b": [1]}').hexdigest()[:16]
    assert fingerprint(b'ab', {'b': [1], 'a': 2}) == known != fingerprint('ab', {'b': [1], 'a': 2})

# --- tensors by name ----------------------------------------------------------------------------------

def model(width=4, seed=0):
    keras.utils.set_random_seed(seed)
    net = keras.Sequential([keras.layers.Dense(width, name='one'), keras.layers.Dense(2, name='two')],
                           name='net')
    net.build((None, 3))
    return net

def values(net): return {k: np.asarray(v) for k, v in named_weights(net).items()}

def test_the_bytes_are_those_of_the_safetensors_library(tmp_path):
    given = {'b': np.arange(6, dtype=np.float32).reshape(2, 3), 'a': np.zeros(3, np.float16),
             'é"x/y': np.array(3, np.int64), 'z': np.ones((2, 0), np.float32), 'c': np.ones(4, np.uint8),
             'q': np.ones(2, bool), 'i': np.ones(1, np.int32), 'h': np.ones(3, ml_dtypes.bfloat16),
             'd': np.ones(1), 'e': np.ones(3, np.int8), 'f': np.ones(3, np.int16)}
    for metadata in ({}, {'facts': json.dumps({'step': 1, 'note': 'ü\n'})}):
        save_weights(tmp_path / 'ours', given, **metadata)
        safetensors.numpy.save_file(given, tmp_path / 'theirs', metadata or None)
        assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()
        assert load_weights(tmp_path / 'ours', {}) == metadata
    for n in range(1, 10):   # heads of every length
        save_weights(tmp_path / 'ours', {'x' * n: np.ones(1)})
        safetensors.numpy.save_file({'x' * n: np.ones(1)}, tmp_path / 'theirs')
        assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()

def test_a_bad_file_of_weights_is_named_and_changes_nothing(tmp_path):
    path, net, other = tmp_path / 'a.safetensors', model(), model(seed=1)
    save_weights(path, named_weights(other))
    data, before, given = path.read_bytes(), values(net), dict(named_weights(other))
    unreadable = b'these are no weights\n' * 9, data[:20], data[:-10], None
    wrong = ({k: v for k, v in given.items() if k != 'two/bias'}, '"two/bias" is missing'), (
        named_weights(model(5)), r'"one/kernel" has shape \(3, 5\), expected \(3, 4\)')
    for content, named in (*((content, 'not readable' if content else 'no such file')
                             for content in unreadable), *wrong):
        if content is None: path.unlink()
        elif isinstance(content, bytes): path.write_bytes(content)
        else: save_weights(path, content)
        with pytest.raises(UserError, match=f'a.safetensors: .*{named}'):
            load_weights(path, named_weights(net))
        assert all(np.array_equal(v, before[k]) for k, v in values(net).items())

def test_parts_that_are_not_written_come_from_another_file(tmp_path):
    old = {'gpt/a': np.zeros(1), 'gpt/b': np.zeros(2), 'voice/a': np.ones(1), 'gptx': np.ones(2)}
    save_weights(tmp_path / 'old', old)
    save_weights(tmp_path / 'new', {'gpt/a': np.full(3, 7.)}, tmp_path / 'old', step='1')
    read = {name: x.tolist() for name, x in read_tensors(tmp_path / 'new')}
    assert read == {'gpt/a': [7, 7, 7], 'voice/a': [1], 'gptx': [1, 1]}
