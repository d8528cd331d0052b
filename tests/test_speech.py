"With recorded speech, if the environment names some: prepare, train, and the loss falls."
import json

import pytest

from process import xtts_nb
from xtts_nb.data.cache import Cache
from xtts_nb.config import XTTSConfig
from xtts_nb.models.dvae import DVAE
from xtts_nb.data.prepare import prepare
from xtts_nb.train.runs import new_run


def test_a_few_updates_lower_the_loss(speech, tmp_path):
    "An untrained DVAE and no XLA keep this within seconds."
    config = XTTSConfig.tiny(64).replace(
        model={'dvae': {'hidden': 16, 'codebook_dim': 8, 'codes': 32},
               'gpt': {'layers': 1, 'conditioning_layers': 1}},
        data={'batch_size': 8, 'buckets': 1},
        training={'steps': 30, 'warmup_steps': 5, 'mode': 'graph'})
    report = prepare(speech, tmp_path / 'cache', config, DVAE(config))
    assert report['clips'] >= 8 and report['seconds'] > 8, report['dropped']
    cache = Cache(tmp_path / 'cache')
    assert len(cache) == report['clips']
    # one code per 46 ms
    assert cache.codes_length.sum() * 1024 / 22050 == pytest.approx(report['seconds'], rel=0.05)
    result = new_run(cache, config, tmp_path / 'run').fit()
    assert result['steps'] == 30 and result['traces'] == 1
    assert result['loss_last'] < 0.95 * result['loss_first']


@pytest.mark.slow
def test_the_commands_of_the_first_page(speech, tmp_path):
    "`prepare` learns its DVAE, `train` 40 updates of the tiny preset, `say` speaks."
    (tmp_path / 'short.yaml').write_text('training: {dvae_steps: 50}')
    done = xtts_nb('prepare', speech, '--out', 'runs/lj', '--config', 'short.yaml', '--json', cwd=tmp_path,
                   timeout=1800)
    assert done.code == 0 and done.json['clips'] >= 8, done.err
    done = xtts_nb('train', '--data', 'runs/lj', '--preset', 'tiny', '--steps', '40', '--json', cwd=tmp_path,
                   timeout=1800)
    assert done.code == 0, done.err
    assert {'steps', 'loss_first', 'loss_last', 'clips_per_s'} <= done.json.keys(), done.err
    assert done.json['steps'] == 40 and done.json['loss_last'] < 0.8 * done.json['loss_first']
    clip = json.loads((tmp_path / 'runs/lj/clips.jsonl').read_text(encoding='utf-8').splitlines()[0])
    voice = speech / 'wavs' / f'{clip["id"]}.wav'
    done = xtts_nb('say', 'printing', '--model', done.json['run'], '--voice', voice, '--json', cwd=tmp_path)
    assert done.code == 0 and (tmp_path / 'say.wav').is_file(), done.err
