"""Enumerations, file access, GPU data and text formats that jobs and studies share."""
