"""What ``tools/setup.sh`` asks of an environment's own pip. Runs with nothing but pip installed."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

# Installed first and on their own: the engine's wheel asks for a build of them that its own index does not carry.
INSTALLED_BEFORE = {"torch", "torchaudio", "torchvision"}

# Where packages come from stays the machine's business; what is installed must not be.
SOURCE_OPTIONS = {
    *("index-url", "extra-index-url", "find-links", "no-index", "trusted-host"),
    *("cert", "client-cert", "proxy", "timeout", "retries", "cache-dir", "keyring-provider"),
}


def requirements(distributions: Iterable[str]) -> list[str]:
    """What installed ``distributions`` ask for on this machine, without ``INSTALLED_BEFORE``."""
    kept = []
    for line in (line for distribution in distributions for line in requires(distribution) or []):
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in INSTALLED_BEFORE:
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def source_settings(config_list: str) -> dict[str, str]:
    """``PIP_*`` variables for the options of ``pip config list`` that say where packages come from, last one wins."""
    settings: dict[str, tuple[int, str]] = {}
    rank = {"global": 0, "install": 1, ":env:": 2}
    for section, option, value in re.findall(r"^(global|install|:env:)\.([\w-]+)=(.*)$", config_list, re.MULTILINE):
        name = option.replace("_", "-").lower()
        if name in SOURCE_OPTIONS and rank[section] >= settings.get(name, (0, ""))[0]:
            settings[name] = (rank[section], " ".join(str(ast.literal_eval(value)).split()))
    return {f"PIP_{name.replace('-', '_').upper()}": value for name, (_, value) in settings.items()}


def main(argv: list[str]) -> int:
    if len(argv) >= 2 and argv[0] == "requirements":
        print("\n".join(requirements(argv[1:])))
        return 0
    if argv == ["sources"]:
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
        for name, value in source_settings(listed).items():
            print(f"{name}={value}")
        return 0
    print("usage: pip_helper.py requirements DISTRIBUTION... | pip_helper.py sources", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
