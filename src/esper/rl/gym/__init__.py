"""Growth as a Gymnasium environment: E networks at once (`vector`), or one (`single`)."""
