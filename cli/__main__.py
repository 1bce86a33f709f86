"""`python -m mlxsup.cli`."""

from .main import main

main()
