"""The command line, one file per command; modules import heavy dependencies only when they run, so `--help` is fast."""
