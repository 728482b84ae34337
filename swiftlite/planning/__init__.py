"""What a layout needs, known before weights load."""
