"""The commands, one idea a file: each turns words into settings, calls the package, and prints.

Modules import what they need when they run, so that `--help` is quick.
"""
