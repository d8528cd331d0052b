"The live view in JupyterLab, in a headless Chromium; skipped, with the reason, where one of them is missing."
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from process import COMMAND

from xtts_nb.config import workspace
from xtts_nb.monitor.traces import free_port

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
LIVE = '.widget-html .xtts-live'   # not the frame that the page itself shows
LESSONS = sorted((ROOT / 'nbs').glob('[0-9]*.ipynb'))
SECONDS = 300   # of a lesson, on a slow machine with other work
WATCHES = re.compile(r'gpu_live\(|LiveCallback\(')
ARM = re.compile(r'^(.+?): .* busy, .*variation', re.MULTILINE)   # a line of the summary of an arm
NAMES = 'chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'
SETTINGS = {'notification': {'fetchNews': 'false', 'checkForUpdates': False, 'doNotDisturbMode': True}}


@pytest.fixture(scope='module')
def chromium() -> str:
    "The browser of this machine, or the one that Playwright fetched."
    for name in ('playwright', 'jupyterlab'):
        pytest.importorskip(name, reason=f'no {name} here: make test-browser installs it')
    from playwright.sync_api import sync_playwright
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        with sync_playwright() as playwright: found = playwright.chromium.executable_path
    if not Path(found).exists(): pytest.skip('no Chromium here: make test-browser installs it')
    return found


@pytest.fixture(scope='module')
def lab(chromium, tmp_path_factory):
    "A JupyterLab over the pages as a user of the package has them: (folder, url)."
    home = tmp_path_factory.mktemp('home')
    folder = home / 'lab'
    (home / 'settings/@jupyterlab/apputils-extension').mkdir(parents=True)
    for name, values in SETTINGS.items():
        file = home / f'settings/@jupyterlab/apputils-extension/{name}.jupyterlab-settings'
        file.write_text(json.dumps(values))
    tracker = home / 'settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings'
    tracker.parent.mkdir()
    tracker.write_text(json.dumps({'windowingMode': 'none'}))   # cells out of sight are drawn too
    ours = 'IN_TEST', 'MPLBACKEND', 'TF_CPP_MIN_LOG_LEVEL'   # set for tests; a user has none of them
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith('JUPYTER')}
    env = kept | {'JUPYTER_CONFIG_DIR': str(home / 'config'), 'JUPYTER_DATA_DIR': str(home / 'data'),
                  'JUPYTER_RUNTIME_DIR': str(home / 'runtime'),
                  'JUPYTERLAB_SETTINGS_DIR': str(home / 'settings'),
                  'JUPYTERLAB_WORKSPACES_DIR': str(home / 'workspaces'), 'CUDA_VISIBLE_DEVICES': '-1',
                  'PYTHONPATH': os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))}
    subprocess.run([*COMMAND, 'notebooks', str(folder)], env=env, check=True, stdout=subprocess.DEVNULL)
    port = free_port()
    command = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--ip=127.0.0.1', f'--port={port}',
               '--allow-root', '--ServerApp.port_retries=0', '--IdentityProvider.token=',
               f'--ServerApp.root_dir={folder}', '--LabApp.expose_app_in_browser=True',
               '--LabApp.collaborative=False']
    log = open(home / 'log', 'w+')
    server, url = subprocess.Popen(command, env=env, cwd=folder, stdout=log,
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
        yield folder, url
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@pytest.fixture(scope='module')
def browser(chromium):
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=['--no-sandbox'])
        yield browser
        browser.close()


def run_notebook(browser, lab, notebook: dict, name: str):
    "A page of JupyterLab on which every cell of `notebook` is being run."
    folder, url = lab
    (folder / name).write_text(json.dumps(notebook))
    page = browser.new_page(viewport={'width': 1280, 'height': 1000})
    page.set_default_timeout(60_000)
    page.goto(f'{url}/lab/tree/{name}?reset')
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


def saved_cells(page, file: Path) -> list[dict]:
    "The cells of a notebook as JupyterLab saves it."
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    return json.loads(file.read_text(encoding='utf-8'))['cells']


def arms(cell: dict) -> set[str]:
    "The names of the arms in the summary that a cell printed."
    return {name for output in cell['outputs'] for name in ARM.findall(''.join(output.get('text', '')))}


@pytest.mark.parametrize('lesson', LESSONS, ids=lambda path: path.stem)
def test_a_lesson_shows_its_arms(browser, lab, lesson):
    notebook = json.loads((lab[0] / lesson.name).read_text(encoding='utf-8'))
    for cell in notebook['cells']: cell.get('outputs', []).clear()
    from playwright.sync_api import Error
    page, frames, stem = run_notebook(browser, lab, notebook, lesson.name), set(), lesson.stem
    end = time.monotonic() + SECONDS
    while not page.evaluate('window.finished'):
        assert time.monotonic() < end, f'{stem}: still running after {SECONDS} s'
        page.wait_for_timeout(200)
        frame = page.evaluate('shown => document.querySelector(shown)?.innerHTML', LIVE)
        if frame is None or frame in frames: continue
        frames.add(frame)
        with suppress(Error): keep(page.locator(LIVE).first, f'{stem}-live.png')   # it may just have ended
    assert len(frames) > 3, 'the live view did not move'
    keep(page, f'{stem}-top.png')
    cells = saved_cells(page, lab[0] / lesson.name)
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    assert not [output['evalue'] for output in outputs if output['output_type'] == 'error']
    assert not [output['text'] for output in outputs if output.get('name') == 'stderr']
    shown = [i for i, cell in enumerate(cells) if WATCHES.search(''.join(cell['source']))
             and any('image/png' in output.get('data', {}) for output in cell.get('outputs', []))]
    assert any(len(arms(cells[i])) > 1 for i in shown), 'no picture with two named arms'
    for i in shown:
        picture = page.locator('.jp-Notebook .jp-Cell').nth(i).locator('.jp-RenderedImage img').first
        assert picture.get_attribute('src').startswith('data:image/png')
        keep(picture, f'{stem}-{i}.png')
    assert not page.locator(LIVE).count()   # the picture stands where the live view was
    page.close()
