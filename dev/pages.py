"""README.md and the pages, from the notebooks as they are stored; nothing is executed.

    python dev/pages.py readme    nbs/index.ipynb -> README.md, its pictures -> nbs/images/
    python dev/pages.py docs      every notebook -> _docs/*.html, each complete in one file
    python dev/pages.py release https://HOST/OWNER/REPOSITORY
                                  README.md with whole addresses, and [project.urls], as PyPI needs them;
                                  a badge in each lesson, which opens it in Colab

The published site is made by nbdev and Quarto from the same notebooks; this needs neither."""
import base64
import html
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from string import Template

import nbformat
from jinja2 import DictLoader
from nbconvert import HTMLExporter, MarkdownExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook
from pygments.formatters import HtmlFormatter

from tree import notebooks, PERSIAN, ROOT, section

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
) -> dict[str, bytes]:
    "The picture of an output as `{file name: bytes}`."
    data = output.get('data', {})
    kind = next((k for k in SHOWN if k in data), None)
    if kind not in SUFFIX: return {}
    name = f'{stem}.{SUFFIX[kind]}'
    content = data[kind].encode() if kind == 'image/svg+xml' else base64.b64decode(data[kind])
    output.data = NotebookNode({'text/markdown': f'![figure](images/{name})'})
    return {name: content}


def readme(
    root: Path = ROOT,  # the repository
) -> tuple[str, dict[str, bytes]]:
    "The text of README.md, and its pictures by name, as they stand in `nbs/images`."
    nb, pictures = visible(root / 'nbs/index.ipynb'), {}
    for cell in nb.cells:
        if 'outputs' not in cell: continue
        cell.outputs = [o for o in cell.outputs if '<audio' not in o.get('data', {}).get('text/html', '')]
        for i, output in enumerate(cell.outputs): pictures |= take_picture(output, f'index-{cell.id}-{i}')
    relink_cells(nb, lambda target: os.path.normpath(f'nbs/{target}').replace(os.sep, '/'))
    exporter = MarkdownExporter(extra_loaders=[DictLoader({'readme.md.j2': README})],
                                template_file='readme.md.j2')
    exporter.display_data_priority = list(SHOWN)
    text, _ = exporter.from_notebook_node(nb)
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

PAGE = Template("""<!doctype html>
<html lang="$language"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>$style</style></head>
<body><main dir="$direction"><a class="jump" href="#contents">$contents</a>
$body
</main><nav id="contents">$nav</nav></body></html>
""")

STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #555; --line: #d5dbe1; --paper: #fff; --code: #f6f7f9;
        --link: #1a5fa8 }
body { display: flex; flex-direction: row-reverse; justify-content: flex-end; margin: 0;
       font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
a { color: var(--link) }
nav { flex: 0 0 14em; padding: 1.5em 1em; box-sizing: border-box; position: sticky; top: 0;
      height: 100vh; overflow: auto }
nav h4 { margin: 1.2em 0 .3em }
nav a { display: block; padding: .15em .5em; color: inherit; text-decoration: none;
        border-inline-start: 3px solid transparent }
nav a[aria-current] { border-color: var(--link); font-weight: 600 }
main { flex: 1; min-width: 0; max-width: 52em; padding: 1em 2em 6em }
.jump, .anchor-link, .prompt { display: none }
blockquote { margin-inline: 0; color: var(--soft); font-size: 1.1em }
pre { padding: .6em .8em; overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; margin: .5em 0 }
.highlight, .highlight pre { background: var(--code); border-radius: 4px }
.output pre { border-left: 3px solid var(--line) }
table { border-collapse: collapse; font-size: .92em; display: block; overflow-x: auto }
td, th { padding: .25em .7em; border-bottom: 1px solid var(--line); text-align: start }
img, svg { max-width: 100% } :not(pre) > code { overflow-wrap: anywhere } audio { width: 100% }
[dir=rtl] { line-height: 1.8 } [dir=rtl] pre, [dir=rtl] code { direction: ltr; unicode-bidi: isolate }
[dir=rtl] pre { text-align: left }
input[type=search] { font: inherit; width: 100%; padding: .4em .6em; box-sizing: border-box }
@media (max-width: 50em) {
  body { display: block } nav { position: static; height: auto; border-top: 1px solid var(--line) }
  nav a { padding: .4em .5em } main { padding: 1em } .jump { display: block } }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe5ea; --soft: #a8b4bf; --line: #3a4550; --paper: #14191e; --code: #1e252c;
          --link: #7db4ec }
  img, svg, .output_html { background: #fff } .output_html { color: #222; color-scheme: light }
DARK }
"""


def style() -> str:
    "The look of a page, in the light and in the dark."
    light, dark = (HtmlFormatter(style=s).get_style_defs('.highlight') for s in ('default', 'github-dark'))
    return light + STYLE.replace('DARK', dark)


PERSIAN_INDEX = 'index_fa.html'   # README.fa.md


def page_name(
    notebook: str,  # `10_data_tf_native.ipynb`
) -> str:
    "`data_tf_native.html`: nbdev names its pages without the number too."
    return re.sub(r'^\d+[a-zA-Z0-9]*_', '', notebook.lower()).removesuffix('.ipynb') + '.html'


def page_link(
    target: str,  # of a relative link
) -> str:
    "A link to a notebook as one to its page; others unchanged, since `_docs` lies beside `nbs`."
    if target == '../README.fa.md': return PERSIAN_INDEX
    path, hash_, part = target.partition('#')
    folder, slash, name = path.rpartition('/')
    return folder + slash + page_name(name) + hash_ + part if name.endswith('.ipynb') else target


def persian_index(
    root: Path,  # the repository
) -> NotebookNode:
    "README.fa.md as a page."
    text = (root / 'README.fa.md').read_text(encoding='utf-8')
    def page(target: str) -> str:   # as a page in `nbs` would link it
        if target.startswith('README.md'): return 'index.ipynb' + target.removeprefix('README.md')
        return target.removeprefix('nbs/') if target.startswith('nbs/') else f'../{target}'
    text = relink(text, page)
    return new_notebook(cells=[new_markdown_cell(text)])


def title(
    nb: NotebookNode,
    default: str,  # where the notebook has no H1
) -> str:
    "The text of the first H1."
    lines = (line for cell in nb.cells if cell.cell_type == 'markdown' for line in cell.source.splitlines())
    return next((line[2:].strip() for line in lines if line.startswith('# ')), default)


def navigation(
    titles: dict[str, str],     # of every page by its file
    sections: dict[str, str],   # of the sidebar, by the same
    here: str,                  # the page that it is for
) -> str:
    "Links to all pages, those of a section under its name."
    up, lines, last = os.path.dirname(here) or '.', [], ''
    link = lambda page, text, more='': f'<a href="{os.path.relpath(page, up)}"{more}>{text}</a>'
    for page, text in titles.items():
        if sections[page] != last: lines.append(f'<h4>{sections[page]}</h4>')
        last = sections[page]
        lines.append(link(page, text, ' aria-current="page"' if page == here else ''))
        if page == 'index.html': lines.append(link('search.html', 'Search'))
    return '\n'.join(lines)


def right_to_left(
    body: str,  # HTML of a page
) -> str:
    "The text without the divisions that nbconvert closes before what they hold; the page has its direction."
    return re.sub(r'<div dir="rtl">\s*</div>', '', body)


def slug(
    heading: str,   # its text
) -> str:
    "The part of an address that GitHub and Quarto give a heading."
    return re.sub(r'[^\w\- ]', '', heading.strip().lower()).replace(' ', '-')


def addressed(
    body: str,  # HTML of a page
) -> str:
    "The page with headings at these addresses, since links name them; nbconvert has others."
    seen = Counter()
    def heading(match: re.Match) -> str:
        level, text = match[1], match[2]
        name = slug(html.unescape(re.sub('<[^>]*>', '', text)).removesuffix('¶'))
        seen[name] += 1
        name += f'-{seen[name] - 1}' if seen[name] > 1 else ''
        text = re.sub(r'(class="anchor-link" href="#)[^"]*', rf'\g<1>{name}', text)
        return f'<h{level} id="{name}">{text}</h{level}>'
    return re.sub(r'<h([1-6]) id="[^"]*">(.*?)</h\1>', heading, body, flags=re.DOTALL)


def docs(
    root: Path = ROOT,  # the repository
) -> dict[str, str]:
    "Every page by its file, in the order of the sidebar, and one to search them."
    found, shown = {}, {}
    for path in notebooks(root):
        begins = section(path) == PERSIAN and PERSIAN_INDEX not in shown
        if begins and (root / 'README.fa.md').is_file():
            found[PERSIAN_INDEX], shown[PERSIAN_INDEX] = root / 'nbs/README_fa.md', persian_index(root)
        page = page_link(path.relative_to(root / 'nbs').as_posix())
        found[page], shown[page] = path, visible(path)
    titles = {page: html.escape(title(nb, page)) for page, nb in shown.items()}
    sections = {page: section(path) for page, path in found.items()}
    look, pages, parts = style(), {}, []

    def add(page: str, name: str, body: str, persian: bool = False):
        language, direction, contents = ('fa', 'rtl', 'فهرست') if persian else ('en', 'ltr', 'Contents')
        pages[page] = PAGE.substitute(
            title=name, style=look, nav=navigation(titles, sections, page), body=body, language=language,
            direction=direction, contents=contents)

    exporter = HTMLExporter(template_name='basic', embed_images=True)
    for page, nb in shown.items():
        relink_cells(nb, page_link)
        body, _ = exporter.from_notebook_node(nb, {'metadata': {'path': str(found[page].parent)}})
        body = addressed(body)
        parts += searched(page, titles[page], body)
        if persian := sections[page] == PERSIAN: body = right_to_left(body)
        add(page, titles[page], body, persian)
    add('search.html', 'Search', search_body(parts))
    return pages


# ---- the search

def plain_text(text: str) -> str:   # HTML
    return ' '.join(html.unescape(re.sub(r'<[^>]*>', ' ', text)).split())


def searched(
    page: str,
    name: str,   # its title, as HTML
    body: str,   # its HTML
) -> list[list[str]]:
    "The link, the heading and the words of each section; of code only what it defines."
    pieces = re.split(r'<h[1-6] id="([^"]*)">(.*?)</h[1-6]>', body, flags=re.DOTALL)
    found, name = [], html.unescape(name)
    for anchor, heading, text in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
        defined = re.findall(r'<span class="n[fc]">(\w+)</span>', text)
        text = re.sub(r'<(pre|style|script|svg)\b.*?</\1>', ' ', text, flags=re.DOTALL)
        heading = plain_text(heading).removesuffix('¶').strip()
        where = name if heading == name else f'{name}: {heading}'
        found.append([f'{page}#{anchor}', where, ' '.join([plain_text(text), *defined])])
    return found


SEARCH = """<h1>Search</h1>
<input type="search" id="words" autofocus dir="auto" placeholder="Words">
<div id="found"></div>
<script>
const parts = PARTS
const plain = text => text.toLowerCase().replaceAll('\u200c', '').replaceAll('\u0643', '\u06a9')
                                        .replaceAll('\u064a', '\u06cc')
const alike = {'\u06a9': '[\u06a9\u0643]', '\u06cc': '[\u06cc\u064a]'}
const letter = c => alike[c] || c.replace(/[.*+?^${}()|[\\]\\\\]/, '\\\\$&')
const loose = word => new RegExp([...word].map(letter).join('\u200c*'), 'i')   // as `plain` may have made it
const texts = parts.map(part => [plain(part[1]), plain(part[1] + ' ' + part[2])])
const field = document.getElementById('words'), list = document.getElementById('found')
function show() {
  const words = plain(field.value).split(/\\s+/).filter(word => word)
  const every = text => words.every(word => text.includes(word))
  const found = words.length ? parts.map((part, i) => i).filter(i => every(texts[i][1])) : []
  found.sort((i, j) => every(texts[j][0]) - every(texts[i][0]))   // those with all words in the heading first
  list.replaceChildren(...found.slice(0, 40).map(i => {
    const entry = document.createElement('p'), link = document.createElement('a')
    entry.dir = 'auto'
    link.href = parts[i][0]
    link.textContent = parts[i][1]
    const at = Math.max(0, parts[i][2].search(loose(words[0])) - 60)
    entry.append(link, document.createElement('br'), parts[i][2].slice(at, at + 180))
    return entry
  }))
  if (words.length && !found.length) list.textContent = 'Nothing holds all of these words.'
}
field.value = new URLSearchParams(location.search).get('q') || ''
field.addEventListener('input', show)
show()
</script>"""


def search_body(
    parts: list[list[str]],  # of `searched`
) -> str:
    "A field, and the sections that hold all words typed into it."
    return SEARCH.replace('PARTS', json.dumps(parts, ensure_ascii=False).replace('</', '<\\/'))


def write_docs(
    root: Path = ROOT,  # the repository
):
    "Write the pages into `_docs`."
    folder = root / '_docs'
    folder.mkdir(exist_ok=True)
    pages = docs(root)
    for page, text in pages.items():
        (folder / page).parent.mkdir(exist_ok=True)
        (folder / page).write_text(text, encoding='utf-8')
    print(f'{len(pages)} pages written; begin at _docs/index.html.')


if __name__ == '__main__':
    actions = {'readme': write_readme, 'docs': write_docs, 'release': write_release}
    name, *arguments = sys.argv[1:] or ['']
    if name not in actions or len(arguments) != (name == 'release'):
        sys.exit('usage: python dev/pages.py readme|docs|release ADDRESS')
    actions[name](*arguments)
