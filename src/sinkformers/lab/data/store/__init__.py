"""Data sets on disk: the catalogue of files, downloads, checksums, archives and their status."""
