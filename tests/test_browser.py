"""Each lesson, from its install cell on, in an environment that held only a kernel: every cell runs,
nothing is written on stderr.

In JupyterLab and a headless Chromium, where the live view and its arms are seen too; in a kernel
alone where there is none."""
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
from pages import search_body
from tree import ROOT, notebooks
from wheels import users_environment

from xtts_nb.config import workspace

pytestmark = pytest.mark.slow
LIVE = '.widget-html .xtts-live'   # not the frame that the page itself shows
LESSONS = [path for path in notebooks() if path.parent.name == 'nbs' and path.stem != 'index']
SECONDS = 900   # of a lesson, on a slow machine with other work
WATCHES = re.compile(r'gpu_live\(|LiveCallback\(')
ARM = re.compile(r'^(.+?): .* busy, .*variation', re.MULTILINE)   # a line of the summary of an arm
PICTURE = '.jp-RenderedImage img, .jp-RenderedSVG img'
NAMES = 'chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'
SETTINGS = {'notification': {'fetchNews': 'false', 'checkForUpdates': False, 'doNotDisturbMode': True}}
WHERE = 'import xtts_nb; print(xtts_nb.__file__)'   # a last cell
ALONE = '''
import sys, nbformat
from nbclient import NotebookClient
page = nbformat.read(sys.argv[1], 4)
NotebookClient(page, timeout=900).execute()
nbformat.write(page, sys.argv[1])
'''


def pip_environment() -> dict:
    "Modules are compiled where they are imported, which most are not."
    return users_environment() | {'PIP_COMPILE': '0', 'PIP_DISABLE_PIP_VERSION_CHECK': '1'}


@pytest.fixture(scope='module')
def chromium() -> Path | None:
    "The browser of this machine, or the one that Playwright fetched, if what drives it is here too."
    try:
        import jupyterlab  # noqa: F401
        from playwright.sync_api import sync_playwright
    except ImportError: return None
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        with sync_playwright() as playwright: found = playwright.chromium.executable_path
    return Path(found) if Path(found).exists() else None


@pytest.fixture(scope='module')
def pages(tmp_path_factory) -> Path:
    "The lessons and nothing beside them, as Colab opens them."
    home = tmp_path_factory.mktemp('pages')
    for lesson in LESSONS: shutil.copy(lesson, home)
    return home


@pytest.fixture(scope='module')
def bare(tmp_path_factory) -> Path:
    "The scripts of an environment that holds a kernel, and nothing of the library or TensorFlow."
    home = tmp_path_factory.mktemp('bare')
    subprocess.run([sys.executable, '-m', 'venv', home], check=True)
    python = home / 'bin' / 'python'
    done = subprocess.run([python, '-m', 'pip', 'install', '-q', 'ipykernel'], env=pip_environment(),
                          capture_output=True, text=True)
    if done.returncode: pytest.skip(f'pip cannot install ipykernel here: {done.stderr.splitlines()[-1]}')
    kernel = home / 'kernels/python3/kernel.json'
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({
        'argv': [str(python), '-m', 'ipykernel_launcher', '-f', '{connection_file}'],
        'display_name': 'Python 3', 'language': 'python'}))
    return python.parent


@pytest.fixture(scope='module')
def user(bare, wheels) -> dict:
    "The environment of somebody whose pip knows the wheel of this checkout."
    kept = {k: v for k, v in users_environment().items() if not k.startswith('JUPYTER')}
    links = f'{wheels[0].parent} {os.environ.get("PIP_FIND_LINKS", "")}'.strip()
    return kept | pip_environment() | {
        'PIP_FIND_LINKS': links, 'JUPYTER_PATH': str(bare.parent), 'CUDA_VISIBLE_DEVICES': '-1',
        'PATH': f'{bare}{os.pathsep}{os.environ["PATH"]}'}


@pytest.fixture(scope='module')
def lab(chromium, pages, user, tmp_path_factory):
    "The address of a JupyterLab over the pages, whose kernel is Python of the bare environment."
    if not chromium: return (yield)
    home = tmp_path_factory.mktemp('home')
    (home / 'settings/@jupyterlab/apputils-extension').mkdir(parents=True)
    for name, values in SETTINGS.items():
        file = home / f'settings/@jupyterlab/apputils-extension/{name}.jupyterlab-settings'
        file.write_text(json.dumps(values))
    tracker = home / 'settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings'
    tracker.parent.mkdir()
    tracker.write_text(json.dumps({'windowingMode': 'none'}))   # cells out of sight are drawn too
    env = user | {'JUPYTER_CONFIG_DIR': str(home / 'config'), 'JUPYTER_DATA_DIR': str(home / 'data'),
                  'JUPYTER_RUNTIME_DIR': str(home / 'runtime'),
                  'JUPYTERLAB_SETTINGS_DIR': str(home / 'settings'),
                  'JUPYTERLAB_WORKSPACES_DIR': str(home / 'workspaces')}
    with socket.create_server(('127.0.0.1', 0)) as server: port = server.getsockname()[1]
    command = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--ip=127.0.0.1', f'--port={port}',
               '--allow-root', '--ServerApp.port_retries=0', '--IdentityProvider.token=',
               f'--ServerApp.root_dir={pages}', '--LabApp.expose_app_in_browser=True',
               '--LabApp.collaborative=False']
    log = open(home / 'log', 'w+')
    server, url = subprocess.Popen(command, env=env, cwd=pages, stdout=log,
                                   stderr=log), f'http://127.0.0.1:{port}'
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f'{url}/api', timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < until, (home / 'log').read_text()[-2000:]
                time.sleep(.2)
        yield url
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@pytest.fixture(scope='module')
def browser(chromium):
    if not chromium: return (yield)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=['--no-sandbox'])
        yield browser
        browser.close()


def run_notebook(browser, lab: str, name: str):
    "A page of JupyterLab on which every cell of a notebook is being run."
    page = browser.new_page(viewport={'width': 1280, 'height': 1000})
    page.set_default_timeout(60_000)
    page.goto(f'{lab}/lab/tree/{name}?reset')
    page.wait_for_function('window.jupyterapp && document.querySelector(".jp-Notebook .jp-Cell")')
    page.evaluate('''async () => {
        const panel = window.jupyterapp.shell.currentWidget;
        await panel.sessionContext.ready;
        window.finished = false;
        window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.finished = true; });
    }''')
    return page


def keep(locator, name: str):
    "A screenshot for people, in runs/browser."
    folder = workspace(ROOT).runs / 'browser'
    folder.mkdir(parents=True, exist_ok=True)
    locator.screenshot(path=folder / name)


def watch(page, stem: str) -> set[str]:
    "Wait until all cells have run; the frames that the live view has shown."
    from playwright.sync_api import Error
    frames, end = set(), time.monotonic() + SECONDS
    while not page.evaluate('window.finished'):
        assert time.monotonic() < end, f'{stem}: still running after {SECONDS} s'
        page.wait_for_timeout(200)
        frame = page.evaluate('shown => document.querySelector(shown)?.innerHTML', LIVE)
        if frame is None or frame in frames: continue
        frames.add(frame)
        with suppress(Error): keep(page.locator(LIVE).first, f'{stem}-live.png')   # it may just have ended
    return frames


def arms(cell: dict) -> set[str]:
    "The names of the arms in the summary that a cell printed."
    return {name for output in cell['outputs'] for name in ARM.findall(''.join(output.get('text', '')))}


def check_seen(page, frames: set[str], cells: list[dict], stem: str):
    "The live view moved, and its picture, with two arms, stands where it was."
    assert len(frames) > 3, 'the live view did not move'
    keep(page, f'{stem}-top.png')
    shown = [i for i, cell in enumerate(cells) if WATCHES.search(''.join(cell['source']))
             and any('image/png' in output.get('data', {}) for output in cell.get('outputs', []))]
    assert any(len(arms(cells[i])) > 1 for i in shown), 'no picture with two named arms'
    for i in shown:
        picture = page.locator('.jp-Notebook .jp-Cell').nth(i).locator(PICTURE).first
        kind = 'svg+xml' if len(arms(cells[i])) > 1 else 'png'   # a comparison is played again
        assert picture.get_attribute('src').startswith(f'data:image/{kind}')
        keep(picture, f'{stem}-{i}.png')
    assert not page.locator(LIVE).count()


def prepared(file: Path) -> Path:
    "A lesson without outputs, and with a last cell that prints where its library is."
    notebook = json.loads(file.read_text(encoding='utf-8'))
    for cell in notebook['cells']: cell.get('outputs', []).clear()
    notebook['cells'].append({'cell_type': 'code', 'id': 'where', 'source': WHERE, 'outputs': [],
                              'metadata': {}, 'execution_count': None})
    file.write_text(json.dumps(notebook), encoding='utf-8')
    return file


def check_ran(cells: list[dict], bare: Path):
    "No error, no line on stderr; the library was that which pip installed."
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    assert not [output['evalue'] for output in outputs if output['output_type'] == 'error']
    assert not [output['text'] for output in outputs if output.get('name') == 'stderr']
    file = Path(''.join(cells[-1]['outputs'][0]['text']).strip())
    assert file.is_relative_to(bare.parent) and not file.is_relative_to(ROOT), file


def test_there_is_a_browser(chromium):
    if chromium: return
    pytest.skip('no Chromium, or no playwright and jupyterlab, so the lessons run without them and nobody '
                'sees their live view: make test-browser installs it')


@pytest.mark.parametrize('lesson', LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_and_shows_its_arms(bare, user, pages, browser, lab, lesson):
    "At the sizes that a user gets, with its slow cells."
    file, read = prepared(pages / lesson.name), lambda: json.loads(file.read_text(encoding='utf-8'))['cells']
    if browser:
        page = run_notebook(browser, lab, lesson.name)
        frames = watch(page, lesson.stem)
        page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
        check_ran(read(), bare)
        check_seen(page, frames, read(), lesson.stem)
        page.close()
    else:
        done = subprocess.run([sys.executable, '-c', ALONE, file], cwd=pages, env=user, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr
        check_ran(read(), bare)


def test_the_pages_are_searched(browser, tmp_path):
    "Headings first; letters that differ by keyboard only are the same."
    if not browser: pytest.skip('no Chromium')
    parts = [['a.html#A', 'One', 'a second word'], ['a.html#B', 'Second', 'one كتاب'],
             ['c.html#C', 'Third', 'x'], ['d.html#D', 'Fourth', 'آن‌ها ' * 90 + 'این کار می‌شود']]
    (tmp_path / 'search.html').write_text(f'<meta charset="utf-8">{search_body(parts)}', encoding='utf-8')
    page = browser.new_page()
    page.goto((tmp_path / 'search.html').as_uri())
    def found(words):
        page.fill('#words', words)
        return page.eval_on_selector_all('#found a', 'links => links.map(a => a.getAttribute("href"))')
    assert found('SECOND') == ['a.html#B', 'a.html#A'] and found('one second') == ['a.html#A', 'a.html#B']
    assert found('کتاب') == ['a.html#B'] and found('') == []
    page.fill('#words', 'می‌شود')   # typed with the joiner or without: the words around it are shown
    assert 'این کار می‌شود' in page.inner_text('#found')
    assert found('third one') == [] and 'Nothing holds' in page.inner_text('#found')
    page.close()
