"""Files and figures, made from files only."""
