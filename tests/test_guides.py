"The code and the commands of the guides run, with small stand-ins for what a reader has."
import json
import re
import shlex
import shutil
from pathlib import Path

import keras
import pytest
import tensorflow as tf

GUIDES = Path(__file__).parents[1] / 'nbs/guides'

def source(page: str, kind: str) -> list[str]:
    cells = json.loads((GUIDES / f'{page}.ipynb').read_text(encoding='utf-8'))['cells']
    return [''.join(c['source']) for c in cells if c['cell_type'] == kind]

def blocks(page: str, language: str = 'python') -> list[str]:
    "The blocks of code in the text of a page, in order."
    return re.findall(rf'```{language}\n(.*?)```', '\n'.join(source(page, 'markdown')), re.S)

@pytest.mark.filterwarnings('ignore')   # of the library's own code only; this code is the reader's
def test_the_code_of_why_is_my_gpu_idle_runs(tmp_path, capsys):
    for i in range(80): (tmp_path / f'{i}.txt').write_text(str(i))
    def load(name):
        x = tf.fill((3,), tf.strings.to_number(tf.io.read_file(name)))
        return x, x[:1]
    make_model = lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    files = tf.data.Dataset.list_files(str(tmp_path / '*.txt'), shuffle=False)
    model, optimizer = make_model(), keras.optimizers.Adam()
    model.compile('adam', 'mse')
    optimizer.build(model.trainable_variables)
    names = dict(files=files, load=load, dataset=files.map(load).batch(4), model=model, optimizer=optimizer,
                 loss_of=keras.losses.mean_squared_error, make_model=make_model,
                 texts=tf.data.Dataset.range(1, 200).map(lambda n: tf.range(n)),
                 step=tf.function(lambda batch: tf.reduce_mean(model(batch[0]))))
    code, shapes = blocks('idle_gpu'), []
    for block in code:
        exec(compile(block, block, 'exec'), names)
        if 'MirroredStrategy' in block: assert names['twin'].optimizer.iterations.numpy() == 20
        if 'bucket_by_sequence_length' in block: shapes = {tuple(batch.shape) for batch in names['texts']}
        if '.prefetch' in block: assert next(iter(names['batches']))[0].shape == (32, 3)
    said = capsys.readouterr().out
    assert all(re.search(rf'^{name} [0-9.e-]+$', said, re.M) for name in ('data', 'step', 'both'))
    assert shapes == {(32, 63), (16, 127)} and len(code) == 16 and len(names['losses']) == 1
    assert code == blocks('idle_gpu_fa') and source('technical', 'code') == source('technical_fa',
                                                                                   'code') != []

# speech, several processes or machines, many clips, the full size, files of others, whole benches: each has
# tests of its own; and what a shell does
ELSEWHERE = ('xtts-nb corpus', 'xtts-nb tune', 'voice/run', 'serve', '--shard', 'merge',
             '--preset xtts_v2', 'from-coqui', 'to-coqui', 'bench', 'check', 'profile', 'diagnose --data',
             'download', 'import', 'Claribel', '--data-gpu', 'make ', 'pip ', 'git ', 'curl', '-d ', '-F ',
             '. .venv', 'report --out', 'subtitles')
SHORT = {'train': '--steps 4', 'find': '--steps 10', 'evaluate': '--clips 2', 'monitor': '--duration 1',
         'diagnose': '--seconds 2'}
SMALL = {'Hello there.': 'aa bb', 'Hello again.': 'cc dd', 'CACHE': 'cache/mine', 'RUN': 'runs/graph'}

def commands_of(page: str) -> list[list[str]]:
    "The commands of a page that are run, in order, made short; of an option given twice the last counts."
    lines = [line for block in blocks(page, 'sh') for line in block.splitlines()
             if not any(words in line for words in ELSEWHERE)]
    out = [shlex.split(line, comments=True) for line in lines]
    assert {program for program, *_ in out} == {'xtts-nb'}
    small = lambda words: ['--config', 'small.yaml'] * (words[0] == 'prepare' and '--dvae' not in words)
    return [[*(SMALL.get(word, word) for word in words), *SHORT.get(words[0], '').split(), *small(words)]
            for _, *words in out]

PAGES = {'quick_start': 11, 'user_guide': 17, 'testing_guide': 2, 'idle_gpu': 5}   # commands that are run
MADE = """runs/mine runs/both runs/tuned models/tuned models/fa runs/fa runs/graph book.wav hello.wav speaks
    report/report.html learning_rate.png voices/anna.safetensors load.jsonl cache/tuning""".split()

@pytest.mark.slow
def test_the_commands_of_the_guides(corpus, mini, cheap, ran, tmp_path, monkeypatch):
    """In order, in one folder, on a small corpus and with updates that take no time.

    What two pages name is run once."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, 'CORPUS')
    shutil.copy(corpus / 'wavs/low-0.wav', 'a_few_seconds.wav')
    Path('book.txt').write_text('aa bb. cc dd.\n\nee ff.')
    Path('fa.txt').write_text('سگ پیر\nقایق\n', encoding='utf-8')
    Path('train.py').write_text('import keras, numpy as np\nx = np.ones((64, 3))\nmodel = keras.Sequential('
                                '[keras.layers.Dense(1)])\nmodel.compile("sgd", "mse")\nmodel.fit(x, x, 8)\n')
    Path('small.yaml').write_text(mini.replace(training={'dvae': {'steps': 20, 'mode': 'eager'}}).to_yaml())
    done, said = [], {page: commands_of(page) for page in PAGES}
    assert {page: len(lines) for page, lines in said.items()} == PAGES
    for words in (words for lines in said.values() for words in lines):
        if words in done: continue
        done.append(words)
        if '--data' in words and 'runs/mine' in words:   # a reader of the other page has no such run
            shutil.rmtree('runs/mine', ignore_errors=True)
        if 'MODEL' in words and not Path('MODEL').exists(): shutil.copytree('runs/mine', 'MODEL')
        one = ran('', *words)
        assert one.code == 0, (words, one.err)
    for block in blocks('user_guide'):
        if 'Speaker' in block: exec(block.replace('Hello there.', 'aa bb'), {})
    assert [path for path in MADE if not Path(path).exists()] == []
