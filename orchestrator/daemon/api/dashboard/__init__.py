"""The dashboard at `/dashboard`: a page of static files, and the state of the daemon as server-sent events."""
