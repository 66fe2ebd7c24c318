"""What can be said of models before they are loaded: number formats, and whose tokens are whose."""
