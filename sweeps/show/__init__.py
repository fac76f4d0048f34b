"""Show studies that run or are planned: the live table, the log, the dry run."""
