"Settings, workspace and the setup of TensorFlow. test_settings.py checks that every key has an effect."
import math
import os
from pathlib import Path

import pytest

from xtts_nb import config as page
from xtts_nb.config import (
    UserError, XTTSConfig, _control_groups, cores, _cpu_quota, _environment_number, setup_tf, sizes,
    _usable_cores, workspace)

DEFAULT = XTTSConfig()

# --- YAML and dictionaries ----------------------------------------------------------------------------------

def test_yaml_goes_there_and_back(tmp_path):
    path = tmp_path / 'c.yaml'
    for config in XTTSConfig.tiny(), XTTSConfig.xtts_v2(), XTTSConfig.tiny(64):
        path.write_text(config.to_yaml())
        assert XTTSConfig.load(path) == config
    for text in '', '# nothing\n', '{}', 'model: {}\n':   # what is left out keeps its default
        path.write_text(text)
        assert XTTSConfig.load(path) == DEFAULT
    for written in '1e-4', '1.0e-4', '0.0001', '"1e-4"':
        path.write_text(f'training: {{gpt: {{learning_rate: {written}}}}}')
        assert XTTSConfig.load(path).training.gpt.learning_rate == 1e-4
    path.write_bytes(b'\xef\xbb\xbfdata:\r\n  batch_size: 3\r\n\r\nspeech:\r\n  top_k: 7\r\n')   # of Windows
    assert XTTSConfig.load(path) == DEFAULT.replace(data={'batch_size': 3}, speech={'top_k': 7})

WRONG = [   # settings, and what the sentence names
    ('training: {gpt: {learnin_rate: 1}}', '"training.gpt.learnin_rate"; did you mean "learning_rate"?'),
    ('training: {steps: 1}', 'did you mean "training.gpt.steps"?'), ('zzz: 1', 'it has model, data'),
    ('training: {batch_size: 8}', 'did you mean "data.batch_size"?'),
    ('training: {gpt: {learning_rate: fast}}', "training.gpt.learning_rate: .*'fast'"),
    ('training: {gpt: {learning_rate: .nan}}', 'training.gpt.learning_rate: .*nan'),
    ('{data: {batch_size: 6}, training: {gpt: {grad_accum_steps: 4}}}', 'batch_size 6 .*grad_accum_steps 4'),
    ('training: {gpt: {seed: 2147483648}}', 'training.gpt.seed: .*2147483648'),
    ('model: {gpt: {hidden_dim: 80, num_heads: 2}}', 'hidden_dim 80 .*32'),
    ('model: {gpt: {num_heads: 3}}', 'hidden_dim 1024 .*num_heads 3'),
    ('model: {audio: {win_length: 2000}}', 'win_length 2000 .*1024'),
    ('model: {audio: {f_max: 12000}}', 'f_max 12000.* 11025'), ('model: {gpt: {dropout: 1.0}}', 'dropout'),
    ('data: {min_seconds: 5, max_seconds: 4}', 'min_seconds 5.* max_seconds 4'),
    ('training: {gpt: {judge_by: dtw}}', 'eval_clips'),
    ('training: {decoder: {periods: [], windows: []}}', 'at least one discriminator'),
    ('data:', 'data: .*None'), ('data: {1: 2}', 'data'), ('a: [', 'not YAML'), ('[1, 2]', 'expected'),
    ('\x00', 'YAML'), (b'model: \xff', 'not readable'), (None, 'no such settings file')]

@pytest.mark.parametrize('text, named', WRONG)
def test_wrong_settings_name_their_file_key_and_value(tmp_path, text, named):
    path = tmp_path / 'run.yaml'
    if text is not None: path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=f'run.yaml: .*{named}') as e: XTTSConfig.load(path)
    assert '\n' not in str(e.value)

def test_replace_keeps_the_rest_and_settings_are_frozen():
    config = XTTSConfig.tiny()
    changed = config.replace(data={'batch_size': 3}, model={'gpt': {'num_layers': 1}})
    assert (changed.data.batch_size, changed.model.gpt.num_layers) == (3, 1)
    assert changed.replace(data={'batch_size': config.data.batch_size},
                           model={'gpt': {'num_layers': 4}}) == config
    for wrong in ({'data': 3}, {'dat': {'batch_size': 3}}, {'data': {'batchsize': 3}}):
        with pytest.raises(UserError): config.replace(**wrong)
    with pytest.raises(ValueError, match='frozen'): config.data.batch_size = 3
    with pytest.raises(UserError, match='huge'): XTTSConfig.preset('huge')

# --- the workspace ------------------------------------------------------------------------------------------

@pytest.fixture
def outside(tmp_path, monkeypatch):
    "A working directory under no settings file, and no test environment."
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('IN_TEST', raising=False)
    return tmp_path.resolve()

def write(folder, text): (folder / 'settings.ini').write_text(text, encoding='utf-8')

def test_the_file_is_searched_upwards_and_the_nearest_counts(outside, monkeypatch):
    w = workspace()
    assert (w.root, w.data, w.cache, w.runs, w.scale) == (
        outside, *(outside / n for n in ('data', 'cache', 'runs')), 'tiny')
    (deep := outside / 'a/b/c').mkdir(parents=True)
    write(outside, '[workspace]\ndata = far\nscale = full\n')
    monkeypatch.chdir(deep)
    assert (workspace().data, workspace().root, sizes(tiny=1, full=2)) == (outside / 'far', outside, 2)
    write(outside / 'a', '[workspace]\ndata = near\n')
    assert (workspace().data, workspace().scale) == (outside / 'a/near', 'tiny')
    assert workspace(outside).data == outside / 'far'
    monkeypatch.setenv('IN_TEST', '1')   # under test the scale is tiny
    assert workspace(outside).scale == 'tiny'

@pytest.mark.parametrize('text, part', [
    ('nonsense\n', ''), ('[workspace]\nscal = tiny\n', 'did you mean "scale"'), ('[workspace\n', ''),
    ('[workspace]\nscale = huge\n', 'scale'), ('[workspace]\ndata = a\ndata = b\n', ''),
    ('[workspac]\ndata = a\n', r'\[workspac\]; did you mean'), ('[Workspace]\n', 'did you mean')])
def test_a_bad_file_is_named(outside, text, part):
    write(outside, text)
    with pytest.raises(UserError, match=f'settings.ini.*{part}'): workspace()

@pytest.mark.parametrize('text, data', [
    ('[other]\nx = 1\n', 'data'), ('', 'data'), ('[workspace]\ndata = 50%\n', '50%'),
    ('\ufeff[workspace]\ndata = a b\n', 'a b'), ('# note\n[workspace]\ndata = ü ; x\n', 'ü ; x')])
def test_what_people_write_is_read(outside, text, data):
    write(outside, text)
    assert workspace().data == outside / data

# --- TensorFlow ---------------------------------------------------------------------------------------------

@pytest.fixture
def start(not_started, monkeypatch):
    "The same on three cores, with the details of its cards, and no wishes of the environment."
    import tensorflow as tf
    for name in ('TF_NUM_INTRAOP_THREADS', 'TF_NUM_INTEROP_THREADS', 'XTTS_NB_MEMORY_LIMIT'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {3, 4, 5} if pid == 0 else {0}, raising=False)
    monkeypatch.setattr(page, '_cpu_quota', lambda: (64., None))
    monkeypatch.setattr(page, '_reported', set())
    # a command that ran before has switched it off
    monkeypatch.setattr(tf.config.experimental, 'tensor_float_32_execution_enabled', lambda: True)
    def start(count=1, **details):
        monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: details)
        return not_started(count)
    return start

def test_threads_and_memory_as_given_else_as_the_environment_asks(start, monkeypatch):
    def got(*given, cards=1, **more):
        start(cards)
        return setup_tf(*given, **more)
    threads = lambda n, m: {'intra-op threads': (n,) * 2, 'inter-op threads': (m,) * 2, 'TF32': (None, True)}
    growing, still, limited = ({f'memory {kind} /physical_device:GPU:0': (value,) * 2} for kind, value in
                               (('growth', True), ('growth', False), ('limit', 500)))
    assert got() == threads(3, 3) | growing and got(2, memory_growth=False) == threads(2, 2) | still
    assert got(memory_limit=500) == threads(3, 3) | limited
    monkeypatch.setenv('TF_NUM_INTEROP_THREADS', '7')
    monkeypatch.setenv('XTTS_NB_MEMORY_LIMIT', '500')
    assert got() == threads(3, 7) | limited and got(1, cards=0) == threads(1, 1)
    for value, number in ((None, None), ('', None), ('12', 12), ('0', None), ('x', UserError),
                          ('1.5', UserError)):
        monkeypatch.setenv('A_NUMBER', value or '')
        if number is UserError: pytest.raises(UserError, _environment_number,
                                              'A_NUMBER').match(f'^A_NUMBER={value}: ')
        else: assert _environment_number('A_NUMBER') == number

@pytest.mark.parametrize('shown, cards, says', [
    (None, 2, 'has 2 GPUs, but TensorFlow opens none'), ('-1', 2, None), ('', 2, None), (None, 0, None)])
def test_a_card_that_tensorflow_cannot_open_is_named_once(start, monkeypatch, capsys, shown, cards, says):
    monkeypatch.setattr('pynvml.nvmlInit', lambda: None)
    monkeypatch.setattr('pynvml.nvmlDeviceGetCount', lambda: cards)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if shown is not None: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', shown)
    start(0)
    setup_tf(), setup_tf()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(says) and all(says in line for line in lines)

@pytest.mark.parametrize('capability, named',
                         [((9, 0), False), ((10, 0), True), ((12, 0), True), (None, False)])
def test_a_card_that_is_too_new_for_tensorflow_is_named(start, capsys, capability, named):
    start(device_name='RTX 5090', compute_capability=capability)
    setup_tf()
    said = capsys.readouterr().err   # as the wheel says of itself
    assert ('built for 9.x at most' in said) == named == said.startswith('RTX 5090') == bool(said)

@pytest.mark.parametrize('limit', [None, 500])
def test_cards_that_are_divided_already_stay_so(start, limit):
    "One is divided, the other is not: no error, now or when TensorFlow starts."
    import tensorflow as tf
    fresh, cards = start(2)
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=m) for m in (100, 200)]
    tf.config.set_logical_device_configuration(cards[0], parts)
    got = setup_tf(threads=2, memory_limit=limit)
    if limit: assert [got[f'memory limit {c.name}'] for c in cards] == [(500, 500)] * 2
    else: assert [got[f'memory growth {c.name}'] for c in cards] == [(True, None), (True, True)]
    divided = tf.config.get_logical_device_configuration(cards[0])
    assert [part.memory_limit for part in divided] == ([500] if limit else [100, 200])
    options = fresh._compute_gpu_options()
    assert len(options.experimental.virtual_devices) == 2 and fresh._context_handle is None

def test_a_request_that_comes_too_late_is_shown():
    import tensorflow as tf
    tf.constant(0)   # TensorFlow has started
    kept = tf.config.threading.get_intra_op_parallelism_threads()
    assert setup_tf(threads=kept + 1)['intra-op threads'] == (kept + 1, kept)

# --- what XLA compiled (00_config reads it again), and the cores of a container -----------------------------

def test_compiled_code_is_kept_apart_for_each_kind_of_machine(monkeypatch):
    "Flags of the CPU, kind of the GPU and version of TensorFlow count; its frequency does not."
    files = {'cpuinfo': 'flags\t: avx amx\ncpu MHz\t: 2000', 'information': 'Model: \tH100\nIRQ: 1'}
    gpus = [Path('/proc/driver/nvidia/gpus/0/information')]
    monkeypatch.setattr(page.Path, 'glob', lambda path, pattern: gpus if str(path).endswith('gpus') else [])
    monkeypatch.setattr(page.Path, 'read_text', lambda path, **_: files[path.name])
    names = {first := page._machine()}
    for name, text in (('cpuinfo', files['cpuinfo'].replace('2000', '3000')), ('cpuinfo', 'flags\t: avx'),
                       ('cpuinfo', 'Features\t: sve'), ('information', 'Model: A100')):
        files[name] = text
        names.add(page._machine())
    monkeypatch.setattr(page.metadata, 'version', lambda name: '9.9.9')
    assert len(names) == 4 and first in names and page._machine() not in names
    assert page._machine().startswith('tensorflow-9.9.9-')

@pytest.mark.parametrize('files, quota', [
    ({}, math.inf), ({'cpu.max': 'max 100000\n'}, math.inf), ({'cpu.max': '250000 100000\n'}, 2.5),
    ({'cpu/cpu.cfs_quota_us': '-1\n', 'cpu/cpu.cfs_period_us': '100000\n'}, math.inf),
    ({'cpu/cpu.cfs_quota_us': '50000\n', 'cpu/cpu.cfs_period_us': '500000\n'}, .1),
    ({'cpu.max': 'odd'}, math.inf)])
def test_a_container_has_the_cores_of_its_quota(monkeypatch, tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (own := tmp_path / 'own').write_text('4:cpu,cpuacct:/a/b\n3:memory:/m\n0::/c\n')
    groups = lambda kind: [g.relative_to(tmp_path).as_posix() for g in _control_groups(kind, tmp_path, own)]
    assert groups('cpu') == ['.', 'cpu', 'cpu/a/b', 'cpu/a', 'c']
    assert groups('memory') == ['.', 'memory', 'memory/m', 'c']
    monkeypatch.setattr(page, '_control_groups', lambda kind: [tmp_path, tmp_path / kind])
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {1, 5, 7}, raising=False)
    assert (_cpu_quota()[0], _usable_cores(), cores()) == (quota, min(3, quota), math.ceil(min(3, quota)))
