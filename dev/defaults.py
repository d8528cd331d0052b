"""What the library declares: the defaults of arguments, options and fields, and its constants, one line each.

    python dev/defaults.py     writes tests/stored/defaults.txt

tests/conftest.py compares each module with this list: whoever changes a default also changes the list, and a
review shows it. Listed are values with a number or a truth value in them; no help texts and no bodies of
lambdas."""
import ast
from collections.abc import Iterator
from pathlib import Path

from tree import ROOT, modules

LIST = ROOT / 'tests/stored/defaults.txt'
LONGEST = 20   # characters of a text that is listed


class _Shortened(ast.NodeTransformer):
    "Removes what is no value: help texts, long texts, code."
    def visit_Constant(self, node):
        long = isinstance(node.value, str) and len(node.value) > LONGEST
        return ast.Constant(...) if long else node

    def visit_JoinedStr(self, node): return ast.Constant(...)

    def visit_Lambda(self, node): return ast.Name('function')

    def visit_Call(self, node):
        node.keywords = [k for k in node.keywords if k.arg != 'help']
        return self.generic_visit(node)


def _value(node: ast.AST) -> str | None:   # None: no number and no truth value in it
    "An expression on one line."
    held = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    if not any(isinstance(v, bool | int | float) for v in held): return None
    return ast.unparse(_Shortened().visit(node))


def _arguments(node: ast.FunctionDef, path: str) -> Iterator[tuple[str, ast.AST]]:
    "The defaults of a function's arguments, and what their annotations declare."
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    yield from ((f'{path}({arg.arg})', value) for arg, value in zip(plain[::-1], a.defaults[::-1]))
    yield from ((f'{path}({arg.arg})', value) for arg, value in zip(a.kwonlyargs, a.kw_defaults) if value)
    yield from ((f'{path}({arg.arg}:)', arg.annotation) for arg in [*plain, *a.kwonlyargs] if arg.annotation)


def _declared(body: list[ast.stmt], path: str) -> Iterator[tuple[str, ast.AST]]:
    "The names and the values of a module's or a class's body, and of the functions in it."
    for node in body:
        if isinstance(node, ast.Assign): yield f'{path}{ast.unparse(node.targets[0])}', node.value
        elif isinstance(node, ast.AnnAssign) and node.value:
            yield f'{path}{ast.unparse(node.target)}', node.value
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from ((f'{path}{node.name} @', decorator) for decorator in node.decorator_list)
            if isinstance(node, ast.FunctionDef): yield from _arguments(node, f'{path}{node.name}')
            yield from _declared(node.body if isinstance(node, ast.ClassDef) else _functions(node),
                                 f'{path}{node.name}.')


def _functions(node: ast.FunctionDef) -> list[ast.stmt]:
    "The functions and classes inside a function."
    return [n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]


def declared(
    module: str,
    root: Path = ROOT,
) -> list[str]:
    "A line for each value that a module declares."
    found = _declared(ast.parse(modules(root)[module].read_text(encoding='utf-8')).body, '')
    return [f'{module}.{name} = {text}' for name, value in found if (text := _value(value))]


if __name__ == '__main__':
    LIST.write_text(''.join(f'{line}\n' for module in modules() for line in declared(module)),
                    encoding='utf-8')
