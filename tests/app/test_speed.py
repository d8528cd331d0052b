"Measuring: pipelines deliver the same before they are timed; steps, starts, speech and service."
import re

import pytest
import tensorflow as tf

from xtts_nb.app import bench_config
from xtts_nb.app.bench_data import check_equal, readers
from xtts_nb.app.bench_service import _load_row, _load_speaker, _service_load
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan

# --- the data pipelines -------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_difference_is_noticed_whatever_differs(prepared, dvae, small, stats):
    plan = BatchPlan(prepared, small.data)
    right = readers(plan, stats)
    def wrong(variant, part, change):
        return f'{variant}_{part}', lambda step: (batch := right[variant](step)) | {part: change(batch[part])}
    variants = dict([wrong('cache', 'codes', lambda x: tf.concat([x[:, :1] + 1, x[:, 1:]], 1)),
                 wrong('cache', 'reference', lambda x: x * 1.1),
                 wrong('native', 'text', lambda x: x[:, ::-1]),
                 wrong('native_wav', 'weight', lambda x: x * 0),
                 wrong('numpy_function', 'mel', lambda x: x[:, 1:])])
    with pytest.raises(UserError, match='different batches, ') as e:
        check_equal(plan, stats, dvae.encode, {'cache': right['cache']} | variants, batches=1)
    assert re.findall(r'(\w+) (\w+) [0-9.]+%', str(e.value)) == [
        (name, name.split('_')[-1]) for name in variants]

# --- the step, and the start of a process -------------------------------------------------------------------

@pytest.fixture(scope='module')
def quick(small): return small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}})

@pytest.mark.slow
def test_a_second_start_compiles_nothing(quick, cheap_xla):
    "Real processes: the counted start reads what the first one wrote; more threads, more switches."
    with bench_config.kernel_workspace() as folder:
        rows = bench_config._compare_starts(quick, 6, 8, folder, rounds=1)
        stamps = lambda: {file.name: file.stat().st_mtime_ns for file in folder.rglob('xla_compile_cache*')}
        kept = stamps()
        assert len(kept) == 1 and len({row['loss'] for row in rows}) == 1   # one program for each update
        assert all(row[phase] >= 0 for row in rows for phase in ('imports', 'model', 'trace', 'compile'))
        many, own, half = bench_config.compare_steps(quick, 6, 8, folder, rounds=2, updates=5)
        assert own['switches'] < many['switches'] and half['loss'] != own['loss'] == rows[0]['loss']
        assert stamps().items() >= kept.items()   # other threads may need more kernels, not these once more

# --- the service --------------------------------------------------------------------------------------------

def test_a_row_of_the_service():
    "Ten and two admitted in two waves; the median of the first wave is 0.55 s, that of the second 1.5 s."
    waves = [[(200, i / 10, 9.) for i in range(1, 11)] + [(429, 0.01, 0.02), (503, 5., 5.)],
             [(200, 1., 9.), (200, 2., 9.), (429, 0.03, 0.04)]]
    assert _load_row(12, waves) == {
        'name': '12 clients', 'first_p50_ms': 650., 'first_p99_ms': 1890., 'spread': 1.39, 'waves': 2,
        'admitted': 12, 'refused': 2, 'late': 1, 'refused_p99_ms': 29.8}
    for answers in ([(200, 1., 1.), (400, 1., 1.)], [(429, 1., 1.)]):
        with pytest.raises(UserError, match='give a text that the model can speak'): _load_row(2, [answers])

@pytest.mark.slow
def test_200_clients_at_once():
    "A real engine: 12 have a place and are spoken, the others know at once that there is none."
    new, row = _service_load(_load_speaker()[0], clients=(0, 200), rounds=1, rows=4, queue=8)
    assert new['admitted'] == 8 and new['name'] == 'a newcomer'
    assert row['admitted'] >= 12 and row['admitted'] + row['refused'] == 200 and not row['late']
    assert row['refused_p99_ms'] < row['first_p50_ms']
