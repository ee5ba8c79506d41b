"""What both ends of a link say of themselves, and when they refuse each other."""
