"The layout of the repository: pages and modules, each in its room."
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# folder -> title, in the order of the sidebar
ROOMS = {'guides': 'Guides', 'data': 'Data', 'models': 'Models', 'train': 'Training', 'monitor': 'Monitoring',
         'speech': 'Speech', 'app': 'Application', 'base': 'Base'}


def notebooks(
    root: Path = ROOT,   # of the repository
) -> list[Path]:
    "Every page: the index, the lessons by number, then the rooms."
    rooms = ['nbs', *ROOMS]
    def place(path: Path) -> tuple: return rooms.index(path.parent.name), path.stem != 'index', path.name
    found = (p for p in (root / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
    return sorted(found, key=place)


def modules(
    root: Path = ROOT,   # of the repository
) -> dict[str, Path]:
    "Every module of the library by its name, as in `data.cache`."
    files = sorted(p for p in (root / 'xtts_nb').rglob('*.py') if p.stem[0] != '_')
    return {'.'.join(p.relative_to(root / 'xtts_nb').with_suffix('').parts): p for p in files}
