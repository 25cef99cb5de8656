"""Print the oldest versions that pyproject.toml allows, as pip's constraints.

pip install -e . -c <(python .ci/oldest.py)
"""

import pathlib
import re
import tomllib


def constraints(project: dict) -> list[str]:
    """One ``name==version`` for each dependency, in the order of the file."""
    found = []
    for text in project["project"]["dependencies"]:
        match = re.match(r"([\w-]+)>=([\w.]+)", text)
        if not match:
            raise SystemExit(f"{text}: has no lower bound")
        found.append("{}=={}".format(*match.groups()))
    return found


if __name__ == "__main__":
    path = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    print("\n".join(constraints(tomllib.loads(path.read_text()))))
