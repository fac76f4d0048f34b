"""Words, files and figures that jobs and studies share."""
