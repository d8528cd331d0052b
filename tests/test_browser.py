"The live view in JupyterLab, in a headless Chromium; skipped, with the reason, where one of them is missing."
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from xtts_nb.config import workspace
from xtts_nb.monitor.traces import free_port

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
LIVE = '.widget-html .xtts-live'   # not the frame that the page itself shows
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
    "A JupyterLab over an empty folder: (folder, url)."
    folder = tmp_path_factory.mktemp('lab')
    home = folder / '.home'
    (home / 'settings/@jupyterlab/apputils-extension').mkdir(parents=True)
    for name, values in SETTINGS.items():
        file = home / f'settings/@jupyterlab/apputils-extension/{name}.jupyterlab-settings'
        file.write_text(json.dumps(values))
    # the live cell lasts seven seconds then
    (folder / 'settings.ini').write_text('[workspace]\nscale = full\n')
    kept = {k: v for k, v in os.environ.items() if k != 'IN_TEST' and not k.startswith('JUPYTER')}
    env = kept | {'JUPYTER_CONFIG_DIR': str(home / 'config'), 'JUPYTER_DATA_DIR': str(home / 'data'),
                  'JUPYTER_RUNTIME_DIR': str(home / 'runtime'),
                  'JUPYTERLAB_SETTINGS_DIR': str(home / 'settings'),
                  'JUPYTERLAB_WORKSPACES_DIR': str(home / 'workspaces'), 'CUDA_VISIBLE_DEVICES': '-1',
                  'PYTHONPATH': os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))}
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
        window.jupyterapp.commands.execute('notebook:run-all-cells');
    }''')
    return page


def keep(locator, name: str):
    "A screenshot for people, in runs/browser."
    folder = workspace(ROOT).runs / 'browser'
    folder.mkdir(parents=True, exist_ok=True)
    locator.screenshot(path=folder / name)


def text(page, selector: str) -> str:
    return page.locator(selector).inner_text() if page.locator(selector).count() else ''


def until(page, holds, what: str, seconds: float = 30):
    "Wait until `holds()`."
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f'{what}: never within {seconds} s'
        page.wait_for_timeout(100)


def test_page_50_shows_a_training_live(browser, lab):
    notebook = json.loads((ROOT / 'nbs' / '50_monitoring.ipynb').read_text(encoding='utf-8'))
    for cell in notebook['cells']: cell.get('outputs', []).clear()
    page = run_notebook(browser, lab, notebook, 'page.ipynb')
    live = page.locator(LIVE)
    live.wait_for()
    live.scroll_into_view_if_needed()
    until(page, lambda: 'loss' in text(page, LIVE), 'the numbers of the training')
    first = text(page, LIVE)
    until(page, lambda: text(page, LIVE) != first, 'a change of the numbers')
    assert all(word in first for word in ('au', 'step', 'wait', 'this process'))
    page.wait_for_timeout(1500)   # for the picture: a curve to look at
    keep(live, 'live.png')
    picture = page.locator('.jp-RenderedImage img').first
    picture.wait_for()            # the block has ended: the picture stands where the widget was
    assert not page.locator(LIVE).count()
    assert picture.get_attribute('src').startswith('data:image/png')
    keep(picture, 'left.png')
    page.close()
