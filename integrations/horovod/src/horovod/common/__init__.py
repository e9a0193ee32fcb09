"""What does not depend on a framework."""
