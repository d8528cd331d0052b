"""README.md is the index page; dev/pages.py shows of a notebook what a reader should see."""
import base64
import json
import re
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import xtts_nb
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


def test_readme_links_start_at_the_repository(root):
    text, _ = pages.readme(root)
    assert '[a page](nbs/00_one.ipynb#two) [log](dev/LOG.md) [web](https://a.b/c)' in text
    assert '| [one](nbs/00_one.ipynb) |' in text


def test_readme_keeps_its_pictures_in_files(root):
    (root / 'nbs/images').mkdir()
    (root / 'nbs/images/index-gone-0.png').write_bytes(PNG)
    (root / 'nbs/images/drawn-by-hand.png').write_bytes(PNG)
    pages.write_readme(root)
    assert '![figure](nbs/images/index-e-0.png)' in (root / 'README.md').read_text()
    images = {f.name: f.read_bytes() for f in (root / 'nbs/images').iterdir()}
    assert images == {'index-e-0.png': PNG, 'drawn-by-hand.png': PNG}
    assert pages.readme(root) == pages.readme(root)


def test_a_release_shows_whole_addresses(tmp_path):
    for name in ('README.md', 'pyproject.toml', 'xtts_nb/__init__.py'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    pages.write_release('https://a.b/c/d', tmp_path)
    text, version = (tmp_path / 'README.md').read_text(encoding='utf-8'), xtts_nb.__version__
    assert f'](https://a.b/c/d/blob/v{version}/nbs/00_config.ipynb)' in text
    assert f'](https://a.b/c/d/raw/v{version}/nbs/images/index-' in text
    assert not re.search(r'\]\((?!https?://|#)', text)
    urls = tomllib.loads((tmp_path / 'pyproject.toml').read_text(encoding='utf-8'))['project']['urls']
    assert urls['Homepage'] == 'https://a.b/c/d' and urls['Changelog'] == f'https://a.b/c/d/blob/v{version}/CHANGELOG.md'


@pytest.mark.parametrize('host, badges', [('https://github.com', 1), ('https://gitlab.com', 0)])
def test_a_release_lets_a_lesson_be_opened_in_colab(tmp_path, host, badges):
    for name in ('nbs/00_config.ipynb', 'nbs/index.ipynb', 'nbs/base/bench.ipynb'):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    pages.write_badges(f'{host}/c/d/blob/v1', tmp_path)
    for name in ('nbs/index.ipynb', 'nbs/base/bench.ipynb'):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
    cells = [json.loads((folder / 'nbs/00_config.ipynb').read_text(encoding='utf-8'))['cells']
             for folder in (ROOT, tmp_path)]
    changed = [(''.join(a['source']), ''.join(b['source'])) for a, b in zip(*cells, strict=True) if a != b]
    assert len(changed) == badges
    for before, after in changed:
        badge = ('[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]'
                 '(https://colab.research.google.com/github/c/d/blob/v1/nbs/00_config.ipynb)')
        assert after == before.replace('# Config\n', f'# Config\n\n{badge}\n', 1)


def test_pages_stand_alone_and_lead_to_each_other(root):
    written = pages.docs(root)
    assert list(written) == ['index.html', 'one.html', 'search.html']
    index = written['index.html']
    assert ('<a href="index.html" aria-current="page">Title</a>\n<a href="search.html">Search</a>\n'
            '<h4>Lessons</h4>\n<a href="one.html">One</a>') in index
    assert '<h2 id="two">' in written['one.html']   # nbconvert would have it as Two
    assert 'href="one.html#two"' in index and 'href="index.html"' in written['one.html']
    assert 'data:image/png;base64,' in index and '<audio>' in index and 'secret' not in index
    assert not [part for part in ('<script', '<link', 'src="http') if part in index]
    assert '<html lang="en">' in index
    assert '<main dir="ltr"><a class="jump" href="#contents">Contents' in index
    light, dark = index.split('@media (prefers-color-scheme: dark)')
    assert '.highlight .k {' in light and '.highlight .k {' in dark   # the words of Python


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


def test_headings_have_the_addresses_of_github():
    body = ''.join(f'<h{n} id="x">{text}<a class="anchor-link" href="#x">¶</a></h{n}>' for n, text in (
        (1, 'A <code>b_c</code>, d'), (2, '3 × fast'), (3, 'Why?'), (3, 'Why?'), (2, 'کار «من»')))
    found = re.findall('<h. id="([^"]*)">.*?href="#([^"]*)">', pages.addressed(body))
    assert found == [(name, name) for name in ('a-b_c-d', '3--fast', 'why', 'why-1', 'کار-من')]

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

def test_what_the_search_knows_of_a_page():
    "Headings, their words, and what code defines; no code, pictures or outputs."
    body = ('<p>before</p><h1 id="A">A &amp; B<a class="anchor-link" href="#A">¶</a></h1><p>two <b>words</b>'
            '&lt;x&gt;</p><pre><span class="k">def</span> <span class="nf">made</span> other</pre>'
            '<h2 id="C-d">C d<a class="anchor-link" href="#C-d">¶</a></h2><svg><text>no</text></svg> end')
    found = pages.searched('p.html', 'A &amp; B', body)
    assert found == [['p.html#A', 'A & B', 'two words <x> made'], ['p.html#C-d', 'A & B: C d', 'end']]
    text = pages.search_body([['p.html#A', 'A', '</script>']])
    assert text.count('</script>') == 1 and r'[["p.html#A", "A", "<\/script>"]]' in text
