"Commands of another user than root: without a home, in folders that are read only."
import ctypes
import os
import shutil

import pytest

from process import environment, python, tree, xtts_nb


def other_user():
    "Runs in a child: a user without a name, who reads any file, as root's interpreter, and writes none."
    if os.getuid(): return
    libc, keep_caps, read_search = ctypes.CDLL(None, use_errno=True), 8, 1 << 2
    assert libc.prctl(keep_caps, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setresgid(54321, 54321, 54321)
    os.setresuid(54321, 54321, 54321)
    head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(read_search, read_search)
    assert libc.capset(head, sets) == 0, ctypes.get_errno()

@pytest.fixture
def folders(straight, corpus, tmp_path):
    "A cache and a corpus that are read only, a home that is too, and a folder to write in."
    shutil.copytree(straight, tmp_path / 'cache')
    shutil.copytree(corpus, tmp_path / 'corpus')
    for name in ('home', 'mine'): (tmp_path / name).mkdir()
    for path in (tmp_path, *tmp_path.rglob('*')): path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / 'mine').chmod(0o777)
    yield tmp_path
    for path in (tmp_path, *tmp_path.rglob('*')): path.chmod(0o755)

def run(folders, line: str, home='', temporary='', **how):
    "A command in the read-only folder, as the other user."
    env = {k: v for k, v in environment().items() if k not in ('HOME', 'USER', 'LOGNAME', 'TMPDIR')}
    if home: env['HOME'] = str(folders / home)
    if temporary: env['TMPDIR'] = str(folders / temporary)
    how = {'cwd': folders, 'env': env, 'before': other_user} | how
    done = xtts_nb(*line.split(), **how)
    assert 'Traceback' not in done.err, done.err
    return done

def test_the_other_user_cannot_write(folders):
    done = python("open('new', 'w')", cwd=folders, before=other_user)
    assert done.code == 1 and 'PermissionError' in done.err and not (folders / 'new').exists()

@pytest.mark.parametrize('home, temporary', [('', ''), ('home', 'home')], ids=['no home', 'read only'])
@pytest.mark.parametrize('line, code, words', [
    ('verify cache', 0, ''), ('config create mine/new.yaml', 0, ''),
    ('config create new.yaml', 2, 'new.yaml: the folder is not writable; choose another'),
    ('verify cache --fix', 0, ''), ('prepare corpus --out cache2 --preset tiny', 2, 'not writable')])
def test_a_user_without_a_home(folders, line, code, words, home, temporary):
    before = tree(folders)
    done = run(folders, line, home, temporary)
    assert done.code == code and words in done.err, done.err
    if code: assert len(done.said) == 1 and tree(folders) == before

def test_a_sound_that_cannot_be_written_is_not_spoken_first(folders):
    done = run(folders, 'say Anna --model cache --voice corpus --out new/say.wav')   # a cache is no model
    assert done.code == 2 and 'say.wav: the folder is not writable; choose another' in done.err

@pytest.mark.slow
def test_a_user_without_a_home_trains_and_speaks(folders):
    "And leaves nothing beside the folders that it names."
    before = tree(folders)
    (folders / 'mine/few.yaml').write_text('training: {dvae_steps: 2}')
    voice = next((folders / 'corpus').rglob('*.wav')).relative_to(folders)
    for line in ('prepare corpus --out mine/cache --preset tiny --config mine/few.yaml',
                 'train --data mine/cache --run mine/run --steps 1',
                 f'say aaa --model mine/run --voice {voice} --out mine/say.wav --retries 0'):
        assert run(folders, line).code == 0
    made = {path for path in tree(folders) if not path.startswith('mine/')}
    assert made == {*before} and (folders / 'mine/say.wav').stat().st_size > 44
