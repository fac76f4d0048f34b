"""Hosts of a hostfile, reached over ssh."""
