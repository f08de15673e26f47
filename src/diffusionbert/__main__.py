"""`python -m diffusionbert` runs the command line."""

from diffusionbert.cli.main import main

main()
