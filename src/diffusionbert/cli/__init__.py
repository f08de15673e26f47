"""The command line, one file per command; modules import what they need when they run, so that `--help` is fast."""
