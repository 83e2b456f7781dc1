"""One file an artefact: its configuration, its run, and its picture or table."""
