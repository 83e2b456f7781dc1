"""The lab: everything that reproduces the paper. It uses only the public API of the library."""
