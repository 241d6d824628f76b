"""Reports: figures, tables and one self-contained HTML page from run folders, finished or still running."""
