"""README.md is the index page; dev/pages.py shows of a notebook what a reader should see."""
import base64
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from xtts_nb.bench import recorded

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'dev'))
import pages  # noqa: E402

PNG = base64.b64decode('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ'
                       'AAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg==')


def test_readme_is_the_index_page():
    text, pictures = pages.readme()
    assert (ROOT / 'README.md').read_text(encoding='utf-8') == text, 'run `make readme`'
    shown = {f.name: f.read_bytes() for f in (ROOT / 'nbs/images').glob('index-*')}
    assert shown == pictures, 'run `make readme`'


def test_the_readme_links_every_page():
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    pages_here = {p.relative_to(ROOT / 'nbs').as_posix() for p in (ROOT / 'nbs').rglob('[!.]*.ipynb')}
    assert [p for p in sorted(pages_here - {'index.ipynb'}) if f'(nbs/{p})' not in text] == []


def test_the_persian_readme_leads_to_pages_and_commands_that_there_are():
    "Its links are files, and its commands stand in the English one, where a comment may follow them."
    text, english = ((ROOT / f'README{end}.md').read_text(encoding='utf-8') for end in ('.fa', ''))
    links = {link.partition('#')[0] for link in re.findall(r'\]\(([^)]+)\)', text)}
    guides = 'idle_gpu', 'quick_start', 'technical', 'testing_guide', 'troubleshooting', 'user_guide'
    assert {f'nbs/guides/{page}_fa.ipynb' for page in guides} < links
    assert [link for link in sorted(links) if not (ROOT / link).exists()] == []
    commands = ''.join(re.findall(r'```sh\n(.*?)```', text, re.DOTALL)).splitlines()
    assert len(commands) > 2 and [c for c in commands if c not in english] == []
    assert text.count('<div dir="rtl">') == text.count('</div>')


def test_figures_in_persian_are_those_of_the_record():
    arm = {row['name']: row for row in recorded('busy', ROOT / 'benchmarks')[-1]['rows']}
    slow, fast = arm['python_eager'], arm['cache_xla']
    figures = slow['mean'], fast['mean'], fast['ratio']
    more = slow['min'], slow['max'], arm['python_xla']['mean']
    for page, shown in (('README.fa.md', figures + more), ('nbs/guides/idle_gpu_fa.ipynb', figures)):
        text = (ROOT / page).read_text(encoding='utf-8')
        for figure in shown:
            persian = f'{figure:.0f}'.translate(str.maketrans('0123456789', '۰۱۲۳۴۵۶۷۸۹'))
            assert re.search(rf'(?<!\w){persian}(?!\w)', text), (page, figure)


def result(**data):
    "A cell's value, by MIME type."
    return new_output('execute_result', data={k.replace('__', '/'): v for k, v in data.items()})


@pytest.fixture
def root(tmp_path) -> Path:
    "A repository of two notebooks, with everything that an index page may hold."
    (tmp_path / 'nbs').mkdir()
    picture = result(image__png=base64.b64encode(PNG).decode(), text__plain='<Figure>')
    cells = [
        new_code_cell('#| default_exp nothing', id='a'),
        new_markdown_cell('# Title\n\n> Subtitle\n\n'
                          '[a page](00_one.ipynb#two) [log](../dev/LOG.md) [web](https://a.b/c)', id='b'),
        new_code_cell('#| hide\nsecret = 1', id='c'),
        new_code_cell('#| export\n#| slow\nx = 1\nx', id='d', outputs=[result(text__plain='1')]),
        new_code_cell('#| echo: false\nplot()', id='e', outputs=[picture]),
        new_code_cell('#| output: false\nloud()', id='f', outputs=[result(text__plain='unheard')]),
        new_code_cell('table()', id='g',
                      outputs=[result(text__markdown='| [one](00_one.ipynb) |\n|---|\n| 2 |')]),
        new_code_cell('print(3)', id='h', outputs=[new_output('stream', name='stderr', text='noise'),
                                                   new_output('stream', name='stdout', text='3\n')]),
        new_code_cell('hear()', id='i',
                      outputs=[result(text__html='<audio></audio>', text__plain='<Audio>')]),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / 'nbs/index.ipynb')
    nbformat.write(new_notebook(cells=[new_markdown_cell('# One\n\n[home](index.ipynb)\n\n## Two', id='a')]),
                   tmp_path / 'nbs/00_one.ipynb')
    return tmp_path


def test_readme_shows_what_a_reader_should_see(root):
    text, _ = pages.readme(root)
    for unseen in ('#|', 'secret', 'plot()', 'unheard', 'noise', 'default_exp', '<Figure>', '<Audio>'):
        assert unseen not in text
    assert '```python\nx = 1\nx\n```\n\n```text\n1\n```' in text
    assert '```python\nloud()\n```' in text
    assert '```text\n3\n```' in text


def test_a_persian_page_runs_from_right_to_left(root):
    "nbconvert closes a division before what it holds, so it is the page that has the direction."
    (root / 'nbs/guides').mkdir()
    text = '# کار\n\n<div dir="rtl">\n\nبا `a` و [خانه](../index.ipynb)\n\n</div>'
    nbformat.write(new_notebook(cells=[new_markdown_cell(text, id='a')]),
                   root / 'nbs/guides/quick_start_fa.ipynb')
    assert [*pages.docs(root)] == ['index.html', 'guides/quick_start_fa.html', 'one.html', 'search.html']
    (root / 'README.fa.md').write_text('# نام\n\n[a](README.md#x) [b](nbs/guides/quick_start_fa.ipynb) '
                                       '[c](dev/LOG.md)', encoding='utf-8')
    written = pages.docs(root)
    assert [*written] == ['index.html', 'index_fa.html', 'guides/quick_start_fa.html', 'one.html',
                          'search.html']
    front = written['index_fa.html']
    assert '<main dir="rtl">' in front and 'aria-current="page">نام</a>' in front
    links = 'index.html#x', 'guides/quick_start_fa.html', '../dev/LOG.md'
    assert [link for link in links if f'<a href="{link}">' not in front] == []
    assert pages.page_link('../README.fa.md') == 'index_fa.html'
    page = written['guides/quick_start_fa.html']
    assert '<html lang="fa">' in page and '<main dir="rtl"><a class="jump" href="#contents">فهرست' in page
    assert '<div dir="rtl">' not in page and '<p>با <code>a</code> و <a href="../index.html">' in page
    assert ('<h4>راهنماها</h4>\n<a href="../index_fa.html">نام</a>\n'
            '<a href="quick_start_fa.html" aria-current="page">کار</a>') in page
    assert '<a href="../search.html">Search</a>' in page


def test_every_link_to_a_part_of_a_page_names_a_heading():
    headings, wrong = {}, []
    files = [ROOT / 'README.md', ROOT / 'README.fa.md', *pages.notebooks()]
    for path in files:
        text = path.read_text(encoding='utf-8')
        if path.suffix == '.ipynb': text = '\n\n'.join(c.source for c in pages.visible(path).cells
                                                       if c.cell_type == 'markdown')
        headings[path] = text, {pages.slug(line) for line in re.findall('^#+ (.*)$', text, re.MULTILINE)}
    for path, (text, _) in headings.items():
        for target, part in re.findall(r'\]\(((?!https?:)[^)#]*)#([^)]+)\)', text):
            there = (path.parent / target).resolve() if target else path
            if part not in headings[there][1]: wrong.append(f'{path.name}: {target}#{part}')
    assert wrong == []
