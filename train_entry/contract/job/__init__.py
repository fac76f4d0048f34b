"""A job's input (spec) and output (results), and the files that hold them. Read this package first."""
