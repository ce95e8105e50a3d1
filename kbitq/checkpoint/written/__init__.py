"""Reading what kbitq wrote, and holding it against its source."""
