"The rules of the repository, checked on its files: no test here runs a page."
import ast
import json
import re
import subprocess
import sys
import tomllib

import pytest
import tree
import yaml
from tree import ROOT

NOTEBOOKS, MODULES = tree.notebooks(), tree.modules()
LESSONS = {'00_config': 'config', '10_data_tf_native': 'data.native', '20_model': 'models.xtts',
           '30_trainer_xla': 'train.step', '40_dual_gpu': 'train.dual', '50_monitoring': 'monitor.live',
           '60_speech': 'speech.generate'}
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))

def cells(path, kind: str) -> list[dict]:
    "The cells of one kind, `source` joined."
    found = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [{**c, 'source': ''.join(c['source'])} for c in found if c['cell_type'] == kind]

# Split, so that this file passes its own test.
ELSEWHERE = re.compile(r'''(?<![\w.~$}:/<-])/(?:home|root|work|tmp|opt|mnt|Users|private)(?=/\w)'''
                       r'''|file:''' r'''//|\bissue[s]? #?\d+\b''')
BESIDE = '../' + 'shared'

def test_no_path_of_one_machine():
    command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
    done, found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True), []
    for name in filter(None, done.stdout.split('\0')):
        if name == 'LICENSE' or not (ROOT / name).is_file(): continue
        text = (ROOT / name).read_bytes().decode(errors='ignore') if '.' in name[-6:] else ''
        if '\0' in text: continue   # pictures and the like
        found += [f'{name}: {m[0]}' for m in ELSEWHERE.finditer(text)]
        if BESIDE in text: found.append(f'{name}: {BESIDE}')
    assert not found

def test_each_module_has_one_page_and_each_page_its_room():
    def module(path):
        found = (re.match(r'#\|\s*default_exp:?\s+(\S+)', c['source']) for c in cells(path, 'code'))
        return next((m[1] for m in found if m), None)
    written = {p.relative_to(ROOT / 'nbs').with_suffix('').as_posix(): module(p) for p in NOTEBOOKS}
    expected = {path: LESSONS.get(path) or path.removeprefix('base/').replace('/', '.') for path in written
                if not path.startswith('guides/') and path != 'index'} | {'guides/from_myxtts': 'app.myxtts'}
    assert {path: name for path, name in written.items() if name} == expected
    assert sorted(expected.values()) == sorted(MODULES)
    assert not {name for name in MODULES if '.' not in name} & {*sys.stdlib_module_names}
    sidebar = yaml.safe_load((ROOT / 'nbs/sidebar.yml').read_text(encoding='utf-8'))['website']['sidebar']
    files = lambda title: [p.relative_to(ROOT / 'nbs').as_posix() for p in NOTEBOOKS if tree.section(p)
                           == title]
    assert sidebar['contents'] == ['index.ipynb', *({'section': title, 'contents': files(title)}
                                        for title in ('Guides', tree.PERSIAN, 'Lessons')),
                       *({'section': title, 'contents': f'{folder}/*.ipynb'}
                         for folder, title in [*tree.ROOMS.items()][2:])]

def test_pages_read_as_pages_and_store_their_outputs():
    for path in NOTEBOOKS:
        markdown, code = [c['source'] for c in cells(path, 'markdown')], cells(path, 'code')
        assert re.match(r'# \S.*\n\n> \S', markdown[0]) and len(' '.join(markdown).split()) > 100, path
        outputs = [o for c in code for o in c['outputs']]
        assert outputs or not code or path.stem == 'index', f'{path}: run `nbdev-test --save` on it'
        assert not [o for o in outputs if o['output_type'] == 'error'], path

def test_a_guide_in_persian_has_the_same_commands():
    for guide in 'idle_gpu', 'quick_start', 'testing_guide', 'troubleshooting', 'user_guide':
        texts = ['\n'.join(c['source'] for c in cells(ROOT / f'nbs/guides/{page}.ipynb', 'markdown'))
                 for page in (guide, f'{guide}_fa')]
        english, persian = (re.findall(r'xtts-nb [^`\n]+', text) for text in texts)
        assert english == persian and len(english) > 7, guide

# a room imports only itself and the rooms before it; '' is the root
ORDER = ['', 'monitor', 'data', 'models', 'speech', 'train', 'app']

def room(module: str) -> str: return module.rpartition('.')[0]

def imported(source: str, here: str) -> set[str]:
    "The modules of the library that the code of a module imports, inside functions too."
    found, package = set(), ['xtts_nb', *here.split('.')[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            above = package[:len(package) + 1 - node.level] if node.level else []
            base = '.'.join([*above, *filter(None, [node.module])])
            found |= {base} | {f'{base}.{a.name}' for a in node.names}
    return {name for f in found if (name := f.removeprefix('xtts_nb.')) in MODULES} - {here}

def test_imports_follow_the_order_of_the_rooms_without_a_circle():
    assert imported('from .audio import mel\nfrom .. import bench\ndef f(): from ..models.gpt import GPT',
                    'data.cache') == {'data.audio', 'bench', 'models.gpt'}
    needs = {name: imported(path.read_text(encoding='utf-8'), name) for name, path in MODULES.items()}
    for name, others in needs.items():
        assert not [m for m in others if ORDER.index(room(m)) > ORDER.index(room(name))], name
    left = {name: {m for m in others if room(m) == room(name)} for name, others in needs.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free: del left[name]
    assert not left, 'these import each other'

# modules that are imported one after the other, and what none up to then may have imported
LIGHT = {'xtts_nb': ['numpy', 'pydantic'], 'xtts_nb.config': [], 'xtts_nb.files': ['numpy'],
         'xtts_nb.settings': [], 'xtts_nb.app.download': ['pooch', 'huggingface_hub', 'tqdm'],
         'xtts_nb.sampler': ['pynvml'], 'xtts_nb.monitor.live': ['matplotlib', 'IPython', 'ipywidgets']}
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
    assert [name for name in dir(xtts_nb) if name[0] != '_'] == xtts_nb.__all__ and {*xtts_nb.__all__} == {
        'XTTS', 'Trainer', 'begin', 'prepare', 'Speaker', 'gpu_live', 'diagnose', 'XTTSConfig', 'setup_tf'}
    for name in xtts_nb.__all__: assert getattr(xtts_nb, name).__name__ == name and name in vars(xtts_nb)
    with pytest.raises(AttributeError): xtts_nb.nothing  # noqa: B018
    headings = re.findall(r'^## \[?([^\]\s]+)', (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8'),
                          re.MULTILINE)
    assert headings[0] == xtts_nb.__version__

def test_lock_file_covers_the_dependencies_and_nothing_of_one_machine():
    key = lambda requirement: re.match(r'[\w.-]+', requirement)[0].lower().replace('_', '-')
    extras = PROJECT['project']['optional-dependencies']
    wanted = {key(r) for r in [*PROJECT['project']['dependencies'], *extras['demo'], *extras['dev']]}
    text = (ROOT / 'requirements.lock').read_text(encoding='utf-8')
    lines = [line for line in text.splitlines() if not line.startswith('#')]
    assert wanted - {'xtts-nb'} <= {key(line) for line in lines}, 'run `make lock`'
    assert all(re.match(r'(?!nvidia-cu)[\w.-]+==[\w.]+( ;|$)', line) for line in lines)
