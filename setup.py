"""Finds the packages below every part, so that a new folder needs no entry anywhere."""

from setuptools import find_packages, setup

PARTS = ("protocol", "supervisor", "worker", "client", "gateway", "cli")
folders = find_packages(include=[*PARTS, *(f"{part}.*" for part in PARTS)])
setup(
    packages=[f"mlxsup.{folder}" for folder in folders],
    package_dir={f"mlxsup.{folder}": folder.replace(".", "/") for folder in folders},
)
