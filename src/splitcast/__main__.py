"""`python -m splitcast`."""

from splitcast.cli import main

main()
