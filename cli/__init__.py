"""The command line (installed as ``kbitq.cli``): the only importer of typer and rich."""
