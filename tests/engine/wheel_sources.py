"""Names of a package looked for in its sources, without importing it: of a wheel whose torch, or whose GPU, is not here."""

from __future__ import annotations

import ast
import functools
import pathlib
import re


class WheelSources:
    """Args:
    root: the folder of an unpacked wheel, which holds ``vllm``.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.tree = functools.cache(self._tree)
        self.find = functools.cache(self._find)

    def missing(self, table: dict[str, str]) -> list[str]:
        """As ``symbols.missing_symbols``, of this wheel."""
        missing = []
        for place, names in table.items():
            module, _, name = place.partition(":")
            found = self.find(module, name)
            if found is None:
                missing.append(place)
                continue
            attributes, _, parameters = names.partition("|")
            missing += [f"{place}.{one}" for one in attributes.split() if not self._has(*found, one)]
            missing += [f"{place}({one})" for one in parameters.split() if not self._takes(*found, one)]
        return missing

    def path(self, module: str) -> pathlib.Path | None:
        plain = self.root.joinpath(*module.split("."))
        return next((path for path in (plain.with_suffix(".py"), plain / "__init__.py") if path.is_file()), None)

    def _tree(self, module: str) -> ast.Module | None:
        path = self.path(module)
        return None if path is None else ast.parse(path.read_text(encoding="utf-8"))

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """(module, definition) of what ``module`` calls ``name``, through whatever hands it on; None if nothing there does."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name in (name, "*") and (alias.asname or name) == name:
                        found = self.find(self._absolute(module, node), name)
                        if found is not None:
                            return found
            if isinstance(node, ast.Dict):  # vllm/__init__.py: names that are imported when they are asked for
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        return self.find(module + value.value.partition(":")[0], name)
        for node in ast.walk(tree):  # an object that is made when it is asked for: what its class has
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return self.find(module, ast.unparse(node.annotation).strip("'"))
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.targets[0]) == name
            ):
                return self.find(module, ast.unparse(node.value.func))
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = (
            module.split(".") if (self.path(module) or self.root).name == "__init__.py" else module.split(".")[:-1]
        )
        kept = package[: len(package) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _family(self, module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        """A class and its bases, as far as they are in the wheel."""
        family = [(module, node)]
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0]
            found = self.find(module, name.split(".")[-1])
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not node:
                family += self._family(*found)
        return family

    def _has(self, module: str, node: ast.AST, name: str) -> bool:
        if not isinstance(node, ast.ClassDef):
            return False
        assigned = re.compile(rf"\bself\.{name}\b\s*(?::[^=\n]+)?=|\bself\.{name}\b\s*:|[(,]\s*self\.{name}\b")
        for place, cls in self._family(module, node):
            for one in cls.body:
                names = [one.name] if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
                names += [
                    ast.unparse(t)
                    for t in getattr(one, "targets", []) or [getattr(one, "target", None)]
                    if t is not None
                ]
                if name in names:
                    return True
            if assigned.search(self.path(place).read_text(encoding="utf-8")):
                return True
        return False

    def _takes(self, module: str, node: ast.AST, name: str) -> bool:
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            return arguments.kwarg is not None or name in [one.arg for one in every]
        if not isinstance(node, ast.ClassDef):
            return False
        for place, cls in self._family(module, node):
            for one in cls.body:
                if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                    return self._takes(place, one, name)
        fields = [one for _, cls in self._family(module, node) for one in cls.body if isinstance(one, ast.AnnAssign)]
        return name in [ast.unparse(one.target) for one in fields]  # a data class, or msgspec's
