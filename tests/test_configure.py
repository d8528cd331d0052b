"Asked and got: what is set is read back, what cannot be set is said, and a child process starts the same."
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf

from xtts_nb import configure as page
from xtts_nb.config import UserError, asked, setup_tf
from xtts_nb.configure import Wish, environment, table_text, verify, write_environment
from xtts_nb.recipes import from_environment


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    "No wishes of an earlier test."
    for name in environment(Wish(memory_limit=1, allocator='cuda_malloc_async')): monkeypatch.delenv(name, raising=False)


# --- the environment -----------------------------------------------------------------------------------------------

CHANGES = [   # a wish, a variable, what it is then; with the plain wish it is something else
    ({'threads': 3}, 'TF_NUM_INTRAOP_THREADS', '3'), ({'threads': 3}, 'TF_NUM_INTEROP_THREADS', '3'),
    ({'memory_limit': 512}, 'XTTS_NB_MEMORY_LIMIT', '512'), ({'memory_limit': 512}, 'TF_FORCE_GPU_ALLOW_GROWTH', None),
    ({'allocator': 'cuda_malloc_async'}, 'TF_GPU_ALLOCATOR', 'cuda_malloc_async'), ({'xla': False}, 'TF_XLA_FLAGS', ''),
    ({'xla': False}, 'XTTS_NB_XLA', 'false'), ({'mixed_precision': False}, 'XTTS_NB_PRECISION', 'float32')]

@pytest.mark.parametrize('wish, name, value', CHANGES)
def test_each_wish_changes_the_environment(wish, name, value):
    assert environment(Wish(**wish)).get(name) == value != environment(Wish()).get(name)

def test_flags_of_others_stay(monkeypatch):
    monkeypatch.setenv('TF_XLA_FLAGS', '--tf_xla_auto_jit=1 --other=2')
    assert environment(Wish())['TF_XLA_FLAGS'] == '--other=2 --tf_xla_auto_jit=2'
    assert environment(Wish(xla=False))['TF_XLA_FLAGS'] == '--other=2'

def test_a_shell_reads_the_file(tmp_path):
    write_environment(tmp_path / 'tf.env', wish := Wish(threads=3, memory_limit=512))
    shell = 'set -a; . ./tf.env; set +a; exec "$0" -c "import os, json; print(json.dumps(dict(os.environ)))"'
    done = subprocess.run(['sh', '-c', shell, sys.executable], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert environment(wish).items() <= json.loads(done.stdout).items()

@pytest.mark.parametrize('wish', [{'threads': 0}, {'memory_limit': -1}, {'allocator': 'malloc'}], ids=str)
def test_a_wish_that_cannot_be(wish):
    with pytest.raises(UserError, match='^configure: '): Wish(**wish)

def test_training_takes_its_keys_from_the_environment(monkeypatch):
    for name, value in environment(Wish(xla=False)).items(): monkeypatch.setenv(name, value)
    assert from_environment() == {'training.enable_xla_compilation': False, 'training.precision': 'bfloat16'}


# --- what TensorFlow is asked --------------------------------------------------------------------------------------

@pytest.fixture
def gpu(monkeypatch):
    "A GPU that notes what it is asked."
    card, seen = SimpleNamespace(name='/physical_device:GPU:0'), {}
    config, real = tf.config, tf.config.list_physical_devices
    monkeypatch.setattr(config, 'list_physical_devices', lambda kind=None: [card] if kind == 'GPU' else real(kind))
    monkeypatch.setattr(config, 'set_logical_device_configuration', lambda gpu, parts: seen.update(limit=parts))
    monkeypatch.setattr(config, 'get_logical_device_configuration', lambda gpu: seen.get('limit'))
    monkeypatch.setattr(config.experimental, 'set_memory_growth', lambda gpu, on: seen.update(growth=on))
    monkeypatch.setattr(config.experimental, 'get_memory_growth', lambda gpu: seen.get('growth'))
    for name in ('set_intra_op_parallelism_threads', 'set_inter_op_parallelism_threads'):   # TensorFlow has started
        monkeypatch.setattr(config.threading, name, lambda n: None)
    return seen

def test_memory_is_limited_or_grows(gpu, monkeypatch):
    assert setup_tf()['memory growth /physical_device:GPU:0'] == (True, True) and 'limit' not in gpu
    assert setup_tf(memory_limit=512)['memory limit /physical_device:GPU:0'] == (512, 512)
    monkeypatch.setenv('XTTS_NB_MEMORY_LIMIT', '256')
    assert setup_tf()['memory limit /physical_device:GPU:0'] == (256, 256) and gpu['limit'][0].memory_limit == 256

def test_threads_of_the_environment_count_where_none_are_asked_for(monkeypatch):
    monkeypatch.setenv('TF_NUM_INTRAOP_THREADS', '7'); monkeypatch.setenv('TF_NUM_INTEROP_THREADS', '5')
    assert [setup_tf()[f'{kind}-op threads'][0] for kind in ('intra', 'inter')] == [7, 5]
    assert setup_tf(threads=2)['intra-op threads'][0] == 2

@pytest.mark.parametrize('value', ['many', '0', '-1', '1.5'])
def test_a_variable_that_is_no_number_is_named(monkeypatch, value):
    monkeypatch.setenv('XTTS_NB_MEMORY_LIMIT', value)
    with pytest.raises(UserError, match=f'^XTTS_NB_MEMORY_LIMIT={value}: give a positive number'): asked('XTTS_NB_MEMORY_LIMIT')

def rows_of(wish, table, used='bfc'): return {r['setting']: r for r in page._memory_rows(wish, table, used)}

def test_the_table_says_what_was_not_got():
    limited = rows_of(Wish(memory_limit=512, allocator='cuda_malloc_async'), {'memory limit GPU:0': (512, None)})
    assert limited['memory limit GPU:0']['ok'] is None and limited['allocator']['ok'] is False
    late = rows_of(Wish(), {'memory growth GPU:0': (True, False)})['memory growth GPU:0']
    assert late['ok'] is False and 'had started already' in late['note']
    nothing = rows_of(Wish(memory_limit=512), {})
    assert nothing['memory limit, MiB']['note'] == nothing['allocator']['note'] == 'no GPU is visible'
    assert [r['ok'] for r in nothing.values()] == [None, None]
    assert 'memory limit, MiB                 512 -> not set            no GPU is visible' in table_text(list(nothing.values()))


# --- in a process of its own ---------------------------------------------------------------------------------------

CHILD = '''
import json
from xtts_nb.configure import configure
first = configure(threads=1, xla=True, mixed_precision=True)
import keras, tensorflow as tf
layer = keras.layers.Dense(2)
layer(tf.ones((1, 2)))
late = configure(threads=2, xla=False, mixed_precision=False)
print(json.dumps([first, late, layer.compute_dtype, keras.layers.Dense(2).compute_dtype, bool(tf.config.optimizer.get_jit())]))
'''

def test_the_call_is_applied_and_read_back():
    env = {k: v for k, v in os.environ.items() if k != 'TF_XLA_FLAGS'}
    done = subprocess.run([sys.executable, '-c', CHILD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, late, mixed, plain, jit = json.loads(done.stdout.splitlines()[-1])
    by_name = {row['setting']: row for row in first}
    assert by_name['intra-op threads']['got'] == 1 and by_name['XLA']['got'] is True and by_name['memory growth']['got'] is None
    assert by_name['precision']['got'] == 'mixed_bfloat16' and not [row for row in first if row['ok'] is False]
    assert (mixed, plain, jit) == ('bfloat16', 'float32', False)
    by_name = {row['setting']: row for row in late}
    assert by_name['intra-op threads'] == {'setting': 'intra-op threads', 'asked': 2, 'got': 1, 'ok': False,
                                           'note': 'TensorFlow had started already'}

@pytest.mark.slow
@pytest.mark.parametrize('wish', [Wish(threads=1), Wish(threads=2, mixed_precision=False), Wish(xla=False)], ids=str)
def test_a_child_trains_as_wished(wish):
    rows = {row['setting']: row for row in verify(wish)}
    assert not [row for row in rows.values() if row['ok'] is False]
    assert (rows['XLA']['got'], rows['precision']['got']) == (wish.xla, wish.precision)
    if wish.threads: assert rows['intra-op threads']['got'] == wish.threads
