"How the wheel is built: with the records in `benchmarks/`, without the scripts beside them."
from setuptools.command.build_py import build_py


class Library(build_py):
    "`build_py` without the modules of `benchmarks/`."
    def find_package_modules(self, package, package_dir):
        if package == 'xtts_nb.notebooks.benchmarks': return []
        return super().find_package_modules(package, package_dir)
