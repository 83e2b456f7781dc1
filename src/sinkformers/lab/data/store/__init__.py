"""Where data sets lie on disk: the catalogue of files, downloads, checksums, archives and their status."""
