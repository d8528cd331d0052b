"""README.md and the pages, from the notebooks as they are stored; nothing is executed.

    python dev/pages.py readme    nbs/index.ipynb -> README.md, its pictures -> nbs/images/
    python dev/pages.py docs      every notebook -> _docs/*.html, by nbconvert alone
    python dev/pages.py release https://HOST/OWNER/REPOSITORY
                                  README.md with whole addresses, and [project.urls], as PyPI needs them;
                                  a badge in each lesson, which opens it in Colab

The published site is made by nbdev and Quarto from the same notebooks."""
import base64
import os
import re
import sys
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from nbconvert import HTMLExporter, MarkdownExporter
from nbformat import NotebookNode

from tree import notebooks, ROOT

# GitHub shows Markdown and pictures; HTML with scripts or sound it strips.
SHOWN = 'text/markdown', 'image/svg+xml', 'image/png', 'image/jpeg', 'text/plain'
SUFFIX = {'image/svg+xml': 'svg', 'image/png': 'png', 'image/jpeg': 'jpg'}
LINK = re.compile(r'(\]\(|<(?:img|a)\b[^>]*?\b(?:src|href)=")(?![a-z]+:|#|/)([^)"\s]+)')


# ---- what a reader sees of a notebook

def split_directives(
    source: str,  # of a cell
) -> tuple[dict[str, str], str]:
    "The nbdev directives at the top of a cell as `{name: value}`, and the rest of it."
    lines, found = source.split('\n'), {}
    while lines and (match := re.match(r'#\|\s*([\w-]+)\s*:?\s*(.*)', lines[0])):
        found[match[1]] = match[2].strip()
        lines.pop(0)
    return found, '\n'.join(lines).strip('\n')


def is_shown(
    output: NotebookNode,  # of a code cell
) -> bool:
    "Remove warnings, and widgets without a picture."
    if output.output_type == 'stream': return output.name == 'stdout'
    return output.output_type == 'error' or bool(output.data.keys() & {*SHOWN, 'text/html'})


def visible(
    path: Path,  # of a notebook
) -> NotebookNode:
    "The notebook without directives, hidden cells and noise."
    nb = nbformat.read(path, as_version=4)
    cells = []
    for cell in nb.cells:
        found, cell.source = split_directives(cell.source)
        code = cell.cell_type == 'code'
        if cell.cell_type == 'raw' or found.keys() & {'hide', 'default_exp'}: continue
        if code:
            cell.outputs = [o for o in cell.outputs if is_shown(o) and found.get('output') != 'false']
            if found.get('echo') == 'false': cell.metadata.transient = {'remove_source': True}
            if 'fig-alt' in found: cell.metadata['fig-alt'] = found['fig-alt'].strip('"')
        if cell.source.strip() or (code and cell.outputs): cells.append(cell)
    nb.cells = cells
    return nb


def relink(
    text: str,  # Markdown
    move,       # target of a relative link -> its new target
) -> str:
    "The text with the target of every relative link and picture changed by `move`."
    return LINK.sub(lambda match: match[1] + move(match[2]), text)


def relink_cells(
    nb: NotebookNode,  # changed in place
    move,              # as in `relink`
):
    "Apply `relink` to the Markdown cells and the Markdown outputs."
    for cell in nb.cells:
        if cell.cell_type == 'markdown': cell.source = relink(cell.source, move)
        for output in cell.get('outputs', []):
            if 'text/markdown' in output.get('data', {}):
                output.data['text/markdown'] = relink(output.data['text/markdown'], move)


# ---- README.md

README = """{%- extends 'markdown/index.md.j2' -%}
{% block input %}
```python
{{ cell.source }}
```
{% endblock input %}
{% block stream %}
```text
{{ output.text.rstrip() }}
```
{% endblock stream %}
{% block data_text scoped %}
```text
{{ output.data['text/plain'].rstrip() }}
```
{% endblock data_text %}
"""


def take_picture(
    output: NotebookNode,  # becomes a Markdown output that shows the picture, if it holds one
    stem: str,             # of the picture's file
    alt: str = 'figure',   # its text for a reader who does not see it
) -> dict[str, bytes]:
    "The picture of an output as `{file name: bytes}`."
    data = output.get('data', {})
    kind = next((k for k in SHOWN if k in data), None)
    if kind not in SUFFIX: return {}
    name = f'{stem}.{SUFFIX[kind]}'
    content = data[kind].encode() if kind == 'image/svg+xml' else base64.b64decode(data[kind])
    output.data = NotebookNode({'text/markdown': f'![{alt}](images/{name})'})
    return {name: content}


def readme(
    root: Path = ROOT,  # the repository
) -> tuple[str, dict[str, bytes]]:
    "The text of README.md, and its pictures by name, as they stand in `nbs/images`."
    nb, pictures = visible(root / 'nbs/index.ipynb'), {}
    for cell in nb.cells:
        if 'outputs' not in cell: continue
        cell.outputs = [o for o in cell.outputs if '<audio' not in o.get('data', {}).get('text/html', '')]
        for i, output in enumerate(cell.outputs):
            pictures |= take_picture(output, f'index-{cell.id}-{i}', cell.metadata.get('fig-alt', 'figure'))
    relink_cells(nb, lambda target: os.path.normpath(f'nbs/{target}').replace(os.sep, '/'))
    exporter = MarkdownExporter(extra_loaders=[DictLoader({'readme.md.j2': README})],
                                template_file='readme.md.j2')
    exporter.display_data_priority = list(SHOWN)
    text, _ = exporter.from_notebook_node(nb)
    text = re.sub(r'\]\(#[^)]*\)', lambda link: link[0].lower(), text)   # as GitHub names headings
    return re.sub(r'\n{3,}', '\n\n', text).strip() + '\n', pictures


def write_readme(
    root: Path = ROOT,  # the repository
):
    "Write README.md and its pictures, and remove the pictures that it no longer shows."
    text, pictures = readme(root)
    folder = root / 'nbs/images'
    for old in folder.glob('index-*'):
        if old.name not in pictures: old.unlink()
    if pictures: folder.mkdir(exist_ok=True)
    for name, content in pictures.items(): (folder / name).write_bytes(content)
    (root / 'README.md').write_text(text, encoding='utf-8')
    print('README.md written from nbs/index.ipynb.')


# ---- the release

def released(
    text: str,      # of README.md
    address: str,   # of the repository on the web
    version: str,
) -> str:
    "README.md with absolute addresses, because PyPI shows it without the repository."
    def whole(target: str) -> str:
        kind = 'raw' if target.endswith(('.png', '.jpg', '.svg')) else 'blob'
        return f'{address}/{kind}/v{version}/{target}'
    return relink(text, whole)


def write_release(
    address: str,
    root: Path = ROOT,
):
    "Make README.md, pyproject.toml and the lessons those of a release."
    init = (root / 'xtts_nb/__init__.py').read_text(encoding='utf-8')
    version = re.search(r'__version__ = "(.+)"', init)[1]
    readme, project = root / 'README.md', root / 'pyproject.toml'
    readme.write_text(released(readme.read_text(encoding='utf-8'), address, version), encoding='utf-8')
    urls = {'Homepage': address, 'Changelog': f'{address}/blob/v{version}/CHANGELOG.md',
            'Issues': f'{address}/issues'}
    lines = '\n'.join(f'{name} = "{url}"' for name, url in urls.items())
    text = project.read_text(encoding='utf-8').rstrip()
    project.write_text(f'{text}\n\n[project.urls]\n{lines}\n', encoding='utf-8')
    write_badges(f'{address}/blob/v{version}', root)


COLAB = 'https://colab.research.google.com'

def write_badges(
    tree: str,   # the address of the files of a release; Colab opens those on GitHub
    root: Path = ROOT,
):
    "Give each lesson a link below its title that opens it in Colab."
    host, _, place = tree.partition('github.com/')
    if host != 'https://': return
    for path in notebooks(root):
        if path.parent.name != 'nbs' or path.stem == 'index': continue
        nb = nbformat.read(path, as_version=4)
        first = next(cell for cell in nb.cells if cell.cell_type == 'markdown')
        title, _, rest = first.source.partition('\n')
        badge = (f'[![Open in Colab]({COLAB}/assets/colab-badge.svg)]'
                 f'({COLAB}/github/{place}/{path.relative_to(root).as_posix()})')
        first.source = f'{title}\n\n{badge}\n{rest}'
        path.write_text(nbformat.writes(nb) + '\n', encoding='utf-8')


# ---- the pages

def write_docs(
    root: Path = ROOT,  # the repository
):
    "Write each notebook, as nbconvert shows it, into `_docs`."
    exporter, pages = HTMLExporter(embed_images=True), notebooks(root)
    for path in pages:
        nb = visible(path)
        relink_cells(nb, lambda target: re.sub(r'\.ipynb(?=#|$)', '.html', target))
        out = root / '_docs' / path.relative_to(root / 'nbs').with_suffix('.html')
        out.parent.mkdir(parents=True, exist_ok=True)
        text, _ = exporter.from_notebook_node(nb, {'metadata': {'path': str(path.parent), 'name': path.stem}})
        out.write_text(text, encoding='utf-8')
    print(f'{len(pages)} pages written; begin at _docs/index.html.')


if __name__ == '__main__':
    actions = {'readme': write_readme, 'docs': write_docs, 'release': write_release}
    name, *arguments = sys.argv[1:] or ['']
    if name not in actions or len(arguments) != (name == 'release'):
        sys.exit('usage: python dev/pages.py readme|docs|release ADDRESS')
    actions[name](*arguments)
