"How the wheel is built: with the records that pages show, without older ones and the scripts beside them."
import json
from pathlib import Path

from setuptools.command.build_py import build_py

RECORDS = 'xtts_nb.notebooks.benchmarks'


def shown(folder: str | Path) -> set[str]:
    "Names of the records that pages show: of each kind and device the newest quiet one, else the newest."
    newest = {}
    for path in Path(folder).glob('*.json'):
        one = json.loads(path.read_text(encoding='utf-8'))
        rank = not one.get('noisy', True), one['date'], one.get('time', ''), path.stem
        kind = path.name.partition('-')[0], one['device']
        newest[kind] = max(newest.get(kind, ()), (rank, path.name))
    return {name for _, name in newest.values()}


class Library(build_py):
    "`build_py` with some of the files of `benchmarks/`."
    def find_package_modules(self, package, package_dir):
        return [] if package == RECORDS else super().find_package_modules(package, package_dir)

    def find_data_files(self, package, src_dir):
        files = super().find_data_files(package, src_dir)
        return [f for f in files if Path(f).name in shown(src_dir)] if package == RECORDS else files
