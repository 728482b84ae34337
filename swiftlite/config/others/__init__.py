"""What other tools call the settings, and their own files."""
