"""The rules of the repository, checked on its files: no test here runs a page."""
import ast
import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import tree
import yaml
from pytest_split.algorithms import DurationBasedChunksAlgorithm

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = tree.notebooks()
PAGES = [nb for nb in NOTEBOOKS if nb.stem != 'index']
MODULES = tree.modules()


def name(path): return path.relative_to(ROOT / 'nbs').with_suffix('').as_posix()


def tracked() -> list[Path]:
    "The files of the repository; without git, the files in its folders."
    if (ROOT / '.git').exists():
        command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        files = [ROOT / f for f in done.stdout.split('\0') if f]
    else:
        folders = '.ci', '.github', 'benchmarks', 'dev', 'nbs', 'tests', 'xtts_nb'
        files = [*ROOT.glob('*'), *(f for folder in folders for f in (ROOT / folder).rglob('*'))]
    return [f for f in files if f.is_file() and not f.is_symlink() and '__pycache__' not in f.parts]


def cells(
    path: Path,  # of a notebook
    kind: str,   # `code` or `markdown`
) -> list[dict]:
    "The cells of one kind, `source` joined."
    found = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [{**c, 'source': ''.join(c['source'])} for c in found if c['cell_type'] == kind]


def module(
    path: Path,  # of a notebook
) -> str | None:
    "The module that the notebook writes."
    found = (re.match(r'#\|\s*default_exp:?\s+(\S+)', c['source']) for c in cells(path, 'code'))
    return next((m[1] for m in found if m), None)


# ---- what must not be in it

# Split, so that this file passes its own test.
ELSEWHERE = re.compile(r'''(?<![\w.~$}:/<-])/(?:home|root|work|tmp|opt|mnt|Users|private)(?=/\w)'''
                       r'''|file:''' r'''//|\bissue[s]? #?\d+\b''')
BESIDE = '../' + 'shared'


def test_no_path_of_one_machine():
    found = []
    for f in tracked():
        try: text = f.read_text(encoding='utf-8')
        except UnicodeDecodeError: continue   # pictures and the like
        if f.name == 'LICENSE': continue
        found += [f'{f.relative_to(ROOT)}:{i}: {m[0]}' for i, line in enumerate(text.splitlines(), 1)
                  for m in ELSEWHERE.finditer(line)]
        if BESIDE in text and f != ROOT / '.ci/run': found.append(f'{f.relative_to(ROOT)}: {BESIDE}')
    assert not found


# ---- notebooks

LESSONS = {'00_config': 'config', '10_data_tf_native': 'data.native', '20_model': 'models.xtts',
           '30_trainer_xla': 'train.step', '40_dual_gpu': 'train.dual', '50_monitoring': 'monitor.live',
           '60_speech': 'speech.generate'}


def test_the_lessons_are_the_pages_of_the_top_folder():
    assert [p.stem for p in NOTEBOOKS if p.parent.name == 'nbs'] == ['index', *LESSONS]


def test_the_sidebar_shows_the_guides_first_and_every_room():
    sidebar = yaml.safe_load((ROOT / 'nbs/sidebar.yml').read_text(encoding='utf-8'))
    first, guides, persian, lessons, *rooms = sidebar['website']['sidebar']['contents']
    files = lambda title: [p.relative_to(ROOT / 'nbs').as_posix() for p in NOTEBOOKS
                           if tree.section(p) == title]
    assert first == 'index.ipynb' and len(files('Guides')) == len(tree.GUIDES) == len(files(tree.PERSIAN)) + 1
    assert lessons == {'section': 'Lessons', 'contents': [f'{name}.ipynb' for name in LESSONS]}
    assert [guides, persian, lessons] == [{'section': title, 'contents': files(title)}
                                          for title in ('Guides', tree.PERSIAN, 'Lessons')]
    assert rooms == [{'section': title, 'contents': f'{folder}/*.ipynb'}
                     for folder, title in [*tree.ROOMS.items()][2:]]
    assert {p.parent.name for p in NOTEBOOKS} == {*tree.ROOMS}


@pytest.mark.parametrize('name', LESSONS)
def test_a_lesson_begins_with_its_installation(name):
    "Directly below the title, on pages it is hidden, and no test runs it; the extra is one that exists."
    found = json.loads((ROOT / f'nbs/{name}.ipynb').read_text(encoding='utf-8'))['cells']
    title, code = ([''.join(c['source']) for c in found][i] for i in (1, 2))
    assert title.startswith('# ') and code.startswith('#| hide\n#| eval: false\n')
    installs = re.search(r"if not find_spec\('xtts_nb'\):\n    %pip install -q 'xtts_nb\[(\w+)\]'$", code)
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
    assert installs[1] in project['optional-dependencies']


TAKES_TENSORFLOW = re.compile(
    r'^ *(import|from) (tensorflow|keras|xtts_nb\.(app|data|models|monitor\.diagnose|speech|train)\b)', re.M)

@pytest.mark.parametrize('path', [p for p in PAGES if p.parent.name == 'nbs'], ids=name)
def test_a_lesson_prepares_tensorflow_before_it_imports_it(path):
    "Else the page shows what TensorFlow says at its start, where a user runs it."
    code = '\n'.join(c['source'] for c in cells(path, 'code'))
    assert re.search(r'^setup_tf\(', code, re.M).start() < TAKES_TENSORFLOW.search(code).start()

@pytest.mark.parametrize('path', PAGES, ids=name)
def test_page_has_a_module(path):
    room = path.parent.name
    if room == 'guides': assert module(path) == ('app.myxtts' if path.stem == 'from_myxtts' else None); return
    if room == 'nbs': assert module(path) == LESSONS[path.stem]
    else: assert module(path) == (path.stem if room == 'base' else f'{room}.{path.stem}')
    assert module(path) in MODULES


def test_each_module_has_one_page():
    assert sorted(filter(None, map(module, NOTEBOOKS))) == sorted(MODULES)
    assert module(ROOT / 'nbs/index.ipynb') is None


@pytest.mark.parametrize('path', NOTEBOOKS, ids=name)
def test_page_reads_as_a_page(path):
    markdown = [c['source'] for c in cells(path, 'markdown')]
    assert re.match(r'# \S.*\n\n> \S', markdown[0]), 'it begins with an H1 and a > subtitle'
    assert len(' '.join(markdown).split()) > 100, 'prose leads'


@pytest.mark.parametrize('path', PAGES, ids=name)
def test_page_stores_its_outputs(path):
    code = cells(path, 'code')
    outputs = [o for c in code for o in c['outputs']]
    assert outputs or not code, 'run `nbdev-test --save` on it'
    assert not [o for o in outputs if o['output_type'] == 'error']


@pytest.mark.parametrize('guide', [
    'idle_gpu', 'quick_start', 'testing_guide', 'troubleshooting', 'user_guide'])
def test_a_guide_in_persian_has_the_same_commands(guide):
    texts = ['\n'.join(c['source'] for c in cells(ROOT / f'nbs/guides/{page}.ipynb', 'markdown'))
             for page in (guide, f'{guide}_fa')]
    english, persian = (re.findall(r'xtts-nb [^`\n]+', text) for text in texts)
    assert english == persian and len(english) > 7


# a room imports only itself and the rooms before it; '' is the root
ORDER = ['', 'monitor', 'data', 'models', 'speech', 'train', 'app']


def room(module: str) -> str: return module.rpartition('.')[0]


@pytest.mark.parametrize('path', [p for p in PAGES if p.parent.name == 'nbs'], ids=name)
def test_no_cell_of_a_lesson_is_longer_than_a_screen(path):
    assert not [c['id'] for c in cells(path, 'code') if c['source'].count('\n') >= 50]


def imported(
    source: str,   # Python
    here: str,     # the module that it is
) -> set[str]:
    "The modules of the library that some code imports, inside functions too."
    found, package = set(), ['xtts_nb', *here.split('.')[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            above = package[:len(package) + 1 - node.level] if node.level else []
            base = '.'.join([*above, *filter(None, [node.module])])
            found |= {base} | {f'{base}.{a.name}' for a in node.names}
    return {name for f in found if (name := f.removeprefix('xtts_nb.')) in MODULES}


@pytest.mark.parametrize('source, modules', [
    ('import xtts_nb.data.native', {'data.native'}), ('from xtts_nb.models import gpt', {'models.gpt'}),
    ('from .audio import mel', {'data.audio'}), ('from .. import bench', {'bench'}),
    ('from ..models.gpt import GPT', {'models.gpt'}),
    ('def f():\n    from xtts_nb.data.text import Tokenizer as T', {'data.text'}),
    ('import numpy, xtts_nb', set())])
def test_imported(source, modules): assert imported(source, 'data.cache') == modules


@pytest.mark.parametrize('module', MODULES)
def test_imports_follow_the_order_of_the_rooms(module):
    "A cycle within a room is refused too."
    source = {name: path.read_text(encoding='utf-8') for name, path in MODULES.items()
              if room(name) == room(module)}
    place = ORDER.index(room(module))
    assert not [m for m in imported(source[module], module) if ORDER.index(room(m)) > place]
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        nearer = {m for m in imported(source[name], name) - {name} if room(m) == room(module)} - seen
        assert module not in nearer, f'{name} imports {module} back'
        seen |= nearer
        todo += nearer


def test_no_module_at_the_root_hides_one_of_python():
    assert not {name for name in MODULES if '.' not in name} & set(sys.stdlib_module_names)


# ---- the package

# modules that are imported one after the other, and what none up to then may have imported
LIGHT = {'xtts_nb': ['numpy', 'pydantic'], 'xtts_nb.config': [], 'xtts_nb.files': ['numpy'],
         'xtts_nb.app.download': ['pooch', 'huggingface_hub', 'tqdm'], 'xtts_nb.sampler': ['pynvml'],
         'xtts_nb.monitor.live': ['matplotlib', 'IPython', 'ipywidgets']}
IMPORT = '''
import importlib, json, sys
for name, heavy in json.loads(sys.argv[1]).items():
    importlib.import_module(name)
    print(name, [m for m in ('tensorflow', 'keras', *heavy) if m in sys.modules])
'''


def test_imports_are_light():
    done = subprocess.run([sys.executable, '-c', IMPORT, json.dumps(LIGHT)], capture_output=True, text=True,
                          check=True)
    assert done.stdout.splitlines() == [f'{name} []' for name in LIGHT]


def test_the_names_that_people_import_are_here():
    import xtts_nb
    shown = [name for name in dir(xtts_nb) if name[0] != '_']
    assert shown == sorted(shown) == xtts_nb.__all__ and set(shown) == {
        'XTTS', 'Trainer', 'prepare', 'Speaker', 'gpu_live', 'diagnose', 'XTTSConfig', 'setup_tf'}
    for name in shown:
        value = getattr(xtts_nb, name)
        assert value.__name__ == name and value.__doc__ and name in vars(xtts_nb)
    with pytest.raises(AttributeError, match="module 'xtts_nb' has no attribute 'nothing'"):
        xtts_nb.nothing  # noqa: B018


def test_version_is_in_the_changelog():
    import xtts_nb
    text = (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
    headings = re.findall(r'^## \[?([^\]\s]+)', text, re.MULTILINE)
    assert headings[0] == xtts_nb.__version__


def test_lock_file_covers_the_dependencies_and_nothing_of_one_machine():
    def key(requirement): return re.match(r'[\w.-]+', requirement)[0].lower().replace('_', '-')
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']
    extras = project['optional-dependencies']
    wanted = {key(r) for r in [*project['dependencies'], *extras['demo'], *extras['dev']]}
    wanted -= {key(project['name'])}
    text = (ROOT / 'requirements.lock').read_text(encoding='utf-8')
    lines = [line for line in text.splitlines() if not line.startswith('#')]
    locked = {key(line) for line in lines}
    assert wanted <= locked, 'run `make lock`'
    assert all(re.match(r'[\w.-]+==[\w.]+( ;|$)', line) for line in lines)
    assert not [n for n in locked if n.startswith('nvidia') and n != 'nvidia-ml-py']


def test_workspace_settings_are_the_defaults():
    parser = configparser.ConfigParser()
    parser.read(ROOT / 'settings.ini', encoding='utf-8')
    assert dict(parser['workspace']) == {'data': 'data', 'cache': 'cache', 'runs': 'runs', 'scale': 'tiny'}


def test_continuous_integration_runs_make_test_and_some_slow_tests():
    assert os.access(ROOT / '.ci/run', os.X_OK)
    commands = re.findall(r'^(?:exec )?(?:timeout .*?)?make .*', (ROOT / '.ci/run').read_text(), re.MULTILINE)
    assert [re.search(r'\btest\S*', c)[0] for c in commands] == ['test', 'test-part']
    nightly = (ROOT / '.github/workflows/nightly.yml').read_text()
    assert re.findall(r'- run: make (\S+)', nightly) == ['test-torch', 'test-all']


def test_every_part_of_the_slow_tests_fits_into_ten_minutes():
    "By the seconds that were measured: of the longest test, and of all on two workers."
    makefile, path = (ROOT / 'Makefile').read_text(), ROOT / 'dev/durations.json'
    seconds = json.loads(path.read_text(encoding='utf-8'))
    parts = DurationBasedChunksAlgorithm()(int(re.search(r'^parts = (\d+)', makefile, re.MULTILINE)[1]),
                                           [SimpleNamespace(nodeid=name) for name in seconds], seconds)
    assert sum(len(part.selected) for part in parts) == len(seconds)
    for part in parts:
        longest = max(seconds[item.nodeid] for item in part.selected)
        assert max(longest, part.duration / 2) < 600, (part.duration, longest)


@pytest.mark.parametrize('target, gpu, marked, flags', [
    ('test', '', ['not slow and not gpu'], ['cpu']), ('test', '1', ['not slow and not cpu'], ['gpu']),
    ('test-all', '', ['not slow and not gpu', 'slow and not alone and not gpu', 'slow and alone and not gpu'],
     ['slow cpu']),
    ('test-all', '1',
     ['not slow and not cpu', 'slow and not alone and not cpu', 'slow and alone and not cpu'],
     ['slow gpu'])])
def test_gpu_tests_and_cpu_tests_never_run_together(target, gpu, marked, flags):
    command = ['make', '-n', target, f'GPU={gpu}']
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r'-m "(.*?)"', recipe) == marked and re.findall(r'--flags "(.*?)"', recipe) == flags
    assert ('CUDA_VISIBLE_DEVICES=-1' in recipe) == (not gpu)
    settings = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['tool']
    assert settings['nbdev']['tst_flags'].split() == ['gpu', 'cpu', 'slow']
    markers = settings['pytest']['ini_options']['markers']
    assert {m.partition(':')[0] for m in markers} == {'slow', 'alone', 'gpu', 'cpu', 'torch'}
