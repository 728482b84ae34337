"""What ends a run early and clearly instead of late, wrongly or never."""
