"""The subcommands of `jaxpipe`, one file for each group.

Each file has functions that add a subcommand's flags to the parser and functions that run it with
the parsed flags; `jaxpipe.cli` joins them.
"""
