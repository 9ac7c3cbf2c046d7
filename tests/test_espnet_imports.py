"""What is needed of ESPnet is in the one that is installed: nothing of the branches that trained OpusLM."""

import ast
import importlib.util
import pathlib

from conftest import REPO


def espnet_modules():
    """Modules of ESPnet by the file that imports them, wherever in it."""
    for path in sorted(path for folder in ("espnet2_vllm", "egs") for path in (REPO / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_espnet":
                names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
            yield from ((path.relative_to(REPO), name) for name in names if name.split(".")[0] in ("espnet", "espnet2"))


def test_every_module_of_espnet_that_is_imported_is_installed():
    places = {name: importlib.util.find_spec(name).submodule_search_locations for name in ("espnet", "espnet2")}
    found = list(espnet_modules())
    assert {name for _, name in found} >= {"espnet2.bin.gan_codec_inference", "espnet2.tasks.ssl"}
    for path, name in found:
        top, *rest = name.split(".")
        modules = [pathlib.Path(place, *rest) for place in places[top]]
        there = any(module.with_suffix(".py").is_file() or module.is_dir() for module in modules)
        assert there, f"{path} imports {name}, which the installed ESPnet does not have"
