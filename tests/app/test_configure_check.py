"Settings of TensorFlow: they are read back, a child process gets them, and what cannot be set is named."
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import tensorflow as tf

from process import python
from xtts_nb.app import check as page
from xtts_nb.config import TrainingConfig, UserError, environment_number, setup_tf
from xtts_nb.app.check import TFSettings, environment, settings_text, verify_settings, write_environment
from xtts_nb.app.recipes import from_environment
from xtts_nb.train.step import choose_xla


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    "No settings of an earlier test."
    for name in environment(TFSettings(memory_limit=1, allocator='cuda_malloc_async')):
        monkeypatch.delenv(name, raising=False)


# --- the environment ----------------------------------------------------------------------------------------

CHANGES = [   # settings, a variable, its value; with the default settings the value is another
    ({'threads': 3}, 'TF_NUM_INTRAOP_THREADS', '3'), ({'threads': 3}, 'TF_NUM_INTEROP_THREADS', '3'),
    ({'memory_limit': 512}, 'XTTS_NB_MEMORY_LIMIT', '512'),
    ({'memory_limit': 512}, 'TF_FORCE_GPU_ALLOW_GROWTH', None),
    ({'allocator': 'cuda_malloc_async'}, 'TF_GPU_ALLOCATOR', 'cuda_malloc_async'),
    ({'xla': False}, 'TF_XLA_FLAGS', ''),
    ({'xla': False}, 'XTTS_NB_XLA', 'false'), ({'mixed_precision': False}, 'XTTS_NB_PRECISION', 'float32')]

@pytest.mark.parametrize('settings, name, value', CHANGES)
def test_each_setting_changes_the_environment(settings, name, value):
    assert environment(TFSettings(**settings)).get(name) == value != environment(TFSettings()).get(name)

def test_the_environment_of_the_default_settings(monkeypatch):
    cores = str(len(os.sched_getaffinity(0)))
    assert environment(TFSettings()) == {
        'TF_NUM_INTRAOP_THREADS': cores, 'TF_NUM_INTEROP_THREADS': cores, 'TF_FORCE_GPU_ALLOW_GROWTH': 'true',
        'TF_XLA_FLAGS': '--tf_xla_auto_jit=2', 'XTTS_NB_XLA': 'auto', 'XTTS_NB_PRECISION': 'bfloat16'}
    monkeypatch.delattr(os, 'sched_getaffinity')
    monkeypatch.setattr(os, 'cpu_count', lambda: 77)
    assert environment(TFSettings())['TF_NUM_INTEROP_THREADS'] == '77'

def test_flags_of_others_stay(monkeypatch):
    monkeypatch.setenv('TF_XLA_FLAGS', '--tf_xla_auto_jit=1 --other=2')
    assert environment(TFSettings())['TF_XLA_FLAGS'] == '--other=2 --tf_xla_auto_jit=2'
    assert environment(TFSettings(xla=False))['TF_XLA_FLAGS'] == '--other=2'

def test_a_shell_reads_the_file(tmp_path):
    write_environment(tmp_path / 'tf.env', settings := TFSettings(threads=3, memory_limit=512))
    shell = 'set -a; . ./tf.env; set +a; exec "$0" -c "import os, json; print(json.dumps(dict(os.environ)))"'
    done = subprocess.run(['sh', '-c', shell, sys.executable], cwd=tmp_path, capture_output=True, text=True,
                          check=True)
    assert environment(settings).items() <= json.loads(done.stdout).items()

@pytest.mark.parametrize('settings', [{'threads': 0}, {'memory_limit': 0}, {'memory_limit': -1},
                                      {'allocator': 'malloc'}], ids=str)
def test_invalid_settings(settings):
    with pytest.raises(FrozenInstanceError): TFSettings(threads=1, memory_limit=1).threads = 2
    with pytest.raises(UserError, match='^configure: '): TFSettings(**settings)

def test_training_takes_its_keys_from_the_environment(monkeypatch):
    for name, value in environment(TFSettings(xla=False)).items(): monkeypatch.setenv(name, value)
    assert from_environment() == {'training.mode': 'graph', 'training.precision': 'bfloat16'}


# --- what is set in TensorFlow ------------------------------------------------------------------------------

@pytest.fixture
def gpu(monkeypatch):
    "A GPU that records its settings."
    card, seen = SimpleNamespace(name='/physical_device:GPU:0'), {}
    config, real = tf.config, tf.config.list_physical_devices
    monkeypatch.setattr(config, 'list_physical_devices',
                        lambda kind=None: [card] if kind == 'GPU' else real(kind))
    monkeypatch.setattr(config, 'set_logical_device_configuration',
                        lambda gpu, parts: seen.update(limit=parts))
    monkeypatch.setattr(config, 'get_logical_device_configuration', lambda gpu: seen.get('limit'))
    monkeypatch.setattr(config.experimental, 'set_memory_growth', lambda gpu, on: seen.update(growth=on))
    monkeypatch.setattr(config.experimental, 'get_memory_growth', lambda gpu: seen.get('growth'))
    monkeypatch.setattr(config.experimental, 'get_device_details', lambda gpu: {})   # nothing is known of it
    for name in ('set_intra_op_parallelism_threads', 'set_inter_op_parallelism_threads'):
        # TensorFlow has started and would refuse
        monkeypatch.setattr(config.threading, name, lambda n: None)
    return seen

def test_memory_is_limited_or_grows(gpu, monkeypatch):
    assert setup_tf()['memory growth /physical_device:GPU:0'] == (True, True) and 'limit' not in gpu
    assert setup_tf(memory_limit=512)['memory limit /physical_device:GPU:0'] == (512, 512)
    monkeypatch.setenv('XTTS_NB_MEMORY_LIMIT', '256')
    assert setup_tf()['memory limit /physical_device:GPU:0'] == (256, 256)
    assert gpu['limit'][0].memory_limit == 256

def test_threads_of_the_environment_count_where_none_are_asked_for(monkeypatch):
    monkeypatch.setenv('TF_NUM_INTRAOP_THREADS', '7')
    monkeypatch.setenv('TF_NUM_INTEROP_THREADS', '5')
    assert [setup_tf()[f'{kind}-op threads'][0] for kind in ('intra', 'inter')] == [7, 5]
    assert setup_tf(threads=2)['intra-op threads'][0] == 2

@pytest.mark.parametrize('value', ['many', '0', '-1', '1.5'])
def test_a_variable_that_is_no_number_is_named(monkeypatch, value):
    monkeypatch.setenv('XTTS_NB_MEMORY_LIMIT', value)
    with pytest.raises(UserError, match=f'^XTTS_NB_MEMORY_LIMIT={value}: give a positive number'):
        environment_number('XTTS_NB_MEMORY_LIMIT')

def rows_of(settings, table, used='bfc'):
    return {r['setting']: r for r in page._memory_rows(settings, table, used)}

def test_the_table_shows_what_was_not_set():
    limited = rows_of(TFSettings(memory_limit=512, allocator='cuda_malloc_async'),
                      {'memory limit GPU:0': (512, None)})
    assert limited['memory limit GPU:0']['ok'] is None and limited['allocator']['ok'] is False
    late = rows_of(TFSettings(), {'memory growth GPU:0': (True, False)})['memory growth GPU:0']
    assert late['ok'] is False and 'had started already' in late['note']
    nothing = rows_of(TFSettings(memory_limit=512), {})
    assert nothing['memory limit, MiB']['note'] == nothing['allocator']['note'] == 'no GPU is visible'
    assert [r['ok'] for r in nothing.values()] == [None, None]
    assert [r['asked'] for r in nothing.values()] == [512, 'bfc']
    assert rows_of(TFSettings(), {})['memory growth']['asked'] is True
    line = 'memory limit, MiB                 512 -> not set            no GPU is visible'
    assert line in settings_text(list(nothing.values()))


@pytest.mark.parametrize('asked, got, note, ok, shown', [
    (2, 2, '', True, ''), (2, 1, '', False, 'TensorFlow had started already'),
    (2, None, '', None, 'TensorFlow had started already'),
    (2, 1, 'why', False, 'why'), (2, 2, 'why', True, 'why'), (False, False, '', True, ''),
    (None, 0, '', False, 'TensorFlow had started already')])
def test_a_row(asked, got, note, ok, shown):
    assert page._row('x', asked, got, note) == {'setting': 'x', 'asked': asked, 'got': got, 'ok': ok,
                                                'note': shown}

def test_rows_as_text():
    rows = [page._row('threads', 2, 1), page._row('XLA', True, False, 'a note'),
            page._row('memory growth', True, None, '')]
    assert settings_text(rows).splitlines() == [
        f'threads        {2:>18} -> {1:<18} TensorFlow had started already',
        f'XLA            {"on":>18} -> {"off":18} a note',
        f'memory growth  {"on":>18} -> {"not set":18} TensorFlow had started already']

THREADS = {'intra-op threads': (2, 2), 'inter-op threads': (2, 1), 'memory growth GPU:0': (True, True)}

@pytest.fixture
def tensorflow(monkeypatch):
    "What `configure` sets in TensorFlow and Keras, recorded, in an environment of its own."
    seen = SimpleNamespace(started=False, jit=True, gpus=[], set={}, table=THREADS)
    monkeypatch.setattr(os, 'environ', {k: v for k, v in os.environ.items() if k != 'TF_GPU_ALLOCATOR'})
    monkeypatch.setattr(page, 'tf_started', lambda: seen.started)
    setup = lambda threads, memory_limit: seen.set.update(setup=(threads, memory_limit)) or seen.table
    monkeypatch.setattr(page, 'setup_tf', setup)
    monkeypatch.setattr(tf.config.optimizer, 'set_jit', lambda value: seen.set.update(jit=value))
    monkeypatch.setattr(tf.config.optimizer, 'get_jit', lambda: 'autoclustering' if seen.jit else '')
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: seen.gpus)
    monkeypatch.setattr(page.keras.config, 'set_dtype_policy', lambda name: seen.set.update(policy=name))
    monkeypatch.setattr(page.keras.config, 'dtype_policy', lambda: SimpleNamespace(name=seen.set['policy']))
    return seen

def test_what_is_set_in_tensorflow(tensorflow):
    rows = {row.pop('setting'): row for row in page.configure()}
    assert tensorflow.set == {'setup': (None, None), 'jit': 'autoclustering', 'policy': 'mixed_bfloat16'}
    assert {name: (row['asked'], row['got'], row['ok']) for name, row in rows.items()} == {
        'intra-op threads': (2, 2, True), 'inter-op threads': (2, 1, False),
        'memory growth GPU:0': (True, True, True),
        'allocator': ('bfc', 'bfc', True), 'XLA': (True, True, True),
        'precision': ('mixed_bfloat16', 'mixed_bfloat16', True)}
    assert rows['XLA']['note'].startswith('on a CPU only where') and os.environ['XTTS_NB_XLA'] == 'auto'
    tensorflow.gpus, tensorflow.jit = ['GPU:0'], False
    rows = {row.pop('setting'): row for row in page.configure(1, 512, 'cuda_malloc_async', False, False)}
    assert tensorflow.set == {'setup': (1, 512), 'jit': False, 'policy': 'float32'}
    assert [rows[name]['asked'] for name in ('intra-op threads', 'inter-op threads')] == [1, 1]
    assert rows['allocator']['got'] == 'cuda_malloc_async'
    assert (rows['XLA']['got'], rows['XLA']['note']) == (False, '')
    tensorflow.jit, tensorflow.started = True, True
    rows = {row.pop('setting'): row for row in page.configure(allocator='cuda_malloc_async')}
    assert (rows['allocator']['got'], rows['allocator']['ok'], rows['XLA']['note']) == ('bfc', False, '')


# --- in a child process -------------------------------------------------------------------------------------

CHILD = '''
import json
from xtts_nb.app.check import configure
first = configure(threads=1, xla=True, mixed_precision=True)
import keras, tensorflow as tf
layer = keras.layers.Dense(2)
layer(tf.ones((1, 2)))
late = configure(threads=2, xla=False, mixed_precision=False)
dtypes = layer.compute_dtype, keras.layers.Dense(2).compute_dtype
print(json.dumps([first, late, *dtypes, bool(tf.config.optimizer.get_jit())]))
'''

def test_the_call_is_applied_and_read_back():
    env = {k: v for k, v in os.environ.items() if k != 'TF_XLA_FLAGS'}
    done = python(CHILD, env=env)
    assert done.code == 0, done.err
    first, late, mixed, plain, jit = json.loads(done.out.splitlines()[-1])
    by_name = {row['setting']: row for row in first}
    assert by_name['intra-op threads']['got'] == 1 and by_name['XLA']['got'] is True
    assert by_name['memory growth']['got'] is None
    assert by_name['precision']['got'] == 'mixed_bfloat16'
    assert not [row for row in first if row['ok'] is False]
    assert (mixed, plain, jit) == ('bfloat16', 'float32', False)
    by_name = {row['setting']: row for row in late}
    assert by_name['intra-op threads'] == {'setting': 'intra-op threads', 'asked': 2, 'got': 1, 'ok': False,
                                           'note': 'TensorFlow had started already'}

@pytest.mark.parametrize('settings, stderr, used, logs', [
    (TFSettings(), 'nothing', 'bfc', False),
    (TFSettings(allocator='cuda_malloc_async'), 'Using CUDA Async Allocator', 'cuda_malloc_async', True)])
def test_the_report_of_a_child(monkeypatch, settings, stderr, used, logs):
    ended, seen = SimpleNamespace(returncode=0, stderr=stderr), {}
    ended.stdout = 'chatter\nmore\n' + json.dumps({
        'table': THREADS, 'xla': (False, True, 'why'), 'precision': 'bfloat16'})
    monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '2')
    run = lambda command, env, **how: seen.update(how, env=env, python=command[0]) or ended
    monkeypatch.setattr(page.subprocess, 'run', run)
    rows = {row['setting']: row for row in verify_settings(settings)}
    assert environment(settings).items() <= seen['env'].items()
    assert (seen['env']['TF_CPP_MIN_LOG_LEVEL'] == '0') == logs
    assert seen['capture_output'] and seen['text'] and seen['python'] == sys.executable
    assert 'PATH' in seen['env']
    assert {name: (row['got'], row['ok']) for name, row in rows.items()} == {
        'intra-op threads': (2, True), 'inter-op threads': (1, False), 'memory growth GPU:0': (True, True),
        'allocator': (used, True), 'XLA': (True, False), 'precision': ('bfloat16', True)}
    assert rows['XLA']['asked'] is False and rows['XLA']['note'] == 'of the training step: why'
    ended.returncode, ended.stderr = 1, 'a traceback\nthe reason\n'
    with pytest.raises(UserError, match='training with these settings fails: the reason$'):
        verify_settings(settings)
    ended.returncode, ended.stderr = -9, ''   # killed
    with pytest.raises(UserError, match='fails: exit code -9$'): verify_settings(settings)

@pytest.mark.slow
@pytest.mark.parametrize('settings', [
    TFSettings(threads=1), TFSettings(threads=2, mixed_precision=False), TFSettings(xla=False)], ids=str)
def test_a_child_trains_with_the_settings(settings):
    rows = {row['setting']: row for row in verify_settings(settings)}
    assert not [row for row in rows.values() if row['ok'] is False]
    mode = 'auto' if settings.xla else 'graph'
    chosen = choose_xla(TrainingConfig(mode=mode, precision=settings.precision))[0]
    assert (rows['XLA']['got'], rows['precision']['got']) == (chosen, settings.precision)
    if settings.threads: assert rows['intra-op threads']['got'] == settings.threads
