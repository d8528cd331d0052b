"README.md is the index page, shows what a reader should see, and leads to pages that are there."
import re

import pages
import pytest
from tree import ROOT, notebooks

from xtts_nb.records import recorded

GUIDES = 'idle_gpu', 'quick_start', 'technical', 'testing_guide', 'troubleshooting', 'user_guide'

def test_readme_is_the_index_page_and_links_every_other():
    text, pictures = pages.readme()
    assert (ROOT / 'README.md').read_text(encoding='utf-8') == text, 'run `make readme`'
    assert {f.name: f.read_bytes() for f
            in (ROOT / 'nbs/images').glob('index-*')} == pictures, 'run `make readme`'
    assert [unseen for unseen in ('#|', 'default_exp', '<Figure') if unseen in text] == []
    here = {p.relative_to(ROOT).as_posix() for p in notebooks()} - {'nbs/index.ipynb'}
    assert [p for p in here if f'({p})' not in text] == []

def test_the_persian_readme_leads_to_pages_and_commands_that_there_are():
    text, english = ((ROOT / f'README{end}.md').read_text(encoding='utf-8') for end in ('.fa', ''))
    assert {f'nbs/guides/{page}_fa.ipynb' for page in GUIDES} < {*re.findall(r'\]\(([^)#]+)', text)}
    commands = ''.join(re.findall(r'```sh\n(.*?)```', text, re.DOTALL)).splitlines()
    assert len(commands) > 2 and [c for c in commands if c not in english] == []

def test_figures_in_persian_are_those_of_the_record():
    variant = {row['name']: row for row in recorded('busy', ROOT / 'benchmarks')[-1]['rows']}
    slow, fast = variant['python_eager'], variant['cache_xla']
    figures = slow['mean'], fast['mean'], fast['ratio']
    more = slow['min'], slow['max'], variant['python_xla']['mean']
    for page, shown in (('README.fa.md', figures + more), ('nbs/guides/idle_gpu_fa.ipynb', figures)):
        text = (ROOT / page).read_text(encoding='utf-8')
        for figure in shown:
            persian = f'{figure:.0f}'.translate(str.maketrans('0123456789', '۰۱۲۳۴۵۶۷۸۹'))
            assert re.search(rf'(?<!\w){persian}(?!\w)', text), (page, figure)

@pytest.mark.parametrize('path', [ROOT / 'README.md', ROOT / 'README.fa.md', *notebooks()],
                         ids=lambda p: p.name)
def test_every_link_to_a_file_or_a_part_of_a_page_is_there(path):
    "As JupyterLab and nbconvert address the headings of a notebook, GitHub and Quarto those of Markdown."
    def read(path):
        if path.suffix != '.ipynb': return path.read_text(encoding='utf-8')
        return '\n\n'.join(c.source for c in pages.visible(path).cells if c.cell_type == 'markdown')
    names = lambda h: [re.sub(p, '', t).replace(' ', '-') for p, t in ((r'[^\w\- ]', h.lower()), ('[`*]', h))]
    for target, _, part in re.findall(r'\]\(((?!https?:)[^)#]*)(#([^)]+))?\)', read(path)):
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), target
        heads = re.findall('^#+ (.*)$', read(there), re.MULTILINE) if part else []
        if part: assert any(part in names(heading) for heading in heads), (target, part)
