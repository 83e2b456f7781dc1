"""Reports on finished runs: tables, figures, sentences and one page."""
