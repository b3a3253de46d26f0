"""`python -m wheelsched.cli`."""

from wheelsched.cli.main import main

main()
