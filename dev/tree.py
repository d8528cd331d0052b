"The layout of the repository: pages and modules, each in its room."
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ('quick_start', 'idle_gpu', 'user_guide', 'testing_guide', 'technical', 'troubleshooting',
          'from_myxtts')
PERSIAN = 'راهنماها'
# folder -> title, in the order of the sidebar
ROOMS = {'guides': 'Guides', 'nbs': 'Lessons', 'data': 'Data', 'models': 'Models', 'train': 'Training',
         'monitor': 'Monitoring', 'speech': 'Speech', 'app': 'Application', 'base': 'Base'}


def section(
    path: Path,   # of a notebook
) -> str:
    "The part of the sidebar that a page stands in; empty for the index."
    if path.stem == 'index': return ''
    return PERSIAN if path.stem.endswith('_fa') else ROOMS[path.parent.name]


def notebooks(
    root: Path = ROOT,   # of the repository
) -> list[Path]:
    "Every page, as in the sidebar: the index, the guides in both languages, the lessons, the other rooms."
    guides, *others = ROOMS.values()
    parts = ['', guides, PERSIAN, *others]
    def place(path: Path) -> tuple:
        name = path.stem.removesuffix('_fa')
        return parts.index(section(path)), GUIDES.index(name) if name in GUIDES else -1, name
    found = (p for p in (root / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
    return sorted(found, key=place)


def modules(
    root: Path = ROOT,   # of the repository
) -> dict[str, Path]:
    "Every module of the library by its name, as in `data.cache`."
    files = sorted(p for p in (root / 'xtts_nb').rglob('*.py') if p.stem[0] != '_')
    return {'.'.join(p.relative_to(root / 'xtts_nb').with_suffix('').parts): p for p in files}
