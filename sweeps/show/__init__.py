"""Everything a person sees while a study runs or is planned: the live table, the log, the dry run."""
