"""`python -m diffusionbert` is the command line."""

from diffusionbert.cli.main import main

main()
