"""Packages of a wheel: all below one, `lmscale`, as impl, harness and experiments are names that others use too.

An editable installation finds them in the tree, under the names that they have there.
"""

import sys

from setuptools import find_packages, setup

OWN = "harness.cli.installed"
FOUND = [each for each in find_packages(include=["impl*", "harness*", "experiments*"]) if each != OWN]
BELOW = "" if "editable_wheel" in sys.argv else "lmscale."
DATA = {
    "experiments.ours": ["*.yaml"],
    "harness.cli": ["templates/*"],
    "harness.experiment": ["published/*.csv", "published/steps/*"],
    "harness.predict": ["systems/*.yaml"],
    "harness.report": ["templates/*", "templates/assets/*"],
}
FOLDERS = {f"{BELOW}{each}": each.replace(".", "/") for each in FOUND}

setup(
    packages=["lmscale", *FOLDERS],
    package_dir={"lmscale": OWN.replace(".", "/"), **FOLDERS},
    package_data={f"{BELOW}{package}": files for package, files in DATA.items()},
)
