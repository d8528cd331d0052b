"""Each lesson, from its install cell on, in an environment that held only a kernel: every cell runs, quietly.

In JupyterLab and a headless Chromium, where the live view is seen too; without them in a kernel alone."""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from tree import ROOT, notebooks
from wheels import link_packages, users_environment

from xtts_nb.config import workspace

pytestmark = pytest.mark.slow
LIVE = '.widget-html .xtts-live'   # not the frame that the page itself shows
LESSONS = [path for path in notebooks() if path.parent.name == 'nbs' and path.stem != 'index']
SECONDS = 900   # of a lesson, on a slow machine with other work
WATCHES = re.compile(r'gpu_live\(|LiveCallback\(')
ARM = re.compile(r'^(.+?): .* busy, .*variation', re.MULTILINE)   # a line of the summary of a variant
NAMES = 'chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'
SETTINGS = {   # windows without news; cells out of sight are drawn too
    'apputils-extension/notification': {'fetchNews': 'false', 'checkForUpdates': False,
                                        'doNotDisturbMode': True},
    'notebook-extension/tracker': {'windowingMode': 'none'}}
WHERE = 'import xtts_nb; print(xtts_nb.__file__)'   # a last cell
ALONE = '''
import sys, nbformat
from nbclient import NotebookClient
page = nbformat.read(sys.argv[1], 4)
NotebookClient(page, timeout=900).execute()
nbformat.write(page, sys.argv[1])
'''

@pytest.fixture(scope='module')
def browser():
    "Chromium of this machine, or the one that Playwright fetched; None without one or what drives it."
    try:
        import jupyterlab  # noqa: F401
        from playwright.sync_api import sync_playwright
    except ImportError: return (yield)
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), playwright.chromium.executable_path)
        if not Path(found).exists(): return (yield)
        browser = playwright.chromium.launch(executable_path=found, args=['--no-sandbox'])
        yield browser
        browser.close()

@pytest.fixture(scope='module')
def pages(tmp_path_factory) -> Path:
    "The lessons and nothing beside them, as Colab opens them: without outputs, and with a last cell."
    home = tmp_path_factory.mktemp('pages')
    for lesson in LESSONS:
        notebook = json.loads(lesson.read_text(encoding='utf-8'))
        for cell in notebook['cells']: cell.get('outputs', []).clear()
        notebook['cells'].append({'cell_type': 'code', 'id': 'where', 'source': WHERE, 'outputs': [],
                                  'metadata': {}, 'execution_count': None})
        (home / lesson.name).write_text(json.dumps(notebook), encoding='utf-8')
    return home

@pytest.fixture(scope='module')
def user(wheels, tmp_path_factory) -> dict:
    """The environment of somebody whose kernel holds nothing, and whose pip knows the wheel of this checkout.

    It holds what the wheel asks for and no more, linked from here: pip, which would take minutes to unpack
    TensorFlow, finds it there and installs the wheel."""
    home = tmp_path_factory.mktemp('bare')
    subprocess.run([sys.executable, '-m', 'venv', home], check=True)
    python, kernel = home / 'bin/python', home / 'kernels/python3/kernel.json'
    kept = {k: v for k, v in users_environment().items() if not k.startswith('JUPYTER')} | {
        'PIP_COMPILE': '0', 'PIP_DISABLE_PIP_VERSION_CHECK': '1'}   # most modules are never imported
    link_packages(home, wheels[0], 'demo')
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({
        'argv': [str(python), '-m', 'ipykernel_launcher', '-f', '{connection_file}'],
        'display_name': 'Python 3', 'language': 'python'}))
    links = f'{wheels[0].parent} {os.environ.get("PIP_FIND_LINKS", "")}'.strip()
    return kept | {'PIP_FIND_LINKS': links, 'JUPYTER_PATH': str(home), 'CUDA_VISIBLE_DEVICES': '-1',
                   'PATH': f'{python.parent}{os.pathsep}{os.environ["PATH"]}'}

@pytest.fixture(scope='module')
def lab(browser, pages, user, tmp_path_factory):
    "The address of a JupyterLab over the pages, whose kernel is Python of the bare environment."
    if not browser: return (yield)
    home = tmp_path_factory.mktemp('home')
    for name, values in SETTINGS.items():
        file = home / f'settings/@jupyterlab/{name}.jupyterlab-settings'
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    folders = {'JUPYTER_CONFIG_DIR': 'config', 'JUPYTER_DATA_DIR': 'data', 'JUPYTER_RUNTIME_DIR': 'runtime',
               'JUPYTERLAB_SETTINGS_DIR': 'settings', 'JUPYTERLAB_WORKSPACES_DIR': 'workspaces'}
    with socket.create_server(('127.0.0.1', 0)) as server: port = server.getsockname()[1]
    command = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--ip=127.0.0.1', f'--port={port}',
               '--allow-root', '--ServerApp.port_retries=0', '--IdentityProvider.token=',
               f'--ServerApp.root_dir={pages}', '--LabApp.expose_app_in_browser=True',
               '--LabApp.collaborative=False']
    with open(home / 'log', 'w+') as log:
        env = user | {name: str(home / folder) for name, folder in folders.items()}
        server = subprocess.Popen(command, env=env, cwd=pages, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(f'http://127.0.0.1:{port}/api', timeout=5).close()
                    break
                assert server.poll() is None and time.monotonic() < until, (home / 'log').read_text()[-2000:]
                time.sleep(.2)
            yield f'http://127.0.0.1:{port}'
        finally:
            server.terminate()
            server.wait(20)

def run_all(page, lab: str, name: str) -> set[str]:
    "Run every cell of a notebook in JupyterLab; the frames that the live view has shown."
    page.set_default_timeout(60_000)
    page.goto(f'{lab}/lab/tree/{name}?reset')
    page.wait_for_function('window.jupyterapp && document.querySelector(".jp-Notebook .jp-Cell")')
    page.evaluate('''async () => {
        const panel = window.jupyterapp.shell.currentWidget;
        await panel.sessionContext.ready;
        window.finished = false;
        window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.finished = true; });
    }''')
    frames, end = set(), time.monotonic() + SECONDS
    while not page.evaluate('window.finished'):
        assert time.monotonic() < end, f'{name}: still running after {SECONDS} s'
        page.wait_for_timeout(200)
        frames.add(page.evaluate('shown => document.querySelector(shown)?.innerHTML', LIVE))
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    return frames - {None}

def check_seen(page, frames: set[str], cells: list[dict], stem: str):
    "The live view moved, and its picture, with two variants, is where it was; for people, in runs/browser."
    assert len(frames) > 3 and not page.locator(LIVE).count(), 'the live view did not move'
    folder = workspace(ROOT).runs / 'browser'
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f'{stem}.png')
    variants = [{name for o in cell.get('outputs', []) for name in ARM.findall(''.join(o.get('text', '')))}
            for cell in cells]
    shown = [i for i, cell in enumerate(cells) if WATCHES.search(''.join(cell['source']))
             and any('image/png' in output.get('data', {}) for output in cell.get('outputs', []))]
    assert any(len(variants[i]) > 1 for i in shown), 'no picture with two named arms'
    for i in shown:
        picture = page.locator('.jp-Notebook .jp-Cell').nth(i)
        picture = picture.locator('.jp-RenderedImage img').first
        assert picture.get_attribute('src').startswith('data:image/png')

@pytest.mark.parametrize('lesson', LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_and_shows_its_arms(user, pages, browser, lab, lesson):
    "At the sizes that a user gets, with its slow cells; the library is the one that pip installed."
    file = pages / lesson.name
    if browser:
        page = browser.new_page(viewport={'width': 1280, 'height': 1000})
        frames = run_all(page, lab, lesson.name)
    else:
        done = subprocess.run([sys.executable, '-c', ALONE, file], cwd=pages, env=user, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr
    cells = json.loads(file.read_text(encoding='utf-8'))['cells']
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    assert not [output['evalue'] for output in outputs if output['output_type'] == 'error']
    assert not [output['text'] for output in outputs if output.get('name') == 'stderr']
    library = Path(''.join(cells[-1]['outputs'][0]['text']).strip())
    assert library.is_relative_to(user['JUPYTER_PATH']) and not library.is_relative_to(ROOT), library
    if browser:
        if lesson.stem[:2] in ('20', '40', '50'): check_seen(page, frames, cells, lesson.stem)
        page.close()
