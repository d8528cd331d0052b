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

def run(folders, line: str, home=''):
    env = {k: v for k, v in environment().items() if k not in ('HOME', 'USER', 'LOGNAME', 'TMPDIR')}
    if home: env |= dict.fromkeys(('HOME', 'TMPDIR'), str(folders / home))
    done = xtts_nb(*line.split(), cwd=folders, env=env, before=other_user)
    assert 'Traceback' not in done.err, done.err
    return done

def test_a_user_without_a_home_or_with_one_that_is_read_only(folders):
    before = tree(folders)
    assert python("open('new', 'w')", cwd=folders, before=other_user).code == 1   # it cannot write indeed
    for home, line in (('home', 'config create new.yaml'), ('', 'prepare corpus --out new --preset tiny'),
                       ('home', 'prepare corpus --out new --preset tiny'),   # before anything is spoken
                       ('', 'say Anna --model cache --voice corpus --out new/say.wav')):
        done = run(folders, line, home)
        assert done.code == 2 and 'not writable' in done.err and len(done.said) == 1, done.err
    for home, line in (('', 'verify cache --fix'), ('home', 'verify cache'),
                       ('', 'config create mine/new.yaml')):
        assert run(folders, line, home).code == 0
    assert {*tree(folders)} == {*before, 'mine/new.yaml'}

@pytest.mark.slow
def test_a_user_without_a_home_trains_and_speaks(folders, mini, cheap_xla):
    "And leaves nothing beside the folders that it names, where XLA compiles the model of the tests too."
    before = tree(folders)
    few = mini.replace(training={'gpt': {'mode': 'auto'}, 'dvae': {'steps': 2, 'mode': 'eager'}})
    (folders / 'mine/few.yaml').write_text(few.to_yaml())
    voice = next((folders / 'corpus').rglob('*.wav')).relative_to(folders)
    for line in ('prepare corpus --out mine/cache --config mine/few.yaml',
                 'train --data mine/cache --run mine/run --steps 1',
                 f'say aaa --model mine/run --voice {voice} --out mine/say.wav --retries 0'):
        assert run(folders, line).code == 0
    made = {path for path in tree(folders) if not path.startswith('mine/')}
    assert made == {*before} and (folders / 'mine/say.wav').stat().st_size > 44
