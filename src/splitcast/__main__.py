"""`python -m splitcast`."""

from splitcast.cli.main import main

main()
