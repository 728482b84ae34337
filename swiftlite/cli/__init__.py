"""The command line: parse, show, exit codes. Nothing heavy is imported until a command really runs."""
