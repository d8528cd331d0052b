"With recorded speech, if the environment names some: `prepare`, `train` and `say`, and the loss falls."
import pytest

from process import xtts_nb

@pytest.mark.slow
def test_the_commands_of_the_first_page(speech, tmp_path):
    "`prepare` learns its DVAE, `train` 20 updates of the tiny preset in two shapes, `say` speaks."
    (tmp_path / 'short.yaml').write_text('data: {buckets: 2}\ntraining: {dvae: {steps: 20}}')
    run = lambda *words: xtts_nb(*words, '--json', cwd=tmp_path, timeout=1800)
    done = run('prepare', speech, '--out', 'runs/lj', '--config', 'short.yaml')
    assert done.code == 0 and done.json['clips'] >= 8, done.err
    done = run('train', '--data', 'runs/lj', '--preset', 'tiny', '--steps', '20')
    assert done.code == 0 and done.json['steps'] == 20, done.err
    assert done.json['loss_last'] < 0.8 * done.json['loss_first'] and done.json['clips_per_s'] > 0
    voice = min((speech / 'wavs').glob('*.wav'))
    done = run('say', 'printing', '--model', done.json['run'], '--voice', voice)
    assert done.code == 0 and (tmp_path / 'say.wav').is_file(), done.err
